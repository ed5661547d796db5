"""Threads by the model's size, unless the user says how many."""

import os

import pytest
import torch

from grade.training.threads import use_fastest_threads


@pytest.fixture(autouse=True)
def as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_small_model_takes_one_thread_and_a_large_one_every_core(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert use_fastest_threads(576) == 1
    assert use_fastest_threads(2560) == os.cpu_count()


def test_the_users_number_stands(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    assert use_fastest_threads(576) == 3
