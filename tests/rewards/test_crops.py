"""Which parts of a text a judge and a reward model learn from, and when learning stops."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_backbone

from grade.errors import InputError
from grade.rewards import fit
from grade.rewards.fit import BagSettings, FitSettings, RewardConfig
from grade.rewards.gold import _crop
from grade.rewards.model import RewardModel
from grade.rewards.shallow import first_layers, layer_count
from grade.rewards.sources import resolve_reward
from grade.rewards.text import beginning
from grade.rewards.verifiers import reasoning_gym


def test_the_judges_crops_are_the_published_ones():
    # Length, then a coin, then the start, from one generator: the judge's weights depend on that order.
    words = [str(i) for i in range(300)]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        length, coin = int(rng.integers(16, 97)), rng.random()
        start = int(rng.integers(300 - length + 1)) if coin < 0.5 else 0
        assert _crop(" ".join(words), np.random.default_rng(seed)).split() == words[start : start + length]


def test_a_training_crop_has_the_lengths_that_were_asked_for(monkeypatch):
    backbone = make_backbone(dtype=torch.float32)
    settings = BagSettings(channels=2, min_tokens=3, max_tokens=4)
    model, widths = RewardModel("bag", backbone, settings), []
    monkeypatch.setattr(fit, "encode", lambda *_: [list(range(1, 15))] * 2)
    monkeypatch.setattr(model, "logits_of_ids", lambda ids, mask: widths.append(mask.sum(1).tolist()))
    logits, _ = fit._crop_problem(model, RewardConfig(bag=settings), settings, [], [], torch.Generator().manual_seed(0))
    for _ in range(40):
        logits(torch.tensor([0, 1]))
    assert {tuple(lengths) for lengths in widths} == {(3, 3), (4, 4)}


@pytest.mark.parametrize(("losses", "epochs"), [([math.nan] * 9, 3), ([2.0, 1.0, math.nan, 3.0, 3.0, 3.0], 5)])
def test_learning_stops_after_patience_epochs_without_a_better_loss(losses, epochs):
    # `losses` are those of the validation reviews by epoch; one that is not a number is not better.
    model = RewardModel("bag", make_backbone(dtype=torch.float32), FitSettings())
    given, seen = iter(losses), []

    def validation():
        seen.append(next(given))
        return torch.full((2, 1), math.log(math.expm1(seen[-1])))  # the log-loss of label 0 at these log-odds

    def learn():
        settings = FitSettings(patience=3, epochs=9, batch_size=2)
        batch = lambda rows: model.pooled_logits(torch.ones(len(rows), model.center.numel()))  # noqa: E731
        return fit._fit(model, settings, batch, torch.zeros(2), validation, torch.zeros(2), torch.Generator())

    if math.isnan(losses[0]):
        with pytest.raises(InputError, match="a finite validation loss"):
            learn()
    else:
        assert learn()["best_epoch"] == 2
    assert len(seen) == epochs


def test_a_base_can_be_cut_to_all_of_its_layers_and_no_more():
    backbone = make_backbone()
    for depth in (1, 2):
        with first_layers(backbone, depth):
            assert layer_count(backbone) == depth
    assert layer_count(backbone) == 2
    for depth in (0, 3):
        with pytest.raises(InputError, match=f"depth: got {depth}; allowed: 1 to 2"), first_layers(backbone, depth):
            pass


@pytest.mark.parametrize(("length", "shown"), [(40, "x" * 40), (41, "x" * 37 + "...")])
def test_a_beginning_has_at_most_forty_characters(length, shown):
    assert beginning("x" * length) == repr(shown)


def test_a_misspelt_function_is_answered_with_the_public_ones(tmp_path):
    (tmp_path / "own.py").write_text("def brevity(completions, **_): ...\ndef _hidden(): ...\n")
    with pytest.raises(InputError, match="brevity") as error:
        resolve_reward(f"{tmp_path / 'own.py'}:brevty", SimpleNamespace(), "completion", None)
    assert "_hidden" not in str(error.value)


def test_a_task_of_reasoning_gym_has_one_entry(monkeypatch):
    def create_dataset(name, size, seed):
        if size < 1:  # as reasoning-gym does
            raise ValueError("size must be positive")
        return SimpleNamespace(score_answer=lambda answer, entry: float(answer == entry["answer"]))

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))
    assert reasoning_gym("chain_sum")(completions=["7"], answer=["7"]) == [1.0]
