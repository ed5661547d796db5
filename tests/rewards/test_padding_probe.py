"""How a classifier is found to read padded embeddings: what is tried, and what a way that fails is followed by."""

import pytest
import torch

from grade.rewards import differentiable
from grade.rewards.differentiable import EmbeddedClassifier


def test_one_row_is_padded_on_the_left_and_one_on_the_right(make_classifier, policy, tokenizer):
    model, lengths = make_classifier("bert", dtype=torch.float32), []

    def note(_, args, options):
        if options.get("input_ids") is not None:
            lengths.append(tuple(options["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    EmbeddedClassifier(model, tokenizer, policy)
    assert lengths == [(1, 6), (1, 5)]  # of 8, without 2 on the left or 3 on the right


@pytest.mark.parametrize("failure", [TypeError, ValueError, RuntimeError])
def test_a_way_of_padding_that_fails_is_followed_by_the_next(failure, monkeypatch, make_classifier, policy, tokenizer):
    def fails(*_):
        raise failure("no such padding")

    monkeypatch.setattr(differentiable, "on_the_right", fails)
    reward = EmbeddedClassifier(make_classifier("gpt2", dtype=torch.float32), tokenizer, policy)
    assert reward.padding in (differentiable.on_the_left, differentiable._by_length)
