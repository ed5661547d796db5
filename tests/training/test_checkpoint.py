"""What a checkpoint and a saved adapter hold is what was written, and belongs to its base."""

import json
import shutil

import pytest
import torch
from training.runs import settings, toy_project

from grade.errors import InputError
from grade.files import write_manifest
from grade.models.adapter import ADAPTER_FILES, BASE_FILE
from grade.training.folder import last_checkpoint
from grade.training.load import load_task
from grade.training.merge import merge
from grade.training.run import evaluate_task, run_training, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with checkpoints, and its settings."""
    root = tmp_path_factory.mktemp("run")
    common = toy_project(root) | {"max_steps": 4, "save_steps": 2, "save_total_limit": None, "eval_strategy": "no"}
    train(settings("ste", common, root / "run"), lambda line: None)
    return root / "run", common


@pytest.fixture
def copied(run, tmp_path):
    """A copy of the run that a test may change."""
    return shutil.copytree(run[0], tmp_path / "run")


@pytest.fixture
def again(run, copied):
    """Trains once more in the copy."""
    return lambda resume="no", overwrite=False, **changes: train(
        settings("ste", run[1] | changes, copied), lambda line: None, resume, overwrite
    )


def test_every_saved_adapter_has_the_fingerprint_of_its_base_and_sorted_settings(run):
    folder, _ = run
    places = [folder / name for name in ("adapter", "checkpoint-2", "checkpoint-4", "checkpoints/step-2")]
    prints = {(place / BASE_FILE).read_bytes() for place in places}
    assert len(prints) == 1
    for place in places:
        targets = json.loads((place / ADAPTER_FILES[0]).read_text())["target_modules"]
        assert targets == sorted(targets) and len(targets) > 1


def contents(folder):
    """Every file with its time of change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def flipped(file, other=None):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def removed(file, other=None):
    file.unlink()


def of_another_step(file, other):
    shutil.copy2(other, file)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [("optimizer.pt", flipped), ("scheduler.pt", removed), ("trainer_state.json", of_another_step),
     ("manifest.json", flipped)],
)  # fmt: skip
def test_a_damaged_checkpoint_is_passed_over_and_its_file_is_named(run, copied, caplog, name, spoil):
    spoil(copied / "checkpoint-4" / name, run[0] / "checkpoint-2" / name)
    assert last_checkpoint(copied).name == "checkpoint-2"
    assert [f"checkpoint-4/{name} is damaged" in record.message for record in caplog.records] == [True]


def test_a_run_goes_on_from_its_newest_whole_checkpoint_to_the_same_bits(run, copied, again):
    damaged, config = copied / "checkpoint-4", settings("ste", run[1], copied)
    flipped(damaged / "optimizer.pt")
    with pytest.raises(InputError, match="resume_from_checkpoint: got .* optimizer.pt is damaged"):
        run_training(config, load_task(config), None, copied, damaged)
    (copied / "metrics.json").unlink()  # as if the run had been killed at the end
    shutil.copytree(damaged, copied / "checkpoint-9")
    assert again("yes", save_steps=3, save_total_limit=2).step == 4
    assert {path.name for path in copied.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4", "checkpoint-9"}
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["step-3"]  # none of what is damaged
    for file in ("adapter/adapter_model.safetensors", "adapter/optimizer.pt", "history.csv", "metrics.json"):
        assert (copied / file).read_bytes() == (run[0] / file).read_bytes(), file


@pytest.mark.parametrize("resume", ["yes", "no"])
def test_folders_that_only_begin_like_a_checkpoint_stay(copied, again, resume):
    names = {"checkpoint-2 (copy)", "checkpoint-2-keep", "checkpoint-2024-notes"}
    for name in names:
        (copied / name).mkdir()
    (copied / "metrics.json").unlink()
    shutil.rmtree(copied / "checkpoint-4")
    assert again(resume, overwrite=resume == "no", save_total_limit=1).step == 4
    assert {path.name for path in copied.glob("checkpoint-*")} == names | {"checkpoint-4"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("optimizer.pt", {}), ("scheduler.pt", {}), ("rng_state.pth", {}), ("scheduler.pt", None),
     ("rng_state.pth", None), ("trainer_state.json", None), ("grade_state.json", {"window": 3}),
     ("grade_state.json", {"text_steps": "1"}), ("trainer_state.json", {"log_history": ""})],
)  # fmt: skip
def test_what_another_program_wrote_into_a_checkpoint_is_one_line(run, copied, name, changes):
    checkpoint, config = copied / "checkpoint-2", settings("ste", run[1], copied)
    if changes is None:
        (checkpoint / name).unlink()
    elif changes:
        state = json.loads((checkpoint / name).read_text())
        (checkpoint / name).write_text(json.dumps(state | changes))
    else:
        torch.save({"a": 1}, checkpoint / name)
    write_manifest(checkpoint)
    with pytest.raises(InputError, match="resume_from_checkpoint: got .*checkpoint-2'; allowed: a (checkpoint|folder)"):
        run_training(config, load_task(config), None, copied, checkpoint)


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_a_damaged_adapter_is_not_exported(copied, tmp_path, name):
    flipped(copied / "adapter" / name)
    with pytest.raises(InputError, match=f"adapter: got .* {name} is damaged"):
        merge(copied, tmp_path / "merged")


