"""One frozen base model in three roles.

- policy: the base with its LoRA adapter on;
- reference: the same weights with the adapter off (`Backbone.reference`);
- reward trunk: the same, with a small head on top (`grade.rewards.model`).

So there is one copy of the base in memory, and KL is exactly 0 while LoRA's B is 0. Any decoder-only causal language
model of transformers that accepts `inputs_embeds` works: tied or untied head, absolute or rotary positions, scaled
embeddings, head bias, logit scale and soft cap. `Backbone` verifies this on a short probe when it is built, and rejects
what it cannot do exactly: remote code, pickled weights, LoRA on the head or the embedding, prompt-learning adapters.

Dropout is off everywhere, LoRA's too: its mask is not part of a sample, so a replayed rollout could not repeat it.

Left out: training the base itself, quantised bases, encoder-decoders.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from grade.errors import InputError
from grade.models.adapter import (
    LoraSettings,
    continued_adapter,
    load_adapter,
    new_adapter,
    refuse_adapted,
    save_adapter,
)
from grade.models.folding import FOLDED_TYPES, folded
from grade.models.gate import check_loaded, check_probe, check_supported, check_vocabulary, silence
from grade.models.head import Head
from grade.models.prompts import position_ids
from grade.models.sharding import Shards, whole
from grade.models.watcher import WatchedCache, Watcher

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Backbone(nn.Module):
    """A frozen causal language model, optionally with a trainable LoRA adapter.

    Args:
        model: A decoder-only causal language model, or a ``PeftModel`` of one, whose adapter is continued.
        tokenizer: Its tokenizer, or None where only ids are used.
        lora: Settings of a new adapter, ours or PEFT's; None for the bare base.
        adapter: Folder of a saved adapter to continue from, instead of ``lora``.
        seed: Seed of a new adapter's initialisation.

    Raises:
        InputError: If the model or the adapter cannot be supported; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: Any = None,
        lora: LoraSettings | LoraConfig | None = None,
        adapter: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        wrapped = model if isinstance(model, PeftModel) else None
        model = model.get_base_model() if wrapped else model
        if wrapped is None:
            refuse_adapted(model)
        check_supported(model)
        silence(model)
        self.model = model
        self._watcher: Watcher | None = None
        self.shards: Shards | None = None
        self.tokenizer = tokenizer
        self.decoder = model.base_model
        self.head = _head_of(model)
        self.embedding = model.get_input_embeddings()
        accepted = inspect.signature(self.decoder.forward).parameters
        self._takes_positions = "position_ids" in accepted
        # Read once: the Trainer aligns the model's special tokens with its tokenizer's.
        self.eos_token_ids = _eos_of(model)
        check_vocabulary(model, tokenizer, self.eos_token_ids)
        check_probe(self)
        self.peft: PeftModel | None = None if wrapped is None else continued_adapter(wrapped)
        if adapter is not None:
            self.peft = load_adapter(model, adapter)
        elif lora is not None:
            self.add_adapter(lora, seed)

    @classmethod
    def load(
        cls,
        source: str | Path,
        dtype: str = "float32",
        lora: LoraSettings | None = None,
        adapter: str | Path | None = None,
        device: str | torch.device = "cpu",
        attention: Literal["auto", "sdpa", "eager"] = "auto",
        seed: int = 0,
    ) -> Backbone:
        """Load a local folder or a Hugging Face id.

        Args:
            source: Folder with ``config.json`` and safetensors weights, or a hub id.
            dtype: One of float32, bfloat16, float16, float64.
            lora: Settings of a new adapter.
            adapter: Folder of a saved adapter.
            device: Where to put the model.
            attention: Attention implementation; auto is the model's own default.
            seed: Seed of a new adapter.

        Returns:
            The backbone.

        Raises:
            InputError: If the model cannot be found, read or supported.
        """
        if dtype not in DTYPES:
            raise InputError("dtype", dtype, ", ".join(DTYPES))
        model, tokenizer = load_pretrained(source, DTYPES[dtype], attention)
        return cls(model.to(device), tokenizer, lora, adapter, seed).to(device)

    @property
    def embedding_weight(self) -> Tensor:
        """The frozen embedding table [V, D], unscaled."""
        return self.embedding.weight

    @property
    def embedding_scale(self) -> float:
        """Factor between the table and what the first layer receives (Gemma 3), 1 for most models."""
        return float(getattr(self.embedding, "scalar_embed_scale", getattr(self.embedding, "embed_scale", 1.0)))

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
        """Longest context in tokens that the model was built for."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 2**31)

    def add_adapter(self, lora: LoraSettings | LoraConfig, seed: int = 0) -> None:
        """Put a new adapter on the base.

        Args:
            lora: Its settings.
            seed: Seed of its initialisation.
        """
        self.peft = new_adapter(self.model, lora, seed)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The adapter's parameters, in a fixed order."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of token ids, as the first layer receives them."""
        return self.embedding(ids)

    def hidden(self, inputs_embeds: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states (after the final norm) of all positions in one pass.

        Args:
            inputs_embeds: [B, L, D].
            mask: [B, L], 0 at padding.

        Returns:
            [B, L, D].
        """
        positions = {"position_ids": position_ids(mask)} if self._takes_positions else {}
        return self.decoder(
            inputs_embeds=inputs_embeds, attention_mask=mask, use_cache=False, **positions
        ).last_hidden_state

    def decode(self, inputs_embeds: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Hidden states of new positions; earlier ones are in the key-value cache, which grows in place.

        Args:
            inputs_embeds: New positions [B, n, D].
            mask: All positions so far, new ones included [B, L].
            cache: From `new_cache`.

        Returns:
            [B, n, D].
        """
        n = inputs_embeds.shape[1]
        positions = {"position_ids": position_ids(mask)[:, -n:]} if self._takes_positions else {}
        return self.decoder(
            inputs_embeds=inputs_embeds, attention_mask=mask, past_key_values=cache, use_cache=True, **positions
        ).last_hidden_state

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache."""
        if self._watcher is None:
            return DynamicCache(config=self.model.config)
        return WatchedCache(self._watcher, config=self.model.config)

    @contextlib.contextmanager
    def watched_by(self, watcher: Watcher | None) -> Iterator[None]:
        """Within this context a watcher is told which phase runs and which weights and caches are created.

        Args:
            watcher: The watcher; None: none.
        """
        before, self._watcher = self._watcher, watcher
        try:
            yield
        finally:
            self._watcher = before

    def anywhere(self, flag: bool) -> bool:
        """Whether a flag is set on any process that holds a part of the base; the flag itself where all is here.

        For loops whose length depends on the data: each pass of a sharded base needs all processes.
        """
        return flag if self.shards is None else self.shards.any(flag)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context that reports a phase to the watcher, if there is one."""
        return self._watcher.during(name) if self._watcher else contextlib.nullcontext()

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context the adapter is off: the frozen base.

        The adapter's parameters do not require gradients inside, so leave it before a backward pass that should reach
        them. Gradients flow to inputs as usual.
        """
        off = contextlib.nullcontext() if self.peft is None else self.peft.disable_adapter()
        with self.phase("reference"), off:
            yield

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Within this context the adapter is folded into the weights it adapts: the same policy, fewer products.

        For sampling, where each step has few rows and the adapter's small products take as much time as the base's.
        Meanwhile the adapted weights exist twice; the originals are put back unchanged. A half-precision base is not
        merged: rounding ``W + B A`` to 8 bits would lose the adapter. Nor is a sharded one, whose weights are gathered
        anew for every token; embedding table and head stay gathered within.
        """
        with self.phase("rollout"), whole(self.embedding_weight, self.head.weight), self._folded():
            yield

    @contextlib.contextmanager
    def _folded(self) -> Iterator[None]:
        if self.peft is None or self.dtype not in FOLDED_TYPES or self.shards is not None:
            yield
            return
        watcher = self._watcher
        with folded(self.model, watcher and (lambda new: watcher.tag(new, "weights"))), self.reference():
            yield

    @contextlib.contextmanager
    def checkpointed_layers(self, enabled: bool) -> Iterator[None]:
        """Within this context each layer of a forward pass keeps only its input and is recomputed in backward.

        transformers drops the key-value cache while checkpointing, so rollouts stay outside. The model stays in eval
        mode: only the layers' own switch is set (dropout rates are 0 in any case).
        """
        if not enabled:
            yield
            return
        model = self.model  # the names of transformers >= 5.20, else the older ones
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        try:
            enable({"use_reentrant": False})
        except ValueError:
            allowed = f"false: {type(model).__name__} cannot recompute its layers"
            raise InputError("gradient_checkpointing", True, allowed) from None
        layers = [m for m in self.model.modules() if hasattr(m, "gradient_checkpointing")]
        outer = [m for m in layers if isinstance(m, GradientCheckpointingLayer)]
        for layer in {inner for m in outer for inner in m.modules() if inner is not m}:
            if hasattr(layer, "gradient_checkpointing"):  # within another: recomputed in backward, when this is off
                layer.gradient_checkpointing = False
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            disable()
            for layer in layers:
                layer.training = False

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter as PEFT does (safetensors and ``adapter_config.json``), with its base's fingerprint.

        Args:
            folder: Target folder.

        Raises:
            InputError: If there is no adapter.
        """
        if self.peft is None:
            raise InputError("adapter", None, "a backbone with a LoRA adapter")
        save_adapter(self.peft, folder)


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Without transformers' warnings, such as its table of missing weights, which an error names in one line."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_pretrained(source: str | Path, dtype: torch.dtype, attention: str = "auto") -> tuple[PreTrainedModel, Any]:
    """Load model and tokenizer, safetensors only, no remote code, all dropout rates 0.

    Args:
        source: Local folder or hub id.
        dtype: Type of the weights.
        attention: Attention implementation; auto is the model's own default.

    Returns:
        The model and its tokenizer.

    Raises:
        InputError: With the reason in one line.
    """
    name = str(source)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.is_encoder_decoder:
            raise InputError("backbone", name, "a decoder-only causal language model, not an encoder-decoder")
        for key in vars(config):
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(getattr(config, key), float):
                setattr(config, key, 0.0)
        logging.disable_progress_bar()  # one bar per model, in logs and notebooks too
        with errors_only():
            model, info = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=dtype, use_safetensors=True,
                attn_implementation=None if attention == "auto" else attention,
                trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        check_loaded(name, info)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:  # transformers raises a dozen types, which mean the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else error.__class__.__name__
        allowed = "a local folder or hub id of a causal language model with safetensors weights and no remote code"
        raise InputError("backbone", name, f"{allowed} ({reason})") from None
    return model, tokenizer


def _eos_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end a sequence."""
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos = model.config.eos_token_id if eos is None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)


def _head_of(model: PreTrainedModel) -> Head:
    config, layer = model.config, model.get_output_embeddings()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = float(config.logit_scale)
    return Head(layer.weight, getattr(layer, "bias", None), scale, getattr(config, "final_logit_softcapping", None))
