"""Settings of training: `GradeConfig`, and `TrainConfig` for a run from files.

Names are those of transformers' ``TrainingArguments`` and, where TRL's ``GRPOConfig`` has one, TRL's. Settings of a
method are fields too, see `grade.gradients.methods`.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import pydantic
from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from grade.config import SEEDS, RewardScope, Text
from grade.errors import InputError
from grade.gradients.methods import AUTO, MethodConfig, Rate, Tau
from grade.models.lora import LoraSettings

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Folder = Annotated[str, BeforeValidator(os.fspath)]

REWARD = "models/reward/backbone/bag"
"""The reward of the example."""


class GradeConfig(MethodConfig):
    """Settings of `grade.training.loop.GradeTrainer`: a run's, and those of its method.

    ``per_device_train_batch_size`` counts completions, as TRL does: B of B / num_generations prompts. A prompt's
    completions may also be spread over several microbatches of a process.

    ``beta`` weighs KL in the objective ``E[R - beta * mean_t KL_t]``, in reward per nat and token. TRL's loss is a mean
    over tokens where this is a sum, so TRL's beta is this one divided by the completion's length.
    """

    output_dir: Folder = Field("trainer_output", description="folder of checkpoints and results")
    beta: NonNegativeFloat = Field(0.0, description="weight of KL to the policy as given, in reward per nat and token")
    target_kl: PositiveFloat | None = Field(
        None,
        description="KL at the end of training, in nats per completion: every step is scaled to a schedule. "
        "null: no budget",
    )
    temperature: Tau = Field(
        1.0, description="sampling temperature; the policy is softmax(logits / temperature) everywhere"
    )
    reward_weights: list[float] | None = Field(None, description="weight of each reward function; null: 1 each")
    reward_scope: RewardScope = Field(
        "prompt_and_completion", description="what classifiers and reward models score; functions always get both"
    )

    max_prompt_length: PositiveInt | None = Field(
        None, description="longest prompt in tokens, P; null: what the model can read"
    )
    truncation: Literal["error", "left", "right"] = Field(
        "error", description="prompts that are too long: error, left (keep the last tokens), right (keep the first)"
    )
    raw_prompts: bool = Field(False, description="do not warn about plain-text prompts to a chat model")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="passed on to the chat template")

    max_steps: Annotated[int, Field(ge=-1)] = Field(
        -1, description="optimizer steps; -1: num_train_epochs passes over the prompts"
    )
    num_train_epochs: PositiveFloat = Field(3.0, description="passes over the prompts, where max_steps is not set")
    per_device_train_batch_size: PositiveInt = Field(
        8, description="completions in a microbatch, B, of B / num_generations prompts (relaxed methods: of B)"
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="microbatches of a process in an optimizer step")
    learning_rate: Rate = Field(2e-4, description="AdamW learning rate of the adapter and the token bias")
    train_bias: bool = Field(False, description="train the token bias too, from 0 if the policy has none")
    lr_scheduler_type: str = Field("linear", description="learning rate schedule, one of transformers' names")
    warmup_steps: NonNegativeFloat = Field(
        0, description="steps of a linear ramp of the learning rate; below 1: their share"
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW weight decay")
    max_grad_norm: NonNegativeFloat = Field(
        1.0, description="the gradient is clipped to this norm; 0: it is not clipped"
    )
    seed: Seed = Field(42, description="seed of adapter, prompt order and noise")
    bf16: bool = Field(False, description="the base in bfloat16")
    use_cpu: bool = Field(False, description="train on the CPU where there is a GPU")
    model_init_kwargs: dict[str, Any] | None = Field(
        None, description="for a model given by name: dtype, attn_implementation, quantization_config"
    )

    eval_strategy: Literal["no", "steps"] = Field("no", description="evaluate every eval_steps, or not")
    eval_steps: PositiveInt | None = Field(None, description="steps between evaluations; null: as logging_steps")
    eval_on_start: bool = Field(False, description="evaluate before the first step and after the last")
    eval_prompts: Annotated[int, Field(ge=2)] | None = Field(
        None, description="held-out prompts at most of an evaluation during training; null: all"
    )
    final_eval_prompts: Annotated[int, Field(ge=2)] | None = Field(
        None, description="held-out prompts at most before the first and after the last step; null: all"
    )
    kl_eval_prompts: NonNegativeInt = Field(64, description="how many of those prompts KL is computed on")
    per_device_eval_batch_size: PositiveInt = Field(64, description="prompts sampled at once in an evaluation")

    logging_steps: PositiveInt = Field(1, description="steps between rows of the log")
    log_completions: bool = Field(False, description="write completions and rewards as a table every logging_steps")
    report_to: str | list[str] = Field("none", description="none, all, or names of trackers, as for transformers")
    save_strategy: Literal["no", "steps", "best"] = Field(
        "steps", description="checkpoints every save_steps, after the best evaluation so far, or none"
    )
    save_steps: PositiveInt = Field(500, description="steps between checkpoints")
    save_total_limit: PositiveInt | None = Field(None, description="newest checkpoints that are kept; null: all")
    metric_for_best_model: str | None = Field(
        None,
        description="the result is the policy of the evaluation where this is best, of which a checkpoint is written: "
        "eval_reward and others largest, a loss or KL smallest; null: the last policy",
    )

    def __init__(self, output_dir: str | os.PathLike[str] = "trainer_output", **values: Any) -> None:
        super().__init__(output_dir=output_dir, **values)

    @pydantic.model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.max_steps == 0:
            raise InputError("max_steps", 0, "at least 1, or -1 for num_train_epochs passes")
        if self.save_strategy == "best" and self.metric_for_best_model is None:
            raise InputError("metric_for_best_model", None, "a metric, with save_strategy: best")
        if self.metric_for_best_model is not None:
            if self.save_strategy == "no":
                raise InputError("save_strategy", "no", "steps or best, with metric_for_best_model")
            if self.eval_strategy == "no":
                raise InputError("eval_strategy", "no", "steps, with metric_for_best_model")
        batch = self.per_device_train_batch_size
        if self.method == AUTO:
            return self
        most = batch * self.gradient_accumulation_steps
        if batch % self.group and (self.group % batch or most % self.group):
            allowed = f"a divisor of per_device_train_batch_size = {batch}"
            if most > batch:
                allowed += f", or a multiple of it that divides the {most} completions of a process's step"
            raise InputError("num_generations", self.group, allowed)
        return self

    @property
    def reading(self) -> dict[str, Any]:
        """How prompts are read, as arguments of `grade.models.prompts.encode_examples`."""
        return {
            "max_prompt_length": self.max_prompt_length, "truncation": self.truncation,
            "chat_template_kwargs": self.chat_template_kwargs, "warn_raw": not self.raw_prompts,
        }  # fmt: skip

    @cached_property
    def training_arguments(self) -> TrainingArguments:
        """The settings that transformers' classes read."""
        from transformers import TrainingArguments

        names = TrainingArguments.__dataclass_fields__.keys() & type(self).model_fields.keys()
        values = {name: getattr(self, name) for name in names - {"gradient_checkpointing"}}
        if metric := self.metric_for_best_model:
            values["greater_is_better"] = not re.search(r"(loss|kl|kl_per_completion)$", metric)
        made = TrainingArguments(**values, remove_unused_columns=False, dataloader_pin_memory=False)
        # Set here, it need not be refused where steps of checkpoints and evaluations differ: the best one is saved.
        made.load_best_model_at_end = bool(metric)
        return made

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.training_arguments.device

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.training_arguments.world_size

    @property
    def process_index(self) -> int:
        """This process."""
        return self.training_arguments.process_index

    @property
    def microbatches(self) -> int:
        """Microbatches in a step, of all processes."""
        return self.gradient_accumulation_steps * self.world_size

    @property
    def step_prompts(self) -> int:
        """Prompts in a step."""
        return self.per_device_train_batch_size * self.microbatches // self.group

    @property
    def step_completions(self) -> int:
        """Completions generated and scored in a step, greedy ones included."""
        return self.step_prompts * self.samples_per_prompt


