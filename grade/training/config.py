"""Settings of training: `GradeConfig`, and `TrainConfig` for a run from the command line.

Names are those of transformers' ``TrainingArguments`` and, where TRL's ``GRPOConfig`` has one, TRL's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing import get_all_start_methods
from numbers import Number
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from transformers import TrainingArguments
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.training_args import trainer_log_levels

from grade.config import SEEDS, Text, allowed_names, own_fields, setting
from grade.data.texts import LEAST
from grade.errors import InputError, reading
from grade.gradients.estimators import ESTIMATORS
from grade.gradients.losses import ImportanceSampling
from grade.gradients.methods import (
    AUTO,
    MOST_MICROBATCHES,
    MOST_ROWS,
    POLICY_GRADIENTS,
    RELAXED,
    MethodConfig,
    Rate,
    Tau,
)
from grade.models.adapter import LoraSettings
from grade.models.backbone import DTYPES
from grade.models.samplers import known_sampler
from grade.rewards.base import RewardScope
from grade.training.trl import refuse_theirs, refuse_unknown, translated

Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
MOST_STEPS = 10**12
SAMPLED = "tokens are drawn from the policy itself: gradients of another distribution would be biased"
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}

_HONOURED = frozenset(
    """output_dir num_train_epochs lr_scheduler_type lr_scheduler_kwargs optim_args adam_beta1 adam_beta2 adam_epsilon
    bf16 fp16 tf32 activation_checkpointing use_cpu full_determinism fsdp deepspeed accelerator_config
    logging_strategy logging_first_step logging_nan_inf_filter log_on_each_node log_level log_level_replica disable_tqdm
    report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id debug skip_memory_metrics
    eval_strategy eval_delay eval_on_start save_only_model save_strategy save_on_each_node save_total_limit
    enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
    hub_always_push hub_revision dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order ddp_backend ddp_timeout do_train do_eval do_predict
    local_rank torch_empty_cache_steps resume_from_checkpoint label_names average_tokens_across_devices
    eval_accumulation_steps ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers""".split()
)
"""Fields of ``TrainingArguments`` that have an effect here, beside those that `GradeConfig` has itself, or none that
could be missed: there are no labels, no logits to keep, no buckets of gradients."""
_RECOMPUTED = (None, {}, {"use_reentrant": False})

REWARD = "models/reward/backbone/bag"
"""The reward of the example."""
FSDP2, SHARDING = "fsdp2", "GRADE_SHARDING"
"""The only way to divide the base, and the variable that asks for it without Accelerate."""
_OFF = ("", "false", "0", "no")
_LAUNCH = {
    "ACCELERATE_USE_DEEPSPEED": _OFF, "ACCELERATE_USE_MEGATRON_LM": _OFF, "ACCELERATE_USE_PARALLELISM_CONFIG": _OFF,
    "ACCELERATE_MIXED_PRECISION": ("", "no"),  # the base's type is a setting of the run, dtype or bf16
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),
    SHARDING: ("", FSDP2),
}  # fmt: skip
_FSDP = {
    "FSDP_VERSION": ("2",), "FSDP_OFFLOAD_PARAMS": ("", "false"), "FSDP_ACTIVATION_CHECKPOINTING": ("", "false"),
    "FSDP_RESHARD_AFTER_FORWARD": ("", "true", "full_shard"), "FSDP_AUTO_WRAP_POLICY": ("", "transformer_based_wrap"),
    "FSDP_IGNORED_MODULES": ("",), "FSDP_TRANSFORMER_CLS_TO_WRAP": ("",),  # every layer is a unit
}  # fmt: skip
"""Variables of ``accelerate launch``, with the values that are supported."""


def sharding() -> str:
    """How the base is divided among the processes: ``fsdp2``, or empty where each has a copy.

    What Accelerate can do and this project cannot is refused, and variables that no launcher sets so. FSDP2 is done
    here (`grade.models.sharding`) and no longer asked of Accelerate, which would wrap a model that the engines do not
    call.
    """
    for variable in ("WORLD_SIZE", "LOCAL_RANK"):
        if not re.fullmatch(r"-?\d+", given := os.environ.get(variable, "1")):
            raise InputError(f"environment: {variable}", given, "a whole number, as torchrun sets it")
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 or int(os.environ.get("LOCAL_RANK", -1)) >= 0
    if several and not os.environ.get("MASTER_ADDR"):
        allowed = "process 0's address, beside a WORLD_SIZE above 1 or a LOCAL_RANK"
        raise InputError("environment: MASTER_ADDR", "nothing", allowed)
    divided = os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in _OFF
    for variable, values in (_LAUNCH | (_FSDP if divided else {})).items():
        given = os.environ.get(variable, "")
        if given.lower() not in values:
            name = variable.removeprefix("ACCELERATE_").removeprefix("USE_").lower()
            raise InputError(f"accelerate launch: {name}", given, " or ".join(value or "nothing" for value in values))
    if divided:
        os.environ.update({"ACCELERATE_USE_FSDP": "false", SHARDING: FSDP2})
    return os.environ.get(SHARDING, "").lower()


@dataclass
class GradeConfig(MethodConfig, TrainingArguments):
    """Settings of `grade.training.trainer.GradeTrainer`: a method's, a run's, and all of ``TrainingArguments``.

    ``per_device_train_batch_size`` counts completions, as TRL does: B of B / num_generations prompts.

    ``beta`` weighs KL in the objective ``E[R - beta * mean_t KL_t]``, in reward per nat and token. TRL's loss is a mean
    over tokens where this is a sum, so TRL's beta is this one divided by the completion's length.
    """

    beta: NonNegativeFloat = setting(0.0, "weight of KL, in reward per nat and token")
    target_kl: PositiveFloat | None = setting(
        None, "KL at the end of training, in nats per completion: every step is scaled to a schedule. null: no budget"
    )
    temperature: Tau = setting(1.0, "sampling temperature; the policy is softmax(logits / temperature) everywhere")
    top_p: float = setting(1.0, f"only 1: {SAMPLED}")
    top_k: int = setting(0, f"only 0: {SAMPLED}")
    min_p: float | None = setting(None, f"only null: {SAMPLED}")
    repetition_penalty: float = setting(1.0, f"only 1: {SAMPLED}")
    num_iterations: PositiveInt | None = setting(
        None, "only 1: TRL makes each pass over a generation a step; passes_per_step are made within one"
    )
    use_vllm: bool = setting(False, "only false: a vLLM server is a sampler, http://host:port")
    trust_remote_code: bool = setting(False, "only false: no code of a model's repository is run")

    sampler: Annotated[str, AfterValidator(known_sampler)] = setting(
        "own", "who samples the completions of a step: own; shared: own, each prompt read once for its group; "
        "http://host:port: a server with the OpenAI completions protocol and token ids, as vLLM's",
    )  # fmt: skip
    sampler_max_difference: PositiveFloat | None = setting(
        None,
        "largest difference of a token's log-probability between another sampler and the policy, in nats; null: "
        "what rounding explains, 0.05, and 1 where the policy has 16 bits",
    )
    sampler_timeout: PositiveFloat = setting(600.0, "seconds to wait for a server's answer")
    sampler_folder: str | None = setting(
        None, "folder for the adapters of each step, which the server reads too; null: a temporary one"
    )
    importance_sampling: ImportanceSampling = setting(
        "none", "policy gradients, samples of another sampler: truncated importance weights, token or sequence"
    )
    importance_sampling_cap: PositiveFloat = setting(2.0, "largest importance weight, C")

    teacher: str | None = setting(
        None, "a model whose distributions the policy learns, alone or beside rewards: a folder or hub id with the "
        "policy's vocabulary, the folder of an adapter, base, the policy without its adapter, or http://host:port, a "
        "server with prompt_logprobs, as vLLM",
    )  # fmt: skip
    teacher_dtype: Literal[tuple(DTYPES)] | None = setting(None, "type of another model; null: the policy's")
    reward_weights: list[float] | None = setting(None, "weight of each reward function; null: 1 each")
    most_texts: Annotated[int, Field(ge=LEAST)] = setting(
        8192, "texts at most that the reward is distilled from: the first rows, or the first windows of whole texts"
    )
    reward_scope: RewardScope = setting(
        "prompt_and_completion", "what classifiers and reward models score; functions always get both"
    )

    max_prompt_length: PositiveInt | None = setting(None, "longest prompt in tokens, P; null: what the model can read")
    truncation: Literal["error", "left", "right"] = setting(
        "error", "prompts that are too long: error, left (keep the last tokens), right (keep the first)"
    )
    raw_prompts: bool = setting(False, "do not warn about plain-text prompts to a chat model")
    chat_template_kwargs: dict[str, Any] | str | None = setting(None, "passed on to the chat template")
    shuffle_dataset: bool = setting(True, "shuffle the prompts in every pass")

    eval_on_end: bool = setting(False, "evaluate after the last step")
    eval_prompts: Annotated[int, Field(ge=2)] | None = setting(
        None, "held-out prompts at most of an evaluation during training; null: all"
    )
    final_eval_prompts: Annotated[int, Field(ge=2)] | None = setting(
        None, "held-out prompts at most before the first and after the last step; null: all"
    )
    kl_eval_prompts: NonNegativeInt = setting(64, "how many of those prompts KL is computed on")
    eval_noise_block: PositiveInt = setting(
        64, "prompts whose noise an evaluation draws together; unlike the batch size, this changes results"
    )
    log_completions: bool = setting(False, "write completions and rewards as a table every logging_steps")

    model_init_kwargs: dict[str, Any] | str | None = setting(
        None, "for a model given by name: dtype, attn_implementation"
    )

    per_device_train_batch_size: Annotated[int, Field(ge=1, le=MOST_ROWS)] = setting(
        8, "completions in a microbatch, B, of B / num_generations prompts (relaxed methods: of B)"
    )
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)] = setting(
        1, "microbatches of a process in an optimizer step"
    )
    max_steps: Annotated[int, Field(ge=-1, le=MOST_STEPS)] = setting(-1, "optimizer steps; -1: num_train_epochs passes")
    seed: Seed = setting(42, "seed of adapter, prompt order and noise")
    learning_rate: Rate = setting(2e-4, "AdamW learning rate of the adapter")
    weight_decay: NonNegativeFloat = setting(0.0, "AdamW weight decay")
    max_grad_norm: NonNegativeFloat = setting(1.0, "the gradient is clipped to this norm; 0: it is not clipped")
    optim: str = setting("adamw_torch", "optimizer, one of transformers' names")
    warmup_steps: NonNegativeFloat = setting(0, "steps of a linear ramp of the learning rate; below 1: their share")
    logging_steps: PositiveFloat = setting(1, "steps between rows of the log; below 1: their share of all steps")
    eval_steps: PositiveFloat | None = setting(None, "steps between evaluations; null: as logging_steps")
    save_steps: PositiveFloat = setting(500, "steps between checkpoints")
    dataloader_num_workers: Annotated[int, Field(ge=0, le=1024)] = setting(0, "processes that read rows; 0: this one")
    per_device_eval_batch_size: PositiveInt = setting(64, "prompts sampled at once in an evaluation")
    dataloader_pin_memory: bool = setting(False, "pin memory in the data loader: rows are text, so it does nothing")
    restore_callback_states_from_checkpoint: bool = setting(True, "callbacks with a state go on where they were")
    remove_unused_columns: bool = setting(False, "only false: other columns are for the rewards")

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Say of a setting of TRL's what does it here."""
        refuse_unknown(values, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check our own values, then let transformers check its own.

        Raises:
            InputError: For the first wrong value.
        """
        MethodConfig.__post_init__(self)
        if isinstance(self.output_dir, os.PathLike):
            self.output_dir = os.fspath(self.output_dir)
        for name in ("model_init_kwargs", "chat_template_kwargs"):  # JSON from a parser, as of transformers' own
            if isinstance(value := getattr(self, name), str):
                with reading(name, value, "a mapping, or one as JSON"):
                    setattr(self, name, {**json.loads(value)})
        ours, plain = own_fields(type(self)), (Number, str, bytes, dict, list)  # others are transformers' own
        given = ((field.name, getattr(self, field.name)) for field in fields(self) if field.init)
        self.check_values(name for name, value in given if name in ours or isinstance(value, plain))
        for field in fields(TrainingArguments):
            value, default = getattr(self, field.name), self.default_of(field.name)
            if field.name.endswith("checkpointing_kwargs") and value in _RECOMPUTED:
                continue
            if field.init and field.name not in ours | _HONOURED and (value or "no") != (default or "no"):
                raise InputError(field.name, value, f"{default}: it has no effect here")
        sharding()  # before transformers reads the same variables
        batch, weighted = self.per_device_train_batch_size, self.importance_sampling != "none"
        contexts = (None, *(get_all_start_methods() if self.dataloader_num_workers else ()))
        # Which take hard tokens from another sampler (`grade.gradients.rollout.condition`).
        replayed = [name for name, m in RELAXED.items() if m.engine == "replay" and ESTIMATORS[m.estimator].hard]
        by_launch = "null; accelerate launch --config_file params/accelerate/fsdp2.yaml divides the base"
        rules = (
            *((name, getattr(self, name) != neutral, f"{neutral} ({SAMPLED})") for name, neutral in _NEUTRAL.items()),
            ("num_iterations", self.num_iterations is not None and (self.num_iterations, self.passes) != (1, 1),
             "passes_per_step: in TRL each pass over the completions counts as a step, here a step makes all"),
            ("use_vllm", self.use_vllm, "False (sampler: http://host:port for a server)"),
            ("trust_remote_code", self.trust_remote_code, "False: no code of a model's repository is run"),
            ("importance_sampling", weighted and self.sampler == "own",
             "none with sampler = own: its completions are the policy's"),
            ("method", self.sampler != "own" and self.relaxed and self.method not in replayed,
             f"{', '.join(replayed)}, or a method without relaxed tokens, with sampler = {self.sampler}: the replay "
             "engine takes hard tokens from elsewhere, soft ones are known here only"),
            ("importance_sampling", weighted and self.policy_gradient is None,
             f"none with {self.method}; token or sequence with {', '.join(POLICY_GRADIENTS)}"),
            ("remove_unused_columns", self.remove_unused_columns, "false: the rewards read the other columns"),
            ("lmbda", self.lmbda < 1 and self.target_kl is not None,
             "1 with a target_kl, which own completions of every step hold"),
            ("minibatches", batch % self.minibatches, f"a divisor of per_device_train_batch_size = {batch}"),
            ("max_steps", self.max_steps == 0, "at least 1, or -1 for num_train_epochs passes"),
            ("num_train_epochs", self.num_train_epochs <= 0, "above 0"),
            ("save_total_limit", self.save_total_limit is not None and self.save_total_limit < 1,
             "at least 1, or null: all are kept"),
            ("eval_delay", self.eval_delay is None or self.eval_delay < 0, "at least 0"),
            ("report_to", self.report_to is None, "none, all, or names of trackers"),
            ("metric_for_best_model", self.save_strategy == "best" and not self.metric_for_best_model,
             "a metric's name, with save_strategy = best"),
            ("save_strategy", self.save_strategy == "best" and self.eval_strategy == "no" and not self.eval_on_end,
             "best with an eval_strategy, whose evaluations it compares"),
            ("dataloader_persistent_workers", self.dataloader_persistent_workers and not self.dataloader_num_workers,
             "false, with dataloader_num_workers = 0"),
            ("dataloader_multiprocessing_context", self.dataloader_multiprocessing_context not in contexts,
             f"one of {contexts}, with dataloader_num_workers = {self.dataloader_num_workers}"),
            ("dataloader_prefetch_factor", self.dataloader_prefetch_factor == 0, "at least 1, or null"),
            *((name, getattr(self, name) not in trainer_log_levels, ", ".join(trainer_log_levels))
              for name in ("log_level", "log_level_replica")),
            ("warmup_steps", 0 < self.max_steps <= self.warmup_steps, f"less than max_steps = {self.max_steps}"),
            ("fsdp", self.fsdp, by_launch),
            ("deepspeed", self.deepspeed, by_launch),
            ("weight_decay", self.weight_decay * self.learning_rate > 1,
             f"at most 1 / learning_rate = {1 / self.learning_rate:g}: a step would turn the weights around"),
            ("ddp_backend", self.ddp_backend and "WORLD_SIZE" not in os.environ, "null: there is one process"),
            ("adam_epsilon", self.adam_epsilon <= 0, "above 0: a step divides by it where a gradient is 0"),
            ("fp16", self.fp16, "false, or bf16: float16 would need a loss scaler"),
        )  # fmt: skip
        for name, wrong, allowed in rules:
            if wrong:
                raise InputError(name, getattr(self, name), allowed)
        if self.method != AUTO or self.teacher is None:  # which may turn out to have no groups
            self.check_groups()
        names = ("per_device_train_batch_size", "max_completion_length")
        self.check_sizes({name: getattr(self, name) for name in names})
        for name in self.trackers:
            if name not in INTEGRATION_TO_CALLBACK:
                raise InputError("report_to", name, allowed_names(name, [*INTEGRATION_TO_CALLBACK, "none"]))
            if not _is_installed(name):
                raise InputError("report_to", name, f"none, or a tracker that is installed: pip install {name}")
        # Layers are recomputed by the engines, outside the rollout, which needs its cache: not by transformers.
        recompute = bool(self.gradient_checkpointing or self.activation_checkpointing)
        self.gradient_checkpointing = self.activation_checkpointing = None
        with self._reading_theirs():
            TrainingArguments.__post_init__(self)
        self.gradient_checkpointing = recompute
        for field in fields(self.accelerator_config):
            if (value := getattr(self.accelerator_config, field.name)) != field.default:
                allowed = f"{field.default}: each process reads and sums its own"
                raise InputError(f"accelerator_config.{field.name}", value, allowed)

    def check_groups(self) -> None:
        """Refuse a microbatch that is not made of whole groups."""
        batch, default = self.per_device_train_batch_size, "" if self.num_generations else f" (null is {self.group})"
        if batch % self.group:
            allowed = f"a divisor of per_device_train_batch_size = {batch}{default}"
            raise InputError("num_generations", self.num_generations, allowed)

    @contextmanager
    def _reading_theirs(self) -> Iterator[None]:
        """Name the field of what transformers refuses: its enumerations name the value, its other errors the field."""
        try:
            yield
        except (ValueError, TypeError, ImportError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            given = {field.name: getattr(self, field.name) for field in fields(TrainingArguments) if field.init}
            changed = {name: value for name, value in given.items() if value != self.default_of(name)}
            changed.pop("output_dir", None)
            named = [name for name, value in changed.items() if reason.startswith(f"{value} is not a valid ")]
            named += [name for name in changed if name in reason]
            named += [name for name, value in changed.items()
                      if name.replace("_", "") in reason.lower() or repr(str(value)) in reason]  # fmt: skip
            name, value = (named[0], changed[named[0]]) if named else (type(self).__name__, changed)
            allowed = reason.partition("please select ")[2] or f"values that fit together ({reason})"
            raise InputError(name, value, allowed) from error

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "", given: Sequence[str] = ()) -> Self:
        """As `grade.config.Settings.parse`."""
        sharding()  # what it refuses is not in the source
        refuse_theirs(values)
        return super().parse(values, source, given)

    @classmethod
    def from_trl(cls, config: Any, **changes: Any) -> Self:
        """The settings of a TRL config: ``GradeConfig.from_trl(GRPOConfig(...))``.

        The method is TRL's own, `grpo` or `rloo`, unless ``changes`` name another; of a config with
        ``teacher_model_name_or_path`` it is `teacher`. ``beta`` is multiplied by ``max_completion_length``; beside a
        teacher it is ``teacher_beta``, of the same meaning. A line is logged for each setting that is translated, or
        dropped because it changes no objective here. TRL need not be installed.

        Args:
            config: TRL's ``GRPOConfig``, ``RLOOConfig``, ``DistillationConfig`` or ``GKDConfig``, or a mapping with
                their names.
            changes: Settings of ours, which come last.

        Returns:
            The settings.

        Raises:
            InputError: For a setting that would train something else.
        """
        ours = cls(output_dir="trainer_output", use_cpu=bool(changes.get("use_cpu", False)))
        values = translated(config, ours, own_fields(cls), changes)
        return cls(**{"output_dir": ours.output_dir} | values | changes)

    @property
    def sharded(self) -> bool:
        """Whether the base is divided among the processes."""
        return self.world_size > 1 and sharding() == FSDP2

    @property
    def trackers(self) -> list[str]:
        """Experiment trackers that are named in ``report_to``."""
        names = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        return [name for name in names if name not in ("none", "all")]

    @property
    def microbatches(self) -> int:
        """Microbatches in a step, of all processes."""
        return self.gradient_accumulation_steps * self.world_size

    @property
    def batch_prompts(self) -> int:
        """Prompts in a microbatch."""
        return self.per_device_train_batch_size // self.group

    @property
    def batch_completions(self) -> int:
        """Completions generated and scored for a microbatch, greedy ones included."""
        greedy = self.policy_gradient is not None and self.policy_gradient.greedy
        return self.per_device_train_batch_size + (self.batch_prompts if greedy else 0)


def _is_installed(tracker: str) -> bool:
    """Whether transformers finds a tracker's package, for which it has a function each."""
    available = getattr(integration_utils, f"is_{tracker.removesuffix('_ml')}_available", None)
    return available is None or bool(available())


@dataclass
class TrainConfig(GradeConfig):
    """A run from files: `GradeConfig`, and what it is trained on. Paths are relative to the working directory."""

    model: str = setting("models/backbone", "folder or Hugging Face id of the base model")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = setting("float32", "type of the base")
    attention: Literal["auto", "sdpa", "eager"] = setting("auto", "attention implementation; auto: the model's default")
    lora: LoraSettings = setting(LoraSettings(), "the adapter")
    base_name: str | None = setting(
        None, "the base as the saved adapter names it; null: the Hugging Face id, or the folder's absolute path"
    )
    reward: str | list[str] | None = setting(
        None,
        "module:function, file.py:function, hf:<id or folder>[@LABEL], or a folder of grade reward; or a list of them; "
        f"null: {REWARD}, or none with a teacher",
    )
    gold: Text = setting("", "a judge that training never sees; empty for none")
    train_dataset: str = setting(
        "data/reviews/policy.jsonl", "prompts: .jsonl, .csv, .parquet, or a Hugging Face id (id:split)"
    )
    texts: Text = setting(
        "",
        "distilled, offline: texts that the reward is distilled from before the first step: a file or hub id with "
        "prompt and completion, or text; or reference:N, completions of the reference",
    )
    eval_dataset: Text = setting("data/reviews/validation.jsonl", "held-out prompts; empty for none")
    samples: NonNegativeInt = setting(8, "completions before and after training that are kept as text")

    eval_on_start: bool = setting(True, "evaluate before the first step")
    eval_on_end: bool = setting(True, "evaluate after the last step")
    num_train_epochs: PositiveFloat = setting(1.0, "passes over the prompts, where max_steps is not given")
    disable_tqdm: bool | None = setting(None, "no progress bar; null: a bar on a terminal only")

    def __post_init__(self) -> None:
        """Check the values; see `GradeConfig`.

        Raises:
            InputError: For the first wrong one.
        """
        super().__post_init__()
        if self.reward is None:
            self.reward = REWARD if self.teacher is None else []
        if self.model_init_kwargs:
            raise InputError("model_init_kwargs", self.model_init_kwargs, "none: dtype and attention do this here")
        if self.bf16 and self.dtype not in ("float32", "bfloat16"):
            raise InputError("dtype", self.dtype, "bfloat16, or the default, with bf16, which makes it that")
        if self.resume_from_checkpoint:
            raise InputError("resume_from_checkpoint", self.resume_from_checkpoint, "none; --resume continues a run")
        for name in ("eval_on_start", "eval_on_end"):
            if not self.eval_dataset:
                setattr(self, name, False)
