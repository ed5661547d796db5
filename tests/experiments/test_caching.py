"""Document 002: options that must agree, measurements on a toy model, and verdicts that follow the figures."""

import pytest
import torch
from conftest import make_backbone, make_prompts

from grade.errors import InputError
from grade.experiments.caching.measure import tables as experiment
from grade.experiments.caching.metrics import caching_claims
from grade.experiments.measured import Tables
from grade.experiments.setting import load_policy, text_sequences
from grade.memory.shapes import QWEN25_3B


def on(backbone):
    """The experiment on a policy in float64."""
    settings = experiment.Settings()
    settings.policy = (
        backbone, make_prompts(), torch.randint(3, 23, (3, 4), generator=torch.Generator().manual_seed(1))
    )  # fmt: skip
    return settings


def test_every_option_gives_the_same_log_probabilities_and_gradient():
    settings = on(make_backbone())
    table = experiment.TABLES["agreement"](settings).set_index("option")
    assert list(table.index) == list(experiment.OPTIONS)
    assert table.ref_max_abs_diff.max() < 1e-12 and table.grad_rel_diff.max() < 1e-12  # float64
    assert table.peak_bytes["hybrid"] < table.peak_bytes["selected"] < table.peak_bytes["activations"]
    assert all(p.grad is None for p in settings.policy[0].trainable_parameters())


def test_the_adapter_acts_on_the_rows_that_are_named():
    backbone, prompts = make_backbone(), make_prompts(batch=4)
    every = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    with backbone.reference():
        base = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    with experiment.adapter_on_rows(backbone, 1):
        mixed = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    torch.testing.assert_close(mixed, torch.cat([every[:1], base[1:]]))
    assert not torch.allclose(every[1:], base[1:])


def test_an_untrained_adapter_changes_nothing_and_a_trained_one_every_layer():
    still, moved = on(make_backbone(perturb=False)), on(make_backbone())
    change = [experiment.TABLES["layer_differences"](s).relative_difference for s in (still, moved)]
    assert change[0].tolist() == [0, 0] and change[1].min() > 0
    policy = experiment.TABLES["policy"](moved)
    assert policy["dropout"] == 0  # train and eval mode
    assert policy["kl_to_itself"] == 0 < policy["kl_to_base"]


def test_text_that_is_too_short_is_refused():
    with pytest.raises(InputError, match="tokens"):
        text_sequences(load_policy("", "", "")[0], ["short"], 1, 4, 6)


CACHING = {
    **{f"caching/layer_{n}_bytes": 10**7 for n in ("norms", "attention", "adapter_inputs", "mlp")},
    "caching/layer_bytes": 4 * 10**7, "caching/layer_eager_bytes": 8 * 10**7, "caching/forward_kept_gb": 5.0,
    **{f"caching/traced_{o}_step_gb": 1.0 for o in experiment.OPTIONS},
    **{f"caching/measured_{o}_ref_max_abs_diff": 0.0 for o in experiment.OPTIONS},
    "caching/second_base_gb": 6.17, "caching/stored_bytes_per_sample": 2044,
    "caching/last_layer_difference": 0.2, "caching/train_eval_difference": 0.0,
    "caching/kl_to_base": 0.7, "caching/kl_to_itself": 0.0,
}  # fmt: skip


def test_document_002_has_its_verdicts():
    claims = {c.claim: c for c in caching_claims(QWEN25_3B, 2, 512, CACHING)}
    assert len(claims) == 20
    assert claims["Q, K and V are 3.67 MB each"].found == 2 * 512 * 2048 * 2 / 1e6
    assert claims["the final logits take 155.6 MB"].found == 2 * 512 * 151_936 * 2 / 1e6
    assert claims["option 3 (one pass, dual output) costs the same memory"].verdict == "confirmed"
    twice = {c.claim: c for c in caching_claims(QWEN25_3B, 2, 512, CACHING | {"caching/traced_dual_step_gb": 2.0})}
    assert twice["option 3 (one pass, dual output) costs the same memory"].verdict == "refuted"
    noisy = caching_claims(QWEN25_3B, 2, 512, CACHING | {"caching/train_eval_difference": 0.1})
    changed = {c.claim for c in noisy} - {c.claim for c in noisy if c.verdict == claims[c.claim].verdict}
    assert changed == {"option 2 is useless because eval and train mode differ (dropout, batch norm)"}


def test_each_table_is_the_same_when_it_is_measured_alone():
    used, alone = (Tables(experiment, experiment.Settings()) for _ in range(2))
    assert len(used["agreement"]) == len(experiment.OPTIONS)  # runs steps on the policy that the others read
    assert used["policy"] == alone["policy"] and used["layer_differences"].equals(alone["layer_differences"])
