"""Methods by name: each has settings of its own."""

import pytest

from grade.errors import InputError
from grade.gradients.methods import METHODS, TEACHER, TILT, MethodConfig
from grade.gradients.policy_gradient import POLICY_GRADIENT_METHODS

OWN = {"hops": 3, "epsilon": 0.1, "scale_rewards": "group", "tau": 0.5}
HAVING = {
    "hops": lambda m: m not in (*POLICY_GRADIENT_METHODS, TEACHER, TILT, "auto") and not m.endswith("_legacy"),
    "epsilon": lambda m: m in ("grpo", "ppo", "auto"),
    "scale_rewards": lambda m: m in ("grpo", "auto"),
    "tau": lambda m: m not in (*POLICY_GRADIENT_METHODS, TEACHER, TILT, "auto"),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_setting_that_a_method_does_not_have_is_refused_and_left_out_of_a_shared_file(method):
    for name, value in OWN.items():
        if HAVING[name](method):
            assert getattr(MethodConfig(method=method, **{name: value}), name) == value
        else:
            with pytest.raises(InputError, match=f"{name}: got '{name}'; allowed: a setting of this method: only "):
                MethodConfig(method=method, **{name: value})
    kept = MethodConfig.values_for(method, OWN | {"max_completion_length": 7, "unknown": 1})
    known = {name for name in OWN if HAVING[name](method)}
    assert kept.keys() == known | {"method", "max_completion_length", "unknown"}
