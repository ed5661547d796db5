"""A base that bitsandbytes holds in 4 or 8 bits: its layers as one differentiable function, and the same on meta.

    y = x W^T + bias,    dL/dx = dL/dy W

W is what the stored numbers stand for, computed anew for each product. bitsandbytes' layers differ from that. With 8
bits it also rounds the inputs, but for columns that are large in some row of the batch, so that a token's logits
depend on what else is in the batch (by 4 % with SmolLM2). With 4 bits, on processors with AVX512-BF16, it packs the
weights in a pass without gradient for a product that has none. Here both are switched off.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.functional import int8_vectorwise_dequant, name2qmap
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import AutoHfQuantizer


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Linear8bit) -> Tensor:
        ctx.layer = layer  # whose weights never change
        return F.linear(x, layer.dequantised(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantised(grad.dtype), None


class _Linear8bit(Linear8bitLt):
    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return int8_vectorwise_dequant(self.weight, self.weight.SCB).to(dtype)


def make_exact(model: PreTrainedModel) -> None:
    """Let the quantised layers of a model compute ``x W^T + bias``, in place."""
    for layer in model.modules():
        if isinstance(layer, Linear8bitLt):
            if layer.weight.SCB is None:  # its first pass takes them from the weight
                layer.weight.SCB = layer.state.SCB
            layer.__class__ = _Linear8bit
        elif isinstance(layer, Linear4bit):
            layer.state_dict()  # undoes the packing
            layer.support_avx512bf16_for_cpu = False


def quantise_on_meta(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Quantise a model on meta in place, as ``from_pretrained`` does with these settings of ``BitsAndBytesConfig``.

    What belongs to a weight becomes buffers, so that it is counted.
    """
    quantizer = AutoHfQuantizer.from_config(settings)
    quantizer.preprocess_model(model=model, device_map={"": "meta"})
    for layer in model.modules():
        if isinstance(layer, Linear4bit | Linear8bitLt):
            layer.weight.data = layer.weight.data.float()
            weight = layer.weight._quantize("meta")
            state = getattr(weight, "quant_state", weight)
            kept = [*vars(state).values(), *vars(getattr(state, "state2", None) or state).values()]
            for number, tensor in enumerate(t for t in kept if isinstance(t, Tensor)):
                layer.register_buffer(f"statistics_{number}", tensor, persistent=False)
    name2qmap.clear()  # a table on meta, which a real model would be given
    quantizer.postprocess_model(model)
