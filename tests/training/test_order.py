"""Rows of microbatches, on any number of processes."""

from types import SimpleNamespace

import pytest

from grade.training.order import Order


def order(rank=0, world=1, accumulation=1, batch=4, group=1, rows=5):
    config = SimpleNamespace(
        process_index=rank, world_size=world, microbatches=accumulation * world, per_device_train_batch_size=batch,
        group=group, seed=3,
    )  # fmt: skip
    return Order(rows, config)


def completions(orders, step, batch):
    """The row of each completion of a step, by microbatch; each is one process's."""
    found = {number: one.prompts(step, number) for one in orders for number in one.microbatches()}
    assert sorted(found) == list(range(len(found))) and len(found) == sum(len(one.microbatches()) for one in orders)
    return [row for _, rows in sorted(found.items()) for row in rows for _ in range(batch // len(rows))]


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize(("world", "accumulation", "batch"), [(1, 16, 1), (1, 8, 2), (1, 4, 4), (2, 8, 1), (2, 2, 4)])
def test_however_a_step_is_divided_its_completions_are_of_the_same_prompts(world, accumulation, batch, group):
    whole, divided = [order(batch=16, group=group)], [
        order(rank, world, accumulation, batch, group) for rank in range(world)
    ]  # fmt: skip
    for step in (1, 2, 3):
        assert completions(divided, step, batch) == completions(whole, step, 16)
    for one in divided:  # a prompt's completions are one process's, one after the other
        numbers = one.microbatches()
        together = max(1, group // batch)
        assert all(first % together == 0 for first in numbers[::together])
        assert numbers == [first + i for first in numbers[::together] for i in range(together)]


def test_every_pass_has_every_row_once():
    passes = [row for step in range(1, 6) for row in order(batch=4).prompts(step, 0)]
    assert [sorted(passes[start : start + 5]) for start in range(0, 20, 5)] == [list(range(5))] * 4
    assert passes[:5] != passes[5:10] and order().prompts(4, 0) == passes[12:16]  # wherever a run is resumed
