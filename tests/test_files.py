"""Outputs of commands: refused before anything is computed, one writer at a time, whole after any fault."""

import builtins
import json
import multiprocessing
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from conftest import save_toy_base

from grade.cli.main import main
from grade.errors import InputError
from grade.files import atomic, claimed, write_text
from grade.training.toy import toy_reviews

PRETRAIN = dict(vocab_size=300, hidden_size=16, intermediate_size=32, layers=1, heads=2, max_positions=32, context=8,
                batch_size=4, steps=2, warmup_steps=1, eval_windows=16)  # fmt: skip
FORK = multiprocessing.get_context("fork")
SLOW = ("backbone",) if os.environ.get("GRADE_ALL_CASES") == "1" else ()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Reviews, a base, an adapter and configs, in folders `in`, `cfg` and `run` of a working folder."""
    from grade.models.adapter import LoraSettings
    from grade.models.backbone import Backbone
    from grade.training.load import name_base

    root = tmp_path_factory.mktemp("project")
    lines = ["text,label", *(f'"{r.text}",{r.label}' for r in toy_reviews(260))]
    (root / "in").mkdir()
    (root / "in" / "reviews.csv").write_text("\n".join(lines) + "\n")
    save_toy_base(root / "in" / "base")
    backbone = Backbone.load(root / "in" / "base", lora=LoraSettings(r=2, alpha=4))
    name_base(backbone)
    backbone.save_adapter(root / "run" / "adapter")
    sizes = {f"{name}_size": 30 for name in ("reward", "policy", "validation", "test")}
    configs = {
        "fetch": {"packages": []}, "data": {"source": str(root / "in" / "reviews.csv")} | sizes,
        "backbone": {"source": "tiny", "hidden_size": 8, "vocab_size": 300}, "pretrain": PRETRAIN,
        "reward": {"bag": {"epochs": 1, "eval_size": 20, "train_size": 20, "validation_size": 20}, "eval_tokens": [8]},
        "train": {"model": str(root / "in" / "base"), "reward": str(root / "bag"), "use_cpu": True,
                  "train_dataset": str(root / "reviews" / "policy.jsonl"), "eval_dataset": "", "gold": ""},
    }  # fmt: skip
    (root / "cfg").mkdir()
    for name, values in configs.items():
        (root / "cfg" / f"{name}.yaml").write_text(json.dumps(values))  # JSON is YAML
    assert main(command("data", root, root / "in" / "reviews")) == 0
    return root


def command(name, root, output):
    """A command that writes to a folder."""
    reviews, config = ["--reviews", root / "in" / "reviews"], ["--config", root / "cfg" / f"{name}.yaml"]
    metrics = ["--metrics", root / "metrics" / "metrics.json"]
    options = {
        "fetch": config, "data": [*config, "--raw-dir", root / "in"],
        "backbone": [*config, *reviews, "--raw-dir", root / "in"], "pretrain": [*config, *reviews, *metrics],
        "gold": [*reviews, *metrics],
        "reward": [*config, *reviews, *metrics, "--kind", "bag", "--backbone", root / "in" / "base"],
        "train": config, "measure": [],
    }  # fmt: skip
    if name == "merge":
        return ["merge", str(root / "run" / "adapter"), str(output)]
    words = [name, *(["exp4"] if name == "measure" else []), *options[name], "--output-dir", output]
    return [str(word) for word in words]


def listing(folder):
    """Every file below a folder with its content; hidden ones are left out, empty folders stay."""
    paths = [path for path in sorted(folder.rglob("*")) if not hidden(path.relative_to(folder))]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def hidden(path):
    return any(part.startswith(".") for part in path.parts)


def litter(folder):
    return [str(path) for path in folder.rglob(".*")]


# --- refused before anything is computed ---
OWNING = ("data", "backbone", "pretrain", "gold", "reward", "merge")
COMMANDS = (*OWNING, "fetch", "train", "measure")


def bad_places(folder):
    """Places that are no output. None of them is worth anything: a command that does not check deletes them."""
    (folder / "taken").mkdir()
    (folder / "taken" / "notes.txt").write_text("mine")
    (folder / "taken" / "adapter").mkdir()  # what a training run would replace
    (folder / "file").write_text("mine")
    (folder / "here").mkdir()
    os.mkfifo(folder / "pipe")
    os.symlink(folder / "circle", folder / "circle")
    return {
        "working folder": ".", "empty": "", "around it": "..", "a file": folder / "file", "pipe": folder / "pipe",
        "below a file": folder / "file" / "out", "not writable": "/proc/none/out", "circle": folder / "circle",
        "long": folder / ("x" * 300), "taken": folder / "taken",
    }  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_place_that_is_no_output_is_one_line_and_nothing_changes(name, project, tmp_path, capsys, monkeypatch):
    places = bad_places(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    if name not in OWNING and name != "train":
        del places["taken"]  # others write there too
    before, wrong = listing(tmp_path), {}
    for what, place in places.items():
        code, error = main(command(name, project, place)), capsys.readouterr().err
        option = {"merge": "OUT", "train": "output_dir"}.get(name, "--output-dir")
        if (code, error.count("\n")) != (2, 1) or f" {option}: got" not in error:
            wrong[what] = (code, error)
    assert not wrong
    assert listing(tmp_path) == before and not litter(tmp_path)
    assert not (project / "metrics").exists()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("fetch", "measure")])
def test_an_input_and_what_is_around_it_are_no_output(name, project, capsys):
    before = listing(project)
    inputs = {"data": "in/reviews.csv", "train": "in/base", "merge": "run/adapter"}
    place = project / inputs.get(name, "in/reviews")
    for output in (place, place.parent, project):
        assert main(command(name, project, output)) == 2
        assert ": got" in capsys.readouterr().err
    assert listing(project) == before and not litter(project)


def test_a_volume_may_be_shared_and_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with claimed(tmp_path, (), shared=True):
        assert litter(tmp_path)
    with pytest.raises(InputError, match="a folder that can be renamed"), claimed(tmp_path, ()):
        pass


@pytest.mark.parametrize("name", COMMANDS[:-1])
def test_a_second_writer_is_refused_until_the_first_is_gone(name, project, tmp_path, capsys):
    place = tmp_path / "out"
    with claimed(place, ()):
        before = listing(tmp_path)
        assert main(command(name, project, place)) == 2
        assert "a folder that no other run is writing to" in capsys.readouterr().err
        assert listing(tmp_path) == before
    assert not place.exists()  # made for the lock, and nothing was written


def test_files_that_cannot_be_written_are_refused_before_anything_is_computed(project, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    commands = [command(name, project, tmp_path / "out") for name in ("pretrain", "gold", "reward")]
    commands += [["bench", "memory", "--output", "x"], ["probe", "--output", "x"],
                 ["evaluate", "--adapter", str(project / "run" / "adapter"), "--output", "x"]]  # fmt: skip
    for words in commands:
        for place in ("folder", "pipe", "/proc/none/x.json"):
            assert main([*words[:-1], place] if words[-1] == "x" else [*words, "--metrics", place]) == 2
            assert "a file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"] and (tmp_path / "pipe").is_fifo()


# --- faults ---
class Fault(OSError):
    """A disk that fails."""


class Shim:
    """Counts what is done to files below a folder; at the n-th operation `act` is called instead."""

    NAMES = ("mkdir", "rename", "replace", "rmdir", "unlink", "open", "fsync", "chmod", "link", "symlink")

    def __init__(self, monkeypatch, folder, n, act):
        self.folder, self.n, self.act, self.count, self.fired = str(folder), n, act, 0, False
        for name in self.NAMES:
            monkeypatch.setattr(os, name, partial(self.call, getattr(os, name)))
        monkeypatch.setattr(builtins, "open", partial(self.call, builtins.open))

    def call(self, real, *args, **options):
        place = args[0] if args else None
        inside = isinstance(place, (str, Path)) and (str(place).startswith(self.folder) or "dir_fd" in options)
        if inside and (real.__name__ != "open" or self.writes(args, options)):
            self.count += 1
            if self.count == self.n:
                self.fired = True
                self.act()
        return real(*args, **options)

    @staticmethod
    def writes(args, options):
        mode = args[1] if len(args) > 1 else options.get("mode", "r")
        return bool(mode & (os.O_WRONLY | os.O_RDWR)) if isinstance(mode, int) else mode != "r"


def fail():
    raise Fault(28, "No space left on device")


def whole(got, old, new):
    return got in (old, new)


@pytest.mark.parametrize("name", ["data", "gold", "fetch", "reward", "pretrain", "merge", *SLOW])
def test_after_a_fault_at_any_operation_the_old_result_stands_or_the_new_one(name, project, tmp_path, capsys):
    out = tmp_path / "out" / "deep"
    assert main(command(name, project, out)) == 0
    new = listing(out)
    replaces = name != "merge"  # which wants a folder that is empty
    old = {file: content + b" " for file, content in new.items()} if replaces else {}
    n, fired = 0, True
    while fired:
        n += 1
        shutil.rmtree(out)
        out.mkdir()
        for file, content in old.items():
            (out / file).write_bytes(content)
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            shim = Shim(patch, out.parent, n, fail)
            code = main(command(name, project, out))
        fired, error = shim.fired, capsys.readouterr().err
        # A fault while the lock or an empty folder is removed changes nothing, and is no error.
        assert (code, error.count("\n")) in ((2, 1), (0, 0)), (n, error)
        assert whole(listing(out), old, new), n
        again = replaces or not listing(out)
        assert main(command(name, project, out)) == (0 if again else 2), n
        assert listing(out) == new and not (again and litter(out.parent)), n
    assert n > 3


def write(out, texts, names=("a", "b", "c")):
    with claimed(out, ("a", "b", "c", "part-*")) as output, output.replacement() as staging:
        for name in names:
            (staging / name).write_text(texts)


def in_child(work):
    """Exit code of work in a process of its own; negative for a signal."""
    child = FORK.Process(target=work)
    child.start()
    child.join()
    return child.exitcode


def test_a_process_killed_at_any_operation_leaves_no_mixture_and_nothing_that_stays(tmp_path):
    out, n, code = tmp_path / "out", 0, -9

    def killed():
        with pytest.MonkeyPatch.context() as patch:
            Shim(patch, out.parent, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
            write(out, "new")

    while code == -9:
        n += 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        write(out, "old", ("a", "part-1"))
        code = in_child(killed)
        contents = {path.read_text() for path in out.glob("*")}
        assert len(contents) <= 1, n
        if n % 2:  # whoever comes next finds the old result or the new one
            with claimed(out, ("a", "b", "c", "part-*")):
                texts = {path.name: path.read_text() for path in out.iterdir()}
            assert texts in ({"a": "old", "part-1": "old"}, dict.fromkeys("abc", "new")), n
        write(out, "newest")
        assert {path.name: path.read_text() for path in out.iterdir()} == dict.fromkeys("abc", "newest"), n
    assert code == 0 and n > 8 and not litter(tmp_path)


def test_the_lock_of_a_dead_process_is_taken_over_and_that_of_a_living_one_is_not(tmp_path):
    read, write_end = os.pipe()

    def hold():
        with claimed(tmp_path / "out", ()):
            os.write(write_end, b"x")
            signal.pause()

    holder = FORK.Process(target=hold)
    holder.start()
    os.read(read, 1)
    with pytest.raises(InputError, match="no other run"), claimed(tmp_path / "out", ()):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with claimed(tmp_path / "out", ()):
        assert litter(tmp_path)
    assert litter(tmp_path) == []


def test_what_someone_puts_there_during_the_computation_is_never_lost(tmp_path):
    out = tmp_path / "out"
    write(out, "old")
    with pytest.raises(InputError, match="'mine'"), claimed(out, ("a", "b", "c")) as output:
        with output.replacement() as staging:
            (staging / "a").write_text("new")
            (out / "mine").write_text("mine")
    assert listing(out) == {"a": b"old", "b": b"old", "c": b"old", "mine": b"mine"} and not litter(out)


def test_folders_of_earlier_versions_are_replaced_with_what_is_stale_in_them(project, tmp_path):
    out = tmp_path / "model"
    shutil.copytree(project / "in" / "base", out)
    for name in ("model-00001-of-00002.safetensors", "special_tokens_map.json", "lost+found", ".gitignore"):
        (out / name).write_text("")
    assert main(command("backbone", project, out)) == 0
    names = {path.name for path in out.iterdir()}
    assert "model-00001-of-00002.safetensors" not in names and {"lost+found", ".gitignore", "config.json"} <= names


def test_a_folder_named_like_a_file_of_ours_is_not_ours(tmp_path):
    out = tmp_path / "out"
    (out / "a").mkdir(parents=True)
    (out / "a" / "mine").write_text("mine")
    with pytest.raises(InputError, match="not 'a'"):
        write(out, "new")
    assert listing(out) == {"a": None, "a/mine": b"mine"}


# --- other disks ---
def test_a_link_to_another_disk_stays_a_link(tmp_path):
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no disk of its own here")
    place = shared / f"grade-{os.getpid()}"
    place.mkdir()
    try:
        (tmp_path / "out").symlink_to(place)
        for text in ("old", "new"):
            write(tmp_path / "out", text)
        assert (tmp_path / "out").is_symlink()
        assert listing(place) == dict.fromkeys("abc", b"new") and not litter(place)
    finally:
        shutil.rmtree(place)


# --- single files ---
@pytest.mark.parametrize("make", [lambda path: path.write_text("new"), lambda path: (path / "sub").mkdir(parents=True)])
@pytest.mark.parametrize("older", [None, "file", "folder"])
def test_a_file_or_folder_is_whole_or_not_there(make, older, tmp_path):
    place = tmp_path / "deep" / "x.json"
    before = []
    if older:
        place.mkdir(parents=True) if older == "folder" else place.parent.mkdir()
        (place / "mine" if older == "folder" else place).write_text("old")
        before = listing(tmp_path)
    with pytest.raises(RuntimeError), atomic(place) as staging:
        assert staging.parent == place.parent and staging.suffix == place.suffix and not staging.exists()
        make(staging)
        raise RuntimeError
    assert not litter(tmp_path) and (not before or listing(tmp_path) == before)

    def die():
        with atomic(place) as staging:
            make(staging)
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -9 and litter(tmp_path) and (not before or listing(tmp_path) == before)
    if older == "file" and place.is_file():
        place.unlink()
    with atomic(place) as staging:
        make(staging)
        assert in_child(partial(overwrite, place.with_name("y.json"))) == 0  # another's
        assert staging.exists()
    assert not litter(tmp_path) and (place.is_file() or os.listdir(place) == ["sub"])


def overwrite(path):
    with atomic(path) as staging:
        staging.write_text("other")


def test_a_text_replaces_no_folder(tmp_path):
    (tmp_path / "page.md" / "mine").mkdir(parents=True)
    with pytest.raises(InputError, match="not a folder"):
        write_text(tmp_path / "page.md", "new")
    assert (tmp_path / "page.md" / "mine").is_dir() and not litter(tmp_path)


def test_a_device_or_pipe_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a device or a pipe"), atomic(tmp_path / "pipe"):
        pass
