"""A checkpoint's adapter: its base's fingerprint travels with it, and what does not fit does not resume."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grade.errors import InputError
from grade.models.adapter import ADAPTER_FILES, BASE_FILE
from grade.models.backbone import Backbone
from grade.training.folder import load_optimizer
from grade.training.run import train

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


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x80\x02."])
def test_an_optimizers_state_that_cannot_be_read_is_one_line(tmp_path, content):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    (tmp_path / "optimizer.pt").write_bytes(content)
    with pytest.raises(InputError, match="optimizer state"):
        load_optimizer(optimizer, tmp_path / "optimizer.pt")


def test_an_optimizers_state_of_another_shape_is_refused(tmp_path):
    """torch takes it, and fails or broadcasts in the next step."""
    saved, other = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(n))]) for n in (2, 1))
    saved.param_groups[0]["params"][0].grad = torch.ones(2)
    saved.step()
    torch.save(saved.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(InputError, match=r"exp_avg of shape \[2\] for \[1\]"):
        load_optimizer(other, tmp_path / "optimizer.pt")
    again = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    load_optimizer(again, tmp_path / "optimizer.pt")
    assert again.state_dict()["state"][0]["exp_avg"].tolist() == saved.state_dict()["state"][0]["exp_avg"].tolist()


def test_a_runs_adapter_does_not_go_on_another_base(run, tmp_path):
    folder, common = run
    backbone = Backbone.load(common["model"], adapter=folder / "adapter")
    with torch.no_grad():
        for p in backbone.model.parameters():
            p.mul_(1.01)
    backbone.peft.unload().save_pretrained(tmp_path / "base")
    backbone.tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match="adapter: got .* a base with other weights"):
        Backbone.load(tmp_path / "base", adapter=folder / "adapter")


def lacking(folder):
    tensors = load_file(folder / ADAPTER_FILES[1])
    tensors.pop(min(tensors))
    save_file(tensors, folder / ADAPTER_FILES[1])


def another_base(folder):
    prints = json.loads((folder / BASE_FILE).read_text())
    (folder / BASE_FILE).write_text(json.dumps(dict.fromkeys(prints, "0")))


def pickled(folder):
    torch.save(load_file(folder / ADAPTER_FILES[1]), folder / "adapter_model.bin")
    (folder / ADAPTER_FILES[1]).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(lacking, "it lacks .*lora_A"), (another_base, "a base with other weights"), (pickled, "is pickled")],
)
def test_a_checkpoint_that_does_not_fit_is_not_resumed(run, tmp_path, spoil, message):
    folder, common = run
    shutil.copytree(folder, tmp_path / "run")
    for name in ("adapter", "metrics.json", "checkpoints"):  # as if the run had died after step 2
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    spoil(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(InputError, match=f"adapter: got .*{message}"):
        train(settings("ste", common, tmp_path / "run"), silent, "yes")
