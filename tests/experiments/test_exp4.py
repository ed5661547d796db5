"""Experiment 4: configurations, token counts by hand, and verdicts that follow from the figures."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from grade.experiments.claims import to_markdown
from grade.experiments.exp4 import steps as exp4
from grade.experiments.exp4.claims import exp4_claims
from grade.memory.figures import plot_categories, plot_timeline
from grade.memory.step import StepConfig
from grade.memory.trace import trace

STEPS = exp4.configurations("tiny", 3, (2, 1), (2, 1))


@pytest.fixture(scope="module")
def traces():
    return {name: trace(config) for name, config in STEPS.items()}


def test_the_documents_token_forwards_by_hand():
    steps = exp4.configurations("tiny", 32, (4, 2), (48, 32))
    # sum_{t<48} (32 + t) = 48 * 32 + 48 * 47 / 2 = 2664, and 1520 for 32 tokens
    assert exp4.token_forwards(steps["start"]) == 4 * 2664
    assert exp4.token_forwards(steps["2 shorter completions"]) == 4 * 1520
    assert exp4.token_forwards(steps["1 half the batch"]) == 2 * 2664
    assert exp4.token_forwards(steps["4 layers checkpointed"]) == 2 * 4 * 2664
    # replay: P + T - 1 on the cache, P + T - 1 in one pass; checkpointed once more for each of 2 hops and backward
    assert exp4.token_forwards(steps["replay, one base"]) == 2 * (63 + 63)
    assert exp4.token_forwards(steps["replay, one base, checkpointed"]) == 2 * (63 + 4 * 63)


def test_each_change_changes_only_itself():
    start = STEPS["start"].model_dump()
    assert (start["base_copies"], start["dtype"], start["gumbel_topk"]) == (3, "float32", 0)
    for name, keys in {
        "2 shorter completions": {"max_new_tokens"},
        "3 bfloat16, eager": {"dtype", "attention"},
        "4 layers checkpointed": {"gradient_checkpointing"},
        "5 explicit freeing": {"explicit_freeing"},
        "6 autocast": {"autocast"},
    }.items():
        assert {k for k, v in STEPS[name].model_dump().items() if v != start[k]} == keys


def test_what_helps_and_what_does_not(traces):
    peak = {name: t.peak for name, t in traces.items()}
    for name in ("1 half the batch", "2 shorter completions", "3 bfloat16, eager", "4 layers checkpointed"):
        assert peak[name] < peak["start"]
    # Frozen float32 weights are cast anew in each pass and kept for backward.
    assert peak["6 autocast"] > peak["start"]
    assert peak["replay, one base"] < peak["bfloat16, sdpa, sizes of 1 and 2"]


def test_every_claim_of_the_document_has_a_verdict_that_follows_its_figure(traces):
    claims = exp4_claims(STEPS, traces)
    assert len(claims) == 14 and {c.seed for c in claims} == {"001"}
    assert to_markdown(claims).count("\n") == 16
    by_name = {c.claim: c for c in claims}
    weights = {"weights": 24_100_000_000}
    fat = traces | {
        "start": replace(traces["start"], categories=traces["start"].categories | {"weights": 48_300_000_000}),
        "all six": replace(traces["all six"], categories=traces["all six"].categories | weights),
    }
    claim = "weights of three models go from 48 to 24 GB"
    assert by_name[claim].verdict == "refuted"
    assert {c.claim: c.verdict for c in exp4_claims(STEPS, fat)}[claim] == "confirmed"


def test_figures_show_every_configuration(traces):
    fig, axes = plt.subplots(1, 2)
    plot_categories(axes[0], traces, budget=2**20)
    assert [t.get_text() for t in axes[0].get_yticklabels()] == list(traces)
    plot_timeline(axes[1], traces["replay, one base"])
    labels = [t.get_text() for t in axes[1].get_legend().get_texts()]
    assert {"rollout", "backward", "optimizer"} <= set(labels)
    plt.close(fig)


def test_options_of_a_step_reach_the_engine():
    assert StepConfig(engine="unrolled", explicit_freeing=True).make_engine().keywords["options"].drop_lists
    assert StepConfig(engine="replay", gradient_checkpointing=True).make_engine().keywords["gradient_checkpointing"]
