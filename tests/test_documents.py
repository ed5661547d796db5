"""Documents 002 and 004: options that must agree, measurements on a toy model, and verdicts that follow the figures."""

import math

import matplotlib.pyplot as plt
import pytest
import torch
from conftest import make_backbone, make_prompts

from grade import caching, intuitor
from grade.claims import to_markdown
from grade.claims_caching import caching_claims
from grade.claims_intuitor import intuitor_claims
from grade.errors import InputError
from grade.figures_documents import plot_layer_differences, plot_peak_sweep, plot_peaks_by_length, plot_scores
from grade.memory.shapes import QWEN25_1_5B, QWEN25_3B
from grade.text_policy import load_policy, text_sequences


@pytest.fixture(scope="module")
def toy():
    backbone, texts = load_policy("", "", "")
    return backbone, *text_sequences(backbone, texts, 2, 4, 6)


def test_every_option_gives_the_same_log_probabilities_and_gradient():
    backbone, prompts = make_backbone(), make_prompts()
    ids = torch.randint(3, 23, (3, 4), generator=torch.Generator().manual_seed(1))
    table = caching.compare_options(backbone, prompts, ids).set_index("option")
    assert list(table.index) == list(caching.OPTIONS)
    assert table.ref_max_abs_diff.max() < 1e-12 and table.grad_rel_diff.max() < 1e-12  # float64
    assert table.peak_bytes["hybrid"] < table.peak_bytes["selected"] < table.peak_bytes["activations"]
    assert all(p.grad is None for p in backbone.trainable_parameters())


def test_the_adapter_acts_on_the_rows_that_are_named():
    backbone, prompts = make_backbone(), make_prompts(batch=4)
    every = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    with backbone.reference():
        base = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    with caching.adapter_on_rows(backbone, 1):
        mixed = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    torch.testing.assert_close(mixed, torch.cat([every[:1], base[1:]]))
    assert not torch.allclose(every[1:], base[1:])


def test_an_untrained_adapter_changes_nothing_and_a_trained_one_every_layer():
    ids = torch.randint(3, 23, (3, 4), generator=torch.Generator().manual_seed(1))
    still = caching.layer_differences(make_backbone(perturb=False), make_prompts(), ids)
    moved = caching.layer_differences(make_backbone(), make_prompts(), ids)
    assert still.relative_difference.tolist() == [0, 0] and moved.relative_difference.min() > 0
    assert moved.attrs["dropout"] == 0  # train and eval mode
    kl = caching.reference_that_keeps_its_adapter(make_backbone(), make_prompts(), ids)
    assert kl["kl_to_itself"] == 0 < kl["kl_to_base"]


def test_text_that_is_too_short_is_refused(toy):
    with pytest.raises(InputError, match="prompt tokens"):
        text_sequences(toy[0], ["short"], 1, 4, 6)


def test_the_documents_table_by_hand():
    rows = intuitor.memory_table(QWEN25_1_5B, 64, 6144).set_index("row").by_formula_gb
    assert rows["full logits"] == 64 * 6144 * 151_936 * 4 / 1e9
    assert rows["optimizer"] == 2 * 4 * 1_543_714_304 / 1e9
    assert rows["model activations"] == 28 * 64 * 6144 * 1536 * 2 / 1e9
    assert rows["gradients of the logits"] == 0


def test_self_certainty_is_exact_on_samples_and_the_documents_formula_is_not(toy):
    backbone, prompts, _ = toy
    hidden, logits, mask, group = intuitor.certainty_samples(backbone, prompts, 6, group=3)
    assert group.tolist() == [0, 0, 0, 1, 1, 1] and logits.shape[:2] == mask.shape
    figures, scores = intuitor.certainty_figures(backbone, hidden, logits, mask, group, chunk=16)
    assert figures["chunked_max_abs_error"] < 1e-4 < figures["document_offset"]
    assert (figures["completions"], figures["tokens"]) == (6, int(mask.sum()))
    spread = scores.groupby("group").self_certainty.std().mean()
    assert figures["within_group_sd"] == pytest.approx(spread)


def test_raising_one_logit_moves_the_right_value_and_not_the_documents():
    sweep = intuitor.peak_sweep(151_936, [5, 35])
    # The peak dominates at 35: logsumexp = 35, the mean of N(0, 4) is about 0.
    assert sweep.published.iloc[-1] == pytest.approx(35, abs=0.05)
    # logsumexp of V draws of N(0, 4): log V + 2; one chunk of 149 follows the peak.
    assert sweep.published.iloc[0] == pytest.approx(math.log(151_936) + 2, abs=0.1)
    assert sweep.document.iloc[-1] - sweep.document.iloc[0] == pytest.approx((35 - 8.9) / 149, rel=0.1)