def test_an_unfinished_checkpoint_is_none(copied, again):
    """Its manifest is written last."""
    (copied / "metrics.json").unlink()
    for step in (2, 4):
        for name in ("manifest.json", "grade_state.json"):
            (copied / f"checkpoint-{step}" / name).unlink()
    assert last_checkpoint(copied) is None
    assert again("yes").step == 4 and last_checkpoint(copied).name == "checkpoint-4"


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("checkpoint-*/adapter_model.safetensors", removed, "--overwrite to start over: no checkpoint .* nothing was"),
        ("run.json", flipped, "output_dir: got .*run.json'; allowed: .*--overwrite"),
    ],
)
def test_what_cannot_be_used_is_refused_and_not_deleted(copied, again, name, spoil, says):
    (copied / "metrics.json").unlink()
    for path in copied.glob(name):
        spoil(path)
    before = contents(copied)
    for resume in ("no", "yes", "auto"):
        with pytest.raises(InputError, match=says):
            again(resume)
        assert contents(copied) == before
    assert again(overwrite=True).step == 4


@pytest.mark.parametrize(
    ("resume", "names", "says"),
    [
        ("no", (), "this run has finished; --overwrite to start over"),
        ("yes", ("history.csv", "checkpoint-2", "checkpoint-4"), "start over: no checkpoint of this run"),
        ("no", ("run.json",), "output_dir: .* a run would replace: it has no run.json"),
    ],
)
def test_results_are_replaced_only_when_that_is_asked_for(copied, again, resume, names, says):
    for name in names:
        shutil.rmtree(copied / name) if (copied / name).is_dir() else (copied / name).unlink()
    stale = copied / "completions" / "eval_00099.parquet"
    stale.touch()
    before = contents(copied)
    with pytest.raises(InputError, match=says):
        again(resume, beta=0.1 if names else 0.3)
    assert contents(copied) == before
    if not names:
        assert again(overwrite=True).step == 4 and not stale.exists()


@pytest.mark.parametrize("spoil", [flipped, removed])
def test_an_evaluation_made_before_an_interruption_is_what_was_written_or_left_out(copied, again, caplog, spoil):
    (copied / "metrics.json").unlink()
    spoil(copied / "completions" / "eval_00000.parquet")
    if spoil is flipped:
        with pytest.raises(InputError, match="eval_00000.parquet'; allowed: the table as it was written"):
            again("yes")
    else:
        assert again("yes").before is None and "eval_00000.parquet is missing" in caplog.text


@pytest.mark.parametrize(
    ("name", "spoil"),
    [("history.csv", removed), ("adapter/adapter_model.safetensors", flipped)],
)
def test_damaged_results_of_a_finished_run_are_written_again(run, copied, again, name, spoil):
    spoil(copied / name)
    assert again("yes").step == 4 and again("yes") is None
    assert (copied / name).read_bytes() == (run[0] / name).read_bytes()


def test_the_best_policy_is_the_result_with_its_own_figures_and_optimizer(run, tmp_path):
    config = settings("ste", run[1] | {
        "load_best_model_at_end": True, "metric_for_best_model": "reward", "greater_is_better": True,
        "eval_strategy": "steps", "eval_steps": 2, "eval_prompts": 6,
    }, tmp_path / "run")  # fmt: skip
    train(config, lambda line: None)
    adapter, metrics = tmp_path / "run" / "adapter", json.loads((tmp_path / "run" / "metrics.json").read_text())
    evaluation = evaluate_task(config, load_task(config, adapter=str(adapter)), 6)
    figures = {name.removeprefix("val/"): value for name, value in evaluation.metrics().items()}
    assert metrics["after"]["val"] == pytest.approx(figures, rel=1e-5)
    assert metrics["before"]["val"]["reward_n"] == metrics["gain"]["reward_n"] == 6 and metrics["steps"] == 4
    samples = json.loads((tmp_path / "run" / "samples.json").read_text())
    assert [sample["after"] for sample in samples] == evaluation.completions[: len(samples)]
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        assert (adapter / name).read_bytes() == (tmp_path / "run" / "checkpoint-2" / name).read_bytes()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-4"]
    assert "that of checkpoint-2, whose reward is the best" in (adapter / "README.md").read_text()

    (tmp_path / "run" / "metrics.json").unlink()
    of_best = tmp_path / "run" / "completions" / "eval_00002.parquet"
    written = of_best.read_bytes()
    shutil.copy(of_best.with_name("eval_00004.parquet"), of_best)
    with pytest.raises(InputError, match="eval_00002.parquet'; allowed: the table as it was written"):
        train(config, None, resume="yes")
    of_best.write_bytes(written)
    state = tmp_path / "run" / "checkpoint-2" / "grade_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"run": "another"}))
    with pytest.raises(InputError, match="checkpoint-2'; allowed: the best checkpoint so far, there or in output_dir"):
        train(config, None, resume="yes")
