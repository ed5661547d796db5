"""A base in pieces: a model sharded by layer; two processes train on one in tests/training/test_sharded.py."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from conftest import make_backbone, make_prompts, tiny_config, tiny_gpt2
from models.test_backbone import COMMON
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CohereConfig, PhiConfig

from grade.models.parameters import fingerprint
from grade.models.sampling import generate
from grade.models.sharded import ShardedBackbone, ShardedTable, divide

CPU = torch.device("cpu")


def held_bytes(module):
    """Bytes of parameters that this process holds; of a divided module its own part."""
    return sum(
        (p.parts.rows if isinstance(p, ShardedTable) else getattr(p, "_local_tensor", p)).nbytes
        for p in module.parameters()
    )


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
