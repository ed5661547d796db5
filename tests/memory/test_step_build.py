"""Models of a traced step are built as long and as wide as the step needs, and not more."""

import pytest
import torch
from torch import nn

import grade.memory.step as steps
from grade.errors import InputError
from grade.memory.models import model_config
from grade.memory.step import StepConfig


def context(tokens):
    """The tiny model, which reads so many tokens."""
    config = model_config("tiny")
    config.max_position_embeddings = tokens
    return config


@pytest.mark.parametrize("values", [{}, {"method": "rloo"}], ids=str)
def test_a_step_fits_the_models_context_to_the_token(monkeypatch, values):
    made = []
    monkeypatch.setattr(steps, "make_reward", lambda *args: made.append(args) or nn.Identity())
    config = StepConfig(model="tiny", prompt_tokens=5, max_new_tokens=7, dtype="float16", **values)
    backbone, others = config.build(context(12))
    assert [(spec, length, relaxed) for spec, _, length, relaxed in made] == [("bag", 12, None if values else "ste")]
    assert made[0][1] is backbone and len(others) == 1
    assert backbone.device.type == "meta" and backbone.head.weight.dtype == torch.float16
    with pytest.raises(InputError, match="got 12; allowed: at most 11"):
        config.build(context(11))


def test_a_support_beyond_the_vocabulary_is_refused_where_there_is_one(monkeypatch):
    monkeypatch.setattr(steps, "make_reward", lambda *_: nn.Identity())
    small = context(100)
    small.vocab_size = 200
    with pytest.raises(InputError, match="gumbel_topk: got 256"):
        StepConfig(model="tiny").build(small)
    assert StepConfig(model="tiny", method="rloo").build(small)[0].vocab_size == 200
    assert StepConfig(model="tiny", gumbel_topk=200).build(small)[0].vocab_size == 200
