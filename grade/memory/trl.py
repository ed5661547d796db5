"""Predict the peak memory of somebody's TRL run: TRL's own trainer takes a step on fake tensors.

The trainer is TRL's, on fake tensors, with its reference model, data collator, sampling, loss, Accelerate's wrapping,
clipping and optimizer. Its batch has the configured lengths, some rows a token shorter, so that masks are needed as in
training. Ids and masks are real (`grade.memory.meta.FakeFloats`), so TRL's own code decides every shape.

What does not run on fake tensors is replaced: loading of weights; on a GPU the kernels of attention
(`grade.memory.compat`) and TRL's Triton kernel for log-probabilities, which works in place; vLLM, by completions of
full length; Liger's kernels, by the model's own. fp16 is traced as bf16, ``flash_attention_2`` as ``sdpa``. Of passes
that sample, the first and the last two run, as in `grade.memory.trace.few_passes`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast, TrainerCallback
from transformers.generation import GenerationMixin

from grade.config import Config
from grade.errors import InputError, reading
from grade.memory.compat import kernels_of
from grade.memory.meta import FakeFloats
from grade.memory.records import LiveTracker
from grade.memory.settings import Device, TrlName
from grade.memory.step import fill_state
from grade.memory.trace import AT_EACH_END, Trace, extrapolated, grow_cache, to_fake
from grade.memory.trl_file import parser, read_trl

_TRACED = {
    "max_steps": 1, "report_to": "none", "save_strategy": "no", "eval_strategy": "no",
    "do_eval": False, "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    "dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False,
    "torch_compile": False, "tf32": None, "push_to_hub": False, "log_completions": False,
    "log_completions_hub_repo": None, "load_best_model_at_end": False, "use_liger_kernel": False,
    "chat_template_path": None, "eos_token": None, "pad_token": None, "assistant_only_loss": False,
    "completion_only_loss": None, "train_sampling_strategy": "sequential", "dataset_num_proc": None,
    "torch_empty_cache_steps": None,
}  # fmt: skip
"""Settings that a trace needs; the step's memory does not depend on them, but for Liger's kernels."""
_REFUSED = {
    "load_in_4bit": "no quantized base", "load_in_8bit": "no quantized base", "deepspeed": "one GPU",
    "parallelism_config": "one GPU", "fsdp": "one GPU", "activation_offloading": "activations on the GPU",
    "precompute_ref_log_probs": "false: a pass over the data is not traced",
    "reward_model_name_or_path": "reward functions: a reward model's memory is not traced",
    "use_transformers_continuous_batching": "generate, or vLLM", "auto_find_batch_size": "a batch size",
}  # fmt: skip


class TrlStep(Config):
    """A step of one of TRL's trainers, with settings by the names of its command line."""

    trainer: TrlName
    values: dict[str, Any] = Field(description="TRL's settings")
    prompt_tokens: int = Field(32, ge=1, description="prompt length in tokens, which TRL takes from the data")

    @property
    def model(self) -> str:
        """What `grade.memory.models.model_config` takes."""
        name = self.values.get("model_name_or_path")
        if not name:
            raise InputError("model_name_or_path", name, "a model, in the file or with --model")
        return name

    def parsed(self, folder: str, device: str = "cpu") -> tuple[Any, Any]:
        """TRL's ``GRPOConfig``, ``SFTConfig`` or ``DPOConfig`` for a trace, and its ``ModelConfig``."""
        for name, allowed in _REFUSED.items():
            if self.values.get(name):
                raise InputError(name, self.values[name], allowed)
        reader = parser(self.trainer)
        values = {name: value for name, value in self.values.items() if name not in ("env", "datasets")}
        values |= _TRACED | ({"fp16": False, "bf16": True} if values.get("fp16") else {})
        values |= {"output_dir": folder, "use_cpu": device != "cuda"}  # without data it runs as on a CPU
        with reading("--trl", self.trainer, "settings that TRL takes"), _quiet():
            reader.set_defaults_with_config(**values)
            _, arguments, model, _ = reader.parse_args_into_dataclasses(args=[])
        if self.trainer != "grpo" and not (arguments.max_length or 0) > self.prompt_tokens:
            raise InputError("max_length", arguments.max_length, f"more than prompt_tokens = {self.prompt_tokens}")
        if self.trainer == "grpo" and not (arguments.max_completion_length or 0) > 0:
            raise InputError("max_completion_length", arguments.max_completion_length, "at least 1")
        return arguments, model

    @cached_property
    def arguments(self) -> Any:
        """TRL's config and its ``ModelConfig``, whose names do not overlap."""
        return SimpleNamespace(**{k: v for part in reversed(self.parsed("unused")) for k, v in vars(part).items()})

    @property
    def method(self) -> str:
        """TRL's trainer."""
        return self.trainer

    @property
    def batch_size(self) -> int:
        """Sequences, or pairs of them, in a microbatch."""
        return self.arguments.per_device_train_batch_size

    @property
    def batch_unit(self) -> int:
        """What ``batch_size`` is a multiple of: whole groups of completions."""
        together = getattr(self.arguments, "steps_per_generation", 1)
        return math.lcm(getattr(self.arguments, "num_generations", 1), together) // together

    @property
    def max_new_tokens(self) -> int:
        """Tokens after the prompt."""
        return getattr(self.arguments, "max_completion_length", 0) or self.arguments.max_length - self.prompt_tokens

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether layers are recomputed."""
        return self.arguments.gradient_checkpointing

    @property
    def vllm_share(self) -> float:
        """The part of the card that a colocated vLLM holds while the policy trains."""
        own = self.arguments
        here = getattr(own, "use_vllm", False) and own.vllm_mode == "colocate" and not own.vllm_enable_sleep_mode
        return own.vllm_gpu_memory_utilization if here else 0.0

    def named(self, quantity: str, value: int | None) -> tuple[str, int | None]:
        """A quantity of a plan by TRL's name; None stays None."""
        if quantity == "batch_size":
            return "per_device_train_batch_size", value
        if self.trainer == "grpo":
            return "max_completion_length", value
        return "max_length", value and value + self.prompt_tokens

    def changed(self, **values: Any) -> Self:
        """A copy with other settings: ``batch_size`` and ``max_new_tokens``, the others by TRL's names."""
        for quantity in {"batch_size", "max_new_tokens"} & values.keys():
            values |= [self.named(quantity, values.pop(quantity))]
        step = type(self).parse(self.model_dump() | {"values": self.values | values})
        _ = step.arguments  # refuses what TRL does
        return step

    def options(self) -> dict[str, dict[str, Any]]:
        """Single changes that may save memory, by what they are."""
        options = {
            "gradient checkpointing": {"gradient_checkpointing": True},
            "LoRA instead of all weights": {"use_peft": True},
            "bfloat16 base": {"dtype": "bfloat16"},
            "fused attention (sdpa)": {"attn_implementation": "sdpa"},
            "half the batch": {"per_device_train_batch_size": max(self.batch_size // 2, 1)},
            "half the length": dict([self.named("max_new_tokens", max(self.max_new_tokens // 2, 1))]),
        }
        if self.trainer == "grpo":
            options |= {"no KL (beta 0)": {"beta": 0.0}, "vLLM on a server": {"use_vllm": True, "vllm_mode": "server"}}
        return {k: v for k, v in options.items() if any(getattr(self.arguments, n) != x for n, x in v.items())}

    @property
    def headline(self) -> str:
        """The run in one line."""
        own = self.arguments
        parts = [
            f"{self.model}, TRL's {self.trainer.upper()}Trainer: B={self.batch_size} P={self.prompt_tokens} "
            f"T={self.max_new_tokens}, base in {own.dtype}",
            f"LoRA of rank {own.lora_r}" if own.use_peft else "full",
            f"G={own.num_generations}, beta={own.beta:g}" if self.trainer == "grpo" else "",
            f"{own.gradient_accumulation_steps} microbatches" if own.gradient_accumulation_steps > 1 else "",
            "bf16 autocast" if own.bf16 else "", "layers checkpointed" if own.gradient_checkpointing else "",
        ]  # fmt: skip
        return ", ".join(part for part in parts if part)

    def notes(self) -> list[str]:
        """What is traced otherwise than it would run, a line each."""
        asked, said = self.values, []
        if asked.get("use_liger_kernel"):
            why = "its kernels take no fake tensors" if find_spec("liger_kernel") else "liger-kernel is not installed"
            said.append(f"use_liger_kernel: traced without it, which needs no less memory ({why})")
        if asked.get("fp16"):
            said.append("fp16: traced as bf16, of the same size")
        if self.arguments.attn_implementation not in (None, "eager", "sdpa"):
            said.append(f"attn_implementation: {self.arguments.attn_implementation} is traced as sdpa")
        if self.vllm_share:
            said.append(f"vLLM on the same card takes {self.vllm_share:g} of it beside the trace")
        elif asked.get("use_vllm"):
            said.append("vLLM holds nothing of this card while the policy trains (a server, or asleep)")
        return said


def load_trl(files: Sequence[str], values: Mapping[str, Any]) -> tuple[TrlStep, list[str]]:
    """The step of ``--trl [TRAINER] FILE``, and what to know of its trace. ``values``: ``model``, ``prompt_tokens``."""
    *trainer, path = files
    if len(trainer) > 1:
        raise InputError("--trl", " ".join(files), "a file, the trainer's name before it if needed")
    for other in values.keys() - {"model", "prompt_tokens"}:
        raise InputError(other, values[other], "model and prompt_tokens only, with --trl: the file has the settings")
    name, settings, unread = read_trl(path, *trainer)
    own = dict(values)
    if "model" in own:
        settings["model_name_or_path"] = own.pop("model")
    step = TrlStep.parse({"trainer": name, "values": settings} | own)
    return step, [*unread, *step.notes()]


def trace_trl(step: TrlStep, *, device: Device = "cuda", all_layers: bool = False) -> Trace:
    """Trace one optimizer step of TRL's trainer; arguments and errors as of `grade.memory.trace.trace`."""
    return extrapolated(step.model, all_layers, lambda model: _trace_layers(step, model, device, all_layers))


def _trace_layers(step: TrlStep, model: PretrainedConfig, device: Device, all_layers: bool) -> LiveTracker:
    mode, watch = FakeFloats(), Watch(0)
    with contextlib.ExitStack() as within:
        folder = within.enter_context(tempfile.TemporaryDirectory())
        # Nothing can be moved from meta.
        within.enter_context(patch.object(nn.Module, "to", lambda module, *_, **__: module))
        trainer = build_trainer(step, model, folder, "meta", watch)
        to_fake(mode.fake, *watch.modules)
        if device == "cuda":
            within.enter_context(_in_place(watch.tracker))
        if not all_layers and hasattr(trainer, "generation_config"):
            within.enter_context(_few_passes(trainer, watch.tracker))
        within.enter_context(reading("traced step", step.trainer, "a step that runs on fake tensors"))
        for context in (_quiet(), mode, kernels_of(device, fakes=True)):
            within.enter_context(context)
        trainer.train()
    return watch.tracker


class Watch(TrainerCallback):
    """Tracks optimizer step number ``at``. At the first one the optimizer is first given the state of later ones."""

    def __init__(self, at: int) -> None:
        self.at, self.tracker, self.modules = at, LiveTracker(sums_in_place=True), []
        self._open = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:  # noqa: D102
        if not self.at:
            fill_state(optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:  # noqa: D102
        if state.global_step != self.at:
            return
        tensors = [t for module in self.modules for t in (*module.parameters(), *module.buffers())]
        lora = [t for t in tensors if t.requires_grad] if hasattr(model, "peft_config") else []
        states = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        for category, existing in (("adapter", lora), ("weights", tensors), ("optimizer", states)):
            self.tracker.track_existing(existing)
            self.tracker.tag(existing, category)
        self._open.enter_context(self.tracker)
        self._open.enter_context(self.tracker.naming(model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:  # noqa: D102
        if state.global_step == self.at:
            self.tracker.tag((p.grad for p in model.parameters()), "gradients")
            self._open.enter_context(self.tracker.during("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: D102
        if state.global_step == self.at + 1:
            self._open.close()


def build_trainer(step: TrlStep, model: PretrainedConfig, folder: str, device: str, watch: Watch) -> Any:
    """TRL's trainer for a step, with random weights (on meta without data) and texts of the configured lengths.

    It stops after the optimizer step that ``watch`` tracks.
    """
    import trl
    from datasets import Dataset

    arguments, described = step.parsed(folder, device)
    arguments.max_steps = watch.at + 1
    arguments.model_init_kwargs = {"attn_implementation": described.attn_implementation, "dtype": described.dtype} | (
        arguments.model_init_kwargs or {}
    )

    def load(*_: Any, dtype: Any = "float32", attn_implementation: str | None = None, **__: Any) -> nn.Module:
        kind, attention = str(dtype).removeprefix("torch."), "eager" if attn_implementation == "eager" else "sdpa"
        kind = None if kind == "auto" else getattr(torch, kind)
        with torch.device(device):
            watch.modules.append(AutoModelForCausalLM.from_config(model, dtype=kind, attn_implementation=attention))
        watch.modules[-1].generation_config.eos_token_id = None  # it may be a word's here
        return watch.modules[-1]

    prompt, tokens = step.prompt_tokens, step.max_new_tokens  # TRL adds an end to texts
    texts = {
        "grpo": {"prompt": (prompt, prompt)},
        "sft": {"text": (prompt + tokens - 1, prompt + tokens - 2)},
        "dpo": {"prompt": (prompt, prompt), "chosen": (tokens - 1,) * 2, "rejected": (tokens - 2,) * 2},
    }[step.trainer]
    columns = {name: [" ".join("a" * max(size, 1)) for size in sizes] for name, sizes in texts.items()}
    make = getattr(trl, f"{step.trainer.upper()}Trainer")
    module = sys.modules[make.__module__]
    more = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if step.trainer == "grpo" else {}
    with (
        patch.object(module, "create_model_from_path", load),
        patch.object(module, "VLLMGeneration", _Completed, create=True),
        reading("--trl", step.trainer, "settings that TRL's trainer takes"),
        _quiet(),
    ):
        trainer = make(
            model=step.model, args=arguments, train_dataset=Dataset.from_dict(columns), callbacks=[watch],
            processing_class=word_tokenizer(), peft_config=trl.get_peft_config(described), **more,
        )  # fmt: skip
    batches = max(arguments.gradient_accumulation_steps, getattr(arguments, "steps_per_generation", 1))
    batch = arguments.per_device_train_batch_size  # of one row there is nothing to pad
    rows = [row % min(batch, 2) for row in range(batch * batches * arguments.max_steps)]
    trainer.train_dataset = trainer.train_dataset.select(rows)
    watch.modules[0] = trainer.model  # with its adapter
    if step.trainer == "grpo":
        _name_phases(trainer, watch.tracker)
    return trainer


def _name_phases(trainer: Any, tracker: LiveTracker) -> None:
    generate, score = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies

    def generating(*args: Any, **kwargs: Any) -> Any:
        with tracker.during("rollout"):
            (first, *ids), logps = generate(*args, **kwargs)
        return [first[:-1], *ids], logps and [logps[0][:-1], *logps[1:]]

    def scoring(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if torch.is_grad_enabled() else tracker.during("scoring"):
            return score(*args, **kwargs)

    trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies = generating, scoring


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"a": 0, "end": 1, "pad": 2}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad", padding_side="left")


class _Completed:
    """In place of vLLM: completions of full length."""

    vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})

    def __init__(self, *, max_completion_length: int, **_: Any) -> None:
        self.length = max_completion_length

    def sync_weights(self) -> None:
        """Left out: the weights' way to vLLM."""

    def generate(self, prompts: list, **_: Any) -> tuple[list, list, list, None]:
        """The prompts, their completions and log-probabilities."""
        return prompts, [[0] * self.length for _ in prompts], [[[0.0]] * self.length for _ in prompts], None


@contextlib.contextmanager
def _few_passes(trainer: Any, tracker: LiveTracker) -> Iterator[None]:
    """Within this context ``generate`` runs its first and last two passes; between them the key-value cache grows."""
    generate, update = trainer._generate_single_turn, GenerationMixin._update_model_kwargs_for_generation
    config, whole = trainer.model.config, {"full_attention"}  # a sliding window's cache does not grow
    windows = getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or whole) - whole
    skipped = 0 if windows else max(trainer.args.max_completion_length - 2 * AT_EACH_END, 0)
    flops: list[int] = []

    def grown(model: Any, outputs: Any, inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
        flops.append(tracker.flops)
        if len(flops) == AT_EACH_END and skipped:
            for _ in grow_cache(outputs.past_key_values, skipped):
                pass
            more["num_new_tokens"] = 1 + skipped
        if len(flops) == AT_EACH_END + 1:  # a pass between costs the mean of the two around
            tracker.flops += skipped * (flops[-1] - flops[-3]) // 2
        return update(model, outputs, inputs, **more)

    def generated(*args: Any) -> tuple[list, Any]:
        flops.clear()
        ids, logps = generate(*args)
        return [row + row[-1:] * skipped for row in ids], logps

    trainer.generation_config.max_new_tokens -= skipped
    trainer._generate_single_turn = generated
    with patch.object(GenerationMixin, "_update_model_kwargs_for_generation", grown):
        yield


@contextlib.contextmanager
def _in_place(tracker: LiveTracker) -> Iterator[None]:
    """Within this context TRL's log-probabilities go a GPU's way: labelled positions only, kernels without memory."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    class Nothing:
        cdiv = staticmethod(lambda a, b: -(-a // b))

        def __getitem__(self, _: Any) -> Callable[..., None]:
            return lambda *_, **__: None

    def product(total: Tensor, a: Tensor, b: Tensor) -> None:
        tracker.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]

    with contextlib.ExitStack() as patched:
        for module, name, value in (
            (chunked_logprob, "_use_triton", lambda _: True), (utils, "_use_triton", lambda _: True),
            (chunked_logprob, "_forward_kernel", Nothing()), (chunked_logprob, "_backward_kernel", Nothing()),
            (chunked_logprob, "triton", Nothing()), (chunked_logprob, "_addmm_fp32", product),
        ):  # fmt: skip
            patched.enter_context(patch.object(module, name, value, create=True))
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within this context neither a trainer's warnings nor its progress are shown."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()) as nowhere:
            with contextlib.redirect_stderr(nowhere):
                yield
    finally:
        logging.disable(before)
