"""Steps of methods: their phases, what they cost beside, and steps that run beside their traces; see test_trace.py."""

import inspect

import pytest
import torch

from grade import GradeConfig
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.replay import replay
from grade.memory.compare import compare, standard_steps
from grade.memory.settings import StepConfig
from grade.memory.step import build, make_step
from grade.memory.trace import trace

STEP = dict(model="tiny", prompt_tokens=4, max_new_tokens=6, dtype="float32")


def test_a_method_reports_the_phases_of_a_step():
    phases = {"forward", "reference", "reward", "backward", "optimizer"}
    for method in ("ste", "gumbel_legacy", "ppo"):
        own = set() if method.endswith("_legacy") else {"rollout"}
        assert set(trace(StepConfig(**STEP, method=method)).phases) == phases | own


def test_a_step_takes_the_method_s_updates_with_its_value_head():
    config = StepConfig(**STEP, method="ppo", batch_size=2)
    step = make_step(config, *build(config, device="cpu"))
    head = step.others[-1]
    before, steps = head.linear.weight.clone(), step.optimizer.state[head.linear.weight]["step"].clone()
    step.run()
    assert step.optimizer.state[head.linear.weight]["step"] - steps == 4
    assert not torch.equal(before, head.linear.weight)


def test_a_step_has_the_defaults_of_training_and_of_the_engine():
    """Two hops, and the document's support of 256 tokens."""
    step, run, engine = StepConfig(), GradeConfig(method="ste"), inspect.signature(replay).parameters["hops"]
    assert step.hops == run.hops == engine.default == 2
    assert step.gumbel_topk == run.gumbel_topk == RelaxationConfig().gumbel_topk == 256


def test_a_row_has_the_traced_peak_and_that_of_the_step_that_ran():
    steps = standard_steps("cpu")
    assert len(steps) == 13 and len(standard_steps("cuda")) == 17
    (row,) = compare(steps[8:9])
    assert (row["name"], row["config"]["method"]) == (steps[8].headline, "gumbel_legacy")
    assert 0 < row["fixed_bytes"] < row["traced_peak_bytes"]
    assert row["measured_peak_bytes"] == pytest.approx(row["traced_peak_bytes"], rel=0.01) and row["seconds"] > 0
