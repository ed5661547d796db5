"""`GradeTrainer`: every method of this package on ``transformers.Trainer``.

Sampling, engines and losses are ours; progress, logging, callbacks, trackers, checkpoints, rotation and the hub are the
Trainer's. One Trainer step is `gradient_accumulation_steps` microbatches on each process. Every microbatch adds ``1/N``
of its gradient, so N of them give the gradient of the whole batch (losses are means over sequences, see
`grade.gradients.objective`). With several passes or minibatches (ppo, grpo) a step samples once and updates several
times; the Trainer sees the last update.

A microbatch's noise is seeded by run, step and place in the step, so it depends neither on the process that runs it nor
on where a run was resumed. Two processes give the gradients of one process with twice the accumulation. Only the
adapter's gradients are summed over processes; the base is replicated, or divided (`grade.models.sharding`).

Left out: streaming datasets, training without an adapter.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput, speed_metrics

from grade.errors import InputError
from grade.gradients.methods import AUTO, RELAXED
from grade.gradients.objective import GradientStep, Objective
from grade.gradients.policy_gradient import StepContext
from grade.gradients.replay import make_engine
from grade.models.prompts import PromptBatch, check_prompts, encode_examples
from grade.models.sampling import check_length
from grade.results import replacing
from grade.rewards.rewards import make_rewards
from grade.training.callbacks import StepEnd
from grade.training.card import Describing
from grade.training.checkpoint import Saving
from grade.training.config import GradeConfig
from grade.training.elsewhere import make_elsewhere
from grade.training.evaluate import Evaluation, Sampling, evaluate_examples
from grade.training.kl_target import Targeting
from grade.training.method import choose_method
from grade.training.order import FirstRows, PromptOrder, named_sets
from grade.training.policy import make_learner, make_policy
from grade.training.together import SharedObjective, Together
from grade.training.tokens import token_table
from grade.training.window import Window

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grade.models.backbone import Backbone
    from grade.rewards.gold import GoldJudge


logger = logging.getLogger(__name__)


class GradeTrainer(Saving, Describing, Targeting, Trainer):
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
        callbacks: Further callbacks.
        optimizers: Optimizer and schedule; None: AdamW and ``lr_scheduler_type``.
        peft_config: LoRA settings; None: PEFT's defaults for this project (rank 16, attention).
        judge: Scores texts in evaluations only; training never sees it.

    Raises:
        InputError: If something does not fit together, naming it; nothing is written then.
    """

    _tag_names = ["grade", "reward-gradients"]

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel | Backbone,
        reward_funcs: Any,
        args: GradeConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        peft_config: LoraConfig | None = None,
        judge: GoldJudge | None = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
            args = GradeConfig(f"{Path(name).name or 'model'}-GRADE")
        self.backbone = make_policy(model, args, processing_class, peft_config)
        if args.relaxed:
            args.relaxation().check(self.backbone.vocab_size)
        self.rewards = make_rewards(
            reward_funcs, self.backbone, args.reward_weights, reward_processing_classes, args.reward_scope
        )
        self.objective = Objective(self.rewards, args.beta, args.reward_scope)
        if args.method == AUTO:
            args = copy.copy(args)
            args.method, why = choose_method(args, self.objective)
            if args.process_index == 0:  # a warning, because others are not shown unless asked for
                logger.warning(f"method: {args.method}: {why}")
            if args.relaxed:
                args.relaxation().check(self.backbone.vocab_size)
        if args.relaxed:
            self.objective.require_gradient(args.method)
        self.judge, self.evaluations = judge, dict[int, Evaluation]()
        self.learner = make_learner(args, self.backbone)
        for dataset in (train_dataset, *named_sets(eval_dataset).values()):
            self._check_dataset(dataset, args)
        if args.max_steps < 0 and train_dataset is not None:
            per_step = args.batch_prompts * args.gradient_accumulation_steps * args.world_size
            args.max_steps = math.ceil(args.num_train_epochs * len(train_dataset) / per_step)
        self.window = Window(self.backbone.tokenizer if args.log_completions else None)
        self._pending: list[tuple[PromptBatch, torch.Generator]] = []
        self._place, self._started, self.seconds = 0, 0.0, 0.0  # microbatch in the step, its start, time of training
        super().__init__(
            model=self.backbone.peft, args=args, data_collator=list, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=self.backbone.tokenizer, callbacks=callbacks,
            optimizers=optimizers,
        )  # fmt: skip
        self.together = Together(self.accelerator, args.sharded)
        self.shared = SharedObjective(self.rewards, args.beta, args.reward_scope, self.together)
        self.elsewhere = make_elsewhere(args, self.backbone, self.together, self.learner)
        self.add_callback(StepEnd(self))

    # ---- data ----
    def _check_dataset(self, dataset: Any, args: GradeConfig) -> None:
        if dataset is None:
            return
        if not hasattr(dataset, "__len__"):
            kind = type(dataset).__name__
            raise InputError("dataset", kind, "one with a length: a stream cannot be continued where it was")
        longest = check_prompts(self.backbone.tokenizer, dataset, **self._reading(args))
        check_length(self.backbone, longest + args.max_completion_length)

    def _reading(self, args: GradeConfig) -> dict[str, Any]:
        return {
            "max_prompt_length": args.max_prompt_length, "truncation": args.truncation,
            "chat_template_kwargs": args.chat_template_kwargs, "warn_raw": not args.raw_prompts,
        }  # fmt: skip

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> PromptBatch:
        """Rows of a dataset as prompts."""
        return encode_examples(self.backbone.tokenizer, rows, **self._reading(self.args)).to(self.backbone.device)

    def get_train_dataloader(self) -> DataLoader:
        """Microbatches of whole prompts, in `PromptOrder`."""
        return self._get_dataloader(
            self.train_dataset, "Training", self.args.batch_prompts, self._get_train_sampler, is_training=True
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> PromptOrder:
        args, rows = self.args, len(self.train_dataset)
        total = args.max_steps * args.gradient_accumulation_steps * args.world_size * args.batch_prompts
        return PromptOrder(rows, total, args.seed if args.shuffle_dataset else None)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, or continue.

        Args:
            resume_from_checkpoint: A checkpoint's folder; True: the newest in ``output_dir``.
            *args: As in ``Trainer.train``.
            **kwargs: As in ``Trainer.train``.

        Returns:
            Steps, loss and metrics.
        """
        if resume_from_checkpoint:
            self.args.eval_on_start = False  # its row is in the history
        self._place = 0
        self._pending.clear()
        with self.together.ending(), self.elsewhere or nullcontext():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Nothing: it is there."""

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.backbone.shards is not None:  # DDP would compare bases of which each process has another part
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        return super()._prepare_for_training(*args, **kwargs)

    # ---- a step ----
    def training_step(self, model: Any, inputs: list[dict[str, Any]], num_items_in_batch: Any = None) -> Tensor:
        """Sample completions of a microbatch and add their gradient; with a policy gradient, once a step.

        Args:
            model: Not used: the engines call the base directly.
            inputs: Rows of the dataset.
            num_items_in_batch: Not used.

        Returns:
            The microbatch's share of the loss.
        """
        args, last = self.args, self.accelerator.sync_gradients
        if self._place == 0:
            self._started, self.rewards.trainer_state = time.perf_counter(), self.state
        place = self._place * args.world_size + args.process_index
        self._place = 0 if last else self._place + 1
        seed = np.random.SeedSequence([args.seed, self.state.global_step + 1, place]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(self.backbone.device).manual_seed(int(seed >> 1))
        self._pending.append((self.encode(inputs), generator))
        if self.elsewhere is not None:
            self.elsewhere.draw(*self._pending[-1], self.state.global_step + 1, self.window)
        microbatches = args.gradient_accumulation_steps * args.world_size
        parts: list[GradientStep] = []
        if self.learner is None:
            parts = self.together(partial(self._relaxed, 1 / microbatches))
        elif last:
            parts = self._updates(microbatches)
        if last:
            self._sum_gradients()
        loss = torch.stack([part.loss.detach() for part in parts]).sum() if parts else torch.zeros(())
        return loss.to(args.device) / args.gradient_accumulation_steps

    def _relaxed(self, scale: float) -> list[GradientStep]:
        args = self.args
        engine = make_engine(
            RELAXED[args.method].engine, args.hops, args.hop_tolerance, bool(args.gradient_checkpointing)
        )
        relaxation = args.relaxation(self.state.global_step)
        prompts, generator = self._pending.pop()
        engine = engine if self.elsewhere is None else self.elsewhere.given(engine)
        step = engine(self.backbone, prompts, self.objective, relaxation, generator, scale)
        self.window.note({"tau": relaxation.tau, "residual": None if step.residual is None else step.residual.double()})
        self.window.note_step(step, prompts, self.rewards.last)
        return [step]

    def _updates(self, microbatches: int) -> list[GradientStep]:
        """Sample the whole step and update; the gradient of the last update is left to the Trainer."""
        pending, self._pending, done = self._pending, [], 0

        def apply() -> None:
            nonlocal done
            done += 1
            if done < self.args.updates:
                self._sum_gradients()
                self._clip_grad_norm(self.model)
                self.optimizer.step()

        self.shared.scores.clear()
        parts = (self.elsewhere or self.learner).step(pending, self.shared, self._context(microbatches, apply))
        # Of each microbatch the samples' scores; a greedy baseline's come after them.
        scores = self.shared.scores[:: max(1, len(self.shared.scores) // len(parts))] or [None] * len(parts)
        for part, (prompts, _), given in zip(parts, pending, scores, strict=True):
            self.window.note_step(part, prompts.repeat(self.args.group), given)
        for name, values in self.learner.figures.items():
            for value in values:
                self.window.note({name: value})
        return parts

    def _context(self, microbatches: int, apply: Any) -> StepContext:
        return StepContext(microbatches, apply, self.together.sum, self.together.gather, self.args.process_index)

    def _sum_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = self.together.sum(torch.zeros_like(p) if p.grad is None else p.grad)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        """Clip each group of parameters by itself: a value head must not change the policy's step."""
        limit = self.args.max_grad_norm or math.inf  # 0: not clipped; updates within a step come here all the same
        norms = [self._norm(group["params"], limit) for group in self.optimizer.param_groups]
        self.window.note({"grad_norm": norms[0].double()})
        return norms[0]

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        if grad_norm is None:  # max_grad_norm = 0: nothing is clipped
            grad_norm = self._norm(self.optimizer.param_groups[0]["params"], math.inf)
            self.window.note({"grad_norm": grad_norm.double()})
        return grad_norm

    def _norm(self, parameters: list[Tensor], limit: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if not torch.isfinite(norm):
            step = self.state.global_step + 1
            raise InputError("gradient norm", float(norm), f"a finite number; step {step} was not taken")
        return norm

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer of ``args.optim``: one group for the adapter, one for a value head."""
        if self.optimizer is None:
            groups: list[dict[str, Any]] = [{"params": self.backbone.trainable_parameters()}]
            if self.learner and self.learner.parameters():
                groups.append({"params": self.learner.parameters(), "lr": self.args.value_learning_rate})
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind(groups, weight_decay=self.args.weight_decay, **options)
        return self.optimizer

    def floating_point_ops(self, inputs: Any) -> int:
        """0: a step's operations are not those of one forward pass over the inputs."""
        return 0

    # ---- log and evaluation ----
    def step_ended(self) -> None:
        """Add a step's seconds, and check its update; called when that is done.

        Raises:
            InputError: If a weight is not finite; nothing of it has been saved.
        """
        step_time = time.perf_counter() - self._started
        self.seconds += step_time
        self.window.note({"step_time": step_time})
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not torch.stack([p.detach().isfinite().all() for p in weights]).all():
            allowed = f"a smaller one: weights are not finite after step {self.state.global_step}"
            raise InputError("learning_rate", self.args.learning_rate, allowed)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the steps since the last row had, as means over microbatches and processes.

        Args:
            logs: The Trainer's row.
            start_time: Start of training.
        """
        if "loss" in logs:
            logs |= self.window.drain(self.together.mean)
            per_step = self.args.batch_completions * self.args.gradient_accumulation_steps * self.args.world_size
            logs |= {"num_samples": self.state.global_step * per_step, "seconds": self.seconds}
            if self.args.log_completions:
                self._write_table(f"completions_{self.state.global_step:05d}", self.window.table(self.together.gather))
        prompts = self.args.batch_prompts * self.args.gradient_accumulation_steps * self.args.world_size
        if self.train_dataset is not None:
            self.state.epoch = self.state.global_step * prompts / len(self.train_dataset)
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample held-out prompts and score them; rewards and KL with standard error and n.

        Args:
            eval_dataset: Rows; None: the trainer's own; a mapping: each by its name.
            ignore_keys: Not used.
            metric_key_prefix: Put before every name.

        Returns:
            ``eval_reward``, ``eval_kl``, ..., and ``eval_loss``, the negative objective.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            named = {name: self.evaluate(rows, None, f"{metric_key_prefix}_{name}") for name, rows in dataset.items()}
            return {key: value for metrics in named.values() for key, value in metrics.items()}
        if dataset is None:
            raise InputError("eval_dataset", None, "rows with a prompt")
        args, start = self.args, time.time()
        ends = self.state.global_step in (0, args.max_steps)
        n = min((args.final_eval_prompts if ends else args.eval_prompts) or len(dataset), len(dataset))
        sampling = Sampling(
            args.max_completion_length, args.min_completion_length, args.per_device_eval_batch_size,
            args.kl_eval_prompts, noise_block=args.eval_noise_block,
        )  # fmt: skip
        evaluation = evaluate_examples(
            self.backbone, FirstRows(dataset, n), self.encode, self.objective, sampling, self.judge,
            (args.process_index, args.world_size), self.together.gather, self.together,
        )  # fmt: skip
        if metric_key_prefix == "eval":
            self.evaluations[self.state.global_step] = evaluation
        self._write_table(f"{metric_key_prefix}_{self.state.global_step:05d}", evaluation.table())
        if hasattr(self.learner, "liked_tokens"):
            self._write_table(f"tokens_{self.state.global_step:05d}", token_table(self.backbone, self.learner))
        # One n for the whole curve: the ends are evaluated on more prompts, the first of which are the curve's.
        metrics = evaluation.first(args.eval_prompts or n).summary(self.objective.beta, metric_key_prefix)
        metrics |= speed_metrics(metric_key_prefix, start, num_samples=n)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(args, self.state, self.control, metrics)
        return metrics

    def _write_table(self, name: str, table: pd.DataFrame) -> None:
        """Completions with their rewards, as ``completions/<name>.parquet``."""
        if self.args.should_save and self.args.save_strategy != "no" and len(table):
            path = Path(self.args.output_dir) / "completions" / f"{name}.parquet"
            with replacing(path, binary=True) as file:
                table.to_parquet(file, index=False)
