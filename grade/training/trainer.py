"""`GradeTrainer`: every method of this package on ``transformers.Trainer``.

Sampling, engines and losses are ours; progress, logging, callbacks, trackers, rotation and the hub are the Trainer's.
One Trainer step is `gradient_accumulation_steps` microbatches on each process. Every microbatch adds ``1/N`` of its
gradient, so N of them give the gradient of the whole batch (losses are means over sequences, see
`grade.gradients.objective`). With several passes or minibatches (ppo, grpo) a step samples once and updates several
times; the Trainer sees the last update.

A microbatch's noise is seeded by run, step and place in the step, so it depends neither on the process that runs it nor
on where a run was resumed. Two processes give the gradients of one process with twice the accumulation. Only the
adapter's gradients are summed over processes; the base is replicated, or divided (`grade.models.sharding`).

With another sampler, the adapter is handed to it once per step and each process asks for its own microbatches. The
completions are scored here, with one pass without gradient, and refused if the two policies' log-probabilities are too
far apart at any token. Evaluations, completions that measure KL, and the greedy ones of `remax`, are sampled here: all
runs see the same noise there.

A checkpoint is the Trainer's (adapter, optimizer, schedule, generators, ``trainer_state.json`` with the history) and
what continues a run with the same bits: the learner's state, that of KL's budget, the seconds so far and the
figures since the last row of the log. Its manifest is written last.

Left out: streaming datasets, training without an adapter.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from grade.data.texts import encode_texts, read_texts, reference_number, reference_texts, score_texts
from grade.errors import InputError, reading
from grade.files import (
    atomic,
    check_whole,
    checkpoints_of,
    hashed,
    read_json,
    remove,
    sha256_of,
    write_json,
    write_manifest,
    write_text,
    writing,
)
from grade.gradients.distilled.learner import DistilledGradient
from grade.gradients.distilled.offline import OfflineGradient, own_completions
from grade.gradients.distilled.store import Evidence
from grade.gradients.engines import make_engine
from grade.gradients.losses import importance_weights
from grade.gradients.methods import AUTO, DISTILLED, HINTED, OFFLINE, OPTIONS, RELAXED, TEACHER, check_teacher, reads
from grade.gradients.objective import GradientStep, Objective
from grade.gradients.policy_gradient import (
    Completions,
    Learner,
    Microbatch,
    PolicyGradient,
    StepContext,
    scored_rewards,
)
from grade.gradients.teacher import TeacherGradient
from grade.models.adapter import ADAPTER_FILES, BASE_FILE, restore_adapter, standing, write_fingerprint
from grade.models.head import wide
from grade.models.parameters import restoring, set_values
from grade.models.prompts import PromptBatch, ScoredTexts, check_prompts, encode_examples, of_columns
from grade.models.room import check_room
from grade.models.samplers import LOCAL, make_sampler, seed_of
from grade.models.scoring import completion_logps, sequence_kl
from grade.models.teacher import SIBLING, Teacher, make_teacher, names_sibling
from grade.models.tokenizer import tokenizer_hash
from grade.rewards.functions import GIVEN
from grade.rewards.rewards import beside, make_rewards
from grade.training.card import model_card
from grade.training.config import GradeConfig
from grade.training.evaluate import Evaluation, evaluate
from grade.training.folder import (
    OPTIMIZER_FILE,
    RUN_FILE,
    STATE_FILE,
    last_checkpoint,
    run_mark,
    settings_of,
    writing_run,
)
from grade.training.kl_budget import LAST_TOLERANCE, TOLERANCE, BatchKL, KLBudget, Measured, scale_step
from grade.training.load import make_policy, place
from grade.training.logs import Lines, LogBuffer, history_rows, token_table
from grade.training.trl import DROPPED, NEUTRAL, REFUSED, RENAMED, refuse_unknown

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grade.models.backbone import Backbone
    from grade.rewards.gold import GoldJudge
    from grade.rewards.rewards import Rewards, Scores

logger = logging.getLogger(__name__)

LEARNER_FILE = "learner.safetensors"
OPENING = 0.5
"""Share of the steps that `auto` makes along scored texts before it samples."""
LANDING = 64
"""Completions on which the last step lands on target_kl."""
_NOT_CALLED = ("compute_loss", "_compute_loss", "prediction_step", "get_decay_parameter_names", "_prepare_inputs",
               "_generate", "_generate_single_turn", "_generate_and_score_completions", "_calculate_rewards",
               "_get_per_token_logps_and_entropies", "_get_per_token_logps", "_get_last_hidden_state",
               "_tokenize_prompts", "_tool_call_loop", "_get_tool_suffix_ids", "_log_metric", "_log_completion_extra",
               "get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights", "compute_liger_loss",
               "_prepare_input", "_get_eval_sampler", "create_optimizer_and_scheduler",
               "compute_loss_context_manager", "autocast_smart_context_manager")  # fmt: skip
"""Methods of the Trainer's and of TRL's that the engines stand for: a subclass that has them would train as if not."""
_CALLED = ("training_step", "create_optimizer", "create_scheduler", "get_train_dataloader", "log", "evaluate")
_LENGTH = ("max_steps", "num_train_epochs")
"""Settings that may differ from those of the checkpoint that is continued."""
_SETTLED = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "bf16", "report_to",
}  # fmt: skip
"""Settings of the Trainer's that construction has read, beside all of ours."""
WINDOW_PROMPT = 32
"""Tokens of the prompts that whole texts are cut into, where max_prompt_length says nothing."""


