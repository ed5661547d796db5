"""A base that bitsandbytes holds in 4 or 8 bits: its layers as one differentiable function, and the same on meta.

    y = x W^T + bias,    dL/dx = dL/dy W

W is what the stored numbers stand for, computed anew for each product. bitsandbytes' layers differ from that. With 8
bits it also rounds the inputs, but for columns that are large in some row of the batch, so that a token's logits
depend on what else is in the batch (by 4 % with SmolLM2). With 4 bits, on processors with AVX512-BF16, it packs the
weights in a pass without gradient for a product that has none. Here both are switched off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.functional import quantize_4bit
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig


class _Product(torch.autograd.Function):
    """``x W^T + bias`` with ``W = codes * scales / 127``, which is not kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, _weight(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad @ _weight(*ctx.saved_tensors, grad.dtype), None, None, None


def _weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype).mul_((scales / 127).unsqueeze(1))


class _Linear8bit(Linear8bitLt):
    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.weight.SCB, self.bias)


def make_exact(model: PreTrainedModel) -> None:
    """Let the quantised layers of a model compute ``x W^T + bias``, in place."""
    for layer in model.modules():
        if isinstance(layer, Linear8bitLt) and not layer.state.has_fp16_weights:
            if layer.weight.SCB is None:  # its first pass takes them from the weight
                layer.weight.SCB = layer.state.SCB
            layer.__class__ = _Linear8bit
        elif isinstance(layer, Linear4bit):
            layer.state_dict()  # undoes the packing
            layer.support_avx512bf16_for_cpu = False


def quantise_on_meta(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Quantise a model on meta in place, as ``from_pretrained`` does with these settings of ``BitsAndBytesConfig``.

    What belongs to a weight becomes buffers, so that it is counted.
    """
    with torch.device("cpu"):
        quantize_4bit(torch.zeros(64), compress_statistics=True)  # a table of all layers is made by the first call
    quantizer = AutoHfQuantizer.from_config(AutoQuantizationConfig.from_dict(dict(settings)))
    quantizer.preprocess_model(model=model, device_map={"": "meta"})
    for layer in model.modules():
        kept: list[Any] = []
        if isinstance(layer, Linear4bit):
            options = {name: getattr(layer.weight, name) for name in ("blocksize", "compress_statistics", "quant_type")}
            data, state = quantize_4bit(torch.empty(layer.out_features, layer.in_features), **options)
            layer.weight = Params4bit(data, quant_state=state, module=layer, bnb_quantized=True, **options)
            kept = [value for part in (state, state.state2) if part is not None for value in vars(part).values()]
        elif isinstance(layer, Linear8bitLt):
            scales = torch.empty(layer.out_features)
            layer.weight = Int8Params(layer.weight.data.to(torch.int8), requires_grad=False, SCB=scales)
            kept = [scales]
        for number, tensor in enumerate(t for t in kept if isinstance(t, Tensor)):
            layer.register_buffer(f"statistics_{number}", tensor, persistent=False)
    quantizer.postprocess_model(model)
