"""One frozen base model in three roles.

- policy: the base with its LoRA adapter on, and with a token bias on its logits if there is one
  (`grade.models.token_bias`);
- reference: the policy as a run was given it (`Backbone.reference`): the same weights with the adapter off and without
  the bias, or with the values that a trained adapter and a bias had then (`Backbone.set_reference`);
- reward trunk: the bare base (`Backbone.bare`), with a small head on top (`grade.rewards.model`).

So there is one copy of the base in memory, and KL is exactly 0 until LoRA's B or the bias changes. Any decoder-only
causal language model of transformers that accepts `inputs_embeds` works: tied or untied head, absolute or rotary
positions, scaled embeddings, head bias, logit scale and soft cap. `Backbone` verifies this on a short probe when it is
built, and rejects what it cannot do exactly: remote code, pickled weights, LoRA on the head or the embedding,
prompt-learning adapters.

Left out: training the base itself, encoder-decoders.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from grade.errors import InputError
from grade.files import remove, require_source, write_json
from grade.models.adapter import (
    BASE_FILE,
    LoraSettings,
    check_base,
    continued_adapter,
    foldable,
    folded,
    has_lora,
    load_adapter,
    new_adapter,
    refuse_adapted,
    restore_adapter,
)
from grade.models.base import FrozenBase
from grade.models.compatibility import check_loaded, probe
from grade.models.gather import whole
from grade.models.head import Head, wide
from grade.models.parameters import fingerprint
from grade.models.token_bias import BIAS_FILE, TokenBias, saved_bias

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_BIAS = "token_bias"  # among values by name; all others are the adapter's


class Backbone(FrozenBase):
    """A frozen causal language model, optionally with a trainable LoRA adapter, a token bias, or both.

    Args:
        model: A decoder-only causal language model, or a ``PeftModel`` of one, whose adapter is continued.
        tokenizer: Its tokenizer, or None where only ids are used.
        lora: Settings of a new adapter, ours or PEFT's; None for the bare base.
        adapter: Folder of a saved adapter, token bias or both to continue from. Beside a bias alone ``lora`` is new.
        seed: Seed of a new adapter's initialisation.

    Raises:
        InputError: If the model or the adapter cannot be supported; the message says why.
    """

    lockstep = False
    """Whether each pass needs all processes, so that they must make equally many."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: Any = None,
        lora: LoraSettings | LoraConfig | None = None,
        adapter: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        wrapped = model if isinstance(model, PeftModel) else None
        model = model.get_base_model() if wrapped else model
        if wrapped is None:
            refuse_adapted(model)
        super().__init__(model, tokenizer)
        self.bias = TokenBias().eval()
        self.given: dict[str, nn.Parameter] = {}  # what `set_reference` was called with
        self.base_name = ""  # where a saved token bias finds its base; empty: where the model was loaded from
        probe(self)
        self.peft: PeftModel | None = None if wrapped is None else continued_adapter(wrapped)
        if adapter is not None:
            values = self.saved_bias(adapter)
            if values is None or has_lora(adapter):
                self.peft = load_adapter(model, adapter)
            self.set_token_bias(values)
        if lora is not None and (adapter is None or self.peft is None):
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
        quantization_config: Any = None,
    ) -> Backbone:
        """Load a local folder with ``config.json`` and safetensors weights, or a Hugging Face id.

        ``dtype`` is one of float32, bfloat16, float16, float64; ``attention`` auto is the model's own default;
        ``quantization_config`` is transformers', or a mapping of its settings. The others, and the `InputError` if the
        model cannot be found, read or supported, are as for the class.
        """
        if dtype not in DTYPES:
            raise InputError("dtype", dtype, ", ".join(DTYPES))
        model, tokenizer = load_pretrained(source, DTYPES[dtype], attention, "backbone", quantization_config)
        return cls(model.to(device), tokenizer, lora, adapter, seed).to(device)

    def add_adapter(self, lora: LoraSettings | LoraConfig, seed: int = 0) -> None:
        """Put a new adapter on the base, its initialisation by the seed."""
        self.peft = new_adapter(self.model, lora, seed)

    @property
    def token_bias(self) -> nn.Parameter | None:
        """What the policy adds to its logits: V numbers in nats, float32 (float64 for a float64 model); or None."""
        return self.bias.values

    def set_token_bias(self, values: Tensor | None, trainable: bool | None = None) -> None:
        """Give the policy a token bias, for all views of this backbone; in place if it has one, and None takes it away.

        Args:
            values: V finite numbers, in nats.
            trainable: Whether it is one of the `trainable_parameters`; None: as before, and a new one is not.

        Raises:
            InputError: If the values are others.
        """
        if values is None:
            self.bias.values = None
            return
        vocab = len(self.ref_head.weight)
        if values.shape != (vocab,) or not values.isfinite().all():
            raise InputError("token_bias", list(values.shape), f"{vocab} finite numbers, one for each token")
        self.bias.set(values.to(self.device, wide(self.dtype)), trainable)

    @property
    def head(self) -> Head:
        """The policy's head, with its token bias; within `reference` the reference's, within `bare` the base's."""
        if not self.bias.on or self.bias.values is self.ref_head.token_bias:
            return self.ref_head
        return replace(self.ref_head, token_bias=self.bias.values)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The adapter's parameters, in a fixed order, and the token bias if it is trained."""
        return [p for p in (*self.model.parameters(), *self.bias.parameters()) if p.requires_grad]

    def view(self, tokenizer: Any = None, temperature: float = 1.0) -> Backbone:
        """The same weights, adapter and token bias with another sampling temperature, and a tokenizer if one is given.

        Completions end with the model's ends of sequence, and with the tokenizer's, which a chat template may use.
        """
        other = copy.copy(self)
        other.tokenizer = tokenizer = tokenizer or self.tokenizer
        other.ref_head = replace(self.ref_head, temperature=temperature)
        end = getattr(tokenizer, "eos_token_id", None)
        if end is not None and end not in self.eos_token_ids:
            other.eos_token_ids = (*self.eos_token_ids, end)
        return other

    def anywhere(self, flag: bool) -> bool:
        """Whether a flag is set on any process of a pass, here on this one: for loops whose length depends on data."""
        return flag

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context it is the reference: the policy of `set_reference`, or the bare base.

        The adapter's parameters do not require gradients inside, so leave it before a backward pass that should reach
        them. Gradients flow to inputs as usual.
        """
        adapter = self._adapter_as_given() if self.given.keys() - {_BIAS} else self._adapter_off()
        with self.phase("reference"), adapter, self.bias.off():
            yield

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        """Within this context the adapter and the token bias are off: the frozen base, whatever the reference is."""
        before, self.ref_head = self.ref_head, replace(self.ref_head, token_bias=None)
        try:
            with self.phase("reference"), self._adapter_off(), self.bias.off():
                yield
        finally:
            self.ref_head = before

    def policy_values(self) -> dict[str, Tensor]:
        """Copies of what makes the policy differ from the base, for `set_reference`: nothing while B and bias are 0."""
        named = self._named_adapter()
        trained = any(".lora_B." in name and p.any() for name, p in named.items())
        values = {name: p.detach().clone() for name, p in named.items()} if trained else {}
        if self.token_bias is not None and self.token_bias.any():
            values[_BIAS] = self.token_bias.detach().clone()
        return values

    def set_reference(self, values: Mapping[str, Tensor]) -> None:
        """Let the policy with these `policy_values` be the reference of this view; with none the bare base is."""
        self.given = {name: nn.Parameter(value.to(self.device), False) for name, value in values.items()}
        self.ref_head = replace(self.ref_head, token_bias=self.given.get(_BIAS))

    def reference_values(self) -> list[Tensor]:
        """Values of the `trainable_parameters` with which the policy is the reference."""
        # Of the base: B = 0, and A as it is.
        values = [
            self.given.get(name, torch.zeros_like(p) if ".lora_B." in name else p.detach())
            for name, p in self._named_adapter().items()
        ]
        return values + [self.reference_bias() for p in self.bias.parameters() if p.requires_grad]

    def reference_bias(self) -> Tensor:
        """The reference's token bias [V], for a policy that has one."""
        return self.given.get(_BIAS, torch.zeros_like(self.token_bias))

    def _named_adapter(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def _adapter_as_given(self) -> Iterator[None]:
        # Parameters are exchanged, not their values: a graph needs those until its backward pass, out of this context.
        policy: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name in self.given.keys() - {_BIAS}:
                path, _, kind = name.rpartition(".")
                layer = self.model.get_submodule(path)
                policy.append((layer, kind, getattr(layer, kind)))
                setattr(layer, kind, self.given[name])
            yield
        finally:
            for layer, kind, parameter in policy:
                setattr(layer, kind, parameter)

    def _adapter_off(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.peft is None else self.peft.disable_adapter()

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Within this context the adapter is folded into the weights it adapts: the same policy, fewer products.

        For sampling, where each step has few rows and the adapter's small products take as much time as the base's.
        Meanwhile the adapted weights exist twice; the originals are put back unchanged. A half-precision base is not
        merged: rounding ``W + B A`` to 8 bits would lose the adapter. Nor is a divided one, whose weights are gathered
        anew for every token; embedding table and head stay gathered within. There is no reference within.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.phase("rollout"))
            stack.enter_context(whole(self.embedding_weight, self.head.weight))
            if self.peft is not None and foldable(self.model) and not self.lockstep:
                watcher = self._watcher
                stack.enter_context(folded(self.model, watcher and (lambda new: watcher.tag(new, "weights"))))
            yield

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter as PEFT does (safetensors and ``adapter_config.json``), with its base's fingerprint.

        Of several adapters it is the active one. The token bias lies beside it, or alone: ``token_bias.safetensors``.
        """
        folder = Path(folder)
        if self.peft is not None:
            name = self.peft.active_adapter
            self.peft.save_pretrained(str(folder), selected_adapters=[name])
            if name != "default":  # PEFT makes a folder within for it
                for path in (folder / name).iterdir():
                    path.replace(folder / path.name)
                (folder / name).rmdir()
        if self.token_bias is None:
            remove(folder / BIAS_FILE)  # of a policy that was there before
        else:
            self.bias.save(folder, self.base_name or self.model.config.name_or_path)
        write_json(folder / BASE_FILE, fingerprint(self.model), 2, sort_keys=True)

    def restore(self, folder: str | Path) -> None:
        """Give the policy the values that `save_adapter` wrote of it, in place."""
        if self.peft is not None:
            restore_adapter(self.peft, folder)
        values = self.saved_bias(folder)
        if (values is None) != (self.token_bias is None):
            with_bias = "with" if values is None else "without"
            raise InputError("adapter", str(folder), f"one {with_bias} {BIAS_FILE}, as the policy is")
        self.set_token_bias(values)

    def saved_bias(self, folder: str | Path) -> Tensor | None:
        """A token bias that was saved for this base [V], if the folder has one, on this device and in its type."""
        values, _ = saved_bias(folder, len(self.ref_head.weight))
        if values is None:
            return None
        check_base(self.model, folder)
        return values.to(self.device, wide(self.dtype))


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Without transformers' warnings, such as its table of missing weights, which an error names in one line."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_pretrained(
    source: str | Path, dtype: torch.dtype, attention: str = "auto", field: str = "backbone",
    quantization_config: Any = None,
) -> tuple[PreTrainedModel, Any]:  # fmt: skip
    """Model and tokenizer: safetensors only, no remote code; arguments as of `Backbone.load`."""
    name = str(source)
    allowed = "a local folder or hub id of a causal language model with safetensors weights and no remote code"
    require_source(field, name, allowed)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        logging.disable_progress_bar()  # one bar per model, in logs and notebooks too
        with errors_only():
            model, info = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=dtype, use_safetensors=True,
                attn_implementation=None if attention == "auto" else attention,
                quantization_config=quantization_config,
                trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        check_loaded(name, info, field)
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(field, name, f"{allowed} ({error})") from error
