"""How a trace is made of trackers: which layers are traced, on which device they count, and what is drawn from them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig

import grade.memory.trace as traces
from grade.errors import InputError
from grade.memory.live import CATEGORIES, SHARDED, LiveTracker, Site, StorageRecord
from grade.memory.models import TINY
from grade.memory.step import StepConfig
from grade.memory.trace import FIXED, LargeTensor, Trace, run_tracked, trace, trace_all, trace_layers

CONFIG = StepConfig(model="tiny")
SCORES, GRADIENT = ("forward", "mm", "h.*", (3,)), ("backward", "add", "", (4,))


def stored(nbytes, op, phase, birth, **values):
    return StorageRecord(nbytes, values.pop("shape", (3,)), torch.float32, op, "h.0", phase, birth, **values)


def tracked(layers, sites=(SCORES, GRADIENT)):
    """Weights of 50 a layer and 800, a forward pass of 100 and 7, a gradient of 300 and 20."""
    tracker = LiveTracker()
    tracker.records = [
        stored(800 + 50 * layers, "existing", "forward", 0, tag="weights"),
        stored(7 + 100 * layers, "add", "forward", 1, saved=True, end_phase="backward"),
        stored(40, "existing", "forward", 2, tag="adapter"),
        stored(1, "zeros", "forward", 3, death=4, end_phase="forward"),
        stored(20 + 300 * layers, "mm", "backward", 4, end_phase="backward", shape=(4,)),
    ]
    peaks = {SCORES: Site(848 + 150 * layers, 3), GRADIENT: Site(867 + 450 * layers, 4)}
    tracker.sites = {key: peaks[key] for key in sites}
    tracker.live, tracker.phase_of = [800, 900, 940, 941, 1000 + layers], ["forward"] * 4 + ["backward"]
    tracker.flops, tracker.received = 5 * layers, 6 * layers + 1
    return tracker


def test_a_deep_model_lies_on_the_line_of_two():
    found = traces._assemble([tracked(2), tracked(4)], [2, 4], 11, vocab=100, seconds=2.5)
    forward = dict(weights=800 + 550, activations=7 + 1100, adapter=40, temporary=1)
    backward = dict(weights=800 + 550, activations=7 + 1100, adapter=40, temporary=20 + 3300)
    empty = dict.fromkeys(CATEGORIES, 0)
    assert found == Trace(
        867 + 4950, empty | backward, {"forward": empty | forward, "backward": empty | backward}, "backward",
        [
            LargeTensor(1220, (4,), "float32", "temporary", "mm", "h.0", "backward"),
            LargeTensor(407, (3,), "float32", "activations", "add", "h.0", "forward"),
        ],
        [("forward", 940), ("forward", 941), ("backward", 1004)], 11, 4, 55, 2.5, 67,
    )  # fmt: skip
    assert list(found.categories) == list(CATEGORIES) and list(found.phases) == ["forward", "backward"]
    assert found.step_bytes == found.peak - 1350 - 40


def test_a_trace_of_one_process_receives_nothing():
    parts = dict.fromkeys(CATEGORIES, 0) | {"weights": 5, "optimizer": 3, "logits": 2}
    found = Trace(10, parts, {}, "forward", [], [], 2, 2, 0, 0.0)
    assert (found.step_bytes, found.received) == (2, 0)


def test_a_model_that_was_traced_whole_is_as_it_was():
    found = traces._assemble([tracked(6)], [6], 6, vocab=100, seconds=0.5)
    assert (found.peak, found.flops, found.received, found.layers, found.traced_layers) == (867 + 2700, 30, 37, 6, 6)
    assert found.phases["forward"]["activations"] == 607 and found.timeline[-1] == ("backward", 1006)


@pytest.mark.parametrize(("flops", "layers", "expected"), [
    ((10, 15), 5, 18), ((10, 15), 3, 12), ((10, 11), 5, 12), ((10, 10), 90, 10), ((15, 10), 6, 5), ((7, 16), 10, 43),
])  # fmt: skip
def test_halves_are_rounded_to_even_numbers(flops, layers, expected):
    pair = tracked(2), tracked(4)
    for tracker, count in zip(pair, flops, strict=True):
        tracker.flops = count
    assert traces._assemble(list(pair), [2, 4], layers, vocab=100, seconds=0.0).flops == expected


def test_only_sites_of_both_traces_count_and_phases_stand_as_in_the_deepest():
    found = traces._assemble([tracked(2, (SCORES,)), tracked(3)], [2, 3], 9, vocab=100, seconds=0.0)
    assert list(found.phases) == ["forward"] and (found.peak, found.peak_phase) == (848 + 1350, "forward")
    found = traces._assemble([tracked(2, (GRADIENT, SCORES)), tracked(3)], [2, 3], 9, vocab=100, seconds=0.0)
    assert list(found.phases) == ["forward", "backward"]
    found = traces._assemble([tracked(2), tracked(3, (GRADIENT, SCORES))], [2, 3], 9, vocab=100, seconds=0.0)
    assert list(found.phases) == ["backward", "forward"]


def test_of_sites_that_are_as_high_the_first_is_the_peak():
    tracker = tracked(2, (SCORES,))
    tracker.sites |= {("forward", "mm", "", (9,)): Site(tracker.sites[SCORES].peak, 0)}
    found = traces._assemble([tracker], [2], 2, vocab=100, seconds=0.0)
    assert found.phases["forward"]["temporary"] == 1  # at 3, where the first was
    tracker.sites |= {("forward", "mm", "", (8,)): Site(tracker.sites[SCORES].peak + 1, 0)}
    assert traces._assemble([tracker], [2], 2, vocab=100, seconds=0.0).phases["forward"]["temporary"] == 0


def test_a_phase_that_only_made_empty_tensors_is_a_phase():
    with LiveTracker() as tracker, tracker.during("reward"):
        kept = torch.zeros(0)
    found = traces._assemble([tracker], [2], 2, vocab=100, seconds=0.0)
    assert (found.peak, list(found.phases), len(kept)) == (0, ["reward"], 0)


@pytest.mark.parametrize("category", SHARDED)
def test_gathered_weights_are_named_where_there_are_some(category):
    tracker = tracked(2)
    tracker.records[3].tag = category
    found = traces._assemble([tracker], [2], 2, vocab=100, seconds=0.0)
    assert list(found.categories) == [*CATEGORIES, *SHARDED]
    assert {name: found.phases["forward"][name] for name in SHARDED} == dict.fromkeys(SHARDED, 0) | {category: 1}


def test_the_ten_largest_that_a_step_made_and_large_ones_are_logits():
    sizes = [3, 9, 1, 12, 5, 7, 2, 11, 6, 10, 4, 8]
    with LiveTracker(round_to=1) as tracker:
        kept = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    tracker.tag(kept[3:4], "weights")  # the largest is none of the step's
    tracker.tag(kept[7:8], "kv cache")
    found = traces._assemble([tracker], [2], 2, vocab=10, seconds=0.0)
    assert [t.nbytes for t in found.largest] == [88, 80, 72, 64, 56, 48, 40, 32, 24, 16]
    assert [t.category for t in found.largest[:3]] == ["kv cache", "logits", "activations"]
    assert (found.largest[0].dtype, found.largest[0].shape, found.largest[0].module) == ("float64", (11,), "")
    assert found.categories["weights"] == 96 and FIXED == ("weights", "adapter", "optimizer")
    assert found.step_bytes == found.peak - 96 == 8 * 66


@pytest.fixture
def asked(monkeypatch):
    """Traces of layers that are written down and not made; a model of as many layers as its name says."""
    calls, clock = [], iter([10.0, 35.0] * 2)

    def traced(config, model, *args):
        calls.append((model.num_hidden_layers, *args))
        return tracked(model.num_hidden_layers)

    monkeypatch.setattr(traces, "trace_layers", traced)
    monkeypatch.setattr(traces, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(traces, "model_config", lambda name: LlamaConfig(**TINY | {"num_hidden_layers": int(name)}))
    return calls


@pytest.mark.parametrize(("layers", "traced"), [
    (1, [1]), (2, [2]), (3, [3]), (4, [4]), (5, [2, 3]), (6, [2, 3]), (36, [2, 3]),
])  # fmt: skip
def test_two_short_models_stand_for_a_deep_one(asked, layers, traced):
    found = trace(StepConfig(model=str(layers)))
    assert asked == [(n, "cuda", 1, "fsdp2") for n in traced]
    assert (found.peak, found.layers, found.traced_layers) == (867 + 450 * layers, layers, traced[-1])
    assert found.seconds == 25
    with pytest.raises(TypeError, match="positional"):  # its settings have names
        trace(StepConfig(model=str(layers)), "cpu")
    asked.clear()
    found = trace(StepConfig(model=str(layers)), device="cpu", all_layers=True, processes=3, sharding="ddp")
    assert asked == [(layers, "cpu", 3, "ddp")] and found.traced_layers == layers and found.seconds == 25


def test_many_steps_are_traced_one_by_one_or_by_processes(monkeypatch):
    made = []

    class Pool:
        def __init__(self, *args):
            made.append(args)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            made.append("left")

        def map(self, function, configs):
            return [function(config) + 100 for config in configs]

    context = SimpleNamespace(set_forkserver_preload=lambda names: made.append(names))
    monkeypatch.setattr(traces, "trace", lambda config: config * 2)
    monkeypatch.setattr(traces, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(traces, "get_context", lambda name: made.append(name) or context)
    configs = {"b": 3, "a": 1}
    assert list(trace_all(configs).items()) == [("b", 6), ("a", 2)]
    assert trace_all(configs, processes=1) == {"b": 6, "a": 2} and made == []
    assert list(trace_all(configs, processes=2).items()) == [("b", 106), ("a", 102)]
    assert made == ["forkserver", ["grade.memory.trace"], (2, context, traces.gc.freeze), "left"]


def test_no_processes_are_refused():
    with pytest.raises(ValueError, match="max_workers must be greater than 0"):
        trace_all({"a": CONFIG}, processes=0)


class Allocation:
    """A step beside weights: 3 numbers on a CPU and 5 without data, which a layer sums with what is real."""

    def __init__(self, *_):
        self.backbone = nn.ModuleDict({"layer": nn.Tanh()})
        self.weights, self.cpu = torch.zeros(2, device="meta"), torch.zeros(3)

    def existing(self):
        return {"weights": [self.weights], "optimizer": [self.cpu]}

    def run(self, tracker):
        self.seen = tracker
        with tracker.during("rollout"):
            self.made = [torch.zeros(5, device="meta"), self.backbone["layer"](REAL + self.cpu)]


REAL = torch.ones(3)


@pytest.mark.parametrize(("device", "counted"), [("cpu", ["cpu"]), ("meta", ["meta"]), (None, ["meta", "cpu"])])
def test_a_step_is_tracked_with_what_was_there_before(device, counted):
    step = Allocation()
    tracker = run_tracked(step, 1, device)
    before = [(r.tag, r.nbytes) for r in tracker.records if r.op == "existing"]
    assert before == [pair for pair, of in ((("weights", 8), "meta"), (("optimizer", 12), "cpu")) if of in counted]
    made = [(r.op, r.phase, r.module, r.shape) for r in tracker.records if r.op != "existing"]
    assert made == [
        *([("zeros", "rollout", "", (5,))] if "meta" in counted else []),
        *([("add", "rollout", "", (3,)), ("tanh", "rollout", "layer", (3,))] if "cpu" in counted else []),
    ]
    assert step.seen is tracker and tracker.device == device


def short(adapter="lora", autocast=False):
    """Settings whose step is an `Allocation`."""
    made = []
    settings = SimpleNamespace(adapter=adapter, autocast=autocast, made=made)
    settings.build = lambda model: (nn.Identity(), [model])
    settings.make_step = lambda backbone, others: made.append(Allocation()) or made[-1]
    return settings


@pytest.mark.parametrize(
    ("device", "autocast", "ops"),
    [
        ("cuda", False, ["zeros"]),  # what is on the CPU takes no memory of a GPU
        ("cpu", False, ["zeros", "add", "tanh"]),
        ("cuda", True, ["zeros", "add", "tanh"]),  # fake tensors of a CPU stand for the GPU's
        ("cpu", True, ["zeros", "add", "tanh"]),
    ],
)
def test_what_counts_depends_on_the_device(monkeypatch, device, autocast, ops):
    faked = []
    monkeypatch.setattr(traces, "to_fake", lambda *args: faked.append(args))
    settings = short(autocast=autocast)
    tracker = trace_layers(settings, "a model", device)
    assert [r.op for r in tracker.records if r.op != "existing"] == ops
    assert [r.nbytes for r in tracker.records] == [512] * len(tracker.records)
    (step,) = settings.made
    assert isinstance(step.cpu, FakeTensor) is autocast and isinstance(step.weights, FakeTensor) is autocast
    assert [other for *_, other in faked] == ["a model"] * autocast


@pytest.mark.parametrize("sharding", ["fsdp2", "ddp"])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_frozen_base_is_divided_among_several(monkeypatch, adapter, processes, sharding):
    divided = []
    monkeypatch.setattr(traces, "divide", lambda backbone: divided.append(torch.distributed.get_world_size()))
    if (adapter, sharding) == ("full", "fsdp2") and processes > 1:
        with pytest.raises(InputError, match="adapter: got 'full'; allowed: lora: only a frozen base is divided"):
            trace_layers(short(adapter), None, "cuda", processes, sharding)
        return
    trace_layers(short(adapter), None, "cuda", processes, sharding)
    assert divided == ([processes] if processes > 1 and sharding == "fsdp2" else [])


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_there_is_at_least_one_process(adapter):
    with pytest.raises(InputError, match="gpus: got 0; allowed: at least 1"):
        trace_layers(short(adapter), None, "cuda", 0)


def test_a_step_is_of_one_process_unless_it_is_told_otherwise(monkeypatch):
    monkeypatch.setattr(traces, "divide", lambda _: pytest.fail("divided"))
    trace_layers(short("full"), None, "cuda")
    monkeypatch.setattr(traces, "divide", lambda _: (_ for _ in ()).throw(KeyError("divided")))
    with pytest.raises(KeyError, match="divided"):  # by fsdp2, of several
        trace_layers(short(), None, "cuda", 2)


@pytest.mark.parametrize(
    ("fails", "error", "says"),
    [
        (lambda: torch.zeros(1, device="meta").item(), InputError, r"traced step: .*test_assemble.*\.item\(\)"),
        (lambda: bool(torch.zeros(2, device="meta").sum() > 1), InputError, r"allowed: code that reads shapes only"),
        (lambda: torch.zeros(2) @ torch.zeros(3), RuntimeError, "inconsistent tensor size|size"),
        (lambda: {}["a"], KeyError, "a"),
    ],
)
def test_only_code_that_reads_values_is_blamed(fails, error, says):
    with pytest.raises(error, match=says) as caught, traces._untraceable_lines_named():
        fails()
    assert type(caught.value) is error
