"""The tiny language model: windows, loss and folder."""

import numpy as np
import pytest
import torch

from grade.cli.main import main
from grade.data.reviews import load_reviews
from grade.data.tiny_lm import PretrainConfig, text_windows, train_tokenizer
from grade.models.backbone import Backbone
from grade.pipeline.base_model import pretrain
from grade.results import read_metrics

TINY = dict(vocab_size=300, hidden_size=16, intermediate_size=32, layers=1, context=8, steps=30,
            warmup_steps=2, eval_windows=16)  # fmt: skip


def test_windows_are_a_stream_that_overlaps_by_the_target():
    tokenizer = train_tokenizer(["aa bb", "cc"], 260)
    windows = text_windows(tokenizer, ["abc", "de"], 3)  # a b c eos d e eos
    text = ["".join(tokenizer.convert_ids_to_tokens(row.tolist())) for row in windows]
    assert text == ["abc<eos>", "<eos>de<eos>"]


def test_the_command_learns_writes_a_loadable_folder_and_repeats_itself(toy, tmp_path, capsys):
    reviews = toy / "reviews"
    config = tmp_path / "pretrain.yaml"
    config.write_text("".join(f"{k}: {v}\n" for k, v in TINY.items()))
    out = tmp_path / "model"
    argv = ["pretrain", "--reviews", str(reviews), "--output-dir", str(out), "--metrics", str(tmp_path / "m.json")]
    assert main([*argv, "--config", str(config)]) == 0
    metrics = read_metrics(tmp_path / "m.json")
    assert metrics["test/nats_per_token"] < 0.9 * np.log(300)
    backbone = Backbone.load(out)
    # 16 windows of the test split.
    windows = text_windows(backbone.tokenizer, [review.text for review in load_reviews(reviews, "test")], 8)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:16]]
    with torch.no_grad():
        nats = np.mean([backbone.model(input_ids=w[None], labels=w[None]).loss.item() for w in windows])
    assert metrics["test/nats_per_token"] == pytest.approx(nats, abs=1e-4) and metrics["test/nats_per_token_n"] == 16
    assert backbone.vocab_size == metrics["vocab_size"] and backbone.eos_token_ids == (0,)
    again = pretrain(PretrainConfig(**TINY), reviews, tmp_path / "again", log=lambda line: None)
    assert again["test/nats_per_token"] == pytest.approx(metrics["test/nats_per_token"], rel=1e-5)
