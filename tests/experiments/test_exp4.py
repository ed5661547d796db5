"""Experiment 4: configurations, token counts by hand, and verdicts that follow from the figures."""

from grade.experiments.exp4.measure import tables as experiment
from grade.experiments.exp4.metrics import exp4_claims

SETTINGS = experiment.Settings(prompt_tokens=3)


def test_the_documents_token_forwards_by_hand():
    steps = experiment.Settings(
        prompt_tokens=32, batch_before=4, batch_after=2, tokens_before=48, tokens_after=32
    ).steps
    # sum_{t<48} (32 + t) = 48 * 32 + 48 * 47 / 2 = 2664, and 1520 for 32 tokens
    assert experiment.token_forwards(steps["start"]) == 4 * 2664
    assert experiment.token_forwards(steps["shorter"]) == 4 * 1520
    assert experiment.token_forwards(steps["half_batch"]) == 2 * 2664
    assert experiment.token_forwards(steps["checkpointed"]) == 2 * 4 * 2664
    # replay: P + T - 1 on the cache, P + T - 1 in one pass; checkpointed once more for each of 2 hops and backward
    assert experiment.token_forwards(steps["replay"]) == 2 * (63 + 63)
    assert experiment.token_forwards(steps["replay_checkpointed"]) == 2 * (63 + 4 * 63)


def test_what_helps_and_what_does_not():
    peak = experiment.TABLES["configurations"](SETTINGS).set_index("configuration").peak_bytes
    for name in ("half_batch", "shorter", "bfloat16", "checkpointed"):
        assert peak[name] < peak["start"]
    # Frozen float32 weights are cast anew in each pass and kept for backward.
    assert peak["autocast"] > peak["start"]
    assert peak["replay"] < peak["loop"]


def test_every_claim_of_the_document_has_a_verdict_that_follows_its_figure():
    table = experiment.TABLES["configurations"](SETTINGS)
    claims = exp4_claims(table)
    assert len(claims) == 14 and {c.seed for c in claims} == {"001"}
    claim = "weights of three models go from 48 to 24 GB"
    assert {c.claim: c.verdict for c in claims}[claim] == "refuted"
    fat = table.set_index("configuration")
    fat.loc["start", "weights_bytes"], fat.loc["all_six", "weights_bytes"] = 48_300_000_000, 24_100_000_000
    assert {c.claim: c.verdict for c in exp4_claims(fat.reset_index())}[claim] == "confirmed"
