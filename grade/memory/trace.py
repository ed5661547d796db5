"""Predict the peak memory of a training step without a GPU, weights or data.

The trainers' own step runs on meta tensors, which have shapes and types but no contents, under a `LiveTracker`. The
prediction therefore follows the code: how many bytes are alive at the peak, what they are for, in which phase, and
which modules made the largest tensors.

Storages are rounded up to 512 bytes, as by CUDA's caching allocator. Left out: the allocator's fragmentation, the
CUDA context, cuBLAS and cuDNN workspaces.

Layers repeat, so live bytes at the same point of the step are linear in the number of repetitions. A deep model is
traced with few layers (`_few_layers`) and each allocation site's peak is extrapolated; the largest is the peak. Tests
compare this with full traces, and those with real steps.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from grade.memory.compat import kernels_of
from grade.memory.meta import NoData
from grade.memory.models import model_config, with_layers
from grade.memory.records import CATEGORIES, Category, LiveTracker
from grade.memory.settings import Device, TracedConfig
from grade.memory.step import Step, build, make_step, states_of
from grade.models.base import FrozenBase, KeysValues
from grade.models.sampling import Decoder

FIXED: tuple[Category, ...] = ("weights", "adapter", "optimizer")
"""What is there before the step and after it."""
AT_EACH_END = 2
"""Sampling passes that run first and last."""


@dataclass(frozen=True)
class LargeTensor:
    """One of the largest tensors at the peak: what made it, in which module (empty in backward, losses) and phase."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    category: Category
    op: str
    module: str
    phase: str


@dataclass(frozen=True)
class Trace:
    """The memory of one optimizer step."""

    phases: dict[str, dict[Category, int]]  # for each phase, in order, bytes by category at its own peak
    largest: list[LargeTensor]  # the ten largest tensors at the peak that the step made (of the traced layers)
    timeline: list[tuple[str, int]]  # live bytes after each allocation, and the phase (of the traced layers)
    layers: int  # layers of the model
    traced_layers: int  # layers that were traced; fewer than ``layers`` if extrapolated
    flops: int  # floating point operations of the step's products and attention
    seconds: float  # wall time of the trace

    @property
    def peak_phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def categories(self) -> dict[Category, int]:
        """Bytes at the peak by category."""
        return self.phases[self.peak_phase]

    @property
    def peak(self) -> int:
        """The highest live bytes."""
        return sum(self.categories.values())

    @property
    def fixed_bytes(self) -> int:
        """Bytes of weights, adapter and optimizer at the peak: what is there before the step and after it."""
        return sum(self.categories[c] for c in FIXED)

    @property
    def step_bytes(self) -> int:
        """Bytes at the peak that the step itself needs."""
        return self.peak - self.fixed_bytes


def trace(config: TracedConfig, *, device: Device = "cuda", all_layers: bool = False) -> Trace:
    """Trace one optimizer step.

    Args:
        config: The step.
        device: Where it would run, which decides the kernels.
        all_layers: Trace every layer, without extrapolation, and every pass that samples, not only the first and the
            last ones: the same peaks, and a timeline of the whole step.

    Returns:
        The trace.

    Raises:
        InputError: For an unknown model, or more tokens than it can read.
    """
    start, model = time.perf_counter(), model_config(config.model)
    layers = model.num_hidden_layers
    numbers = [layers] if all_layers else _few_layers(_layer_kinds(model))
    with contextlib.nullcontext() if all_layers else _few_passes(config.max_new_tokens):
        trackers = [trace_layers(config, with_layers(model, n), device) for n in numbers]
    return _assemble(trackers, numbers, layers, model.vocab_size, time.perf_counter() - start)


