"""Settings of a traced step: what `grade memory` computes when it is told no more, what fits together, its headline."""

from types import SimpleNamespace

import pytest
import torch
from field_table import table

from grade.errors import InputError
from grade.gradients.methods import METHODS
from grade.memory.policy_step import PolicyStepConfig
from grade.memory.step import _MOMENTS, StepConfig, _total

COMMON = {
    "model": "qwen3-4b", "batch_size": (1, ">= 1"), "gradient_accumulation_steps": (1, ">= 1"),
    "prompt_tokens": (32, ">= 1"), "max_new_tokens": (64, ">= 1"), "gradient_checkpointing": False, "autocast": False,
    "dtype": "bfloat16", "adapter": "lora", "attention": "sdpa", "base_copies": (1, ">= 1"),
}  # fmt: skip
OWN = {
    "method": "ste", "engine": "auto", "hops": (2, ">= 0"), "support": "perturbed_top_k", "gumbel_topk": (256, ">= 0"),
    "explicit_freeing": False, "num_generations": (None, ">= 1"), "kl_estimator": "exact",
    "num_iterations": (None, ">= 1"), "minibatches": (1, ">= 1"), "self_certainty_reward": False,
    "distil_window": (2048, ">= 1"), "kl_coef": (0.1, ">= 0"), "reward": "bag",
}  # fmt: skip


def test_defaults_and_bounds_of_any_step_and_of_a_methods():
    found = table(StepConfig)
    assert {name: found[name] for name in COMMON | OWN} == COMMON | OWN
    assert set(found) == {*COMMON, *OWN, "lora"}
    assert {name: table(PolicyStepConfig)[name] for name in COMMON} == COMMON
    config = StepConfig()
    assert all(getattr(config, name) == (v[0] if isinstance(v, tuple) else v) for name, v in (COMMON | OWN).items())
    assert config.longest(SimpleNamespace(max_position_embeddings=5)) == 5


GROUPED = {"rloo": 8, "grpo": 8, "distilled": 8}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_settings_by_default(method):
    config = StepConfig(method=method)
    relaxed = method not in ("reinforce", "rloo", "remax", "grpo", "ppo", "distilled")
    assert config.policy_gradient is not relaxed
    assert config.batch_size == config.batch_unit == GROUPED.get(method, 1)
    engine = ("unrolled" if method.endswith("_legacy") else "replay") if relaxed else None
    assert config.engine_name == engine


