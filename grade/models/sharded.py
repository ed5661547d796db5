"""The frozen base in pieces: each of W processes holds 1/W of it and gathers what it computes with.

Two kinds of weights, two ways:

- **Layers** are units of torch's ``fully_shard`` (FSDP2): gathered before a layer's forward or backward pass, freed
  after it. The decoder itself is the root unit, with what is left: the last norm, learned positions.
- **Embedding table and head**, usually one tensor, are used as plain weights: rows are looked up, all of them take part
  in a product, a few in a bag. Each is a `ShardedTable`, a tensor of the whole shape that holds V / W rows. An operator
  that reads it gathers the others and frees them afterwards; within `whole` they stay. Autograd saves the sharded
  tensor, so a backward pass gathers anew instead of keeping all rows.

The adapter is on every process (a few MB): it is saved and resumed as ever, its gradients are summed once a step, and
float32 factors beside a bfloat16 base need no unit of their own. Frozen weights have no gradients, so nothing is
reduced or scattered.

All processes must gather equally often, or they wait for each other for ever. So all make the same passes; where the
number depends on the data (early ends), they agree by `ShardedBackbone.anywhere`.

``accelerate launch --config_file params/accelerate/fsdp2.yaml`` asks for it, see `grade.training.load.divider`.

Left out: offloading to the CPU, replicas of shards (HSDP), parts of a layer on several devices.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.parameters import keep_fingerprint

_aten = torch.ops.aten
_STAYS_SHARDED = (_aten.detach.default, _aten.alias.default)
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class _RowShards:
    """This process's ceil(V / W) rows of a table [V, D], on the last process also padding; all of them while needed.

    The whole table, which each process of the group has, is not kept.
    """

    def __init__(self, table: Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
        size, rank = group.size(), group.rank()
        self.shape, self.group = table.shape, group
        own = -(-len(table) // size)
        self.rows = torch.zeros(own, *table.shape[1:], dtype=table.dtype, device=device)
        part = table[rank * own : (rank + 1) * own]
        self.rows[: len(part)] = part
        self._users, self._all = 0, None

    @contextlib.contextmanager
    def all(self) -> Iterator[Tensor]:
        """Within this context all rows [V, D] are here. A collective operation, unless they are here already."""
        if self._all is None:
            self._all = self.gather()
        self._users += 1
        try:
            yield self._all
        finally:
            self._users -= 1
            if self._users == 0:
                self._all = None

    def gather(self) -> Tensor:
        """All rows [V, D], new. A collective operation."""
        everything = self.rows.new_empty(len(self.rows) * self.group.size(), *self.shape[1:])
        _gather_into(everything, self.rows, group=self.group)
        return everything[: self.shape[0]]


class ShardedTable(Tensor):
    """A frozen matrix, or its transpose, whose rows lie on several processes; operators read it as if all were here."""

    parts: _RowShards
    _transposed: bool

    @staticmethod
    def __new__(cls, shards: _RowShards, transposed: bool = False) -> ShardedTable:  # noqa: D102
        size = shards.shape[::-1] if transposed else shards.shape
        self = Tensor._make_wrapper_subclass(cls, size, dtype=shards.rows.dtype, device=shards.rows.device)
        self.parts, self._transposed = shards, transposed
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # results are ordinary tensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Gather what ``func`` reads, and run it."""
        if func in _STAYS_SHARDED:
            return ShardedTable(args[0].parts, args[0]._transposed)
        if func is _aten.t.default or (func is _aten.permute.default and list(args[1]) == [1, 0]):
            return ShardedTable(args[0].parts, not args[0]._transposed)
        if func._schema.is_mutable and isinstance(args[0], ShardedTable):
            raise RuntimeError(f"{func} would change a sharded table, which is frozen")
        with contextlib.ExitStack() as stack:

            def gathered(table: ShardedTable) -> Tensor:
                rows = stack.enter_context(table.parts.all())
                return rows.t() if table._transposed else rows

            args, kwargs = tree_map_only(ShardedTable, gathered, (args, kwargs or {}))
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # noqa: D105 - the contents are elsewhere
        return f"ShardedTable(shape={tuple(self.shape)}, dtype={self.dtype}, rows={len(self.parts.rows)})"


class ShardedBackbone(Backbone):
    """A backbone whose base is divided among all processes."""

    lockstep = True
    continues = False  # the number of passes would depend on the completions' length
    group: dist.ProcessGroup

    def anywhere(self, flag: bool) -> bool:
        """Whether a flag is set on any process. A collective operation."""
        flags = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flags)


def divide(backbone: Backbone, device: torch.device) -> ShardedBackbone:
    """Divide a backbone's base among all processes; in place, as ``fully_shard`` does, for all that refers to it."""
    backbone.group = _shard_base(backbone.model, device)
    backbone.ref_head = replace(backbone.ref_head, weight=backbone.model.get_output_embeddings().weight)
    for p in backbone.bias.parameters():  # as the adapter: all of it on every process, and the same
        p.data = p.data.to(device)
        dist.broadcast(p.data, src=0, group=backbone.group)
    backbone.__class__ = ShardedBackbone
    return backbone


def _shard_base(model: PreTrainedModel, device: torch.device) -> dist.ProcessGroup:
    """Divide a base among all processes, in place; each must have loaded the same one, and must call this.

    The base is on the CPU or on the device, and moves there layer by layer. Its embedding table and head become sharded
    tables; tied ones stay one. Returns the group of processes.
    """
    decoder, tables = model.base_model, (model.get_input_embeddings(), model.get_output_embeddings())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    group = mesh.get_group()
    for module in (model, decoder, tables[0]):
        keep_fingerprint(module)
    adapter = [p for name, p in model.named_parameters() if p.requires_grad or ".lora_" in f".{name}"]
    for p in adapter:
        p.data = p.data.to(device)
        dist.broadcast(p.data, src=0, group=group)
    weights = {id(table.weight): table.weight.data for table in tables}  # one, if they are tied
    sharded = {key: nn.Parameter(ShardedTable(_RowShards(data, group, device)), False) for key, data in weights.items()}
    for table in tables:
        table.weight = sharded[id(table.weight)]
    ignored = {*sharded.values(), *adapter}
    try:
        if not (layers := _layers(decoder)):
            raise ValueError("it has no list of layers")
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        fully_shard(decoder, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
    except ValueError as error:
        raise InputError("backbone", type(model).__name__, f"a model that can be sharded by layer ({error})") from None
    # Of layers' outputs; nothing here changes a hidden state in place.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            # gloo sums where the mean is asked for, in some versions of torch (its issue 162338). Nothing is reduced
            # while the base is frozen.
            module.set_force_sum_reduction_for_comms(True)
    for p in set(model.parameters()) - set(decoder.parameters()) - set(sharded.values()):  # a head's bias
        p.data = p.data.to(device)
    return group


def _layers(module: nn.Module) -> list[nn.Module]:
    """The modules in a decoder's outermost lists: its layers."""
    layers: list[nn.Module] = []
    for child in module.children():
        layers += child if isinstance(child, nn.ModuleList) else _layers(child)
    return layers