def trace_callable(
    step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
    *, device: Device = "cuda",
) -> Trace:  # fmt: skip
    """Trace one call of any function, such as somebody's own training step.

    It is called twice, the first time for the state that an optimizer has from its first step on. It must not read the
    contents of tensors, but for checks, which are true. Tensors that it makes on the CPU count for ``device="cpu"``
    only. All layers are traced; the phases are ``forward``, ``backward`` and ``optimizer``.

    Args:
        step: Takes one step: forward, backward, update. Its tensors are on device ``meta``.
        model: What stays in memory, on device ``meta``; several models are an `nn.ModuleList`.
        optimizer: What updates it.
        device: Where it would run, which decides the kernels.

    Returns:
        The trace. Only with a ``model.config.vocab_size`` does it tell logits from other tensors.
    """
    start, tracker = time.perf_counter(), LiveTracker(device=None if device == "cpu" else "meta")
    parameters = list(model.parameters())
    with contextlib.ExitStack() as stack:
        stack.enter_context(NoData())
        stack.enter_context(kernels_of(device))
        step()
        _count_existing(tracker, {
            "weights": [*parameters, *model.buffers()],
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [] if optimizer is None else states_of(optimizer),
        })  # fmt: skip
        for parameter in parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: tracker.tag([p.grad], "gradients"))
                stack.callback(hook.remove)
        if optimizer is not None:
            update = contextlib.ExitStack()
            before = optimizer.register_step_pre_hook(lambda *_: update.enter_context(tracker.during("optimizer")))
            after = optimizer.register_step_post_hook(lambda *_: update.close())
            stack.callback(before.remove)
            stack.callback(after.remove)
        with tracker, tracker.naming(model):
            step()
    vocab = getattr(getattr(model, "config", None), "vocab_size", sys.maxsize)
    return _assemble([tracker], [0], 0, vocab, time.perf_counter() - start)


def _layer_kinds(config: PretrainedConfig) -> list[tuple]:
    """What tells each layer from others: its attention, and its tensors, those of a mixture or of a dense layer."""
    types, tensors = dict(enumerate(getattr(config, "layer_types", None) or ())), defaultdict[int, list](list)
    with torch.device("meta"):
        for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters():
            if place := re.search(r"\.(\d+)\.(.*)", name):
                tensors[int(place[1])].append((place[2], parameter.shape))
    return [(types.get(n), *tensors[n]) for n in range(config.num_hidden_layers)]


