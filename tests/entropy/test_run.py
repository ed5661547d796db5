"""The probe of a config: sums with a verifier, which needs an optional extra."""

import importlib.util
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import make_backbone

from grade.entropy.run import ProbeRunConfig, asked_of, probe_adapter
from grade.entropy.samples import Samples
from grade.errors import InputError
from grade.models.prompts import padded

SUMS = [(1, 5), (9, 0), (4, 3), (2, 2)]
SMALL = {"task": "arithmetic", "batch_config": {"B": 2, "G": 3}, "generation": {"max_new_tokens": 4},
         "max_prompt_tokens": 64}  # fmt: skip


class OneDigit:
    """Stands for reasoning-gym's dataset: the same entries and the same verifier's signature."""

    def __init__(self, size, seed, **_):
        self.entries = [{"answer": str(a + b), "metadata": {"expression": f"{a} + {b}"}} for a, b in SUMS[:size]]
        self.asked = []

    def __iter__(self):
        return iter(self.entries)

    def score_answer(self, answer, entry):
        self.asked.append((answer, entry))
        return 1.0 if answer == entry["answer"] else 0.1 if answer else 0.0


def probe(base, **changes):
    return probe_adapter(ProbeRunConfig.parse(SMALL | changes | {"backbone": str(base)}), None)


def answer(monkeypatch, texts):
    """Let the policy's completions of the update be these texts."""

    def drawn(policy, prompts, group, *_):
        rows = [policy.tokenizer(text)["input_ids"] for text in texts()]
        return Samples(prompts, *(part.view(len(prompts), group, -1) for part in padded(rows)))

    monkeypatch.setattr("grade.entropy.probe.draw", drawn)


def test_a_report_is_of_an_adapters_weights_and_token_bias(tmp_path):
    """Wherever the folder lies."""
    policy, asked = make_backbone(perturb=False), []
    for number in range(4):
        with torch.no_grad():
            if number == 2:
                policy.set_token_bias(torch.ones(policy.vocab_size))
            elif number == 3:
                next(p for p in policy.trainable_parameters() if p.any()).mul_(2)
        policy.save_adapter(tmp_path / str(number))
        asked.append(asked_of(ProbeRunConfig.parse(SMALL), tmp_path / str(number)))
    assert asked[0] == asked[1] and all(a != b for a, b in itertools.combinations(asked[1:], 2))


def test_only_the_first_number_counts_and_only_if_it_is_the_answer(base, monkeypatch):
    made = []
    fake = SimpleNamespace(create_dataset=lambda name, **options: made.append(OneDigit(**options)) or made[-1])
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    answer(monkeypatch, lambda: (" 6\n7", "6", " 8 or 9", " seven", "7", "4 is not 5"))
    report = probe(base)
    # The update's prompts are the last two problems, each with three completions.
    assert [answer for answer, _ in made[0].asked] == ["6", "6", "8", None, "7", "4"]
    assert [entry["answer"] for _, entry in made[0].asked] == ["7"] * 3 + ["4"] * 3
    assert report.figures["reward_mean"] == pytest.approx(1 / 6)
    with pytest.raises(InputError, match="tokens of the prompt in row 0: got .*at most 9"):
        probe(base, max_prompt_tokens=9)


@pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="needs the extra arithmetic")
def test_the_real_verifier_pays_right_sums_alone(base, monkeypatch):
    gym = importlib.import_module("reasoning_gym")
    made, create = [], gym.create_dataset
    monkeypatch.setattr(
        gym, "create_dataset", lambda *name, **options: made.append(create(*name, **options)) or made[-1]
    )
    answer(monkeypatch, lambda: [f"{sign}{sum_['answer']}" for sum_ in list(made[0])[-2:] for sign in ("", " ", "1")])
    assert probe(base).figures["reward_mean"] == pytest.approx(2 / 3)
