"""Methods by name: which settings they read, and the temperature of a step."""

import pytest

from grade.errors import InputError
from grade.gradients.methods import METHODS, OPTIONS, MethodConfig, reads


@pytest.mark.parametrize("method", METHODS)
def test_a_setting_that_a_method_does_not_read_is_refused(method):
    other = {"hops": 3, "rao_draws": 2, "residual_weight": 0.5, "epsilon": 0.1, "gamma": 0.9, "baseline_momentum": 0.5}
    for option, value in other.items():
        if reads(method, option):
            assert getattr(MethodConfig(method=method, **{option: value}), option) == value
        else:
            with pytest.raises(InputError, match=f"{option}: got {value}; allowed: only with {OPTIONS[option][0]}"):
                MethodConfig(method=method, **{option: value})
    kept = MethodConfig.values_for(method, other | {"max_completion_length": 7})
    assert kept["method"] == method and kept["max_completion_length"] == 7
    assert {name for name in other if name in kept} == {name for name in other if reads(method, name)}


@pytest.mark.parametrize(("end", "steps", "tau"), [(None, 0, 0.5), (0.5, 0, 0.5), (1.0, 4, 0.75)])
def test_the_temperature_stays_or_is_annealed_in_some_steps(end, steps, tau):
    values = dict(method="ste", tau_start=0.5, tau_end=end)
    assert MethodConfig(**values, tau_anneal_steps=steps).relaxation(2).tau == tau
    with pytest.raises(InputError, match=f"tau_anneal_steps: got {4 - steps}; allowed: at least 1"):
        MethodConfig(**values, tau_anneal_steps=4 - steps)