class TrainConfig(GradeConfig):
    """A run from files: `GradeConfig`, and what it is trained on. Paths are relative to the working directory."""

    model: str = Field("models/backbone", description="folder or Hugging Face id of the base model")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field("float32", description="type of the base")
    attention: Literal["auto", "sdpa", "eager"] = Field(
        "auto", description="attention implementation; auto: the model's default"
    )
    quantization_config: dict[str, Any] | None = Field(
        None, description="of bitsandbytes, such as {load_in_4bit: true}; null: the base as its folder has it"
    )
    lora: LoraSettings = Field(LoraSettings(), description="the adapter, where it is a new one")
    adapter: Text = Field(
        "", description="folder of an adapter, a token bias or both to continue from, such as adapter/ of a run"
    )
    base_name: str | None = Field(
        None,
        description="the base as the saved adapter names it; null: the Hugging Face id, or the folder's absolute path",
    )
    reward: str | list[str] | None = Field(
        None,
        description="module:function, file.py:function, hf:<id or folder>[@LABEL], self_certainty, or a folder of "
        f"grade reward; or a list of them; null: {REWARD}",
    )
    gold: Text = Field("", description="a judge that training never sees; empty for none")
    train_dataset: str = Field(
        "data/reviews/policy.jsonl", description="prompts: .jsonl, .csv, .parquet, or a Hugging Face id (id:split)"
    )
    eval_dataset: Text = Field("data/reviews/validation.jsonl", description="held-out prompts; empty for none")
    samples: NonNegativeInt = Field(8, description="completions before and after training that are kept as text")

    eval_on_start: bool = Field(True, description="evaluate before the first step and after the last")
    num_train_epochs: PositiveFloat = Field(1.0, description="passes over the prompts, where max_steps is not set")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The example's reward where nothing else is learned, and no evaluation without held-out prompts."""
        if values.get("reward") is None:
            values = {**values, "reward": REWARD}
        if values.get("eval_dataset", "data") in ("", None):
            values = {**values, "eval_on_start": False}
        return values