@pytest.mark.parametrize(
    "values",
    [
        dict(method="ste_legacy", gradient_checkpointing=True),  # the step's own, whatever the trainers say
        dict(method="ste", gradient_checkpointing=True),
        dict(method="grpo", gradient_checkpointing=True),
        dict(method="distilled", gradient_checkpointing=True),
        dict(engine="unrolled", gradient_checkpointing=True, explicit_freeing=True),
        dict(method="gumbel_legacy", explicit_freeing=True),
        dict(method="grpo", hops=2, gumbel_topk=256, support="perturbed_top_k"),  # as they are by default
        dict(method="ste", num_generations=None, minibatches=1, distil_window=2048),
        dict(method="grpo", batch_size=16),
        dict(method="grpo", num_generations=4, batch_size=12, minibatches=6),
        dict(method="distilled", num_generations=4, distil_window=8),
        dict(method="ppo", engine="auto"),
    ],
    ids=str,
)
def test_what_fits_together_is_taken_as_it_is(values):
    config = StepConfig.parse(values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(method="auto"), "method: got 'auto'; allowed: the method itself, as auto depends on the reward: gumbel"),
        (dict(method="grpo", hops=1), "hops: got 1; allowed: only with gumbel, .*, not with grpo"),
        (dict(method="grpo", hops=3), "hops: got 3; .*not with grpo"),
        (dict(method="grpo", hops=0), "hops: got 0; .*not with grpo"),
        (dict(method="st", gumbel_topk=257), "gumbel_topk: got 257; .*not with st"),
        (dict(method="st", gumbel_topk=255), "gumbel_topk: got 255; .*not with st"),
        (dict(method="reinforce", support="top_k"), "support: got 'top_k'; .*not with reinforce"),
        (dict(method="ste", kl_estimator="k3"), "kl_estimator: got 'k3'; .*not with ste"),
        (dict(method="ste", num_iterations=1), "num_iterations: got 1; .*not with ste"),
        (dict(method="ste", self_certainty_reward=True), "self_certainty_reward: got True; .*not with ste"),
        (dict(method="ste", minibatches=2), "minibatches: got 2; allowed: only with grpo, ppo, not with ste"),
        (dict(method="rloo", distil_window=2049), "distil_window: got 2049; allowed: only with distilled, not with rl"),
        (dict(method="grpo", engine="checkpointed"), "engine: got 'checkpointed'; allowed: auto for grpo: a policy"),
        (dict(method="ppo", engine="replay"), "engine: got 'replay'; allowed: auto for ppo"),
        (dict(method="distilled", engine="unrolled"), "engine: got 'unrolled'; allowed: auto for distilled"),
        (dict(engine="checkpointed", gradient_checkpointing=True),
         "gradient_checkpointing: got True; allowed: false for the engine checkpointed"),
        (dict(engine="checkpointed", explicit_freeing=True), "allowed: false for the engine checkpointed: it keeps"),
        (dict(explicit_freeing=True), "explicit_freeing: got True; allowed: false for the engine replay"),
        (dict(method="st", explicit_freeing=True), "allowed: false for the engine replay"),
        (dict(method="ppo", explicit_freeing=True), "explicit_freeing: got True; allowed: false for the method ppo"),
        (dict(method="grpo", batch_size=4), r"got 4; allowed: a multiple of 8 \(8 completions of a prompt\)"),
        (dict(method="grpo", batch_size=12), r"batch_size: got 12; allowed: a multiple of 8 \(8 completions"),
        (dict(method="rloo", num_generations=3, batch_size=2), r"a multiple of 3 \(3 completions of a prompt\)"),
        (dict(method="ppo", minibatches=2, batch_size=3),
         r"a multiple of 2 \(1 completions of a prompt, 2 minibatches\)"),
        (dict(method="grpo", num_generations=4, minibatches=6, batch_size=6),
         r"a multiple of 12 \(4 completions of a prompt, 6 minibatches\)"),
        (dict(method="distilled", num_generations=4, distil_window=7), "distil_window: got 7; allowed: at least 8"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        StepConfig.parse(values)


@pytest.mark.parametrize(("values", "expected"), [
    (dict(method="ppo", minibatches=3), 3), (dict(method="grpo", num_generations=6), 6),
    (dict(method="grpo", num_generations=6, minibatches=4), 12), (dict(method="ste"), 1),
    (dict(method="grpo", num_generations=6, minibatches=4, batch_size=24), 24),
])  # fmt: skip
def test_a_batch_is_the_smallest_one_unless_it_is_given(values, expected):
    assert StepConfig(**values).batch_size == expected


def test_a_policy_gradient_has_the_trainers_settings():
    config = StepConfig(
        method="grpo", max_new_tokens=9, num_generations=3, kl_estimator="k3", num_iterations=5, minibatches=6,
        self_certainty_reward=True, gradient_checkpointing=True,
    )  # fmt: skip
    found = config._settings
    assert (found.method, found.max_completion_length, found.num_generations, found.kl_estimator) == (
        "grpo",
        9,
        3,
        "k3",
    )
    assert (found.num_iterations, found.minibatches, found.self_certainty_reward) == (5, 6, True)
    assert found.gradient_checkpointing is True and found.updates == 30
    assert StepConfig(method="distilled", distil_window=64)._settings.distil_window == 64
    for method in ("ste", "ste_legacy"):  # the engine's own
        assert StepConfig(method=method, gradient_checkpointing=True)._settings.gradient_checkpointing is False
    assert StepConfig(method="grpo")._settings.gradient_checkpointing is False


LINE = "B=1 P=32 T=64, bfloat16, lora, sdpa"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, f"tiny, ste (replay, 2 hops): {LINE}"),
        ({"hops": 0}, f"tiny, ste (replay, 0 hops): {LINE}"),
        ({"engine": "checkpointed"}, f"tiny, ste (checkpointed): {LINE}"),
        ({"engine": "unrolled"}, f"tiny, ste (unrolled): {LINE}"),
        ({"method": "gumbel_legacy", "engine": "replay"}, f"tiny, gumbel_legacy (replay, 2 hops): {LINE}"),
        ({"gradient_accumulation_steps": 2}, f"tiny, ste (replay, 2 hops): {LINE}, 2 microbatches"),
        ({"base_copies": 2}, f"tiny, ste (replay, 2 hops): {LINE}, 2 copies of the base"),
        ({"gradient_checkpointing": True}, f"tiny, ste (replay, 2 hops): {LINE}, layers checkpointed"),
        ({"autocast": True}, f"tiny, ste (replay, 2 hops): {LINE}, autocast"),
        (
            {"gradient_accumulation_steps": 2, "autocast": True, "base_copies": 3, "gradient_checkpointing": True},
            f"tiny, ste (replay, 2 hops): {LINE}, 2 microbatches, layers checkpointed, autocast, 3 copies of the base",
        ),
        ({"method": "ste_legacy", "explicit_freeing": True, "autocast": True},
         f"tiny, ste_legacy (unrolled): {LINE}, explicit freeing, autocast"),
        ({"reward": "trunk"}, f"tiny, ste (replay, 2 hops): {LINE}"),
        ({"reward": "hf:a/b"}, f"tiny, ste (replay, 2 hops): {LINE}, reward hf:a/b"),
        ({"method": "ppo", "num_iterations": 1}, f"tiny, ppo (G=1, 1 update): {LINE}"),
        ({"method": "ppo", "num_iterations": 2}, f"tiny, ppo (G=1, 2 updates): {LINE}"),
        ({"method": "ppo"}, f"tiny, ppo (G=1, 4 updates): {LINE}"),
        ({"method": "reinforce", "adapter": "full", "attention": "eager", "dtype": "float16", "batch_size": 3},
         "tiny, reinforce (G=1, 1 update): B=3 P=32 T=64, float16, full, eager"),
        ({"method": "grpo", "num_generations": 2, "minibatches": 2, "prompt_tokens": 3, "max_new_tokens": 4},
         "tiny, grpo (G=2, 2 updates): B=2 P=3 T=4, bfloat16, lora, sdpa"),
    ],
    ids=str,
)  # fmt: skip
def test_the_headline_says_what_the_step_is(values, line):
    assert StepConfig.parse({"model": "tiny"} | values).headline == line


def test_sums_over_one_process_are_the_values_or_stand_ins_without_data():
    values, scalar = torch.tensor([1.0, 2.0]), torch.empty((), device="meta")
    assert _total(values) is values and _total(scalar) is scalar
    assert _total(torch.empty(3, device="meta")) is _MOMENTS
