"""A model card says what was trained and what came of it, and nothing of the machine."""

import json

import numpy as np
from huggingface_hub import ModelCard

from grade.training.config import TrainConfig
from grade.training.evaluate import Evaluation
from grade.training.run import RunResult, write_run
from grade.training.toy import toy_task


def evaluation(rewards):
    values = np.array(rewards)
    return Evaluation(["One", "Two"], ["a", "b"], values, np.full(2, np.nan), np.full(2, 0.5), 0.5, {"short": values})


def card_of(folder, before=None, after=None, **changes):
    values = {"method": "rloo", "model": "someone/model", "output_dir": str(folder / "run"), "reward": "hf:some/judge",
              "train_dataset": "some/texts:train", "max_steps": 7, "target_kl": 5.0}  # fmt: skip
    config = TrainConfig.parse(values | {"use_cpu": True} | changes)
    write_run(folder / "run", config, toy_task(), RunResult([{"samples": 1}], before, after, seconds=1.0, step=7))
    return ModelCard.load(folder / "run" / "adapter" / "README.md")


def test_a_card_has_the_hubs_metadata_and_paired_figures(tmp_path):
    """Before 0, 1 and after 2, 5: differences 2 and 4."""
    card = card_of(tmp_path, evaluation([0.0, 1.0]), evaluation([2.0, 5.0]))
    assert card.data.to_dict()["base_model"] == "someone/model"
    assert "| reward | 0.5 ± 0.5 (n=2) | 3.5 ± 1.5 (n=2) | 3 ± 1 (n=2) |" in card.text
    assert "| KL, nats per token | 0.5 ± 0 (n=2) | 0.5 ± 0 (n=2) | 0 ± 0 (n=2) |" in card.text


def test_a_completion_that_no_function_scored_takes_no_figure_away(tmp_path):
    """Of prompts that are scored before and after: 3 - 0."""
    card = card_of(tmp_path, evaluation([0.0, 1.0]), evaluation([3.0, np.nan]))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["gain"]["reward"] == 3 and metrics["gain"]["reward_n"] == 1
    assert "| reward | 0.5 ± 0.5 (n=2) | 3" in card.text


def test_nothing_says_where_it_was_made(tmp_path):
    (tmp_path / "base").mkdir()
    files = {"model": "base", "reward": "rewards.py:short", "train_dataset": "mine.jsonl"}
    card = card_of(tmp_path, **{name: str(tmp_path / file) for name, file in files.items()})
    assert str(tmp_path) not in card.content and "base_model" not in card.data.to_dict()
