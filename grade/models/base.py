"""A frozen language model as a function of embeddings: pass, decoding step, head, recomputed layers.

Relaxed tokens have embeddings and no ids, so everything here takes `inputs_embeds`. Dropout is off everywhere: its mask
is not part of a sample, so a replayed rollout could not repeat it. `grade.models.compatibility` says which models do
all this exactly; `grade.models.backbone` adds the adapter.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from grade.models.head import EmbeddingTable, Head
from grade.models.prompts import position_ids
from grade.plugins import QUANTISED, import_object

SPARE = 16
"""Where the room for keys and values is too small, the new one has a sixteenth more positions than it needs."""


class KeysValues(DynamicLayer):
    """A layer's keys and values [B, H, L, D], appended in place.

    transformers' own layer concatenates: each token copies all before it, which takes a sixth of the time of 1,024
    tokens of SmolLM2. In place there is no gradient, so in grad mode it concatenates.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append those of new positions; all so far."""
        if torch.is_grad_enabled():
            self._room = [*super().update(key_states, value_states, *args, **kwargs)]
            return self.keys, self.values
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._room = [key_states[..., :0, :], value_states[..., :0, :]]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        for number, new in enumerate((key_states, value_states)):
            old = self._room[number]
            if end > old.shape[-2]:
                self._room[number] = new.new_empty(*new.shape[:-2], end + end // SPARE, new.shape[-1])
                self._room[number][..., :start, :] = old[..., :start, :]
            self._room[number][..., start:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows, also more of them than there were."""
        super().reorder_cache(beam_idx)
        self._room = [self.keys, self.values]


class _Cache(DynamicCache):
    """A key-value cache that reports its tensors to a watcher, if there is one, as they are created."""

    def __init__(self, config: PreTrainedConfig, watcher: Any = None) -> None:
        super().__init__(config=config)
        self.layers = [KeysValues() if type(layer) is DynamicLayer else layer for layer in self.layers]
        self._watcher = watcher

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        result = super().update(*args, **kwargs)
        if self._watcher is not None:
            self._watcher.tag(result, "kv cache")
        return result


