"""Steps of methods: their phases, what they cost beside, and what their settings may be; peaks are in test_trace.py."""

import pytest
import torch

from grade.errors import InputError
from grade.memory.models import model_config
from grade.memory.settings import StepConfig
from grade.memory.step import build, make_step
from grade.memory.trace import trace

STEP = dict(model="tiny", prompt_tokens=4, max_new_tokens=6, dtype="float32")


def test_a_method_reports_the_phases_of_a_step():
    phases = {"forward", "reference", "reward", "backward", "optimizer"}
    for method in ("ste", "gumbel_legacy", "ppo", "distilled"):
        own = set() if method.endswith("_legacy") else {"rollout"}
        assert set(trace(StepConfig(**STEP, method=method)).phases) == phases | own
    assert "reward" not in trace(StepConfig(**STEP, method="grpo", self_certainty_reward=True)).phases


def test_a_wider_window_costs_its_rows_in_memory():
    """Tokens [T] of 8 bytes, embeddings [D] of 4: kept, and copied when new ones are entered, with their products.

    Of 1,280 that were fitted 250 wait, so products of 252 with 1,532 are of 4 bytes, and of 8 when they are widened.
    """
    narrow, wide = (trace(StepConfig(**STEP, method="distilled", num_generations=2, distil_window=n), device="cpu")
                    for n in (256, 1280))  # fmt: skip
    rows = 1024 * (6 * 8 + 4 * model_config("tiny").hidden_size)
    assert wide.categories["weights"] >= narrow.categories["weights"]
    assert rows <= wide.peak - narrow.peak <= 2.2 * rows + 12 * 252 * 1532


def test_a_step_takes_the_method_s_updates_with_its_value_head():
    for options, updates in (({}, 4), (dict(passes_per_step=3, minibatches=2), 6)):
        config = StepConfig(**STEP, method="ppo", **dict(batch_size=2) | options)
        step = make_step(config, *build(config, device="cpu"))
        head = step.others[-1]
        before, steps = head.linear.weight.clone(), step.optimizer.state[head.linear.weight]["step"].clone()
        step.run()
        assert step.optimizer.state[head.linear.weight]["step"] - steps == updates
        assert not torch.equal(before, head.linear.weight)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(method="grpo", batch_size=6, num_generations=4), r"batch_size: got 6; allowed: a multiple of 4 \(4 comp"),
        (dict(method="ppo", batch_size=6, minibatches=4), "batch_size: got 6; .*multiple of 4 .*4 minibatches"),
        (dict(method="grpo", hops=3), "hops: got 3; allowed: only with gumbel.*not with grpo"),
        (dict(method="grpo", engine="replay"), "engine: got 'replay'; allowed: auto for grpo"),
        (dict(method="grpo", explicit_freeing=True), "explicit_freeing: got True; allowed: false for the method grpo"),
        (dict(method="distilled", distil_window=8), "distil_window: got 8; allowed: at least 16: two groups of 8"),
        (
            dict(method="auto"),
            "method: got 'auto'; allowed: the method itself, as auto depends on the reward: gumbel, ",
        ),
    ],
    ids=str,
)
def test_settings_that_a_method_does_not_have_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        StepConfig.parse(STEP | values)
