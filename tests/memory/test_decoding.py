"""A trace in which few of the sampling passes run has the peaks and counts of a full one."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from grade.memory.decoding import few_passes, quick_trace
from grade.memory.models import TINY, model_config
from grade.memory.step import StepConfig
from grade.memory.trace import trace, trace_layers
from grade.models.sampling import Decoder

STEP = dict(model="tiny", prompt_tokens=4, max_new_tokens=9)
CASES = [
    dict(batch_size=2, gumbel_topk=8),
    dict(method="gumbel", reward="trunk", gumbel_topk=0, attention="eager", dtype="float32"),
    dict(method="remax", batch_size=2),
    dict(method="ppo", batch_size=2, minibatches=2),
    dict(method="distilled", num_generations=2, distil_window=64),
    dict(method="ste_legacy", max_new_tokens=3, gumbel_topk=8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peaks_and_operations_are_those_of_a_full_trace(case):
    config = StepConfig(**STEP | case)
    full, few = trace(config), quick_trace(config)
    assert replace(few, seconds=0, timeline=[]) == replace(full, seconds=0, timeline=[])
    assert len(few.timeline) < len(full.timeline) or case.get("method") == "ste_legacy"


def test_on_several_gpus_what_is_received_is_counted_for_every_pass():
    config = StepConfig(**STEP, gumbel_topk=8)
    full, few = trace(config, processes=2), quick_trace(config, processes=2)
    assert full.received > 0
    assert replace(few, seconds=0, timeline=[]) == replace(full, seconds=0, timeline=[])


@pytest.mark.parametrize("tokens", [1, 2, 5, 6])
def test_short_completions_run_every_pass(tokens):
    config = StepConfig(**STEP | dict(max_new_tokens=tokens), gumbel_topk=8)
    full, few = trace(config), quick_trace(config)
    assert (few.peak, few.flops) == (full.peak, full.flops)
    assert (len(few.timeline) == len(full.timeline)) == (tokens <= 5)


def test_outside_the_context_every_pass_runs():
    before = Decoder.advance
    with few_passes(9):
        assert Decoder.advance is not before
    assert Decoder.advance is before


def test_a_cache_that_grows_is_seen_growing():
    config = StepConfig(**STEP | dict(max_new_tokens=20), gumbel_topk=8)
    sizes = []
    for growing in (False, True):
        with few_passes(20, growing):
            tracker = trace_layers(config, LlamaConfig(**TINY), "cuda")
        sizes.append({r.shape[2] for r in tracker.records if r.tag == "kv cache"})
    assert sizes[1] == set(range(4, 4 + 20)) > sizes[0]
    assert model_config("tiny").num_hidden_layers == 2
