"""A merged folder is the adapter's policy without PEFT, and is whole or not there."""

import shutil

import pytest
import torch
from conftest import perturb_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grade.errors import InputError
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
    assert merge(tmp_path / "adapter", tmp_path / "out", dtype).dtype == kind
    lora = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{Q_PROJ}.lora_{x}.weight"].float() for x in "AB")
    weight = load_file(bases / base / "model.safetensors")[f"{Q_PROJ}.weight"].float()
    got = load_file(tmp_path / "out" / "model.safetensors")[f"{Q_PROJ}.weight"]
    assert got.dtype == kind and torch.equal(got, (weight + (b @ a) * 3.0).to(kind))  # alpha / r = 3


def test_a_merge_into_a_folder_with_files_or_of_one_without_an_adapter_is_refused(adapter, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").touch()
    with pytest.raises(InputError, match="OUT: got .*; allowed: a folder that does not exist yet, or is empty"):
        merge(adapter, tmp_path / "mine")
    with pytest.raises(InputError, match="RUN: got .* a finished run"):
        merge(tmp_path, tmp_path / "out")


def test_another_base_than_the_adapters_is_refused(bases, tmp_path):
    shutil.copytree(bases / "float32", tmp_path / "base")
    make_adapter(tmp_path / "base", tmp_path / "adapter")
    path = tmp_path / "base" / "model.safetensors"
    save_file({name: 1.01 * value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match="with other weights"):
        merge(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
