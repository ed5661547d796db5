"""A policy at other parameters: moved along a vector, and back bit by bit whatever happens meanwhile."""

import pytest
import torch

from grade.errors import InputError
from grade.models.parameters import flatten, moved, restoring, set_values, split_vector, trained_parameters


def test_parameters_move_along_the_vector_and_come_back(backbone):
    parameters = trained_parameters(backbone)
    before = flatten(p.detach() for p in parameters).clone()
    v = torch.linspace(-1, 1, len(before), dtype=before.dtype)
    with pytest.raises(ZeroDivisionError), moved(backbone, v, 0.5):
        torch.testing.assert_close(flatten(p.detach() for p in parameters), before + 0.5 * v)
        1 / 0  # noqa: B018
    assert torch.equal(flatten(p.detach() for p in parameters), before)
    with restoring(parameters):
        set_values(parameters, [torch.zeros_like(p) for p in parameters])
        assert not flatten(p.detach() for p in parameters).any()
    assert torch.equal(flatten(p.detach() for p in parameters), before)


def test_a_vector_is_cut_into_one_part_for_each_parameter(backbone):
    parameters = trained_parameters(backbone)
    v = torch.arange(sum(p.numel() for p in parameters), dtype=torch.float32)
    parts = split_vector(backbone, v)
    assert [(part.shape, part.dtype) for part in parts] == [(p.shape, p.dtype) for p in parameters]
    assert torch.equal(flatten(parts).float(), v)
    for wrong in (v[1:], v[None]):
        with pytest.raises(ValueError, match="update vector has shape"):
            split_vector(backbone, wrong)
    with pytest.raises(ValueError, match="zip"):
        set_values(parameters, parts[:-1])


def test_only_an_adapter_is_trained(backbone):
    backbone.embedding_weight.requires_grad_(True)
    with pytest.raises(InputError, match="an adapter's only"):
        trained_parameters(backbone)
    backbone.model.requires_grad_(False)
    with pytest.raises(InputError, match="none"):
        trained_parameters(backbone)
