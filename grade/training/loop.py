"""`GradeTrainer`: prompts, sample, score, gradient, update, log, evaluate, save.

A step has `gradient_accumulation_steps` microbatches on each process. Each adds ``1/N`` of its gradient, so N of them
give the gradient of the whole batch (losses are means over sequences, see `grade.gradients.objective`). A method
(`grade.gradients.methods`) samples the whole step, has it scored, and updates once or several times.

A completion's noise depends on run, step and its number in the step: not on the microbatches that a step is cut into,
nor on the process, nor on where a run was resumed. Two processes give the gradients of one process with twice the
accumulation: only the adapter's gradients are summed over processes.

Callbacks and trackers are transformers' own (`CallbackHandler`); they see a run as one epoch.

Left out: streaming datasets, training without an adapter, push to the hub, epochs as events.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from grade.errors import InputError
from grade.files import atomic, write_text
from grade.gradients.learner import OWN_RATE, Microbatch, StepContext, prompts_of
from grade.gradients.methods import AUTO, METHODS, TEACHER
from grade.gradients.objective import GradientStep, Objective
from grade.models.noise import RowGenerator
from grade.models.prompts import PromptBatch, encode_examples
from grade.models.token_bias import BIAS_FILE
from grade.plugins import import_object
from grade.rewards.rewards import make_rewards
from grade.training.card import model_card
from grade.training.checkpoint import last_checkpoint, load_checkpoint, save_checkpoint
from grade.training.config import GradeConfig
from grade.training.evaluate import Evaluation, evaluate
from grade.training.load import checked_rows, make_policy, place_policy
from grade.training.logs import Lines, LogBuffer, history_rows, write_log
from grade.training.order import Order

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grade.models.backbone import Backbone

logger = logging.getLogger(__name__)

SAMPLER = "grade.training.served:StepSampler"
"""Completions from another sampler."""
STEERING = "grade.training.kl_budget:KLSteering"
"""Keeps KL on a schedule."""
TEACHER_REWARD = "grade.training.teacher:add_teacher"
"""A teacher beside rewards, or alone."""


class GradeTrainer:
    """Trains an adapter by reward gradients through generated text, or by policy gradients.

    Arguments are those of TRL's ``GRPOTrainer`` where it has them.

    Args:
        model: Hugging Face id or folder, a model, a ``PeftModel`` whose adapter is continued, or a `Backbone`.
        reward_funcs: A reward or a list of them, see `grade.rewards.rewards.make_rewards`: functions, classifiers, our
            reward models. Relaxed methods need differentiable ones.
        args: Settings.
        train_dataset: Rows with a ``prompt``, text or messages. Other columns are passed on to functions.
        eval_dataset: Held-out rows, or several sets by name.
        processing_class: The policy's tokenizer; None: the model's own.
        reward_processing_classes: Tokenizers of the classifiers; None: their own.
        callbacks: Further callbacks of transformers.
        optimizers: Optimizer of the adapter's parameters and its schedule; None: AdamW and ``lr_scheduler_type``.
        peft_config: LoRA settings; None: this project's defaults (rank 16, attention).
        judge: Its ``score(texts)`` gives numbers for evaluations; training never sees it.
        teacher: A model in place of ``args.teacher``. Without rewards it is what is learned, with method `teacher`.

    Attributes:
        backbone: The policy.
        given: The settings as they were given.
        config: The settings, with the method and the number of steps that were chosen.
        state: transformers' ``TrainerState``, with the log.
        evaluations: Evaluations of ``eval_dataset`` by step.
        seconds: Time of training so far, without evaluations.

    Raises:
        InputError: If something does not fit together, naming it; nothing is written then.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel | Backbone,
        reward_funcs: Any = None,
        args: GradeConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        peft_config: LoraConfig | None = None,
        judge: Any = None,
        teacher: PreTrainedModel | str | None = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
            args = GradeConfig(f"{Path(name).name or 'model'}-GRADE")
        self.given = self.config = config = args
        policy = make_policy(
            model, processing_class, peft_config, config.model_init_kwargs, config.seed, config.train_bias
        )
        place_policy(policy, config)
        self.backbone = policy.view(processing_class, config.temperature)
        self.chosen: dict[str, str] = {}
        self.backbone.set_reference(self.backbone.policy_values())
        teacher = teacher or getattr(config, "teacher", None)
        rewards = None
        if reward_funcs not in (None, []) or teacher is None:
            rewards = make_rewards(
                reward_funcs, self.backbone, config.reward_weights, reward_processing_classes, config.reward_scope
            )
        self.config = config = self._with_method(config, rewards, teacher)
        self.train_dataset = checked_rows(train_dataset, "train_dataset", self.backbone, config)
        self.rows = 0 if self.train_dataset is None else len(self.train_dataset)
        if config.max_steps < 0 and self.rows:
            steps = math.ceil(config.num_train_epochs * self.rows / config.step_prompts)
            self.config = config = config.replace(max_steps=steps)
        if eval_dataset is None and config.eval_strategy != "no":
            raise InputError("eval_strategy", config.eval_strategy, "no, or an eval_dataset")
        self.eval_dataset, self.judge = eval_dataset, judge
        sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
        for name, rows in sets.items():
            checked_rows(rows, name, self.backbone, config)
        terms = ()
        if teacher is not None:
            rewards, *terms = import_object(TEACHER_REWARD)(self, teacher, rewards)
        self.rewards = rewards
        self.objective = Objective(rewards, config.beta, config.reward_scope, terms)
        if config.relaxed:
            config.relaxation().check(self.backbone.vocab_size)
            self.objective.require_gradient(config.method)
        self.method = import_object(METHODS[config.method].learner)(config, self.backbone)
        if policy.token_bias is not None:
            self.chosen["token bias"] = f"in {BIAS_FILE}, which PEFT alone does not read and `grade merge` keeps"
        self.sampler = import_object(SAMPLER)(config) if hasattr(config, "sampler") else None
        self.args = config.training_arguments
        self.steering = None
        if config.target_kl is not None:
            self.steering = import_object(STEERING)(self.backbone, config, self._sum)
        self.accelerator = Accelerator(cpu=config.use_cpu)
        self.log_buffer = LogBuffer(
            self.backbone.tokenizer if config.log_completions else None, self.backbone.eos_token_ids
        )
        self.evaluations: dict[int, Evaluation] = {}
        self.seconds = 0.0
        self.order = Order(self.rows, config)
        self.optimizer, self.lr_scheduler = optimizers
        self._make_optimizer()
        self.control, self.state = TrainerControl(), TrainerState()
        trackers = get_reporting_integration_callbacks(self.args.report_to)
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *trackers, *(callbacks or ()), Lines(self.evaluations)], self.model,
            self.backbone.tokenizer, self.optimizer, self.lr_scheduler,
        )  # fmt: skip
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def _with_method(self, config: GradeConfig, rewards: Any, teacher: Any) -> GradeConfig:
        """The settings with the method that ``auto`` stands for."""
        if config.method == AUTO:
            others = teacher is not None or hasattr(config, "sampler") or any(part.of_policy for part in rewards.parts)
            chosen, why = import_object("grade.training.auto:choose_method")(config, others)
            if rewards is None:
                chosen, why = {"method": TEACHER}, "no reward but a teacher, so the value of every token is known"
            config = config.replace(**chosen)
            self.choose("method", f"{config.method}: {why}")
        if config.method == TEACHER and teacher is None:
            raise InputError("teacher", None, f"a model to learn from, with method {TEACHER}")
        return config

    def choose(self, what: str, text: str) -> None:
        """Note what was chosen for the user, and why: a line of the log, and a row of the model card."""
        self.chosen[what] = text
        if self.config.process_index == 0:
            logger.warning(f"{what}: {text}")

    def _make_optimizer(self) -> None:
        """AdamW with one group for the adapter and one for what else the method trains, and its schedule."""
        config = self.config
        if self.optimizer is None:
            groups: list[dict[str, Any]] = [{"params": self.backbone.trainable_parameters()}]
            if others := self.method.parameters():
                groups.append({"params": others, "lr": OWN_RATE})
            self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, weight_decay=config.weight_decay)
        if self.lr_scheduler is None and config.max_steps > 0:
            self.lr_scheduler = get_scheduler(
                config.lr_scheduler_type, self.optimizer, self.args.get_warmup_steps(config.max_steps), config.max_steps
            )

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> PromptBatch:
        """Rows of a dataset as prompts."""
        return encode_examples(self.backbone.tokenizer, rows, **self.config.reading).to(self.backbone.device)

    # ---- a step ----
    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Train, or continue from a checkpoint's folder; True: the newest one of ``output_dir``."""
        if not self.rows:
            raise InputError("train_dataset", self.train_dataset, "rows with a prompt")
        if not self.backbone.trainable_parameters():
            raise InputError("model", "a policy of which nothing is trained", "one with an adapter, or train_bias")
        self._begin(resume_from_checkpoint)
        try:
            self._steps()
        finally:
            if self.sampler is not None:
                self.sampler.close()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self.backbone.restore(self.state.best_model_checkpoint)
            best = Path(self.state.best_model_checkpoint).name
            self.choose("policy", f"that of {best}, whose {self.config.metric_for_best_model} is the best")
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if self.config.save_strategy != "no" and self.config.process_index == 0:
            write_log(self.config.output_dir, history_rows(self.state.log_history))
        losses = [row["loss"] for row in self.state.log_history if "loss" in row]
        return TrainOutput(self.state.global_step, float(np.mean(losses)) if losses else math.nan, {})

    def _steps(self) -> None:
        while self.state.global_step < self.config.max_steps and not self.control.should_training_stop:
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            self.training_step()
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._log_evaluate_save()

    def _begin(self, resume_from_checkpoint: str | Path | bool | None) -> None:
        checkpoint = resume_from_checkpoint or None
        if checkpoint is True and (checkpoint := last_checkpoint(self.config.output_dir)) is None:
            raise InputError("resume_from_checkpoint", True, f"a checkpoint in {self.config.output_dir}")
        self.state = TrainerState(
            max_steps=self.config.max_steps, num_train_epochs=math.ceil(self.passes(self.config.max_steps)), epoch=0.0
        )
        self.control = TrainerControl()
        if checkpoint is not None:
            load_checkpoint(self, Path(checkpoint))
        self.state.is_local_process_zero = self.args.local_process_index == 0  # a checkpoint has the first one's
        self.state.is_world_process_zero = self.args.process_index == 0
        if self.backbone.given:
            self.choose("reference", "the policy as given, whose adapter or token bias is trained; not the bare base")
        self.state.compute_steps(self.args, self.config.max_steps)
        self.state.max_steps = self.config.max_steps
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.config.eval_on_start and checkpoint is None:
            self._evaluate()

    def training_step(self) -> None:
        """Sample completions of a step, have them scored, add their gradient, and update."""
        config, step, start = self.config, self.state.global_step + 1, time.perf_counter()
        self.rewards.trainer_state = self.state
        if self.steering is not None:
            self.steering.before_step()
        microbatches = [self._microbatch(step, number) for number in self.order.microbatches()]
        context = StepContext(config.microbatches, self._update, self._sum, gather_object, step - 1)
        parts = self.method.step(microbatches, self.objective, context)
        self._note(parts, microbatches)
        self._check_weights(step)
        if self.steering is not None:
            self.log_buffer.add(self.steering.after_update(step, self.method.direction))
        self.lr_rate = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.state.global_step, self.state.epoch = step, self.passes(step)
        if self.steering is not None and step == config.max_steps:
            self._land()
        self.log_buffer.add({"step_time": time.perf_counter() - start})
        self.seconds += time.perf_counter() - start

    @property
    def processing_class(self) -> Any:
        """The policy's tokenizer."""
        return self.backbone.tokenizer

    @property
    def model(self) -> PeftModel | PreTrainedModel:
        """The policy as PEFT's model; without an adapter its base."""
        return self.backbone.peft or self.backbone.model

    def _microbatch(self, step: int, number: int) -> Microbatch:
        """A prompt for each completion of a microbatch, with the generator for them, or the completions."""
        config, batch = self.config, self.config.per_device_train_batch_size
        seed = np.random.SeedSequence([config.seed, step, 0]).generate_state(1, np.uint64)[0]
        first = number * batch
        generator = RowGenerator(self.backbone.device, int(seed >> 1), first, config.microbatches * batch)
        rows = self.order.prompts(step, number)
        prompts = self.encode([self.train_dataset[i] for i in rows]).repeat(batch // len(rows))
        if self.sampler is None:
            return prompts, generator
        completions, figures = self.sampler.sample(self.backbone, prompts, generator, step)
        self.log_buffer.add(figures)
        return completions

    def _update(self) -> None:
        """Sum gradients over processes, clip them, and take an optimizer step."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        have = self._sum(torch.tensor([float(p.grad is not None) for p in weights], device=self.config.device))
        for p, count in zip(weights, have.tolist(), strict=True):
            if count:  # on some process; weight decay would move the others
                p.grad = self._sum(torch.zeros_like(p) if p.grad is None else p.grad)
        limit = self.config.max_grad_norm or math.inf
        # Each by itself: a value head must not change the policy's step.
        norms = [
            torch.nn.utils.clip_grad_norm_(part, limit)
            for part in (self.backbone.trainable_parameters(), self.method.parameters())
        ]
        for norm in norms:
            if not torch.isfinite(norm):
                allowed = f"a finite number; step {self.state.global_step + 1} was not taken"
                raise InputError("gradient norm", float(norm), allowed)
        self.log_buffer.add({"grad_norm": norms[0].double()})
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)

    def _check_weights(self, step: int) -> None:
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not torch.stack([p.detach().isfinite().all() for p in weights]).all():
            allowed = f"a smaller one: weights are not finite after step {step}"
            raise InputError("learning_rate", self.config.learning_rate, allowed)

    def _note(self, parts: list[GradientStep], microbatches: list[Microbatch]) -> None:
        """Put a step's results into the log."""
        for part, microbatch in zip(parts, microbatches, strict=True):
            prompts = prompts_of(microbatch)
            self.log_buffer.add_step(part, prompts)
            if self.steering is not None:
                self.steering.add(prompts, part.completion_ids, part.completion_mask)
        self.log_buffer.add_groups(torch.cat([part.reward for part in parts]).view(-1, self.config.group))
        for name, values in self.method.figures.items():
            for value in values:
                self.log_buffer.add({name: value})

    def _sum(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value, reduction="sum")

    def mean(self, values: list[Tensor | float]) -> float:
        """The mean of values over processes, each of which has equally many, or none."""
        mean = torch.stack([torch.as_tensor(v).detach().cpu() for v in values]).mean() if values else torch.zeros(())
        if self.config.world_size > 1:
            both = torch.tensor([float(mean), float(bool(values))], dtype=torch.float64, device=self.accelerator.device)
            mean, having = self._sum(both)
            mean = mean / having
        return float(mean)

    def _land(self) -> None:
        """Scale the last step to the target, along completions of prompts drawn anew, the same on all processes."""
        rng = np.random.default_rng([self.config.seed, 2, self.state.global_step])
        prompts = self.encode([self.train_dataset[int(i)] for i in rng.choice(self.rows, self.steering.landing)])
        generator = torch.Generator(self.backbone.device).manual_seed(int(rng.integers(2**31)))
        self.steering.land(prompts, generator, self.method.direction)

    # ---- log, evaluation, checkpoints ----
    def _log_evaluate_save(self) -> None:
        control = self.control
        last = control.should_training_stop or self.state.global_step >= self.config.max_steps
        control.should_evaluate |= last and self.config.eval_on_start
        # An evaluation has the step's samples and seconds beside it; after a checkpoint a new row begins.
        if control.should_log or last or control.should_evaluate or control.should_save:
            self._log_step()
        if control.should_evaluate and self._evaluate():
            self.control.should_save = True
        if self.control.should_save:
            save_checkpoint(self)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _log_step(self) -> None:
        drained = self.log_buffer.drain(self.mean)
        logs = {"loss": drained.pop("loss"), "grad_norm": drained.pop("grad_norm"), "learning_rate": self.lr_rate}
        self.log(logs | drained | {"num_samples": self.samples, "seconds": self.seconds})
        if self.config.log_completions:
            self.write_table(f"completions_{self.state.global_step:05d}", self.log_buffer.drain_rows())

    def log(self, logs: dict[str, float]) -> None:
        """Add a row to the log, and hand it to the callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    @property
    def samples(self) -> int:
        """Completions of the policy that the run has drawn so far."""
        return self.state.global_step * self.config.step_completions

    def passes(self, steps: int) -> float:
        """Passes over the prompts in so many steps."""
        return steps * self.config.step_prompts / self.rows

    def _evaluate(self) -> bool:
        """Evaluate; whether the metric of the best model has improved, in training."""
        metrics, name = self.evaluate(), self.config.metric_for_best_model
        if name is None:
            return False
        value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None and self.state.best_metric is None:
            raise InputError("metric_for_best_model", name, f"one of {', '.join(metrics)}")
        best, sign = self.state.best_metric, 1 if self.args.greater_is_better else -1
        # Where nothing was scored there is no value; no checkpoint holds the policy that was given.
        if value is None or self.state.global_step == 0 or (best is not None and not sign * value > sign * best):
            return False
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return True

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Sample held-out prompts and score them: ``eval_reward``, ``eval_kl``, ..., with standard error and n.

        ``eval_loss`` is the negative objective. Rows are those of ``self.eval_dataset``, of one of its sets, or others.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows
        if isinstance(rows, dict):
            metrics = {}
            for name, part in rows.items():
                metrics |= self.evaluate(part, f"{metric_key_prefix}_{name}")
            return metrics
        if rows is None:
            raise InputError("eval_dataset", None, "rows with a prompt")
        if eval_dataset is not None:
            checked_rows(rows, "eval_dataset", self.backbone, self.config)
        config, step = self.config, self.state.global_step
        self.rewards.trainer_state = self.state
        most = config.final_eval_prompts if step in (0, config.max_steps) else config.eval_prompts
        n, of_run = min(most or len(rows), len(rows)), eval_dataset is None and metric_key_prefix == "eval"
        evaluation = evaluate(
            self.backbone, [rows[i] for i in range(n)], self.rewards, self.judge,
            max_new_tokens=config.max_completion_length, min_new_tokens=config.min_completion_length,
            scope=config.reward_scope, batch_size=config.per_device_eval_batch_size, kl_prompts=config.kl_eval_prompts,
            encode=self.encode, rank=config.process_index, processes=config.world_size,
        )  # fmt: skip
        if of_run:
            self.evaluations[step] = evaluation
        if of_run or metric_key_prefix != "eval":  # other rows do not take the place of these, which are read again
            self.write_table(f"{metric_key_prefix}_{step:05d}", evaluation.table())
        # One n for the whole curve: the ends are evaluated on more prompts, the first of which are the curve's.
        metrics = evaluation.first(config.eval_prompts or n).summary(self.objective.beta, metric_key_prefix)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @property
    def kept_step(self) -> int:
        """The step whose policy is the result: the last one, or with ``metric_for_best_model`` the best."""
        best = self.args.load_best_model_at_end and self.state.best_model_checkpoint
        return int(best.rpartition("-")[2]) if best else self.state.global_step

    def saved_ends(self) -> tuple[Evaluation | None, Evaluation | None]:
        """The evaluations before training and of its result, of the prompts that both have."""
        before, after = (self.evaluations.get(step) for step in (0, self.kept_step or None))
        if before and after:
            before = before.first(len(after.prompts))
        return before, after

    def table_path(self, name: str) -> Path:
        """The file of a table."""
        return Path(self.config.output_dir) / "completions" / f"{name.replace('/', '_')}.parquet"

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        """Write a table of text below ``output_dir``, unless nothing is saved."""
        config = self.config
        wanted = config.save_strategy != "no" or config.log_completions
        if config.process_index == 0 and wanted and len(table):
            with atomic(self.table_path(name)) as file:
                table.to_parquet(file, index=False)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the adapter, which `grade merge`, `grade generate` and PEFT read, and a model card."""
        if self.config.process_index == 0:
            folder = Path(output_dir or self.config.output_dir)
            self.backbone.save_adapter(folder)
            card = model_card(
                self.config, *self.saved_ends(), name=folder.resolve().name, method=self.config.method,
                base=self.backbone.model.config.name_or_path, rewards=self.rewards.names,
                prompts=f"{self.rows} rows", steps=self.state.global_step, chosen=self.chosen,
            )  # fmt: skip
            write_text(folder / "README.md", card)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """As ``Trainer.add_callback``."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """As ``Trainer.remove_callback``."""
        self.callback_handler.remove_callback(callback)
