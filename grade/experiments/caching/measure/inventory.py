"""What one layer keeps for backward, tensor by tensor: the list behind a trace's "activations"."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from grade.memory.models import model_config, with_layers
from grade.memory.settings import Device, TracedConfig
from grade.memory.trace import trace_layers

_GROUPS = {
    "norms": ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
    "adapter inputs": ("q_proj", "k_proj", "v_proj", "o_proj", "lora_A", "lora_B"),
    "MLP": ("mlp", "gate_proj", "up_proj", "down_proj", "act_fn"),
}


def layer_inventory(config: TracedConfig, device: Device = "cuda") -> pd.DataFrame:
    """Tensors of a middle layer that are alive when the forward pass with gradient ends.

    Columns group, module, op, shape, dtype, count, bytes (of all of them), in the order in which they were made.
    Groups: norms, attention, adapter inputs (what the adapter's products keep), MLP.
    """
    tracker = trace_layers(config, with_layers(model_config(config.model), 3), device)
    last = max(i for i, phase in enumerate(tracker.phase_of) if phase == "forward")
    counts: Counter = Counter()
    for record in tracker.alive_at(last):
        _, inside, module = record.module.partition(".layers.1.")
        if inside:
            counts[module, record.op, record.shape, str(record.dtype).removeprefix("torch."), record.nbytes] += 1
    rows = [
        dict(group=_group(module, op), module=module, op=op, shape=shape, dtype=dtype, count=n, bytes=n * nbytes)
        for (module, op, shape, dtype, nbytes), n in counts.items()
    ]
    return pd.DataFrame(rows, columns=["group", "module", "op", "shape", "dtype", "count", "bytes"])


def _group(module: str, op: str) -> str:
    parts = module.split(".")
    for group, names in _GROUPS.items():
        if any(part in names for part in parts):
            return group
    return "attention"