class GradeTrainer(Trainer):
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
        texts: Texts that the reward is distilled from before training (`grade.data.texts`): rows with ``prompt`` and
            ``completion``, or ``text``; a file or hub id; or ``reference:N``. They are scored once. With method
            `teacher` those of the steps that ``lmbda`` leaves.
        teacher: A model in place of ``args.teacher``. Without rewards it is what is learned, with method `teacher`.

    Attributes:
        backbone: The policy.
        evaluations: Evaluations of ``eval_dataset`` by step.
        seconds: Time of training so far, without evaluations.

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
        optimizers: tuple[torch.optim.Optimizer | None, LambdaLR | None] = (None, None),
        peft_config: LoraConfig | None = None,
        judge: GoldJudge | None = None,
        texts: Any = None,
        teacher: PreTrainedModel | str | None = None,
        **others: Any,
    ) -> None:
        for name in others.keys() & GradeConfig.__dataclass_fields__.keys():
            raise InputError(name, others[name], f"a setting: args = GradeConfig({name}=...)")
        others = {name: value for name, value in others.items() if value is not None}  # TRL's that ask for nothing
        refuse_unknown(others, GradeTrainer.__init__.__annotations__.keys(), "argument of GradeTrainer")
        if args is None:
            name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
            args = GradeConfig(f"{Path(name).name or 'model'}-GRADE")
        if not isinstance(args, GradeConfig):
            raise InputError("args", type(args).__name__, "a GradeConfig; GradeConfig.from_trl makes one of TRL's")
        given, args = args, replace(args)  # checked again: values may have been set; the caller's serves other trainers
        refuse_unknown(_added(given, vars(args)), vars(args))
        for name in _NOT_CALLED:
            if getattr(type(self), name, None) is not getattr(GradeTrainer, name, None):
                allowed = f"as in GradeTrainer, which does not call it; a subclass may change {', '.join(_CALLED)}"
                raise InputError(f"{type(self).__name__}.{name}", "another method", allowed)
        self.args = args
        if callbacks is not None and not isinstance(callbacks, list | tuple):
            raise InputError("callbacks", callbacks, "a list of TrainerCallback")
        for callback in callbacks or ():
            self._check_callback(callback)
        policy = make_policy(model, processing_class, peft_config, args.model_init_kwargs, args.seed)
        place(policy, args.device, args.bf16, args.sharded)
        self.backbone = policy.view(processing_class, args.temperature)
        self._check_dataset(train_dataset, "train_dataset")
        teacher = args.teacher if teacher is None else teacher
        self.rewards = None
        if teacher is None or reward_funcs not in (None, []):
            self.rewards = make_rewards(
                reward_funcs, self.backbone, args.reward_weights, reward_processing_classes, args.reward_scope
            )
        self._check_sets(eval_dataset)
        self.learner, self.chosen = None, dict[str, str]()
        if args.method == AUTO:
            args.method, why = _choose_method(args, self.rewards, texts is not None, teacher is not None)
            self._choose("method", f"{args.method}: {why}")
            replace(args)  # checked again
        self.teacher = self._make_teacher(teacher, train_dataset, texts is not None)
        of_rewards = None if args.hinted else self.teacher
        self.objective = Objective(self.rewards, args.beta, args.reward_scope, of_rewards)
        if args.relaxed:
            args.relaxation().check(self.backbone.vocab_size)
            self.objective.require_gradient(args.method)
        else:
            distilled = partial(DistilledGradient, teacher=self.teacher)
            learners = {DISTILLED: distilled, OFFLINE: OfflineGradient, TEACHER: TeacherGradient}
            self.learner = learners.get(args.method, PolicyGradient)(args, self.backbone)
        self.sampler = None
        if args.sampler != "own":
            self.sampler = make_sampler(args.sampler, args.sampler_timeout, args.sampler_folder)
        self.judge, self.evaluations = judge, dict[int, Evaluation]()
        for name in ("eval_strategy", "eval_on_start", "eval_on_end"):
            if eval_dataset is None and getattr(args, name) not in (False, "no"):
                raise InputError(name, str(getattr(args, name)), "an eval_dataset to evaluate on")
        if train_dataset is not None and args.sampler in LOCAL:
            names = ("per_device_train_batch_size", "max_completion_length")
            kept = 0.0 if args.gradient_checkpointing else 1 / args.minibatches
            own = self.teacher and self.teacher.own
            check_room(self.backbone, {name: getattr(args, name) for name in names}, kept, own)
        self._prompts, self._texts, self._given = train_dataset, None, None
        self._offline = args.method == OFFLINE
        self.along = self.learner if self._offline else None
        self.text_steps, self._opened = 0, list[Tensor]()
        if texts is not None or (self._offline and train_dataset is not None):
            self._texts = self._read_texts(texts)
        elif train_dataset is not None:
            for name in ("own_completions", "most_texts"):
                if getattr(args, name) != args.default_of(name):
                    raise InputError(name, getattr(args, name), "another value than the default only with texts")
        if self._offline and self._texts is not None:
            train_dataset = [{"number": number} for number in range(len(self._texts))]
        if args.max_steps < 0 and train_dataset is not None:
            per_step = args.batch_prompts * args.microbatches
            args.max_steps = math.ceil(args.num_train_epochs * len(train_dataset) / per_step)
            replace(args)  # checked again
        budgeted = args.target_kl is not None and not self._offline
        self.kl_budget = KLBudget(args.target_kl, args.max_steps) if budgeted else None
        self.log_buffer = LogBuffer(self.backbone.tokenizer if args.log_completions else None)
        self.seconds = 0.0
        self._check_optimizers(optimizers)
        with writing(args.output_dir, "output_dir"):
            super().__init__(
                model=self.backbone.peft, args=args, data_collator=list, train_dataset=train_dataset,
                eval_dataset=eval_dataset, processing_class=self.backbone.tokenizer,
                callbacks=callbacks and list(callbacks), optimizers=optimizers,
            )  # fmt: skip
        for theirs in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            self.remove_callback(theirs)
        self.add_callback(Lines(self.evaluations))
        self.add_callback(_StepEnd(self))
        self._made = self._standing()
        self._settled = dict(vars(self.args))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what is read at construction alone: assigned later, it would have no effect."""
        if "_settled" in vars(self) and value is not getattr(self, name, None):
            theirs = (GradeConfig.__dataclass_fields__, DROPPED, NEUTRAL, REFUSED)
            setting = name in RENAMED or (any(name in names for names in theirs) and not hasattr(self, name))
            if setting or name in _READ_ONCE:
                allowed = "as the trainer was made: it is an argument, a setting or a method of a new GradeTrainer"
                raise InputError(f"trainer.{name}", type(value).__name__, allowed)
            if name == "eval_dataset":
                self._check_sets(value)
        super().__setattr__(name, value)

    def _check_settled(self, training: bool = True) -> None:
        """Refuse a policy, and settings of ours and TRL's, that were changed since construction, which has read some.

        An evaluation may be one of the reference, whose adapter is off.
        """
        self.model.eval()  # in train mode some models drop units, or sample without a cache
        now = self._standing()
        for name in now if training else now.keys() - {"trained parameters"}:
            if now[name] != self._made[name]:
                raise InputError(f"trainer.model: {name}", "others", "those with which the trainer was made")
        refuse_unknown(_added(self.args, self._settled), self._settled)
        ours = GradeConfig.__dataclass_fields__.keys() - TrainingArguments.__dataclass_fields__.keys()
        for name in ours | _SETTLED:
            if (value := getattr(self.args, name)) != self._settled[name]:
                allowed = f"{self._settled[name]!r}, as the trainer was made: settings are for a new GradeTrainer"
                raise InputError(f"trainer.args.{name}", value, allowed)

    def _standing(self) -> dict[str, Any]:
        """What stays of the policy, by name."""
        tokenizer = self.backbone.tokenizer
        words = [tokenizer and len(tokenizer), tokenizer and tokenizer.eos_token_id]
        return standing(self.backbone.peft) | {"vocabulary and end of sequence": words}

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """As ``Trainer.add_callback``."""
        self._check_callback(callback)
        super().add_callback(callback)

    def _check_callback(self, callback: Any) -> None:
        """Refuse what is no callback, and one that waits for a metric that nobody measures."""
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise InputError("callbacks", callback, "a list of TrainerCallback")
        for name, missing in (("metric_for_best_model", None), ("eval_strategy", "no")):
            if issubclass(kind, EarlyStoppingCallback) and getattr(self.args, name) == missing:
                raise InputError(name, missing, "another value with EarlyStoppingCallback, which reads it")

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """As ``Trainer.init_hf_repo``."""
        with reading("push_to_hub", self.args.hub_model_id or self.args.output_dir, "a repository of the hub"):
            super().init_hf_repo(*args, **kwargs)

    def _check_optimizers(self, optimizers: Any) -> None:
        """A given optimizer must have what is trained, and nothing else: the frozen base is also the reference."""
        pair = isinstance(optimizers, tuple | list) and len(optimizers) == 2
        if not pair or not isinstance(optimizers[0], torch.optim.Optimizer | None):
            allowed = "a pair: an optimizer of the adapter's parameters and its schedule, or None for either"
            raise InputError("optimizers", optimizers, allowed)
        optimizer, schedule = optimizers
        if schedule is not None and getattr(schedule, "optimizer", None) is not optimizer:
            allowed = "a schedule of the optimizer that is given with it"
            raise InputError("optimizers", type(schedule).__name__, allowed)
        if optimizer is None:
            return
        adapter = {id(p) for p in self.backbone.trainable_parameters()}
        trained = adapter | {id(p) for p in (self.learner.parameters() if self.learner else [])}
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = "the adapter's parameters" if adapter - given else "PPO's value head"
        for wrong, what, allowed in (
            (given - trained, "parameters that are not trained", "the adapter's parameters alone"),
            (trained - given, f"an optimizer without {missing}", "one with all that is trained, or none"),
            (isinstance(optimizer, torch.optim.LBFGS), "LBFGS", "one whose step needs no closure"),
        ):
            if wrong:
                raise InputError("optimizers", what, allowed)

    # ---- data ----
    def _make_teacher(self, given: Any, dataset: Any, texts: bool) -> Teacher | None:
        """The teacher, if there is one: it becomes one of the rewards, or what predicts them."""
        args = self.args
        if args.hinted and (given is None or self.rewards is None):
            missing, allowed = ("teacher", "base, or another model,") if given is None else ("reward", "a reward")
            raise InputError(missing, None, f"{allowed} with family {HINTED}, which predicts rewards by a teacher")
        options = ("teacher_beta", "teacher_weight", "teacher_context", "teacher_dtype", "teacher_topk")
        changed = {name: getattr(args, name) for name in options if getattr(args, name) != args.default_of(name)}
        check_teacher(args.method, None if given is None else str(args.teacher or type(given).__name__), changed)
        if given is None:
            return None
        if args.method == TEACHER and texts == (args.lmbda == 1):
            raise InputError("lmbda", args.lmbda, "below 1 with texts" if texts else "1 without texts")
        if args.method == TEACHER and self.rewards is not None:
            raise InputError(
                "method", TEACHER, f"{DISTILLED} or a policy gradient beside rewards, of which it has none"
            )
        if texts and args.method != TEACHER and not args.hinted:
            raise InputError(
                "texts", "given", "none beside a teacher and rewards: a divergence is not one of the text's"
            )
        if names_sibling(args.teacher_context) and not args.hinted:
            raise InputError("teacher_context", args.teacher_context, f"{{{SIBLING}}} with family {HINTED} alone")
        encode = partial(encode_examples, **self._reading | {"max_prompt_length": None})
        teacher = make_teacher(
            given, self.backbone, weight=args.teacher_weight, beta=args.teacher_beta, context=args.teacher_context,
            dtype=args.teacher_dtype, rows=dataset or (), encode=encode, topk=args.teacher_topk,
            timeout=args.sampler_timeout,
        )  # fmt: skip
        if "teacher_topk" in changed and teacher.served is None:
            raise InputError("teacher_topk", args.teacher_topk, "another value than the default only with a server")
        if "teacher_dtype" in changed and not (teacher.own and isinstance(given, str | Path)):
            raise InputError("teacher_dtype", args.teacher_dtype, "None, but for another model given by its name")
        if args.hinted and teacher.served is not None:
            raise InputError("teacher", teacher.name, f"base or another model with {HINTED}, which needs every token")
        if args.hinted:
            self._choose("teacher", f"{teacher.name}: its log-ratios predict rewards")
            return teacher
        kind = {0: "forward KL", 1: "reverse KL"}.get(teacher.beta, f"Jensen-Shannon divergence, beta {teacher.beta:g}")
        if teacher.served is not None:
            kind = f"{kind}, of {teacher.served.model}'s {args.teacher_topk} likeliest tokens and the rest as one"
        self._choose("teacher", f"{teacher.name}: {kind}")
        self.rewards = beside(self.rewards, teacher, args.reward_scope, wide(self.backbone.dtype))
        return teacher

    def _check_sets(self, eval_dataset: Any) -> None:
        """Check a set of held-out rows, or several by name."""
        named = eval_dataset.items() if isinstance(eval_dataset, dict) else [("", eval_dataset)]
        wrong = any(not isinstance(name, str) or name and rows is None for name, rows in named)
        if wrong or not named or len({str(name).replace("/", "_") for name, _ in named}) < len(named):
            allowed = "rows with a prompt, or sets of them by name, of which / counts as _"
            raise InputError("eval_dataset", eval_dataset, allowed)
        for _, dataset in named:
            self._check_dataset(dataset, "eval_dataset")

    def _check_dataset(self, dataset: Any, name: str) -> None:
        if dataset is None:
            return
        if isinstance(dataset, pd.DataFrame):
            raise InputError(name, "DataFrame", "rows with a prompt: frame.to_dict('records') makes them")
        if isinstance(dataset, str | Path | Mapping):
            allowed = "rows with a prompt; of several splits one, and datasets.load_dataset reads one by name"
            raise InputError(name, str(dataset), allowed)
        if not hasattr(dataset, "__len__"):
            raise InputError(name, str(dataset), "rows with a prompt, and their number: not a stream")
        # By number where there is no iterator: __getitem__ need not raise IndexError.
        rows = dataset if hasattr(dataset, "__iter__") else (dataset[i] for i in range(len(dataset)))
        try:
            with reading("rows", type(dataset).__name__, "rows that can be read"):
                longest, row = check_prompts(self.backbone.tokenizer, rows, **self._reading)
        except InputError as error:
            raise InputError(f"{name}: {error.field}", error.value, error.allowed) from error
        columns = getattr(dataset, "column_names", None) or dataset[0]
        for column in {*GIVEN}.intersection(columns) - {"completion_ids"}:  # a column that no function gets
            allowed = "another name: functions get the trainer's own by this one"
            raise InputError(f"column of {name}", column, allowed)
        context, most = self.backbone.max_positions, self.args.max_completion_length
        if most >= context:
            raise InputError("max_completion_length", most, f"less than the model's context of {context} tokens")
        if longest + most > context:
            room = f"{context - most}: the model's context of {context} less max_completion_length = {most}"
            allowed = f"at most {room}; or max_prompt_length = {context - most} and truncation left or right"
            raise InputError(f"{name}: tokens of the prompt in row {row}", longest, allowed)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> PromptBatch:
        """Rows of a dataset as prompts."""
        return encode_examples(self.backbone.tokenizer, rows, **self._reading).to(self.backbone.device)

    @property
    def _reading(self) -> dict[str, Any]:
        """How prompts are read."""
        return {
            "max_prompt_length": self.args.max_prompt_length, "truncation": self.args.truncation,
            "chat_template_kwargs": self.args.chat_template_kwargs, "warn_raw": not self.args.raw_prompts,
        }  # fmt: skip

    def _read_texts(self, texts: Any) -> list[dict[str, Any]]:
        args = self.args
        if args.method not in (OFFLINE, DISTILLED, TEACHER):
            raise InputError("texts", texts, f"only with method {OFFLINE}, {DISTILLED} or {TEACHER}")
        if texts is None:
            raise InputError("texts", None, f"text to train along, with method {OFFLINE}: rows, a file, or reference:N")
        if self._offline and args.beta == 0 and args.target_kl is None:
            raise InputError("beta", 0.0, f"above 0, or a target_kl, with method {OFFLINE}: nothing else keeps it near")
        backbone, length, number = self.backbone, args.max_completion_length, reference_number(texts)
        if number is None:
            prompt = args.max_prompt_length or WINDOW_PROMPT
            rows = read_texts(texts, backbone.tokenizer, prompt, length, args.most_texts)
        elif number > args.most_texts:
            raise InputError("texts", texts, f"at most most_texts = {args.most_texts} completions")
        elif self._prompts is None:
            raise InputError("train_dataset", None, f"prompts for the completions of {texts}")
        else:
            rows = reference_texts(
                self._prompts, number, backbone, completion_tokens=length, encode=self.encode, seed=args.seed,
                min_new_tokens=args.min_completion_length,
            )  # fmt: skip
        self._check_dataset(rows, "texts")
        return rows

    def _distil_texts(self, resumed: bool) -> None:
        args = self.args
        if args.method == TEACHER:
            length = args.max_completion_length
            self._given = encode_texts(self._texts, self.backbone, completion_tokens=length, encode=self.encode)
            return
        texts = score_texts(
            self._texts, self.backbone, self.rewards, completion_tokens=args.max_completion_length, encode=self.encode
        )
        learner, target = self.learner, args.target_kl
        learner.read(texts)
        if learner.prior is None:
            return
        self._choose("texts", f"{len(texts)}; {learner.prior.summary}")
        text_steps = args.max_steps if self._offline else int(OPENING * args.max_steps)
        if not text_steps or not (target or args.beta):
            return  # without either nothing would keep the policy near
        if not self._offline:
            self.along = OfflineGradient(args, self.backbone, learner.families)
            if not (resumed and self._opened):  # where this run began, also if this trainer was interrupted
                self._opened = [p.detach().clone() for p in self.backbone.trainable_parameters()]
        self._set_text_steps(text_steps)
        self.along.begin(texts, learner.prior, target, args.beta)
        steering = self.along.steering
        self.objective = replace(self.objective, beta=steering.beta)
        gain = self.along.promised.at(target)[0] if target else math.nan
        promised = f", where they promise {gain:+.3f} at {target:g} nats" if target else ""
        text = f"{self.text_steps} of {args.max_steps}, beta from {steering.beta:.3g}{promised}"
        self._choose("steps along the texts", text)

    def _set_text_steps(self, steps: int) -> None:
        self.text_steps = steps
        if self.kl_budget is not None:
            self.kl_budget = KLBudget(self.args.target_kl, self.args.max_steps - steps)

    def _choose(self, what: str, text: str) -> None:
        """Note what was chosen for the user, and why: a line of the log, and a row of the model card."""
        self.chosen[what] = text
        if self.args.process_index == 0:  # a warning, because others are not shown unless asked for
            logger.warning(f"{what}: {text}")

    def get_train_dataloader(self) -> DataLoader:
        """Microbatches of whole prompts, in shuffled passes."""
        loader = self._get_dataloader(
            self.train_dataset, "Training", self.args.batch_prompts, self._get_train_sampler, is_training=True
        )
        loader.device = None  # to which Accelerate would move rows, making every mapping within them anew
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> _Passes:
        args, rows = self.args, len(self.train_dataset)
        total = args.max_steps * args.microbatches * args.batch_prompts
        return _Passes(rows, total, args.seed if args.shuffle_dataset else None)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: None = None,
        ignore_keys_for_eval: None = None, **others: Any,
    ) -> TrainOutput:  # fmt: skip
        """Train, or continue from a checkpoint's folder; True: the newest whole one of ``output_dir``'s last run.

        None is ``args.resume_from_checkpoint``.
        """
        refuse_unknown(others, (), "argument of train")
        _refuse_unread(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        self._check_settled()
        if self.train_dataset is None or not len(self.train_dataset):
            raise InputError("train_dataset", self.train_dataset, "rows with a prompt")
        if not any(isinstance(callback, _StepEnd) for callback in self.callback_handler.callbacks):
            self.add_callback(_StepEnd(self))  # removed with all others
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if resume_from_checkpoint is True and (newest := last_checkpoint(self.args.output_dir)):
            resume_from_checkpoint = str(newest)
        known = isinstance(given := resume_from_checkpoint, str | Path) and (Path(given) / STATE_FILE).is_file()
        if not (known or given is None or given is False):
            allowed = f"a checkpoint's folder, or True where a whole one is in {self.args.output_dir}"
            raise InputError("resume_from_checkpoint", resume_from_checkpoint, allowed)
        self._began = time.time()  # a run that is continued has begun before
        self._place, self._pending = 0, list[Microbatch]()  # in the step, and its samples
        self.best_before: str | None = None  # the best checkpoint of a run that is continued
        self._published = self._passed = -1  # steps: whose adapter the sampler has; the last that ended a pass
        self._own_steps = 0, 0  # steps that were counted, and how many of them had own completions
        self._called = -1  # and the last whose log, evaluation and checkpoint the Trainer asked for
        self._unevaluated = False  # the step: its evaluation failed, as its checkpoint says
        eval_on_start = self.args.eval_on_start
        self.args.eval_on_start = eval_on_start and not resume_from_checkpoint  # its row is in the history
        try:
            if self._texts is not None:
                self._distil_texts(bool(resume_from_checkpoint))
            return super().train(resume_from_checkpoint)
        except BaseException:
            with suppress(OSError):  # the folder, which the Trainer made, where nothing was written
                os.rmdir(self.args.output_dir)
            raise
        finally:
            self.args.eval_on_start = eval_on_start
            if self.sampler is not None:
                self.sampler.close()

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """No-op: the model is already on the device."""

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.backbone.shards is not None:  # DDP would compare bases of which each process has another part
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        return super()._prepare_for_training(*args, **kwargs)

    # ---- a step ----
    def training_step(self, model: Any, inputs: list[dict[str, Any]], num_items_in_batch: Any = None) -> Tensor:
        """Sample completions of a microbatch and add their gradient; a learner does so for the whole step at its end.

        The microbatch's share of the loss. ``model`` is not used: the engines call the base directly.
        """
        args, last = self.args, self.accelerator.sync_gradients
        if self._place == 0:
            self._check_settled()  # a callback may have set some
            self._started, self.rewards.trainer_state = time.perf_counter(), self.state
            self.rewards.recorded = []
            if args.target_kl is not None:  # the adapter at the step's start, and its completions
                self._before = [p.detach().clone() for p in self.backbone.trainable_parameters()]
                self._completions = []
        place = self._place * args.world_size + args.process_index
        self._place = 0 if last else self._place + 1
        seed = np.random.SeedSequence([args.seed, self.state.global_step + 1, place]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(self.backbone.device).manual_seed(int(seed >> 1))
        if (texts := self._texts_of(self.state.global_step + 1)) is not None:
            texts = texts[[row["number"] for row in inputs] if self._offline else self._text_numbers(place, len(texts))]
            prompts, completions = texts.prompts, Completions(texts.prompts, texts.ids, texts.mask)
        else:
            prompts = self.encode(inputs)
            completions = None if self.sampler is None else self._sample_elsewhere(prompts, generator)
        if self.learner is None:
            parts = [self._relaxed_step(prompts, generator, completions)]
        else:
            self._pending.append((prompts, generator) if completions is None else completions)
            parts = self._learn() if last else []
        if last:
            self._sum_gradients()
        loss = torch.stack([part.loss.detach() for part in parts]).sum() if parts else torch.zeros(())
        return loss.to(args.device) / args.gradient_accumulation_steps

    def _texts_of(self, step: int) -> ScoredTexts | None:
        """What a step, from 1, is made along; None: own completions."""
        if self._along_texts(step):
            return self.along.texts
        own = self._given is None or np.random.default_rng([self.args.seed, 4, step]).random() < self.args.lmbda
        return None if own else self._given

    def _along_texts(self, step: int) -> bool:
        """Whether this step, from 1, is one along texts."""
        return step <= self.text_steps

    @property
    def _opened_along_texts(self) -> bool:
        """Whether steps along texts have begun this run, and own completions did not disprove them."""
        return self.text_steps > 0 and not self.along.steering.disproved

    def _text_numbers(self, place: int, rows: int) -> list[int]:
        """Texts of a microbatch, in shuffled passes over all ``rows``."""
        args = self.args
        before = self.state.global_step * args.microbatches + place
        numbers = range(before * args.batch_completions, (before + 1) * args.batch_completions)
        orders = {turn: np.random.default_rng([args.seed, 3, turn]).permutation(rows)
                  for turn in {number // rows for number in numbers}}  # fmt: skip
        return [int(orders[number // rows][number % rows]) for number in numbers]

    def _relaxed_step(
        self, prompts: PromptBatch, generator: torch.Generator, completions: Completions | None
    ) -> GradientStep:
        args = self.args
        engine = make_engine(
            RELAXED[args.method].engine, args.hops, args.hop_tolerance, bool(args.gradient_checkpointing)
        )
        if completions is not None:
            engine = partial(engine, completions=(completions.ids, completions.mask))
        relaxation = args.relaxation(self.state.global_step)
        step = engine(self.backbone, prompts, self.objective, relaxation, generator, 1 / args.microbatches)
        residual = None if step.residual is None else step.residual.double()
        self.log_buffer.add({"tau": relaxation.tau, "residual": residual})
        self._add_step(step, prompts, self.rewards.last)
        return step

    def _learn(self) -> list[GradientStep]:
        """Sample the whole step and update; the gradient of the last update is left to the Trainer."""
        pending, self._pending, done = self._pending, [], 0

        def apply() -> None:
            nonlocal done
            done += 1
            if done < self.args.updates:
                self._sum_gradients()
                self._clip_grad_norm(self.model)
                self.optimizer.step()

        taught = self.teacher.figures if self.teacher else []
        taught.clear()  # what evaluations have left
        context = StepContext(self.args.microbatches, apply, self._sum, gather_object, self.args.process_index)
        learner = self.along if self._along_texts(self.state.global_step + 1) else self.learner
        parts = learner.step(pending, self.objective, context)
        self._along, self._kl = pending, [(p.kl.double() * p.completion_mask).sum(-1).mean() for p in parts]
        # Each microbatch's samples are scored first; a greedy baseline's completions come after them.
        recorded = self.rewards.recorded
        scores = recorded[:: max(1, len(recorded) // len(parts))] or [None] * len(parts)
        for part, microbatch, given in zip(parts, pending, scores, strict=True):
            own = isinstance(microbatch, Completions)
            prompts = microbatch.prompts if own else microbatch[0].repeat(self.args.group)
            self._add_step(part, prompts, given)
        for name, values in learner.figures.items():
            for value in values:
                self.log_buffer.add({name: value})
        for figures in taught:
            self.log_buffer.add(figures)
        return parts

    def _add_step(self, step: GradientStep, prompts: PromptBatch, scores: Scores | None) -> None:
        self.log_buffer.add_step(step, prompts, scores)
        if self.kl_budget is not None:
            half = slice(None, None, 2)
            self._completions.append((prompts[half], step.completion_ids[half], step.completion_mask[half]))

    def _sample_elsewhere(self, prompts: PromptBatch, generator: torch.Generator) -> Completions:
        """G completions of each prompt by the other sampler, refused if it samples another policy."""
        args, start, step = self.args, time.perf_counter(), self.state.global_step + 1
        if step != self._published:
            name = self.sampler.publish(self.backbone) if args.process_index == 0 else None
            self.sampler.use(gather_object([name])[0])
            self._published = step
        prompts = prompts.repeat(args.group)
        most, least = args.max_completion_length, args.min_completion_length
        # A generator of its own: what is drawn given the tokens does not depend on who sampled them, and how.
        own = torch.Generator(generator.device).manual_seed(seed_of(generator))
        samples = self.sampler.sample(self.backbone, prompts, most, own, least)
        seconds = time.perf_counter() - start
        with torch.no_grad():
            logps = completion_logps(self.backbone, prompts, samples.ids, samples.mask, min_new_tokens=least)
        policies = samples.mismatch(logps)
        policies.check(self.sampler.name, self.backbone.dtype, args.sampler_max_difference)
        figures = {"mean_ratio": policies.mean_ratio, "largest_difference": policies.largest_difference,
                   "seconds": seconds}  # fmt: skip
        self.log_buffer.add({f"sampler/{name}": torch.tensor(v, dtype=torch.float64) for name, v in figures.items()})
        weights = importance_weights(
            logps, samples.logps, samples.mask, args.importance_sampling, args.importance_sampling_cap
        )
        return Completions(prompts, samples.ids, samples.mask, weights)

    def _sum(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value, reduction="sum")

    def _mean(self, values: list[Tensor | float]) -> float:
        """The mean of values over processes, each of which has equally many, or none."""
        mean = torch.stack([torch.as_tensor(v).detach().cpu() for v in values]).mean() if values else torch.zeros(())
        if self.args.world_size > 1:
            both = torch.tensor([float(mean), float(bool(values))], dtype=torch.float64, device=self.accelerator.device)
            mean, having = self._sum(both)
            mean = mean / having
        return float(mean)

    def _sum_gradients(self) -> None:
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        have = self._sum(torch.tensor([float(p.grad is not None) for p in weights], device=self.args.device))
        for p, count in zip(weights, have.tolist(), strict=True):
            if count:  # on some process; weight decay would move the others
                p.grad = self._sum(torch.zeros_like(p) if p.grad is None else p.grad)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        """Clip adapter and value head each by itself: a value head must not change the policy's step."""
        limit = self.args.max_grad_norm or math.inf  # 0: nothing is clipped
        parts = (self.backbone.trainable_parameters(), self.learner.parameters() if self.learner else [])
        norms = [torch.nn.utils.clip_grad_norm_(part, limit) for part in parts]
        for norm in norms:
            if not torch.isfinite(norm):
                allowed = f"a finite number; step {self.state.global_step + 1} was not taken"
                raise InputError("gradient norm", float(norm), allowed)
        self.log_buffer.add({"grad_norm": norms[0].double()})
        return norms[0]

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer of ``args.optim``: one group for the adapter, one for a value head."""
        if self.optimizer is None:
            groups: list[dict[str, Any]] = [{"params": self.backbone.trainable_parameters()}]
            if self.learner and self.learner.parameters():
                groups.append({"params": self.learner.parameters(), "lr": self.args.value_learning_rate})
            args = self.args
            allowed = "an optimizer that takes optim_args, adam_beta1, adam_beta2 and adam_epsilon as they are"
            with reading("optim", getattr(args.optim, "value", args.optim), allowed):
                kind, options = self.get_optimizer_cls_and_kwargs(args, self.model)
                without = copy.copy(args)
                without.optim_args = None
                if args.optim_args and options == self.get_optimizer_cls_and_kwargs(without, self.model)[1]:
                    raise InputError("optim_args", args.optim_args, "none: this optimizer does not read it")
                self.optimizer = kind(groups, weight_decay=args.weight_decay, **options)
        elif not isinstance(self.optimizer, AcceleratedOptimizer):  # which an earlier call has made
            self._check_optimizers((self.optimizer, None))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As ``Trainer.create_scheduler``."""
        args = self.args
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        with reading("lr_scheduler_kwargs", str(args.lr_scheduler_kwargs), f"those of {kind}"):
            return super().create_scheduler(num_training_steps, optimizer)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Not here: it makes the model anew for each trial."""
        raise InputError("hyperparameter_search", "a call", "a loop over settings, each with a GradeTrainer of its own")

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        check_whole(best, "load_best_model_at_end")
        restore_adapter(self.backbone.peft, best)
        self._choose("policy", f"that of {best.name}, whose {self.args.metric_for_best_model} is the best")

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        name = self.args.metric_for_best_model
        with reading("metric_for_best_model", name, f"one of {', '.join(sorted(metrics))}", KeyError):
            return super()._determine_best_metric(metrics, trial)

    def floating_point_ops(self, inputs: Any) -> int:
        """0: a step's operations are not those of one forward pass over the inputs."""
        return 0

    def _updated(self) -> None:
        """After a step's last update: check the weights, and scale the step so that KL is on its budget."""
        step = self.state.global_step + 1
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not torch.stack([p.detach().isfinite().all() for p in weights]).all():
            allowed = f"a smaller one: weights are not finite after step {step}"
            raise InputError("learning_rate", self.args.learning_rate, allowed)
        if (budget := self.kl_budget) is None or self._along_texts(step):
            return
        step -= self.text_steps
        args, policy = self.args, self.backbone.trainable_parameters()
        least, most = args.min_completion_length, args.max_completion_length
        with restoring(policy):
            set_values(policy, self._before)
            batch = BatchKL(self.backbone, self._completions, least, most, self._sum)
        wanted = budget.wanted(step, batch.start)
        steering = self.along.steering if self._opened_along_texts else None
        at_most = steering is not None  # beta is near its value then
        first = 1.0 if at_most else budget.scale
        if budget.exceeded(step):
            set_values(policy, self._before)
            landed = self._shrink(batch, float(budget.values[0]), budget.after(step), TOLERANCE)
            scale = 0.0  # the step is not taken, and the next one begins with its own length
            budget.landed(1.0, batch.start, landed)
        else:
            scale, landed = scale_step(policy, self._before, batch.start, wanted, batch.measure, first, at_most)
            budget.landed(scale, batch.start, landed)
        if steering is not None:
            self.objective = replace(self.objective, beta=steering.follow(float(budget.values[0]), budget.steps - step))
        # In double, as KL is: the mean of two processes is then that of one to the last digits.
        figures = {"kl_budget": budget.after(step), "kl_scale": scale}
        self.log_buffer.add({name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()})

    def _step_ended(self) -> None:
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()
        if self._along_texts(self.state.global_step):
            self._steer(self._mean(self._kl))
        elif self.kl_budget is not None and self.state.global_step == self.state.max_steps:
            own = self._own_completions(LANDING)[1]
            self._shrink(own, self.kl_budget.filter(own.start), self.args.target_kl, LAST_TOLERANCE)
        step_time = time.perf_counter() - self._started
        self.seconds += step_time
        self.log_buffer.add({"step_time": step_time})

    def _steer(self, kl: float) -> None:
        """After a step along texts: keep within the target, measure own completions now and then, set beta."""
        args, step, steps, steering = self.args, self.state.global_step, self.text_steps, self.along.steering
        target = steering.target
        allowed = math.inf if target is None else target / steering.ratio
        now = own_completions(step, steps, args.own_completions)
        if kl > allowed / 4 or now:  # a step can more than double KL
            kl_after = self._texts_kl()
            if kl_after > allowed:
                parameters = self.backbone.trainable_parameters()
                before, measure = Measured(kl, 0.0), lambda: Measured(self._texts_kl(), 0.0)
                kl_after = scale_step(parameters, self._before, before, allowed, measure)[1].kl
            if now:
                self._measure_own(now, kl_after)
        self.log_buffer.add({"beta": torch.tensor(self.objective.beta, dtype=torch.float64)})
        self.objective = replace(self.objective, beta=steering.follow(kl, steps - step))
        if steering.disproved or (step == steps and not self._offline):
            self._end_opening()

    def _end_opening(self) -> None:
        """Go on with own completions, from the start where these disproved what the texts predict."""
        args, steering, step = self.args, self.along.steering, self.state.global_step
        found = f"rewards of {steering.samples} own completions"
        if self._offline and steering.disproved:
            allowed = "texts more like what the policy writes, or method: auto, which corrects the prediction"
            raise InputError("texts", f"{found} that do not rise with what they predict", allowed)
        if self._offline:
            return
        self.learner.transfer = evidence = Evidence([each.clone() for each in steering.evidence.groups])
        trust, r2 = evidence.trust, evidence.r2(evidence.trust)
        if not steering.disproved:
            steering.ratio, steering.recent = 1.0, []
            text = f"{found} rise with the prediction: it counts {trust:.2f} (R2 {r2:.2f}) from step {step + 1} on"
        else:
            set_values(self.backbone.trainable_parameters(), self._opened)
            self.optimizer.state.clear()
            self._set_text_steps(step)
            self.objective = replace(self.objective, beta=args.beta)
            text = f"{found} do not rise with the prediction: from step {step + 1} on without texts, from the start"
        self._choose("transfer", text)

    def _texts_kl(self) -> float:
        """KL along the step's texts, in nats per completion."""
        each = [sequence_kl(self.backbone, t.prompts, t.ids, t.mask).double().sum(1).mean() for t in self._along]
        return self._mean(each)

    def _measure_own(self, number: int, kl: float) -> None:
        """Score a few completions of the policy; after the last step, scale the adapter to their KL."""
        learner = self.along
        own, batch = self._own_completions(number)
        rewards = scored_rewards(self.backbone, own.prompts, own.ids, own.mask, self.objective)
        learner.steering.measure(batch.start.kl, kl, learner.predict(own), rewards)
        self.log_buffer.add({
            "distilled/own_kl": batch.start.kl, "distilled/own_reward": rewards.nanmean().double(),
            "distilled/trust": learner.steering.evidence.trust,
        })  # fmt: skip
        if self.state.global_step == self.state.max_steps and self.args.target_kl is not None:
            self._shrink(batch, batch.start.kl, self.args.target_kl, LAST_TOLERANCE)

    def _own_completions(self, number: int) -> tuple[Completions, BatchKL]:
        """Completions of the policy for prompts drawn anew, the same on all processes, and their KL."""
        args, step = self.args, self.state.global_step
        rng = np.random.default_rng([args.seed, 2, step])
        rows = self._texts if self._prompts is None else self._prompts
        prompts = self.encode([rows[int(i)] for i in rng.choice(len(rows), number)])
        generator = torch.Generator(self.backbone.device).manual_seed(int(rng.integers(2**31)))
        most, least = args.max_completion_length, args.min_completion_length
        samples = make_sampler("own").sample(self.backbone, prompts, most, generator, least)
        own = Completions(prompts, samples.ids, samples.mask)
        return own, BatchKL(self.backbone, [(own.prompts, own.ids, own.mask)], least)

    def _shrink(self, own: BatchKL, kl: float, target: float, tolerance: float) -> Measured:
        """Scale the adapter from ``kl`` to the target's, on own completions; what they measure then."""
        scaled = [p for name, p in self.model.named_parameters() if "lora_B" in name and p.requires_grad]
        growth = target / max(kl, 1e-12)
        zeros, wanted, first = [torch.zeros_like(p) for p in scaled], growth * own.start.kl, min(growth**0.5, 1.5)
        return scale_step(scaled, zeros, Measured(0.0, 0.0), wanted, own.measure, first, tolerance=tolerance)[1]

    # ---- log and evaluation ----
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer after a step; then, in its order, the end of a pass over the prompts and the next one's begin.

        Steps may cross the end of a pass, so all passes are one epoch of the Trainer's loop, which reports the first
        one's begin and the last one's end.
        """
        step, handler, first = self.state.global_step, self.callback_handler, self.state.global_step != self._called
        self._called = step
        last = self.control.should_training_stop or step >= self.state.max_steps
        ended = first and self.ends_pass(step)
        if step != self._passed:  # which a stop at the end of a pass calls again
            saving, later = self.control.should_save, first and (last or ended)  # with the evaluation of the pass
            self.control.should_save = saving and not later
            self._log_save_evaluate(*args, **kwargs)
            self.control.should_save |= saving and later
        if last or self.control.should_training_stop:
            return
        if ended:
            self._passed = step
            self.control = handler.on_epoch_end(self.args, self.state, self.control)
            self._log_save_evaluate(*args, **kwargs)
            if not self.control.should_training_stop:
                self.control = handler.on_epoch_begin(self.args, self.state, self.control)
        elif self.control.should_epoch_stop:
            allowed = f"should_training_stop: step {step} is within a pass, the rest of which cannot be left out"
            raise InputError("control.should_epoch_stop", True, allowed)

    def _log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # An evaluation without the step's own row would have no samples and seconds beside it.
        self.control.should_log = self.control.should_log or self.control.should_evaluate
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer; where a reward or the judge fails, the steps are saved, and a resume begins with it."""
        rows = len(self.state.log_history)
        try:
            metrics = super()._evaluate(*args, **kwargs)
        except Exception:
            save = self.state.global_step and self.args.save_strategy != "no" and not self._unevaluated
            if save and self.args.world_size == 1:  # others may not have failed
                del self.state.log_history[rows:]  # of sets before the one that failed
                self._unevaluated = True
                with suppress(InputError, OSError):  # the first error is the one to read
                    self._save_checkpoint(self.model, None)
            raise
        self._unevaluated = False
        return metrics

    def _make_up(self) -> None:
        """The evaluation that failed, and its checkpoint again."""
        if self._unevaluated:
            self.control.should_evaluate = self.control.should_save = True
            super()._maybe_log_save_evaluate(self._tr_loss, None, self.model, None, self.state.epoch, None, 0.0)

    def _samples(self, step: int) -> int:
        """Completions of the policy that a run has drawn."""
        args, (counted, own) = self.args, self._own_steps
        own += sum(self._texts_of(each) is None for each in range(counted + 1, step + 1))
        self._own_steps = step, own
        drawn = own * args.microbatches * args.batch_completions
        return drawn + (self.along.steering.samples if self.along else 0)

    def ends_pass(self, step: int) -> bool:
        """Whether a pass over the prompts ends in a step."""
        return int(self.passes(step)) > int(self.passes(step - 1))

    def passes(self, steps: int) -> float:
        """Passes over the prompts in so many steps."""
        return steps * self.args.microbatches * self.args.batch_prompts / len(self.train_dataset)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the steps since the last row had, as means over microbatches and processes."""
        args, step = self.args, self.state.global_step
        if "loss" in logs:
            logs |= self.log_buffer.drain(self._mean)
            samples = self._samples(step)
            logs |= {"num_samples": samples, "seconds": self.seconds}
            if args.log_completions:
                rows = self.log_buffer.drain_rows()
                with reading("log_completions", ", ".join(rows), "columns of which each has values of one type"):
                    rows.to_parquet(io.BytesIO())
                self._write_table(f"completions_{step:05d}", rows)
        if self.train_dataset is not None:
            self.state.epoch = self.passes(step)
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As ``Trainer.evaluate``: on ``self.eval_dataset``, one of its sets by name, or other rows with a prompt."""
        if eval_dataset is None and self.eval_dataset is None:
            raise InputError("eval_dataset", None, "rows with a prompt")
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        if not isinstance(eval_dataset, str):
            self._check_sets(eval_dataset)
        elif eval_dataset not in sets:
            raise InputError("eval_dataset", eval_dataset, f"one of the sets by name: {', '.join(sets) or 'none'}")
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: None = None, metric_key_prefix: str = "test") -> Any:
        """As ``Trainer.predict``, on rows with a prompt: what `evaluate` measures, and no predictions."""
        if test_dataset is None:
            raise InputError("test_dataset", None, "rows with a prompt")
        self._check_dataset(test_dataset, "test_dataset")
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self, dataloader: DataLoader, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Sample held-out prompts and score them: ``eval_reward``, ``eval_kl``, ..., with standard error and n.

        ``eval_loss`` is the negative objective.
        """
        _refuse_unread(ignore_keys=ignore_keys)
        self._check_settled(training=False)
        args, step, rows = self.args, self.state.global_step, dataloader.dataset
        ends, self.rewards.trainer_state = step in (0, args.max_steps), self.state
        n = min((args.final_eval_prompts if ends else args.eval_prompts) or len(rows), len(rows))
        evaluation = evaluate(
            self.backbone, [rows[i] for i in range(n)], self.rewards, self.judge,
            max_new_tokens=args.max_completion_length, min_new_tokens=args.min_completion_length,
            scope=args.reward_scope, batch_size=args.per_device_eval_batch_size, kl_prompts=args.kl_eval_prompts,
            noise_block=args.eval_noise_block, encode=self.encode, rank=args.process_index, processes=args.world_size,
        )  # fmt: skip
        if metric_key_prefix == "eval":
            self.evaluations[step] = evaluation
        self._write_table(f"{metric_key_prefix}_{step:05d}", evaluation.table())
        if isinstance(self.learner, DistilledGradient | OfflineGradient):
            learner = self.along if self._along_texts(max(step, 1)) else self.learner
            tokens = token_table(self.backbone.tokenizer, learner.liked_tokens(), learner.token_counts())
            self._write_table(f"tokens_{step:05d}", tokens)
        # One n for the whole curve: the ends are evaluated on more prompts, the first of which are the curve's.
        metrics = evaluation.first(args.eval_prompts or n).summary(self.objective.beta, metric_key_prefix)
        return EvalLoopOutput(None, None, metrics, n)

    @property
    def kept_step(self) -> int:
        """The step whose policy is the result: the last one, or with ``load_best_model_at_end`` the best."""
        best = self.args.load_best_model_at_end and self.state.best_model_checkpoint
        return int(best.rpartition("-")[2]) if best else self.state.global_step

    def saved_ends(self) -> tuple[Evaluation | None, Evaluation | None]:
        """The evaluations before training and of its result, of the prompts that both have."""
        before, after = (self.evaluations.get(step) for step in (0, self.kept_step or None))
        if before and after:
            before = before.first(len(after.prompts))
        return before, after

    def _table_path(self, name: str) -> Path:
        file = name.replace("/", "_")  # a set may be math/easy
        return Path(self.args.output_dir) / "completions" / f"{file}.parquet"

    def _evaluation_path(self, step: int) -> Path:
        return self._table_path(f"eval_{step:05d}")

    def _write_table(self, name: str, table: pd.DataFrame) -> None:
        args = self.args
        if args.should_save and (args.save_strategy != "no" or args.log_completions) and len(table):
            table.attrs["table"] = f"{name} of {run_mark(args.output_dir)}"
            with writing_run(args.output_dir), atomic(self._table_path(name)) as file:
                table.to_parquet(file, index=False, write_page_checksum=True)

    # ---- checkpoints ----
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        args, output = self.args, Path(self.args.output_dir)
        folder = output / f"checkpoint-{self.state.global_step}"
        try:
            with writing_run(output), self._unrotated() as limit:
                if args.should_save:
                    remove(folder)  # of a run that was resumed from an earlier one
                self.accelerator.wait_for_everyone()
                super()._save_checkpoint(model, trial)
                if args.should_save:
                    self._save_state(folder)
                self.accelerator.wait_for_everyone()  # every process has written its generators
                if args.should_save:
                    write_manifest(folder)
                    self._remove_older(folder, limit)
        except InputError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        with self._unrotated():  # the newest one is what an interrupted run goes on from
            return super()._finalize_training(*args, **kwargs)

    @contextmanager
    def _unrotated(self) -> Iterator[int | None]:
        """Where the Trainer would remove checkpoints: `_remove_older` does, once this one is whole."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield limit
        finally:
            self.args.save_total_limit = limit

    def _remove_older(self, folder: Path, limit: int | None) -> None:
        """As rotate_checkpoints, to which a later step's folder, damaged or another run's, would be the newest."""
        best = Path(self.state.best_model_checkpoint or folder)
        older = takewhile(lambda path: path != folder, checkpoints_of(folder.parent))
        older = [path for path in older if path != best]
        kept = max(0, (limit or math.inf) - 1 - (best != folder))
        for path in older[: max(0, len(older) - kept)]:
            shutil.rmtree(path, ignore_errors=True)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = output_dir or self.args.output_dir
        with writing(folder, "output_dir"):
            super()._save(folder, state_dict)
            if self.args.should_save:
                adapter, folder = write_fingerprint(self.backbone.peft, folder), Path(folder)
                # A checkpoint's is written last, a run's own is of other files.
                if folder not in checkpoints_of(folder.parent) and not (adapter / RUN_FILE).exists():
                    write_manifest(adapter, [*ADAPTER_FILES, BASE_FILE])

    def _save_state(self, folder: Path) -> None:
        """What the Trainer does not know of. Noise needs no state: it is seeded by step and place."""
        base = {"model": getattr(self.backbone.model.config, "_name_or_path", "")}  # for `grade show`
        state = {"seconds": self.seconds, "window": self.log_buffer.state(), "settings": base | self._settings(),
                 "run": run_mark(self.args.output_dir), "began": self._began,
                 "unevaluated": self._unevaluated}  # fmt: skip
        tables = {step: self._evaluation_path(step) for step in self.evaluations}  # a used folder has others
        state["evaluations"] = {step: sha256_of(table) for step, table in tables.items() if table.is_file()}
        if self.kl_budget is not None:
            state["kl_budget"] = self.kl_budget.state()
        state |= {"text_steps": self.text_steps, "chosen": self.chosen, "optimizer": self._optimizer_kind()}
        if self.learner is not None:
            state["means"] = self.learner.means
            tensors = {name: value for learner in self._learners for name, value in learner.tensors().items()}
            if tensors:
                save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / LEARNER_FILE)
        write_json(folder / STATE_FILE, state)

    def _optimizer_kind(self) -> str:
        """The name of its class, perhaps within Accelerate's."""
        return type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__

    def _settings(self) -> dict[str, Any]:
        teacher = self.teacher and self.teacher.fingerprint()
        return {
            "reward": self.rewards.names, "prompts and texts": self._read, **settings_of(self.args),
            "teacher's weights": teacher, "type of the base": str(self.backbone.dtype),
            "processing_class": tokenizer_hash(self.backbone.tokenizer),
            "chat template": hashed(getattr(self.backbone.tokenizer, "chat_template", None)),
        }  # fmt: skip

    @cached_property
    def _read(self) -> str:
        """A hash of the prompts and the texts that are trained on."""
        prompts = of_columns(self._prompts or (), "prompt")
        texts = [[*row.values()] for row in self._texts or ()]
        return hashed([prompts[i]["prompt"] for i in range(len(prompts))], texts)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        check_whole(folder, "resume_from_checkpoint")
        for name in (OPTIMIZER_FILE, SCHEDULER_NAME, "rng_state*.pth"):
            if not any(path.is_file() for path in folder.glob(name)):
                allowed = f"a folder with {name}, which save_only_model leaves out"
                raise InputError("resume_from_checkpoint", str(folder), allowed)
        with reading("resume_from_checkpoint", folder, "a checkpoint of GradeTrainer"):
            ours = read_json(folder / STATE_FILE)
            before = ours["settings"]
            for name, value in self._settings().items():
                if name not in _LENGTH and before.get(name, value) != value:
                    raise InputError(name, value, f"{before[name]!r}, as in {folder}, to continue it")
            state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
            history_rows(state.log_history + [])
            if state.global_step not in range(self.args.max_steps + 1):
                allowed = f"at least {state.global_step!r}, the step of {folder}"
                raise InputError("max_steps", self.args.max_steps, allowed)
            if self.args.load_best_model_at_end and state.best_model_checkpoint:
                self.best_before = self._found(Path(state.best_model_checkpoint), folder.parent, ours.get("run"))
        restore_adapter(self.backbone.peft, folder)

    def _found(self, best: Path, beside: Path, run: str | None) -> str:
        """A run's best checkpoint, where the run may have been moved and another one be in its old place."""
        for folder in (beside / best.name, Path(self.args.output_dir, best.name), best):
            if folder.is_dir() and read_json(folder / STATE_FILE).get("run") == run:
                return str(folder)
        raise InputError("load_best_model_at_end", str(best), "the best checkpoint so far, there or in output_dir")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        with reading("resume_from_checkpoint", checkpoint, "a checkpoint of GradeTrainer with this method"):
            super()._load_optimizer_and_scheduler(checkpoint)
            schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
            if isinstance(schedule, LambdaLR):  # whose length may be another than the checkpoint's
                rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
                schedule._last_lr = [base * rate(schedule.last_epoch) for base, rate in rates]
                for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
                    group["lr"] = rate
            state = read_json(Path(checkpoint) / STATE_FILE)
            if (kind := state.get("optimizer")) not in (None, self._optimizer_kind()):
                raise InputError("optimizers", self._optimizer_kind(), f"{kind}, as in {checkpoint}, to continue it")
            self.seconds, self._unevaluated = float(state["seconds"]), state.get("unevaluated", False)
            self._began = float(state.get("began", 0.0))
            self.log_buffer.restore(state["window"])
            for step, known in state["evaluations"].items():
                table = self._evaluation_path(int(step))
                if not table.is_file():
                    logger.warning(f"{table} is missing: the results leave the evaluation after step {step} out")
                elif sha256_of(table) != known:
                    allowed = f"the table as it was written; without it the results leave step {step} out"
                    raise InputError("resume_from_checkpoint", str(table), allowed)
                else:
                    self.evaluations[int(step)] = Evaluation.of_table(pd.read_parquet(table))
            if state["text_steps"] > self.text_steps:  # they only ever become fewer
                allowed = f"one with at least {state['text_steps']} steps along texts, as {checkpoint} has made"
                raise InputError("max_steps", self.args.max_steps, allowed)
            self._set_text_steps(state["text_steps"])
            self.chosen |= state["chosen"]
            if self.kl_budget is not None:
                self.kl_budget.restore(state["kl_budget"])
            if self.learner is not None:
                self.learner.means[:] = map(float, state["means"])
                if (learned := Path(checkpoint) / LEARNER_FILE).is_file():
                    for learner in self._learners:
                        learner.load_tensors(load_file(learned))
                    beta = self.along.steering.beta if self._opened_along_texts else self.args.beta
                    self.objective = replace(self.objective, beta=beta)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading("resume_from_checkpoint", str(checkpoint), "a checkpoint with the state of its generators"):
            super()._load_rng_state(checkpoint)

    @property
    def _learners(self) -> set[Learner]:
        """The learner, and what learns along texts; each finds its own state among all by the names."""
        return {self.learner, self.along} - {None}

    # ---- model card ----
    def create_model_card(
        self, language: str | None = None, license: str | None = None, tags: str | list[str] | None = None,
        model_name: str | None = None, finetuned_from: str | None = None, tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None, dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None, dataset_name: str | None = None,
    ) -> None:  # fmt: skip
        """As the Trainer's (less ``dataset_args``), with the evaluations before and after training.

        ``dataset_name`` is TRL's name of ``dataset``.
        """
        if not self.is_world_process_zero():
            return
        output = Path(self.args.output_dir)
        about = {"language": language, "license": license, "pipeline_tag": (_listed(tasks) or [None])[0]}
        words = ", ".join(_listed(dataset or dataset_name) or _listed(dataset_tags))
        train, sets = self.train_dataset, self.eval_dataset
        held_out = sets if isinstance(sets, dict) else {} if sets is None else {"": sets}
        card = model_card(
            self.args, self.backbone.peft.active_peft_config, *self.saved_ends(),
            name=model_name or output.resolve().name, method=self.args.method, rewards=self.rewards.names,
            steps=self.state.global_step,
            base=finetuned_from or getattr(self.backbone.model.config, "_name_or_path", ""),
            train_data=", ".join(filter(None, (words, "" if train is None else f"{len(train)} rows"))),
            eval_data="; ".join(f"{name}: {len(rows)} rows".removeprefix(": ") for name, rows in held_out.items()),
            chosen=self.chosen, tags=_listed(tags), datasets=_listed(dataset_tags),
            about={name: value for name, value in about.items() if value},
        )  # fmt: skip
        write_text(output / "README.md", card)


