"""What loading a base leaves as it was, and what is written beside an adapter."""


import pytest
import torch
from conftest import tiny_config
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from grade.errors import InputError
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone, load_pretrained


def test_only_dropout_rates_become_zero(tmp_path):
    config = tiny_config(attention_dropout=0.5, rms_norm_eps=0.25, initializer_range=0.125)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=_words()).save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, torch.float32)[0].config
    assert (loaded.attention_dropout, loaded.rms_norm_eps, loaded.initializer_range) == (0.0, 0.25, 0.125)


def _words():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(i): i for i in range(23)}, unk_token="0"))


def test_layers_that_do_not_exist_are_answered_with_those_that_do():
    model = AutoModelForCausalLM.from_config(tiny_config())
    with pytest.raises(InputError) as error:
        Backbone(model, None, LoraSettings(r=2, alpha=4, target_modules=["nowhere"]))
    names = str(error.value).partition("(")[2].partition(")")[0].split(", ")
    assert names == ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