def _few_layers(kinds: Sequence[object]) -> list[int]:
    """Numbers of layers to trace of a model whose layers are of these kinds; all where that is no less to trace.

    From some layer on kinds repeat. The first number has two periods, as gradients may end within the one before; the
    second has one more.

    >>> _few_layers("AAAAAA"), _few_layers("DAAAAAA"), _few_layers("SFSFSFSFSF"), _few_layers("SFFSFSSF")
    ([2, 3], [3, 4], [4, 6], [8])
    """
    layers = len(kinds)
    choices = [
        [start + 2 * period, start + 3 * period]
        for period in range(1, layers // 5 + 1)
        for start in range((layers - 5 * period) // 2 + 1)
        if (layers - start) % period == 0 and kinds[start + period :] == kinds[start : layers - period]
    ]
    return min(choices, key=sum, default=[layers])


def run_tracked(step: Step, round_to: int = 512, device: str | None = None) -> LiveTracker:
    """Run a step on whatever tensors it has, fake or real; the tracker also counts what existed before."""
    tracker = LiveTracker(round_to, device)
    _count_existing(tracker, step.existing())
    with tracker, tracker.naming(step.backbone):
        step.run(tracker)
    return tracker


def _count_existing(tracker: LiveTracker, existing: Mapping[Category, Sequence[Tensor]]) -> None:
    for category, tensors in existing.items():
        tracker.track_existing(tensors)
        tracker.tag(tensors, category)


def trace_layers(config: TracedConfig, model: PretrainedConfig, device: Device) -> LiveTracker:
    """Trace all layers of ``model``, and return the tracker with every tensor in it; see `trace`."""
    backbone, others = build(config, model)
    mode = contextlib.nullcontext()
    counted = None if device == "cpu" else "meta"  # CPU tensors take no GPU memory
    if config.autocast:  # autocast depends on the device, and meta has none; fake CPU tensors do, at twice the time
        mode, counted = FakeTensorMode(allow_non_fake_inputs=True), None
        _to_fake(mode, backbone, *others)
    with mode, NoData(), kernels_of(device):
        return run_tracked(make_step(config, backbone, others), device=counted)


def _to_fake(mode: FakeTensorMode, *roots: nn.Module) -> None:
    """Replace every parameter and buffer on ``meta`` by an empty fake CPU tensor, tied ones once.

    PEFT cannot be built inside a `FakeTensorMode`, and operators do not accept meta and fake tensors together.
    """
    fakes: dict[int, torch.Tensor] = {}
    with mode:
        for module in (m for root in roots for m in root.modules()):
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        is_parameter = isinstance(tensor, nn.Parameter)
                        fakes[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    store[name] = fakes[id(tensor)]
    for base in (root for root in roots if isinstance(root, FrozenBase)):
        layer = base.model.get_output_embeddings()
        base.ref_head = replace(base.ref_head, weight=layer.weight, bias=getattr(layer, "bias", None))


@contextlib.contextmanager
def _few_passes(new_tokens: int) -> Iterator[None]:
    """Within this context a decoder runs the model for the first two and the last two of T tokens that it is fed.

    Most of a trace is the sampling loop: every token runs every traced layer. From token to token a pass allocates
    the same, with one more position in the key-value cache. So no pass needs more than the last one, and of those
    between nothing is allocated but the cache. The rest of the sampling loop runs for every token: logits,
    noise, the support, the lists that hold them. A pass takes the same number of operations more than the one
    before it, so their sum follows from the second and the last but one. Live bytes over the step have fewer
    points. Caches with a sliding window decode every token.
    """
    passes = new_tokens - 1  # the last token is not fed
    last_ones = passes - AT_EACH_END + 1
    skipped = last_ones - AT_EACH_END - 1
    original = Decoder.advance

    def advance(self: Decoder, embeds: Tensor) -> Tensor | None:
        number = self.passes = getattr(self, "passes", 0) + 1
        watcher = self.backbone._watcher
        given = skipped < 1 or embeds.shape[1] > 1  # tokens that are scored come all at once
        if given or watcher is None or any(type(layer) is not KeysValues for layer in self.cache.layers):
            return original(self, embeds)
        if AT_EACH_END < number < last_ones:
            if number == last_ones - 1:
                _grow(self, skipped)
        else:
            before = watcher.flops
            original(self, embeds)
            flops = watcher.flops - before
            if number == AT_EACH_END:
                self.flops = flops
            elif number == last_ones:
                watcher.flops += skipped * (self.flops + flops) // 2
        return None

    with patch.object(Decoder, "advance", advance):
        yield


def _grow(decoder: Decoder, positions: int) -> None:
    """More positions in the mask and in the cache."""
    decoder.mask = torch.cat([decoder.mask, decoder.mask.new_ones(len(decoder.mask), positions)], 1)
    for _ in range(positions):
        for number, layer in enumerate(decoder.cache.layers):
            decoder.cache.update(layer.keys[..., -1:, :], layer.values[..., -1:, :], number)


def _assemble(trackers: list[LiveTracker], traced: list[int], layers: int, vocab: int, seconds: float) -> Trace:
    """Peaks by phase, extrapolated in layers from the last two traces if there are two."""

    def at(*values: int) -> int:
        if len(values) == 1:
            return values[0]
        slope = (values[1] - values[0]) / (traced[1] - traced[0])
        return round(values[1] + slope * (layers - traced[1]))

    last, sites = trackers[-1], [tracker.peaks() for tracker in trackers]
    highest = dict[str, tuple[int, tuple]]()  # of each phase, and where
    for key in sites[-1]:
        if all(key in site for site in sites):
            peak = at(*(site[key].live for site in sites))
            if peak > highest.get(key[0], (-1,))[0]:
                highest[key[0]] = (peak, key)
    phases = {}
    for name, (_, key) in highest.items():
        parts = [Counter[str]() for _ in trackers]
        for tracker, site, count in zip(trackers, sites, parts, strict=True):
            for record in tracker.alive_at(site[key].birth):
                count[tracker.category(record, vocab)] += record.nbytes
        phases[name] = {c: at(*(count[c] for count in parts)) for c in CATEGORIES}
    _, key = max(highest.values(), key=lambda site: site[0])
    made = [r for r in last.alive_at(sites[-1][key].birth) if last.category(r, vocab) not in FIXED]
    largest = [
        LargeTensor(r.nbytes, r.shape, str(r.dtype).removeprefix("torch."), last.category(r, vocab), r.op, r.module,
                    r.phase)
        for r in sorted(made, key=lambda r: -r.nbytes)[:10]
    ]  # fmt: skip
    timeline = [(r.phase, r.live) for r in last.records if r.op != "existing"]
    flops = at(*(tracker.flops for tracker in trackers))
    return Trace(phases, largest, timeline, layers, traced[-1], flops, seconds)