class FrozenBase(nn.Module):
    """A decoder-only causal language model without dropout, whose weights are frozen; it is changed in place."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        super().__init__()
        # With a mask cuDNN's attention has NaN gradients at some lengths on H100 (pytorch issue 196678) and samples
        # wrong tokens on B200 (issue 193893). Torch's other kernels are right, and the ones that traces know.
        torch.backends.cuda.enable_cudnn_sdp(False)
        _freeze(model)
        if getattr(model, "quantization_method", None) == "bitsandbytes":
            import_object(QUANTISED)(model)
        self.model, self.tokenizer = model, tokenizer
        self.decoder = model.base_model
        self.ref_head = head_of(model)
        self.embedding = model.get_input_embeddings()
        self._takes_positions = "position_ids" in inspect.signature(self.decoder.forward).parameters
        # Read once: other code may align the model's special tokens with its tokenizer's.
        eos = model.generation_config.eos_token_id if model.generation_config else None
        eos = model.config.eos_token_id if eos is None else eos
        self.eos_token_ids = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
        self._watcher: Any = None  # such as `grade.memory.records.LiveTracker`

    @property
    def head(self) -> Head:
        """From hidden states to logits."""
        return self.ref_head

    @property
    def embedding_weight(self) -> Tensor:
        """The frozen embedding table [V, D], unscaled."""
        return self.embedding.weight

    @property
    def embedding_scale(self) -> float:
        """Factor between the table and what the first layer receives (Gemma 3), 1 for most models."""
        return EmbeddingTable.of(self.embedding).scale

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of the embedding table."""
        return self.embedding_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width D of the embedding table."""
        return self.embedding_weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the base weights."""
        return self.embedding_weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the base weights."""
        return self.embedding_weight.device

    @property
    def max_positions(self) -> int:
        """Longest context in tokens that the model was built for.

        With LongRoPE that before its extension: in a longer pass transformers turns every position in another way, so
        that tokens' probabilities depend on the other rows, and cached keys are those of the shorter one.
        """
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        limits = [getattr(config, "max_position_embeddings", None) or 2**31]
        for each in (rope, *rope.values()):  # perhaps one for each type of layers
            if isinstance(each, dict) and each.get("rope_type") == "longrope":
                limits.append(each["original_max_position_embeddings"])
        return int(min(limits))

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of token ids, as the first layer receives them."""
        return self.embedding(ids)

    def outputs(self, inputs_embeds: Tensor, mask: Tensor, **options: Any) -> Any:
        """What transformers' decoder returns for a pass over embeddings [B, L, D]; the mask [B, L] is 0 at padding."""
        self._keep_still()
        options = {"use_cache": False} | options
        if self._takes_positions:
            options["position_ids"] = position_ids(mask)[:, -inputs_embeds.shape[1] :]
        return self.decoder(inputs_embeds=inputs_embeds, attention_mask=mask, **options)

    def _keep_still(self) -> None:
        """Back to eval mode if somebody has called ``train()``, which brings back dropout and the noise of routers."""
        if self.embedding.training:
            self.model.eval()

    def hidden(self, inputs_embeds: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states [B, L, D] (after the final norm) of all positions, as in `outputs`."""
        return self.outputs(inputs_embeds, mask).last_hidden_state

    def decode(self, inputs_embeds: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Hidden states of new positions [B, n, D]; earlier ones are in the key-value cache, which grows in place.

        The mask [B, L] covers all positions so far, new ones included.
        """
        return self.outputs(inputs_embeds, mask, past_key_values=cache, use_cache=True).last_hidden_state

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache."""
        return _Cache(self.model.config, self._watcher)

    @property
    def continues(self) -> bool:
        """As `Policy.continues`: only keys and values are kept, no layer is recomputed, no cast of a weight kept."""
        kept = {type(layer) for layer in DynamicCache(config=self.model.config).layers}
        recomputed = any(getattr(m, "gradient_checkpointing", False) and m.training for m in self.model.modules())
        device = self.device.type  # autocast knows no meta device
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        return not recomputed and not autocast and kept <= {DynamicLayer, DynamicSlidingWindowLayer}

    @contextlib.contextmanager
    def watched_by(self, watcher: Any) -> Iterator[None]:
        """Within this context a watcher, if any, learns which phase runs and which weights and caches are created."""
        before, self._watcher = self._watcher, watcher
        try:
            yield
        finally:
            self._watcher = before

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context that reports a phase to the watcher, if there is one."""
        return self._watcher.during(name) if self._watcher else contextlib.nullcontext()

    @contextlib.contextmanager
    def checkpointed_layers(self, enabled: bool) -> Iterator[None]:
        """Within this context each layer of a forward pass keeps only its input and is recomputed in backward.

        transformers drops the key-value cache while checkpointing, so rollouts stay outside. The model stays in eval
        mode: only the layers' own switch is set (dropout rates are 0 in any case).
        """
        if not enabled:
            yield
            return
        self._keep_still()
        model = self.model  # the names of transformers >= 5.20, else the older ones
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        enable({"use_reentrant": False})
        layers = [m for m in self.model.modules() if hasattr(m, "gradient_checkpointing")]
        outer = [m for m in layers if isinstance(m, GradientCheckpointingLayer)]
        for layer in {inner for m in outer for inner in m.modules() if inner is not m}.intersection(layers):
            layer.gradient_checkpointing = False  # within another: recomputed in backward, when this is off
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            disable()
            for layer in layers:
                layer.training = False


def _freeze(model: PreTrainedModel) -> None:
    """Put a model in eval mode, its weights frozen, the dropout rates of its configuration and its layers at 0.

    Rates too, because recomputed layers run with their own ``training`` on (`FrozenBase.checkpointed_layers`), not
    their children's, and models that drop whole layers or call the function ``dropout`` look at that. Mixtures of
    experts run one by one in float64: the joint kernel knows no float64.
    """
    model.requires_grad_(False).eval()
    for owner in [*model.modules(), *(each.config for each in model.modules() if hasattr(each, "config"))]:
        for key, value in vars(owner).items():
            if "drop" in key and isinstance(value, float):
                setattr(owner, key, 0.0)
    choose = getattr(model, "set_experts_implementation", None)
    if choose is not None and model.dtype == torch.float64:
        choose("eager")


def head_of(model: PreTrainedModel) -> Head:
    """A model's head, with the scale and soft cap of its configuration."""
    config, layer = model.config, model.get_output_embeddings()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = float(config.logit_scale)
    return Head(layer.weight, getattr(layer, "bias", None), scale, getattr(config, "final_logit_softcapping", None))
