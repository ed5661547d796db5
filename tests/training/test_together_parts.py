"""Processes: what is asked of them, and what they do together, without any but this one."""

import os
from types import SimpleNamespace

import pytest
import torch

from grade.errors import InputError
from grade.rewards.base import Reward
from grade.training import launch, threads
from grade.training import together as module
from grade.training.together import SharedObjective, Together


@pytest.mark.parametrize(("width", "cores", "want"), [(1023, 7, 1), (1024, 7, 7), (2048, None, 1)])
def test_threads_of_a_width(width, cores, want, monkeypatch):
    set_to = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(threads.torch, "set_num_threads", set_to.append)
    threads.use_fastest_threads(width)
    assert set_to == [want]


@pytest.mark.parametrize(
    "variables",
    [
        {}, {"ACCELERATE_USE_DEEPSPEED": "false"}, {"ACCELERATE_USE_MEGATRON_LM": "0"}, {"FSDP_VERSION": "1"},
        {"ACCELERATE_MIXED_PRECISION": ""}, {"ACCELERATE_MIXED_PRECISION": "NO"}, {"ACCELERATE_USE_FSDP": "no"},
    ],
)  # fmt: skip
def test_processes_without_sharding(variables, monkeypatch):
    for name in (launch.SHARDING, *(n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_")))):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.sharding() == ""


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({}, None), ({"FSDP_OFFLOAD_PARAMS": "False"}, None), ({"FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"}, None),
        ({"FSDP_RESHARD_AFTER_FORWARD": "true"}, None), ({"FSDP_ACTIVATION_CHECKPOINTING": "false"}, None),
        ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}, None), ({"FSDP_IGNORED_MODULES": ""}, None),
        ({"FSDP_IGNORED_MODULES": "a"}, "fsdp_ignored_modules: got 'a'; allowed: none"),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "A"}, "fsdp_transformer_cls_to_wrap"),
        ({"FSDP_RESHARD_AFTER_FORWARD": "shard_grad_op"}, "fsdp_reshard_after_forward: got 'shard_grad_op'"),
        ({"FSDP_OFFLOAD_PARAMS": ""}, "fsdp_offload_params"), ({"FSDP_VERSION": "3"}, "FSDP1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("on", ["true", "1", "YES"])
def test_what_of_fsdp_is_taken_over(variables, refused, on, monkeypatch):
    for name in (launch.SHARDING, *(n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_")))):
        monkeypatch.delenv(name, raising=False)
    for name, value in {launch.SHARDING: "", "ACCELERATE_USE_FSDP": on, "FSDP_VERSION": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(InputError, match=refused):
            launch.sharding()
        assert os.environ["ACCELERATE_USE_FSDP"] == on and os.environ[launch.SHARDING] == ""
    else:
        assert launch.sharding() == "fsdp2" == os.environ[launch.SHARDING]
        assert os.environ["ACCELERATE_USE_FSDP"] == "false"


class Accelerator:
    """Of one process of several; sums are with 10 of the other."""

    def __init__(self, processes, main=True):
        self.num_processes, self.is_main_process, self.process_index = processes, main, 0 if main else 1
        self.device, self.waited = torch.device("cpu"), 0

    def reduce(self, value, reduction):
        other = torch.full_like(value, 10)
        return value + other if reduction == "sum" else (value + other) / 2

    def wait_for_everyone(self):
        self.waited += 1


def test_one_process_asks_no_one(monkeypatch):
    alone = Together(Accelerator(1))
    monkeypatch.setattr(Accelerator, "reduce", lambda *_, **__: pytest.fail("asked"))
    value = torch.tensor(2.0)
    assert alone.sum(value) is value and alone.any(True) is True and alone.any(False) is False
    rows = [1, 2]
    assert alone.gather(rows) is rows and alone(lambda: 3) == 3
    assert alone.mean([torch.tensor(1.0), 4.0]) == 2.5 and isinstance(alone.mean([1.0]), float)
    with alone.ending():
        alone.wait()
    assert alone.accelerator.waited == 1 and not alone.sharded


def test_two_processes_sum_average_and_agree(monkeypatch):
    two = Together(Accelerator(2))
    assert two.several and two.sum(torch.tensor(2.0)) == 12 and two.mean([torch.tensor(1.0), 5.0]) == 6.5
    assert two.any(False) is True  # the other's flags are set
    monkeypatch.setattr(module, "gather_object", lambda rows: [*rows, "theirs"])
    assert two.gather(["mine"]) == ["mine", "theirs"]
    monkeypatch.setattr(Accelerator, "reduce", lambda self, value, reduction: value)
    assert two.any(False) is False and two.any(True) is True


class Store:
    """Where processes meet."""

    def __init__(self, left=0, message=None, leaves=0):
        self.values, self.left, self.leaves, self.asked = {}, left, leaves, 0
        if message is not None:
            import pickle

            self.values[module._MESSAGE] = pickle.dumps(message).hex().encode()

    def compare_set(self, key, before, value):
        self.values.setdefault(key, value.encode())

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        self.left += amount
        self.asked += 1
        if not amount:
            self.left += self.leaves
        return self.left


@pytest.fixture
def meeting(monkeypatch):
    """Lets processes meet at a store; what they abort and how long they sleep is counted."""
    made = SimpleNamespace(aborted=0, slept=[], now=0.0)

    def at(store, backend="gloo"):
        made.store = store
        monkeypatch.setattr(module, "_store", lambda: store)
        monkeypatch.setattr(module.dist, "get_backend", lambda: backend)

    def abort():
        made.aborted += 1

    def sleep(seconds):
        made.slept.append(seconds)
        made.now += 1.0

    monkeypatch.setattr(module.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)
    made.at = at
    return made


def test_the_process_that_fails_tells_the_others_and_leaves(meeting):
    meeting.at(Store(leaves=1))
    two = Together(Accelerator(2))
    with pytest.raises(InputError, match="^reward: got 1"), two.ending():
        raise InputError("reward", 1, "good")
    assert meeting.aborted == 1 and len(meeting.slept) == 1  # until the other has left as well
    assert not two._ending
    other = Together(Accelerator(2, main=False))  # it is thrown out of a collective operation, and reads why
    with pytest.raises(InputError, match="^reward: got 1; allowed: good"), other.ending():
        raise RuntimeError("connection closed")
    assert meeting.aborted == 2 and len(meeting.slept) == 1  # only the first process waits: the store is its own


def test_the_first_message_stands(meeting):
    meeting.at(Store(left=1, message=("loss", 2, "finite")))
    with pytest.raises(InputError, match="^mine"), Together(Accelerator(2)).ending():
        raise InputError("mine", 1, "good")
    with pytest.raises(InputError, match="^loss: got 2; allowed: finite"), Together(Accelerator(2)).ending():
        raise RuntimeError("connection closed")
    assert meeting.slept == []  # all had left


def test_an_error_that_no_one_has_explained_stays(meeting):
    meeting.at(Store(left=1))
    with pytest.raises(RuntimeError, match="closed"), Together(Accelerator(2)).ending():
        raise RuntimeError("closed")


def test_the_first_process_waits_ten_seconds_at_most(meeting):
    meeting.at(Store())
    with pytest.raises(InputError), Together(Accelerator(2)).ending():
        raise InputError("reward", 1, "good")
    assert meeting.slept == [0.01] * 11  # a second each, by this clock: at 11 it is beyond 10


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_store_that_has_gone_leaves_a_message_of_its_own(meeting, kind, monkeypatch):
    def gone():
        raise kind("no store")

    meeting.at(Store())
    monkeypatch.setattr(module, "_store", gone)
    with pytest.raises(InputError, match="^process: got 1; allowed: one whose partners have not ended"):
        with Together(Accelerator(2, main=False)).ending():
            raise RuntimeError("closed")
    with pytest.raises(InputError, match="^mine"), Together(Accelerator(2)).ending():
        raise InputError("mine", 1, "good")


def test_endings_within_one_another_are_one(meeting):
    meeting.at(Store(leaves=1))
    two = Together(Accelerator(2))
    with pytest.raises(InputError), two.ending(), two.ending():
        raise InputError("reward", 1, "good")
    assert meeting.aborted == 1
    sharded = Together(Accelerator(2), sharded=True)
    assert sharded(lambda: 3) == 3 and meeting.aborted == 1
    with pytest.raises(InputError):
        sharded(_fails)
    assert meeting.aborted == 2


def _fails():
    raise InputError("reward", 1, "good")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_only_connections_that_outlive_a_partner_are_watched(backend, meeting, monkeypatch):
    started = []
    monkeypatch.setattr(module.threading, "Thread", lambda **kwargs: started.append(kwargs) or SimpleNamespace(
        start=lambda: started.append("start")))  # fmt: skip
    meeting.at(store := Store(), backend)
    with Together(Accelerator(2)).ending():
        assert len(started) == (0 if backend == "gloo" else 2)
    if started:
        assert started[0]["daemon"] is True and started[0]["target"] is module._abort_when_told
        assert started[0]["args"][0] is store and started[0]["args"][1].is_set()  # done


def test_a_message_aborts_what_waits(meeting):
    waits = []

    class Done:
        def __init__(self, rounds):
            self.rounds = rounds

        def wait(self, seconds):
            waits.append(seconds)
            self.rounds -= 1
            return self.rounds < 0

    module._abort_when_told(Store(), Done(3))
    assert waits == [0.5] * 4 and meeting.aborted == 0
    module._abort_when_told(Store(message=("a", 1, "b")), Done(3))
    assert len(waits) == 5 and meeting.aborted == 1

    class Gone(Store):
        def check(self, keys):
            raise RuntimeError("gone")

    module._abort_when_told(Gone(), Done(3))
    assert meeting.aborted == 1


def test_scores_are_kept_one_by_one(monkeypatch):
    calls = []
    reward = Reward()
    reward.last = "first"
    shared = SharedObjective(reward, 0.5, together=lambda work: calls.append(0) or work())
    monkeypatch.setattr(module.Objective, "score", lambda self, *args: ("scored", args))
    assert shared.score(1, 2, 3, 4) == ("scored", (1, 2, 3, 4))
    reward.last = "second"
    shared.score(1, 2, 3, 4)
    assert shared.scores == ["first", "second"] and len(calls) == 2 and shared.beta == 0.5
    assert SharedObjective(reward).scores == [] and SharedObjective(reward).together is None
