"""What loading a base leaves as it was, and what is written beside an adapter."""

import json

import pytest
import torch
from conftest import make_backbone, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from grade.errors import InputError
from grade.models.adapter import BASE_FILE, LoraSettings, write_fingerprint
from grade.models.backbone import Backbone, load_pretrained
from grade.models.prompts import _without_eos


def test_only_dropout_rates_become_zero(tmp_path):
    config = tiny_config(attention_dropout=0.5, rms_norm_eps=0.25, initializer_range=0.125)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=_words()).save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, torch.float32)[0].config
    assert (loaded.attention_dropout, loaded.rms_norm_eps, loaded.initializer_range) == (0.0, 0.25, 0.125)


def _words():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(i): i for i in range(23)}, unk_token="0"))


def test_a_fingerprint_is_sorted_so_that_the_same_base_has_the_same_file(tmp_path):
    backbone = make_backbone()
    write_fingerprint(backbone.peft, tmp_path)
    text = (tmp_path / BASE_FILE).read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_layers_that_do_not_exist_are_answered_with_those_that_do():
    model = AutoModelForCausalLM.from_config(tiny_config())
    with pytest.raises(InputError) as error:
        Backbone(model, None, LoraSettings(r=2, alpha=4, target_modules=["nowhere"]))
    names = str(error.value).partition("(")[2].partition(")")[0].split(", ")
    assert names == ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_a_model_that_cannot_recompute_its_layers_says_so(monkeypatch):
    backbone = make_backbone()

    def refuses(*_):
        raise ValueError("not supported")

    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        monkeypatch.setattr(type(backbone.model), name, refuses, raising=False)
    with pytest.raises(InputError, match="gradient_checkpointing: got True; allowed: false: LlamaForCausalLM cannot"):
        with backbone.checkpointed_layers(True):
            pass
    with backbone.checkpointed_layers(False):
        pass


@pytest.mark.parametrize(
    ("ids", "kept"), [([], []), ([2], [2]), ([5, 2], [5]), ([5, 6], [5, 6]), ([2, 2], [2]), ([2, 5], [2, 5])]
)
def test_a_prompt_loses_one_final_end_but_never_all_of_itself(ids, kept):
    assert _without_eos(ids, 2) == kept
