"""The tiny language model: optimizer, loss and folder."""

import json

import numpy as np
import pytest
import torch

from grade.cli.main import main
from grade.data.base_model import train_tokenizer
from grade.data.tiny_lm import Muon, PretrainConfig, orthogonalised, pretrain, text_windows
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.results import read_metrics
from grade.training.toy import toy_reviews

TINY = dict(vocab_size=300, hidden_size=16, intermediate_size=32, layers=1, heads=2, max_positions=32, context=8,
            batch_size=4, steps=30, warmup_steps=2, eval_windows=16)  # fmt: skip


@pytest.fixture
def reviews(tmp_path):
    for i, split in enumerate(("policy", "test")):
        lines = [json.dumps(r._asdict()) for r in toy_reviews(40, seed=i)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_orthogonalised_matrices_keep_their_singular_vectors_and_lose_their_values():
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((4, 4), (3, 7), (7, 3)):
        x = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
        values = torch.linalg.svdvals(orthogonalised(x))
        assert ((values > 0.6) & (values < 1.3)).all()  # the quintic's fixed band
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        rotated = u.mT @ orthogonalised(x) @ vh.mT
        off = rotated - torch.diag_embed(torch.diagonal(rotated, dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-10


def test_muon_treats_matrices_of_one_shape_as_it_would_alone():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(4)]
    together = [torch.nn.Parameter(v.clone()) for v in values[:2]]
    alone = [torch.nn.Parameter(v.clone()) for v in values[:2]]
    optimizers = [Muon(together, 0.1), Muon(alone[:1], 0.1), Muon(alone[1:], 0.1)]
    for _ in range(2):
        for p, gradient in zip([*together, *alone], values[2:] * 2, strict=True):
            p.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b, start in zip(together, alone, values[:2], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
        assert not torch.equal(a, start)


def test_windows_are_a_stream_that_overlaps_by_the_target():
    tokenizer = train_tokenizer(["aa bb", "cc"], 260)
    windows = text_windows(tokenizer, ["abc", "de"], 3)  # a b c eos d e eos
    text = ["".join(tokenizer.convert_ids_to_tokens(row.tolist())) for row in windows]
    assert text == ["abc<eos>", "<eos>de<eos>"]
    with pytest.raises(InputError, match="context"):
        text_windows(tokenizer, ["abc"], 9)


def test_the_command_learns_writes_a_loadable_folder_and_repeats_itself(reviews, tmp_path, capsys):
    config = tmp_path / "pretrain.yaml"
    config.write_text("".join(f"{k}: {v}\n" for k, v in TINY.items()))
    out = tmp_path / "model"
    argv = ["pretrain", "--reviews", str(reviews), "--output-dir", str(out), "--metrics", str(tmp_path / "m.json")]
    assert main([*argv, "--config", str(config)]) == 0
    metrics = read_metrics(tmp_path / "m.json")
    assert metrics["test/nats_per_token"] < 0.9 * np.log(300)
    backbone = Backbone.load(out)
    # 16 windows of the test split, and as many nats in all over characters instead of tokens.
    windows = text_windows(backbone.tokenizer, [r.text for r in toy_reviews(40, seed=1)], 8)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:16]]
    with torch.no_grad():
        nats = np.mean([backbone.model(input_ids=w[None], labels=w[None]).loss.item() for w in windows])
    characters = sum(len(t) for t in backbone.tokenizer.batch_decode(windows[:, 1:], skip_special_tokens=True))
    assert metrics["test/nats_per_token"] == pytest.approx(nats, abs=1e-4) and metrics["test/nats_per_token_n"] == 16
    assert metrics["test/nats_per_char"] == pytest.approx(nats * 16 * 8 / characters, rel=1e-4)
    assert backbone.vocab_size == metrics["vocab_size"] and backbone.eos_token_ids == (0,)
    again = pretrain(PretrainConfig(**TINY), reviews, tmp_path / "again", log=lambda line: None)
    assert again["test/nats_per_token"] == pytest.approx(metrics["test/nats_per_token"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"heads": 3}, "heads"), ({"context": 32}, "context"), ({"warmup_steps": 30}, "warmup_steps")],
)
def test_impossible_shapes_are_refused_before_anything_is_written(reviews, tmp_path, changes, field):
    with pytest.raises(InputError, match=field):
        pretrain(PretrainConfig(**TINY | changes), reviews, tmp_path / "model")
    assert not (tmp_path / "model").exists()