class _StepEnd(TrainerCallback):
    """After each update and step what the trainer does then; after the last a row of the log, perhaps an evaluation."""

    def __init__(self, trainer: GradeTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.num_train_epochs = math.ceil(self.trainer.passes(state.max_steps))
        state.compute_steps(args, state.max_steps)  # a checkpoint's state has those of the run before
        # The Trainer takes what is in the place where the run was, or forgets it.
        state.best_model_checkpoint = self.trainer.best_before or state.best_model_checkpoint
        self.trainer._make_up()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._updated()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._step_ended()
        last = state.global_step >= state.max_steps
        state.epoch = self.trainer.passes(state.global_step)
        follows = args.eval_strategy == "epoch" and args.eval_delay <= state.epoch  # with the end of the last pass
        control.should_evaluate = control.should_evaluate or (last and args.eval_on_end and not follows)
        control.should_log = control.should_log or last


def _choose_method(args: GradeConfig, rewards: Rewards | None, texts: bool, teacher: bool) -> tuple[str, str]:
    """``method: auto``: the method that a reward calls for, with the reason in one line.

    Without rewards there is a teacher. A reward on the embedding table (`bag`) is differentiated itself, unless groups
    are asked for; others are distilled, and so is any beside a teacher, or where scored texts are given. A setting that
    only `grpo` has means `grpo`, so that a script for TRL's trainer does what it says. `docs/methods.md` has the
    measurements behind the rest.
    """

    def changed(method: str, other: str) -> list[str]:
        """Non-default settings that only this candidate supports."""
        return [
            option for option in OPTIONS
            if reads(method, option) and not reads(other, option) and getattr(args, option) != args.default_of(option)
        ]  # fmt: skip

    if rewards is None:
        return TEACHER, "there is a teacher and no reward, so the value of every token is known"
    grpo, distilled = changed("grpo", DISTILLED), changed(DISTILLED, "grpo")
    if grpo and distilled:
        allowed = f"grpo, which has {grpo[0]}, or {DISTILLED}, which has {distilled[0]}"
        raise InputError("method", args.method, allowed)
    if grpo:
        return "grpo", f"{grpo[0]} is a setting of grpo"
    if texts:
        return DISTILLED, "scored texts are given, which it is distilled from before the first step"
    if teacher:
        return DISTILLED, "beside a teacher the reward's values are enough"
    shallow = all(part.kind == "bag" for part in rewards.parts)
    if shallow and not distilled and args.num_generations is None:
        return "ste", "the reward reads the embedding table itself, so its own gradient needs the fewest samples"
    without = [part for part in rewards.parts if part.differentiable is None]
    if without:
        return DISTILLED, f"reward {without[0].name!r} gives values only, so a gradient is distilled from them"
    return DISTILLED, "the reward has a gradient, but through a transformer one distilled from its values trains better"


@dataclass
class _Passes:
    """Numbers of ``total`` rows, in passes that are shuffled if there is a seed."""

    rows: int
    total: int
    seed: int | None

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        rng = None if self.seed is None else np.random.default_rng([self.seed, 1])
        for start in range(0, self.total, self.rows):
            order = range(self.rows) if rng is None else rng.permutation(self.rows).tolist()
            yield from order[: self.total - start]


_READ_ONCE = {
    *inspect.signature(Trainer).parameters, *inspect.signature(GradeTrainer).parameters, "backbone", "rewards",
    *_NOT_CALLED,
} - {"eval_dataset", "judge"}  # fmt: skip
"""What a trainer has from its construction; those two are read at each evaluation."""


def _added(args: GradeConfig, known: Iterable[str]) -> dict[str, Any]:
    """Attributes that were set on a config and are none of its own; what libraries keep there begins with _."""
    return {name: value for name, value in vars(args).items() if name not in known and not name.startswith("_")}


def _refuse_unread(**given: Any) -> None:
    """Refuse arguments of the Trainer's that have no effect here."""
    for name, value in given.items():
        if value is not None:
            raise InputError(name, value, "None: it has no effect here")


def _listed(value: Any) -> list[str]:
    return [] if not value else [value] if isinstance(value, str) else list(value)
