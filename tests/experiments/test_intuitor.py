"""Document 004: measurements on a toy model, and verdicts that follow the figures."""

import math

import pytest

from grade.experiments.intuitor.measure import tables as experiment
from grade.experiments.intuitor.metrics import intuitor_claims
from grade.experiments.traced import zero3_share
from grade.memory.shapes import QWEN25_1_5B
from grade.memory.trace import trace

DOCUMENT = experiment.Settings(model="qwen2.5-1.5b", table_batch=64, table_tokens=6144)


def test_the_documents_table_by_hand():
    rows = experiment.TABLES["formulas"](DOCUMENT).set_index("row").by_formula_gb
    assert rows["full logits"] == 64 * 6144 * 151_936 * 4 / 1e9
    assert rows["optimizer"] == 2 * 4 * 1_543_714_304 / 1e9
    assert rows["model activations"] == 28 * 64 * 6144 * 1536 * 2 / 1e9
    assert rows["gradients of the logits"] == 0


def test_self_certainty_is_exact_on_samples_and_the_documents_formula_is_not():
    figures, scores = experiment.Settings().certainties
    assert scores.group.tolist() == [prompt for prompt in range(4) for _ in range(4)]
    assert figures["chunked_max_abs_error"] < 1e-4 < figures["document_offset"]
    assert figures["completions"] == 16 and 16 * 4 <= figures["tokens"] <= 16 * 6
    spread = scores.groupby("group").self_certainty.std().mean()
    assert figures["within_group_sd"] == pytest.approx(spread)


def test_raising_one_logit_moves_the_right_value_and_not_the_documents():
    sweep = experiment.TABLES["sweep"](experiment.Settings(sweep_vocab=151_936, chunk=1024))
    # The peak dominates at 35: logsumexp = 35, the mean of N(0, 4) is about 0.
    assert sweep.published.iloc[-1] == pytest.approx(35, abs=0.05)
    # logsumexp of V draws of N(0, 4): log V + 2; one chunk of 149 follows the peak.
    assert sweep.published.iloc[0] == pytest.approx(math.log(151_936) + 2, abs=0.1)
    assert sweep.document.iloc[-1] - sweep.document.iloc[0] == pytest.approx((35 - 8.9) / 149, rel=0.1)


def test_settings_are_answered_by_the_planner(monkeypatch):
    sizes = experiment.Settings(settings_prompt_tokens=32, settings_new_tokens=[64, 64])
    monkeypatch.setattr(experiment, "GPUS", 2)
    table = experiment.TABLES["fits"](sizes)
    assert table.fits.tolist() == table.needed.tolist() == [8, 8, 32, 32]
    small = experiment.Settings().update(32, 64, logits="all", self_certainty=True).changed(batch_size=2)
    monkeypatch.setattr(experiment, "BUDGET", zero3_share(trace(small), small, 2).peak)
    assert experiment.TABLES["fits"](sizes).fits.iloc[0] == 2


def test_document_004_has_its_verdicts():
    figures = {f"intuitor/{s}_fits_{logits}": n for s, n in (("conservative", 8), ("aggressive", 18))
               for logits in ("dense", "chunked")}  # fmt: skip
    names = ("document_offset", "document_correlation_tokens", "document_correlation_in_group", "tokens", "completions",
             "sweep_published", "sweep_document", "chunked_max_abs_error", "half_max_abs_error", "within_group_sd",
             "bfloat16_max_abs_error")  # fmt: skip
    figures |= {f"intuitor/{name}": 1.0 for name in names}
    rows = experiment.TABLES["formulas"](DOCUMENT).set_index("row").by_formula_gb.to_dict()
    peaks = {6144: {f"{who}, {how}": 10.0 for who in ("PPO", "Intuitor")
                    for how in ("dense logits", "logits in chunks")}}  # fmt: skip
    claims = {c.claim: c for c in intuitor_claims(QWEN25_1_5B, rows, peaks, figures)}
    assert len(claims) == 16
    assert claims["Intuitor needs 468 GB more than PPO"].found == 0
    assert claims["the conservative settings fit 8 x 80 GB"].verdict == "confirmed"
    assert claims["the aggressive settings fit 8 x 80 GB"].verdict == "partly"
    fat = {6144: peaks[6144] | {"Intuitor, dense logits": 478.0}}
    judged = {c.claim: c.verdict for c in intuitor_claims(QWEN25_1_5B, rows, fat, figures)}
    assert judged["Intuitor needs 468 GB more than PPO"] == judged["Intuitor in all needs 481 GB"] == "confirmed"
