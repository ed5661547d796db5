"""A base in pieces: rows of a table on several processes, operators that read them, and a model sharded by layer."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import make_backbone, make_prompts, tiny_config, tiny_gpt2
from models.test_backbone import COMMON
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CohereConfig, PhiConfig

from grade.models import sharded
from grade.models.parameters import fingerprint
from grade.models.sampling import generate
from grade.models.sharded import RowShards, ShardedBackbone, ShardedTable, divide

CPU = torch.device("cpu")


def group(size, rank):
    """One process of several."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


@pytest.fixture
def together(monkeypatch):
    """Makes every process's rows of a table in this one; gathering joins them."""
    known = {}

    def gather(out, rows, group):
        parts = next(parts for parts in known.values() if any(part.rows is rows for part in parts))
        out.copy_(torch.cat([part.rows for part in parts]))

    monkeypatch.setattr(sharded, "_gather_into", gather)

    def make(table, size):
        known[id(table)] = [RowShards(table, group(size, rank), CPU) for rank in range(size)]
        return known[id(table)]

    return make


def held_bytes(module):
    """Bytes of parameters that this process holds; of a divided module its own part."""
    return sum(
        (p.parts.rows if isinstance(p, ShardedTable) else getattr(p, "_local_tensor", p)).nbytes
        for p in module.parameters()
    )


def numbers(rows, columns=3):
    return torch.arange(1.0, 1 + rows * columns, dtype=torch.float64).view(rows, columns)


@pytest.mark.parametrize(("rows", "size", "own"), [(4, 2, 2), (5, 3, 2), (4, 3, 2), (2, 1, 2)])
def test_each_process_has_equally_many_rows_and_the_last_ones_are_padding(rows, size, own, together):
    table = numbers(rows)
    parts = together(table, size)
    for rank, part in enumerate(parts):
        want = torch.zeros(own, 3, dtype=torch.float64)
        mine = table[rank * own : (rank + 1) * own]
        want[: len(mine)] = mine
        assert torch.equal(part.rows, want) and part.rows.dtype == table.dtype and part.shape == table.shape
        assert torch.equal(part.gather(), table)


def test_an_operator_reads_a_sharded_table_as_if_it_were_whole(together):
    whole_table = numbers(5)
    table = ShardedTable(together(whole_table, 2)[0])
    x = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 4, 2]])
    assert table.shape == (5, 3) and table.dtype == torch.float64 and table.device == CPU
    for read in (
        lambda t: F.embedding(ids, t),
        lambda t: F.linear(x, t),
        lambda t: x @ t.t(),
        lambda t: x @ t.permute(1, 0),
        lambda t: t.t().t() @ x.t(),
        lambda t: torch.addmm(torch.ones(5, 1, dtype=t.dtype), t, x.t(), beta=2),
        lambda t: torch.cat([t, t]),
        lambda t: F.embedding_bag(ids, t, per_sample_weights=x, mode="sum"),
        lambda t: torch.stack(tensors=[t, t]),
    ):
        got, want = read(table), read(whole_table)
        assert type(got) is torch.Tensor and torch.equal(got, want)
    (got,) = torch.autograd.grad(F.linear(x, table).sum(), x)
    assert torch.equal(got, whole_table.sum(0, keepdim=True))


# ---- a model ----
@contextlib.contextmanager
def processes(size, backend):
    """This process as the first of several: alone with gloo, or with others that do not exist."""
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, rank=0, world_size=size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


MODELS = {
    "tied": (tiny_config(), {}),
    "untied": (tiny_config(tie_word_embeddings=False), {}),
    "positions and tied": (tiny_gpt2(), {"target_modules": ["c_attn"]}),
    "head bias": (PhiConfig(**COMMON), {"target_modules": ["q_proj"]}),
    "logit scale": (CohereConfig(**COMMON, logit_scale=0.3), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_base_sharded_in_one_process_computes_what_it_did(name):
    config, lora = MODELS[name]
    backbone, prompts = make_backbone(config, **lora), make_prompts()
    tied = backbone.model.get_output_embeddings().weight is backbone.embedding_weight
    known, nbytes = fingerprint(backbone.model), held_bytes(backbone)

    def run():
        parameters = backbone.trainable_parameters()
        logits = backbone.head(backbone.hidden(backbone.embed(prompts.ids), prompts.mask))
        grads = torch.autograd.grad(logits.square().mean(), parameters)
        ids, _ = generate(backbone, prompts, 4, torch.Generator().manual_seed(0), stop_early=False)
        with backbone.reference(), torch.no_grad():
            reference = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
        return [logits.detach(), *grads, ids, reference]

    want = run()
    with processes(1, "gloo"):
        assert divide(backbone, CPU) is backbone
        layers = [module for module in backbone.decoder.modules() if isinstance(module, FSDPModule)]
        assert len(layers) == 3 and backbone.decoder in layers  # two layers, and what is left
        for got, value in zip(run(), want, strict=True):
            torch.testing.assert_close(got, value)
        assert_divided(backbone)
        weight = backbone.embedding_weight
        assert (backbone.head.weight is weight) == tied == (backbone.model.get_output_embeddings().weight is weight)
        assert not weight.requires_grad and not backbone.head.weight.requires_grad
        assert fingerprint(backbone.model) == known and held_bytes(backbone) == nbytes
        view = backbone.view(temperature=0.7)
        assert isinstance(view, ShardedBackbone) and view.anywhere(True) and not view.anywhere(False)


def assert_divided(backbone):
    """After a pass each weight of the decoder is in pieces again; the adapter never is."""
    for name, p in backbone.model.named_parameters():
        if "lora_" in name:
            assert type(p) is nn.Parameter and p.requires_grad
        elif p is backbone.embedding_weight or p is backbone.head.weight:
            assert isinstance(p, ShardedTable)
        elif name.startswith("lm_head."):
            assert type(p) is nn.Parameter  # a head's bias
        else:
            assert isinstance(p, DTensor) and not p.requires_grad


def test_a_process_of_two_holds_half_the_base_and_all_of_the_adapter():
    backbone = make_backbone(dtype=torch.float32)
    adapter = sum(p.nbytes for p in backbone.trainable_parameters())
    total, table = held_bytes(backbone), backbone.embedding_weight.nbytes
    with processes(2, "fake"):
        divide(backbone, CPU)
        # 23 rows: 12 in each process, one of the second's is padding; all other sizes are even.
        assert held_bytes(backbone) == adapter + (total - adapter - table) // 2 + 12 * 16 * 4
        assert fingerprint(backbone.decoder) and fingerprint(backbone.embedding)
