"""What a checkpoint and a saved adapter hold is what was written, and belongs to its base."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from grade.errors import InputError
from grade.models.adapter import ADAPTER_FILES, BASE_FILE
from grade.training.folder import last_checkpoint
from grade.training.load import load_task
from grade.training.merge import merge
from grade.training.run import run_training, train

sys.path.insert(0, str(Path(__file__).parent))
from runs import settings, toy_project  # noqa: E402


def silent(_):
    pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with checkpoints, and its settings."""
    root = tmp_path_factory.mktemp("run")
    common = toy_project(root) | {"max_steps": 4, "save_steps": 2, "save_total_limit": None, "eval_strategy": "no"}
    train(settings("ste", common, root / "run"), silent)
    return root / "run", common


def test_every_saved_adapter_has_the_fingerprint_of_its_base_and_sorted_settings(run):
    folder, _ = run
    places = [folder / name for name in ("adapter", "checkpoint-2", "checkpoint-4", "checkpoints/step-2")]
    prints = {(place / BASE_FILE).read_bytes() for place in places}
    assert len(prints) == 1
    for place in places:
        targets = json.loads((place / ADAPTER_FILES[0]).read_text())["target_modules"]
        assert targets == sorted(targets) and len(targets) > 1


def flipped(file, other):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def removed(file, other):
    file.unlink()


def of_another_step(file, other):
    shutil.copy2(other, file)


def cut(file, other):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("adapter_model.safetensors", flipped), ("optimizer.pt", flipped), ("scheduler.pt", removed),
        ("scheduler.pt", of_another_step), ("trainer_state.json", of_another_step), ("rng_state.pth", flipped),
        ("grade_state.json", cut), (BASE_FILE, cut), (ADAPTER_FILES[0], removed),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_passed_over_and_its_file_is_named(run, tmp_path, caplog, name, spoil):
    folder, _ = run
    shutil.copytree(folder, tmp_path / "run")
    spoil(tmp_path / "run" / "checkpoint-4" / name, folder / "checkpoint-2" / name)
    assert last_checkpoint(tmp_path / "run").name == "checkpoint-2"
    assert [f"checkpoint-4/{name} is damaged" in record.message for record in caplog.records] == [True]


def test_a_run_goes_on_from_its_newest_whole_checkpoint_to_the_same_bits(run, tmp_path):
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoint-4"
    flipped(damaged / "optimizer.pt", None)
    config = settings("ste", common, tmp_path / "run")
    with pytest.raises(InputError, match="resume_from_checkpoint: got .* optimizer.pt is damaged"):
        run_training(config, load_task(config), None, tmp_path / "run", damaged)
    (tmp_path / "run" / "metrics.json").unlink()  # as if the run had been killed at the end
    assert train(config, silent, "yes").step == 4
    for file in ("adapter/adapter_model.safetensors", "adapter/optimizer.pt", "history.csv", "metrics.json"):
        assert (tmp_path / "run" / file).read_bytes() == (folder / file).read_bytes(), file


def test_a_damaged_adapter_is_not_exported(run, tmp_path):
    folder, _ = run
    for name in ADAPTER_FILES:
        shutil.copytree(folder, tmp_path / name)
        flipped(tmp_path / name / "adapter" / name, None)
        with pytest.raises(InputError, match=f"adapter: got .* {name} is damaged"):
            merge(tmp_path / name, tmp_path / "merged")


def test_an_unfinished_checkpoint_is_none(run, tmp_path):
    """Its manifest is written last."""
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    for step in (2, 4):
        for name in ("manifest.json", "grade_state.json"):
            (tmp_path / "run" / f"checkpoint-{step}" / name).unlink()
    assert last_checkpoint(tmp_path / "run") is None
    assert train(settings("ste", common, tmp_path / "run"), silent, "yes").step == 4
    assert last_checkpoint(tmp_path / "run").name == "checkpoint-4"


@pytest.mark.parametrize("resume", ["no", "yes", "auto"])
@pytest.mark.parametrize("name", ["manifest.json", "adapter_model.safetensors"])
def test_checkpoints_that_cannot_be_used_are_not_deleted(run, tmp_path, name, resume):
    """Older code wrote none of the manifests; a disk may damage every checkpoint."""
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    for step in (2, 4):
        (tmp_path / "run" / f"checkpoint-{step}" / name).unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="--overwrite to start over: checkpoint-4 .* nothing was deleted"):
        train(settings("ste", common, tmp_path / "run"), silent, resume)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_needs_overwrite(run, tmp_path):
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="this run has finished; --overwrite to start over"):
        train(settings("ste", common | {"beta": 0.3}, tmp_path / "run"), silent)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    stale = tmp_path / "run" / "completions" / "eval_00099.parquet"
    stale.touch()
    assert train(settings("ste", common, tmp_path / "run"), silent, overwrite=True).step == 4
    assert not stale.exists()


def test_damaged_results_without_a_checkpoint_are_not_replaced(run, tmp_path):
    folder, common = run
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    flipped(tmp_path / "run" / "history.csv", None)
    with pytest.raises(InputError, match="--overwrite to start over: it has no checkpoint to go on from"):
        train(settings("ste", common, tmp_path / "run"), silent, "yes")


def test_a_run_without_its_note_is_not_replaced(run, tmp_path):
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(InputError, match="output_dir: .* a run would replace: it has no run.json"):
        train(settings("ste", common, tmp_path / "run"), silent, "no")
    assert (tmp_path / "run" / "adapter").is_dir()


@pytest.mark.parametrize("spoil", [flipped, removed])
def test_an_evaluation_made_before_an_interruption_is_what_was_written_or_left_out(run, tmp_path, caplog, spoil):
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    spoil(tmp_path / "run" / "completions" / "eval_00000.parquet", None)
    config = settings("ste", common, tmp_path / "run")
    if spoil is flipped:
        with pytest.raises(InputError, match="eval_00000.parquet'; allowed: the table as it was written"):
            train(config, silent, "yes")
    else:
        assert train(config, silent, "yes").before is None
        assert "eval_00000.parquet is missing" in caplog.text


@pytest.mark.parametrize(
    ("name", "spoil"),
    [("history.csv", removed), ("metrics.json", flipped), ("adapter/adapter_model.safetensors", flipped)],
)
def test_damaged_results_of_a_finished_run_are_written_again(run, tmp_path, name, spoil):
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    spoil(tmp_path / "run" / name, None)
    config = settings("ste", common, tmp_path / "run")
    assert train(config, silent, "yes").step == 4
    assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()
    assert train(config, silent, "yes") is None


@pytest.mark.parametrize("spoil", [cut, flipped])
def test_a_damaged_note_is_one_line_and_removes_no_checkpoint(run, tmp_path, spoil):
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    spoil(tmp_path / "run" / "run.json", None)
    for resume in ("no", "yes", "auto"):
        with pytest.raises(InputError, match="output_dir: got .*run.json'; allowed: .*--overwrite"):
            train(settings("ste", common, tmp_path / "run"), silent, resume)
    assert (tmp_path / "run" / "checkpoint-4" / "manifest.json").is_file()
    assert train(settings("ste", common, tmp_path / "run"), silent, overwrite=True).step == 4
