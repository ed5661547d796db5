"""Defaults of the methods' settings and what each method is: every published figure was made with these."""

from dataclasses import asdict

import pytest
from field_table import table

from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.methods import POLICY_GRADIENT_METHODS, RELAXED, MethodConfig

RELAXATION = {
    "estimator": "ste", "support": "perturbed_top_k", "gumbel_topk": (256, ">= 0"), "tau": (1.0, "> 0"),
    "rao_draws": (8, ">= 1"), "max_new_tokens": (24, ">= 1"), "min_new_tokens": (0, ">= 0"),
}  # fmt: skip
METHOD = {
    "method": "auto", "max_completion_length": 512, "min_completion_length": 0, "gradient_checkpointing": False,
    "gumbel_topk": 64, "support": "perturbed_top_k", "rao_draws": 8, "tau_start": 2.0, "tau_end": 2.0,
    "tau_anneal_steps": 0, "hops": 1, "hop_tolerance": 0.0, "num_generations": None, "kl_estimator": "exact",
    "baseline_momentum": 0.9, "epsilon": 0.2, "num_iterations": None, "minibatches": 1, "scale_rewards": "none",
    "self_certainty_reward": False, "gamma": 1.0, "gae_lambda": 0.95, "value_learning_rate": 1e-3, "value_clip": 0.2,
    "whiten_advantages": True, "value_fit": "sgd", "residual_weight": "auto", "distil_families": None,
    "distil_window": 2048,
}  # fmt: skip
PLAIN = dict(grouped=False, clipped=False, value_head=False, greedy=False, running_mean=False, passes=1)
KINDS = {
    "reinforce": {"running_mean": True}, "rloo": {"grouped": True}, "remax": {"greedy": True},
    "grpo": {"grouped": True, "clipped": True}, "ppo": {"clipped": True, "value_head": True, "passes": 4},
}  # fmt: skip
OUTSIDE = {
    "max_completion_length": 0, "min_completion_length": -1, "gumbel_topk": -1, "tau_anneal_steps": -1, "hops": -1,
    "hop_tolerance": -0.1, "tau_start": 0.0, "tau_end": 1e7,
}  # fmt: skip
OUTSIDE_PPO = {
    "gamma": [0.0, 1.1], "gae_lambda": [-0.1, 1.1], "epsilon": [0.0, 1.0], "value_learning_rate": [0.0, 1e31],
    "value_clip": [0.0], "num_iterations": [0], "minibatches": [0],
}  # fmt: skip
EDGES_PPO = {"gamma": [1.0], "gae_lambda": [0.0, 1.0], "epsilon": [0.01, 0.99], "value_learning_rate": [1e30]}


def test_defaults_and_bounds():
    found = table(RelaxationConfig)
    assert {name: found[name] for name in RELAXATION} == RELAXATION
    assert {name: MethodConfig.default_of(name) for name in METHOD} == METHOD


@pytest.mark.parametrize("name", KINDS)
def test_a_policy_gradient_is_what_its_row_says(name):
    row = POLICY_GRADIENT_METHODS[name]
    assert {key: getattr(row, key) for key in PLAIN} == PLAIN | KINDS[name]
    assert (row.advantage is None) == (name == "ppo")
    config = MethodConfig(method=name)
    assert (config.group, config.passes) == (8 if row.grouped else 1, row.passes)
    assert config.relaxed is False and config.policy_gradient is row


def test_legacy_methods_run_the_originals_engine():
    engines = {name: asdict(method)["engine"] for name, method in RELAXED.items()}
    assert {name for name, engine in engines.items() if engine == "unrolled"} == {
        name for name in engines if name.endswith("_legacy")
    }
    assert set(engines.values()) == {"replay", "unrolled"}
    assert MethodConfig(method="ste_legacy").relaxed is True and MethodConfig(method="ste").policy_gradient is None


@pytest.mark.parametrize("name", OUTSIDE)
def test_values_out_of_range_are_refused(name):
    with pytest.raises(InputError, match=name):
        MethodConfig(method="ste", **{name: OUTSIDE[name]})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OUTSIDE_PPO.items() for value in values])
def test_values_of_ppo_out_of_range_are_refused(name, value):
    with pytest.raises(InputError, match=name):
        MethodConfig(method="ppo", **{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EDGES_PPO.items() for value in values])
def test_values_of_ppo_at_the_edge_are_taken(name, value):
    assert getattr(MethodConfig(method="ppo", **{name: value}), name) == value


@pytest.mark.parametrize("name", ["group", "baseline_momentum"])
def test_a_baselines_momentum_is_below_one(name):
    if name == "group":
        with pytest.raises(InputError, match="num_generations: got 1; allowed: at least 2"):
            MethodConfig(method="rloo", num_generations=1)
    else:
        assert MethodConfig(method="reinforce", baseline_momentum=0.0).baseline_momentum == 0.0
        with pytest.raises(InputError, match=name):
            MethodConfig(method="reinforce", baseline_momentum=1.0)


def test_one_file_serves_several_methods():
    values = {"hops": 2, "epsilon": 0.1, "seed": 3, "method": "ppo"}
    assert MethodConfig.values_for("ste", values) == {"hops": 2, "seed": 3, "method": "ste"}
    assert MethodConfig.values_for("grpo", values) == {"epsilon": 0.1, "seed": 3, "method": "grpo"}