def test_settings_are_answered_by_the_planner():
    table = intuitor.settings_fit("tiny", 32, (64, 64), 2, 10**12)
    assert table.fits.tolist() == table.needed.tolist() == [8, 8, 32, 32]
    small = intuitor.full_update("tiny", 32, 64, batch_size=2, logits="all", self_certainty=True)
    budget = intuitor.shard(intuitor.trace(small), small, 2).peak
    assert intuitor.settings_fit("tiny", 32, (64, 64), 2, budget).fits.iloc[0] == 2


CACHING = {
    **{f"caching/layer_{n}_bytes": 10**7 for n in ("norms", "attention", "adapter_inputs", "mlp")},
    "caching/layer_bytes": 4 * 10**7, "caching/layer_eager_bytes": 8 * 10**7, "caching/forward_kept_gb": 5.0,
    **{f"caching/traced_{o}_step_gb": 1.0 for o in caching.OPTIONS},
    **{f"caching/measured_{o}_ref_max_abs_diff": 0.0 for o in caching.OPTIONS},
    "caching/measured_dual_over_selected_seconds": 1.4, "caching/second_base_gb": 6.17,
    "caching/stored_bytes_per_sample": 2044, "caching/last_layer_difference": 0.2, "caching/train_eval_difference": 0.0,
    "caching/kl_to_base": 0.7, "caching/kl_to_itself": 0.0,
}  # fmt: skip


def test_document_002_has_its_verdicts():
    claims = {c.claim: c for c in caching_claims(QWEN25_3B, 2, 512, CACHING)}
    assert len(claims) == 20 and to_markdown(claims.values()).count("\n") == 22
    assert claims["Q, K and V are 3.67 MB each"].found == 2 * 512 * 2048 * 2 / 1e6
    assert claims["the final logits take 155.6 MB"].found == 2 * 512 * 151_936 * 2 / 1e6
    assert claims["option 3 (one pass, dual output) costs the same memory"].verdict == "confirmed"
    twice = {c.claim: c for c in caching_claims(QWEN25_3B, 2, 512, CACHING | {"caching/traced_dual_step_gb": 2.0})}
    assert twice["option 3 (one pass, dual output) costs the same memory"].verdict == "refuted"
    noisy = caching_claims(QWEN25_3B, 2, 512, CACHING | {"caching/train_eval_difference": 0.1})
    changed = {c.claim for c in noisy} - {c.claim for c in noisy if c.verdict == claims[c.claim].verdict}
    assert changed == {"option 2 is useless because eval and train mode differ (dropout, batch norm)"}


def test_document_004_has_its_verdicts():
    figures = {f"intuitor/{s}_fits_{logits}": n for s, n in (("conservative", 8), ("aggressive", 18))
               for logits in ("dense", "chunked")}  # fmt: skip
    names = ("document_offset", "document_correlation_tokens", "document_correlation_in_group", "tokens", "completions",
             "sweep_published", "sweep_document", "chunked_max_abs_error", "half_max_abs_error", "within_group_sd",
             "bfloat16_max_abs_error")  # fmt: skip
    figures |= {f"intuitor/{name}": 1.0 for name in names}
    rows = intuitor.memory_table(QWEN25_1_5B, 64, 6144).set_index("row").by_formula_gb.to_dict()
    steps = ("PPO, dense logits", "Intuitor, dense logits", "PPO, logits in chunks", "Intuitor, logits in chunks")
    peaks = {6144: dict.fromkeys(steps, 10.0)}
    claims = {c.claim: c for c in intuitor_claims(QWEN25_1_5B, rows, peaks, figures)}
    assert len(claims) == 16
    assert claims["Intuitor needs 468 GB more than PPO"].found == 0
    assert claims["the conservative settings fit 8 x 80 GB"].verdict == "confirmed"
    assert claims["the aggressive settings fit 8 x 80 GB"].verdict == "partly"
    fat = {6144: peaks[6144] | {"Intuitor, dense logits": 478.0}}
    judged = {c.claim: c.verdict for c in intuitor_claims(QWEN25_1_5B, rows, fat, figures)}
    assert judged["Intuitor needs 468 GB more than PPO"] == judged["Intuitor in all needs 481 GB"] == "confirmed"


def test_figures_of_both_documents(toy):
    table, traces = intuitor.length_table("tiny", [96], gpus=2)
    assert {step for _, step in traces} == set(table.step)
    fig, axes = plt.subplots(1, 4)
    plot_peaks_by_length(axes[0], table, {96: (1, 2)})
    assert len(axes[0].lines) == 6  # two as stated, four traced
    plot_peak_sweep(axes[1], intuitor.peak_sweep(64, [5, 35], chunk=8))
    plot_layer_differences(axes[2], caching.layer_differences(toy[0], toy[1], toy[2]))
    samples = intuitor.certainty_samples(toy[0], toy[1], 6, group=3)
    plot_scores(axes[3], intuitor.certainty_figures(toy[0], *samples, chunk=16)[1])
    assert len(axes[3].collections[0].get_offsets()) == 6
    plt.close(fig)
