"""What a file or folder is replaced by is whole, or the old content stands."""

import multiprocessing
import os
import signal

import pytest

from grade.files import atomic

FORK = multiprocessing.get_context("fork")


def listing(folder):
    """Every file below a folder with its content; hidden ones are left out."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): p.read_text() for p in paths if not any(part[0] == "." for part in p.parts)}


def make_file(path):
    path.write_text("new")


def make_folder(path):
    (path / "sub").mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "older"),
    [(make_file, None), (make_file, "file"), (make_file, "folder"), (make_folder, None), (make_folder, "folder")],
)
def test_after_an_error_or_a_kill_the_old_content_stands(make, older, tmp_path):
    path = tmp_path / "deep" / "x.json"
    if older:
        path.mkdir(parents=True) if older == "folder" else path.parent.mkdir()
        (path / "mine" if older == "folder" else path).write_text("old")
    before = listing(tmp_path)
    with pytest.raises(RuntimeError), atomic(path) as staging:
        assert staging.parent == path.parent and staging.suffix == path.suffix and not staging.exists()
        make(staging)
        raise RuntimeError
    assert listing(tmp_path) == before and not list(tmp_path.rglob(".*"))

    def die():
        with atomic(path) as staging:
            make(staging)
            os.kill(os.getpid(), signal.SIGKILL)

    child = FORK.Process(target=die)
    child.start()
    child.join()
    assert child.exitcode == -9 and listing(tmp_path) == before
    with atomic(path) as staging:
        make(staging)
    assert path.read_text() == "new" if path.is_file() else os.listdir(path) == ["sub"]
