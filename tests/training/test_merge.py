"""A merged folder is the adapter's policy without PEFT, and is whole or not there."""

import json
import shutil

import pytest
import torch
from conftest import perturb_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grade.errors import InputError
from grade.files import write_manifest
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.training.load import name_base
from grade.training.merge import merge
from grade.training.toy import toy_task

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A tiny base in two types, with settings that a merged model must keep."""
    root = tmp_path_factory.mktemp("bases")
    task = toy_task()
    bare = task.backbone.peft.unload()
    bare.config.attention_dropout, bare.generation_config.max_length = 0.25, 77
    for name in ("float32", "bfloat16"):
        bare.to(getattr(torch, name)).save_pretrained(root / name)
        task.backbone.tokenizer.save_pretrained(root / name)
    return root


def make_adapter(base, folder):
    backbone = perturb_adapter(Backbone.load(base, lora=LoraSettings(r=2, alpha=6)), scale=0.2)
    name_base(backbone)
    backbone.save_adapter(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(bases, tmp_path_factory):
    return make_adapter(bases / "float32", tmp_path_factory.mktemp("run") / "adapter")


def test_a_merged_folder_has_the_bases_settings_and_tokenizer_and_no_adapter(bases, adapter, tmp_path):
    merge(adapter, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.attention_dropout == 0.25 and model.generation_config.max_length == 77
    text = "The film was a delight."
    first, second = (AutoTokenizer.from_pretrained(folder)(text) for folder in (bases / "float32", tmp_path / "out"))
    assert first["input_ids"] == second["input_ids"]
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "lora" in name or "base" in name]


@pytest.mark.parametrize(("base", "dtype", "kind"), [
    ("float32", None, torch.float32), ("float32", "bfloat16", torch.bfloat16), ("bfloat16", None, torch.bfloat16),
    ("bfloat16", "float32", torch.float32),
])  # fmt: skip
def test_weights_are_added_in_float32_and_rounded_once(bases, tmp_path, base, dtype, kind):
    make_adapter(bases / base, tmp_path / "adapter")
    assert merge(tmp_path / "adapter", tmp_path / "out", dtype) == kind
    lora = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{Q_PROJ}.lora_{x}.weight"].float() for x in "AB")
    weight = load_file(bases / base / "model.safetensors")[f"{Q_PROJ}.weight"].float()
    got = load_file(tmp_path / "out" / "model.safetensors")[f"{Q_PROJ}.weight"]
    assert got.dtype == kind and torch.equal(got, (weight + (b @ a) * 3.0).to(kind))  # alpha / r = 3


def test_a_checkpoints_own_tokenizer_is_kept_and_an_empty_folder_is_filled(bases, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "checkpoint-3")
    tokenizer = AutoTokenizer.from_pretrained(bases / "float32")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "checkpoint-3")
    (tmp_path / "out").mkdir()
    merge(tmp_path / "checkpoint-3", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"


def change_config(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


BAD = {
    "a base that is gone": (lambda f: change_config(f, base_model_name_or_path="/nowhere/base"),
                            "base_model_name_or_path: got '/nowhere/base'"),
    "no base": (lambda f: change_config(f, base_model_name_or_path=None), "base_model_name_or_path: got None"),
    "another kind": (lambda f: change_config(f, peft_type="PROMPT_TUNING", num_virtual_tokens=2), "PROMPT_TUNING"),
    "an unknown kind": (lambda f: change_config(f, peft_type="NEW"), "an adapter that fits.*NEW"),
    "damaged weights": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "an adapter that fits"),
    "damaged settings": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json names its base"),
    "no run": (lambda f: (f / "adapter_config.json").unlink(), "RUN: got .* a finished run"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_one_line_and_writes_nothing(adapter, tmp_path, recwarn, spoil, message):
    shutil.copytree(adapter, tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    with pytest.raises(InputError, match=message):
        merge(tmp_path / "adapter", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"] and not recwarn.list


def lacks_a_tensor(tensors):
    return {name: value for name, value in tensors.items() if "layers.1.mlp.up_proj" not in name}


BASES = {
    "one tensor less": (lacks_a_tensor, "these lack .*up_proj"),
    "one tensor more": (lambda tensors: tensors | {"model.more": torch.ones(1)}, "model.more"),
    "other weights": (lambda tensors: {name: value * 1.01 for name, value in tensors.items()}, "with other weights"),
}


@pytest.mark.parametrize(("change", "message"), BASES.values(), ids=BASES)
def test_a_base_with_other_tensors_than_the_adapters_is_refused(bases, tmp_path, change, message):
    shutil.copytree(bases / "float32", tmp_path / "base")
    make_adapter(tmp_path / "base", tmp_path / "adapter")
    path = tmp_path / "base" / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=message):
        merge(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_has_not_finished_names_its_newest_checkpoint(tmp_path):
    for step in (2, 10):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "run" / f"checkpoint-{step}" / "weights").touch()
        write_manifest(tmp_path / "run" / f"checkpoint-{step}")
    with pytest.raises(InputError, match="newest checkpoint of this unfinished run is .*checkpoint-10$"):
        merge(tmp_path / "run", tmp_path / "out")
