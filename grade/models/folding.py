"""LoRA folded into the weights that it adapts, and the check that this is the same policy.

Folding is exact where a model calls its adapted layers. Some models read the weight of a layer instead, as in absorbed
projections of latent attention: a pass would leave the adapter out, and sampling with folded weights would not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from grade.errors import InputError

FOLDED_TYPES = (torch.float32, torch.float64)
"""Types of a base whose adapter is folded: rounding ``W + B A`` to 8 bits would lose the adapter."""
_NOISE = 0.1
"""Size of the check's adapter against the weights'."""
_SHARE = 0.1
"""Largest difference, against the adapter's effect. A layer type that is left out has a larger share; rounding, TF32
included, has a smaller one."""
_TOKENS = 5


def lora_layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    """Names and LoRA layers of a model."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


@contextlib.contextmanager
def folded(model: nn.Module, made: Callable[[list[Tensor]], None] | None = None) -> Iterator[None]:
    """Within this context each adapted weight is ``W + scale * B A``; afterwards it is W again, bit by bit.

    The adapter is still on: switch it off inside.

    Args:
        model: A model with LoRA layers.
        made: Called with each new weight.
    """
    originals: list[tuple[nn.Parameter, Tensor]] = []
    try:
        with torch.no_grad():
            for _, layer in lora_layers(model):
                active = [n for n in layer.active_adapters if n in layer.lora_A or n in layer.lora_embedding_A]
                if layer.disable_adapters or not active:
                    continue
                weight = layer.get_base_layer().weight
                originals.append((weight, weight.data))
                delta = sum(layer.get_delta_weight(name) for name in active)
                weight.data = weight.data + delta.to(weight.dtype)
                if made is not None:
                    made([weight])
        yield
    finally:
        for weight, original in reversed(originals):  # the first value of a weight that came twice is put back last
            weight.data = original


def refuse_unfoldable(peft: PeftModel) -> None:
    """Reject a model whose logits with folded weights are not those with the adapter beside them.

    Args:
        peft: Base and adapter, which is noise for the time of the check.

    Raises:
        InputError: Naming the layers.
    """
    weight, layers = peft.get_base_model().get_input_embeddings().weight, lora_layers(peft)
    if weight.is_meta or isinstance(weight, FakeTensor) or weight.dtype not in FOLDED_TYPES:
        return
    if _folds(peft, [layer for _, layer in layers]):
        return
    kinds = sorted({name.rsplit(".", 1)[-1] for name, _ in layers})
    named = {kind: [layer for name, layer in layers if name.endswith(f".{kind}")] for kind in kinds}
    wrong = [kind for kind in kinds if not _folds(peft, named[kind])]
    allowed = "layers that the model calls: where it reads their weights itself, sampling would differ from training"
    raise InputError("lora.target_modules", wrong or kinds, allowed)


@torch.no_grad()
def _folds(peft: PeftModel, layers: list[LoraLayer]) -> bool:
    """Whether folding changes nothing while the adapter is noise on these layers and 0 elsewhere."""
    from grade.models.parameters import restoring  # here: it would lengthen the chain of imports

    model, generator = peft.get_base_model(), torch.Generator().manual_seed(0)
    table = model.get_input_embeddings().weight
    ids = torch.arange(1, 1 + _TOKENS, device=table.device).remainder(len(table)).view(1, -1)

    def logits() -> Tensor:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.double()

    with restoring([p for _, layer in lora_layers(peft) for pair in _factors(layer) for p in pair[:2]]):
        for _, layer in lora_layers(peft):
            size = _NOISE * layer.get_base_layer().weight.double().square().mean().sqrt() * (layer in layers)
            for a, b, scale in _factors(layer):
                for p, factor in ((a, b.shape[1] ** -0.5), (b, size / scale if scale else 0.0)):
                    p.copy_(torch.randn(p.shape, generator=generator).to(p) * factor)
        beside = logits()
        with folded(model), peft.disable_adapter():
            inside = logits()
        with peft.disable_adapter():
            effect = (beside - logits()).norm()
    rounding = 1e3 * torch.finfo(table.dtype).eps * beside.norm()
    return not (inside - beside).norm() > _SHARE * effect + rounding


def _factors(layer: LoraLayer) -> list[tuple[nn.Parameter, nn.Parameter, float]]:
    """A, B and scale of each active adapter of a layer."""
    factors = []
    for name in layer.active_adapters:
        if name in layer.lora_A:
            factors.append((layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]))
        elif name in layer.lora_embedding_A:
            factors.append((layer.lora_embedding_A[name], layer.lora_embedding_B[name], layer.scaling[name]))
    return factors
