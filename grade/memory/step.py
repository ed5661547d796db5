"""One optimizer step to trace or to measure: the trainers' own code on a backbone without a task.

All code that allocates is the trainers': `grade.gradients`, the reward models, AdamW. Prompts and weights are random,
as memory does not depend on values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig

from grade.errors import InputError
from grade.gradients.distilled.families import Family, Observed
from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.distilled.offline import OfflineGradient
from grade.gradients.distilled.ridge import Choice
from grade.gradients.distilled.store import Fit, growth, joined
from grade.gradients.engines import make_engine
from grade.gradients.methods import DISTILLED, OFFLINE, TEACHER, MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import Completions, PolicyGradient, StepContext
from grade.gradients.teacher import TeacherGradient
from grade.gradients.unrolled import UNROLLED, stepwise
from grade.memory.models import build_backbone, model_config
from grade.memory.records import Category, LiveTracker
from grade.memory.rewards import make_reward, make_teacher, reward_context, teacher_config, teacher_weights
from grade.memory.settings import Microbatch, StepConfig, TracedConfig, generator_on
from grade.models.backbone import Backbone
from grade.models.head import wide
from grade.models.prompts import PromptBatch
from grade.models.sharding import local_part
from grade.models.teacher import Teacher
from grade.rewards.rewards import Rewards, TeacherReward

Program = Callable[[Callable[[], None]], None]
"""A whole step: adds gradients and calls the function it is given wherever an update of the parameters is due."""

_PLACEHOLDERS = {
    (3,): torch.tensor([2.0, 0.0, 2.0], dtype=torch.float64),
    (2,): torch.tensor([1.0, 0.5], dtype=torch.float64),
}
"""What methods read of sums: count, sum and sum of squares of a pair that PPO can whiten; a square and the shares of
two equal parts, for the blend of `distilled`."""


@dataclass
class Step:
    """An optimizer step that can be run again and again."""

    backbone: Backbone
    optimizer: torch.optim.AdamW  # with its state, as in every step of a run but the first
    program: Program
    others: list[nn.Module]  # further modules that stay in memory: a reward model, a teacher, a value head
    copies: list[Tensor]  # of the base, which only take up memory
    kinds: int = 1  # of steps that a run has, run in turn: the largest counts, of operations and traffic the mean

    def run(self, tracker: LiveTracker | None = None) -> None:
        """Gradients, their sum over processes, clipping and the optimizer's updates, as in training."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        parameters = [p for group in groups for p in group]

        def apply() -> None:
            with self.backbone.phase("optimizer"):
                for p in parameters if dist.is_initialized() else ():
                    if p.grad is not None:
                        p.grad = p.grad.clone()
                        dist.all_reduce(p.grad)
                for group in groups:
                    torch.nn.utils.clip_grad_norm_(group, 1.0)
                self.optimizer.step()
            if tracker:
                tracker.tag((p.grad for p in parameters), "gradients")

        for _ in range(self.kinds):
            self.optimizer.zero_grad(set_to_none=True)
            with self.backbone.watched_by(tracker):
                self.program(apply)
            self.optimizer.zero_grad(set_to_none=True)
        if tracker:
            tracker.flops, tracker.received = tracker.flops // self.kinds, tracker.received // self.kinds

    def existing(self) -> dict[Category, list[Tensor]]:
        """Tensors that exist before the step, by category."""
        lora = self.backbone.trainable_parameters() if self.backbone.peft is not None else []
        adapter = {id(p) for p in lora}
        tensors = [t for m in (self.backbone, *self.others) for t in (*m.parameters(), *m.buffers())]
        weights = [local_part(t) for t in tensors if id(t) not in adapter]
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return {"weights": [*weights, *self.copies], "adapter": lora, "optimizer": states}


def build(
    config: TracedConfig, model: PretrainedConfig | None = None, device: str = "meta"
) -> tuple[Backbone, list[nn.Module]]:
    """Backbone and further modules of a step with random weights, on meta without data; frozen but for the adapter.

    ``model`` is the configuration of another model than ``config`` names: of fewer layers, for example.
    """
    model = model_config(config.model) if model is None else model
    backbone = build_backbone(model, config.dtype, config.adapter, config.lora, config.attention, device)
    length, most = config.prompt_tokens + config.max_new_tokens, context_of(config)
    if most is not None and length > most:
        allowed = f"at most {most} (context of the model, the reward, the teacher)"
        raise InputError("prompt_tokens + max_new_tokens", length, allowed)
    if not isinstance(config, StepConfig):
        return backbone, []
    if not config.policy_gradient:
        config.trainer.relaxation().check(backbone.vocab_size)
    others = [] if config.teacher is None else [teacher_weights(config, backbone)]
    if config.method != TEACHER:
        others.insert(0, make_reward(config.reward, backbone, None if config.policy_gradient else config.method))
    return backbone, others


def context_of(config: TracedConfig) -> int | None:
    """Prompt and completion, in tokens, that the models of a step can read; None if there is no limit."""
    lengths = [getattr(model_config(config.model), "max_position_embeddings", None)]
    if isinstance(config, StepConfig):
        lengths.append(reward_context(config.reward))
        if config.teacher is not None:
            own = getattr(teacher_config(config), "max_position_embeddings", None)
            lengths.append(own and own - config.teacher_context_tokens)
    return min((n for n in lengths if n), default=None)


def make_step(config: TracedConfig, backbone: Backbone, others: list[nn.Module]) -> Step:
    """The step on the modules from `build`, on real tensors or without data; its optimizer state is filled."""
    trained_too: list[nn.Module] = []
    if not isinstance(config, StepConfig):
        program = _accumulated(config, config.microbatch(backbone))
    elif not config.policy_gradient:
        program = _accumulated(config, _relaxed(config, backbone, others[0]))
    else:
        program, trained_too = _policy_gradient(config, backbone, others)
    groups = [backbone.trainable_parameters(), *(list(module.parameters()) for module in trained_too)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, weight_decay=0.0)
    fill_state(optimizer)
    trained = {id(p) for p in groups[0]}
    base = [p for p in backbone.parameters() if config.adapter == "full" or id(p) not in trained]
    copies = [torch.empty_like(p, requires_grad=False) for _ in range(config.base_copies - 1) for p in base]
    kinds = 2 if isinstance(config, StepConfig) and config.method == DISTILLED else 1
    return Step(backbone, optimizer, program, [*others, *trained_too], copies, kinds)


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that it has in every step of a run but the first."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _accumulated(config: TracedConfig, microbatch: Microbatch) -> Program:
    def program(apply: Callable[[], None]) -> None:
        for _ in range(config.gradient_accumulation_steps):
            microbatch()
        apply()

    return program


def _relaxed(config: StepConfig, backbone: Backbone, reward: nn.Module) -> Microbatch:
    if config.explicit_freeing:
        engine = partial(stepwise, options=replace(UNROLLED, drop_lists=True))
    else:
        engine = make_engine(config.engine_name, config.hops, gradient_checkpointing=config.gradient_checkpointing)
    relaxation, objective = config.trainer.relaxation(), Objective(reward, config.kl_coef)
    prompts, scale = config.prompts(backbone), 1 / config.gradient_accumulation_steps
    layers = config.gradient_checkpointing and config.engine_name == "unrolled"  # replay has a switch of its own

    def run() -> None:
        with config.casting(backbone), backbone.checkpointed_layers(layers):
            engine(backbone, prompts, objective, relaxation, generator_on(backbone), scale)

    return run


def _policy_gradient(
    config: StepConfig, backbone: Backbone, others: list[nn.Module]
) -> tuple[Program, list[nn.Module]]:
    """The step's code, and modules beside the backbone that are trained."""
    trainer, count = config.trainer, config.gradient_accumulation_steps
    teacher = None if config.teacher is None else make_teacher(config, backbone, others[-1])
    if teacher is None or trainer.hinted:
        objective = Objective(others[0], config.kl_coef)
    else:
        *rewards, _ = others
        parts = [*(Objective(reward).reward_model for reward in rewards), TeacherReward(teacher)]
        objective = Objective(Rewards(parts, dtype=wide(backbone.dtype)), config.kl_coef, teacher=teacher)
    prompts = config.prompts(backbone, config.batch_size // trainer.group)
    if config.method == DISTILLED:
        learner = _DistilledWithoutData(trainer, backbone, prompts, teacher)
        more = [learner.kept]
    elif config.method == OFFLINE:
        learner, more = _OfflineWithoutData(trainer, backbone, prompts), []
    elif config.method == TEACHER:
        learner, more = TeacherGradient(trainer, backbone), []
    else:
        learner = PolicyGradient(trainer, backbone)
        more = [learner.value_head] if learner.value_head is not None else []

    def program(apply: Callable[[], None]) -> None:
        with config.casting(backbone):
            given = (_texts(config, prompts) if config.method == OFFLINE else (prompts, generator_on(backbone))
                     for _ in range(count))  # fmt: skip
            learner.step(given, objective, StepContext(count, apply, total=_total))

    return program, more


def _texts(config: StepConfig, prompts: PromptBatch) -> Completions:
    """Texts of full length."""
    ids = prompts.ids.new_zeros(len(prompts), config.max_new_tokens)
    return Completions(prompts, ids, torch.ones_like(ids))


def _total(values: Tensor) -> Tensor:
    """The sum over one process; a placeholder where there is no data and the method reads it."""
    without_data = values.is_meta or isinstance(values, FakeTensor)
    return _PLACEHOLDERS.get(tuple(values.shape), values) if without_data else values


def _seen(config: MethodConfig, backbone: Backbone, prompts: PromptBatch, families: Iterable[Family]) -> Observed:
    """What families of features read of one completion of full length."""
    ids = torch.zeros(1, config.max_completion_length, dtype=torch.long, device=backbone.device)
    return Observed.of(backbone, families, prompts[:1], ids, torch.ones_like(ids))


class _OfflineWithoutData(OfflineGradient):
    """The method with a fit whose values are not looked at, of the last family; own completions need less."""

    def __init__(self, config: MethodConfig, backbone: Backbone, prompts: PromptBatch) -> None:
        super().__init__(config, backbone)
        *_, (name, family) = self.families.items()
        row = family.rows(_seen(config, backbone, prompts, [family]))
        weights = family.weights(torch.zeros(1, 1, dtype=torch.float64, device=row.device), row)
        self.prior = Fit(name, weights, Choice(1.0, 0.5, 1.0, 0.1))


class _DistilledWithoutData(DistilledGradient):
    """The method with a full window, and fits whose values are not looked at: what it keeps and allocates in any step.

    Included: sampling, scoring, features, the rows of all families of a full window and of as many completions as may
    wait, their copy when these are entered and the products with them, the weights of a fit without each of the step's
    groups, and the gradient, in turn with the two parts apart, as in every fourth step, and at once: the first divides
    a microbatch, the second has one graph of both parts. The last family is the one used. Left out: what is on the CPU
    for any device, that is Gram matrices and factors (8 bytes times the square of the window for each family) and lists
    of tokens.
    """

    def __init__(self, config: MethodConfig, backbone: Backbone, prompts: PromptBatch, teacher: Teacher | None) -> None:
        super().__init__(config, backbone, teacher)
        self.kept, self.turn = nn.Module(), 0
        seen = _seen(config, backbone, prompts, self.families.values())
        for name, family in self.families.items():
            row = family.rows(seen)
            self.kept.register_buffer(f"rows_{name}", row.new_zeros(self.store.window, *row.shape[1:]))
            waiting = math.ceil(growth(self.store.window) / 2)
            self.kept.register_buffer(f"waiting_{name}", row.new_zeros(waiting, *row.shape[1:]))
            for number, signs in enumerate(getattr(family, "_signs", ())):
                self.kept.register_buffer(f"signs_{name}_{number}", signs)

    @torch.no_grad()
    def update_fit(self, samples: list[Sample], context: StepContext) -> None:
        """Enter rows and make the weights of a fit."""
        groups = sum(len(s.reward) for s in samples) // self.config.group
        self.steps, self.turn = self.turn, 1 - self.turn
        for name, family in self.families.items():
            new = joined([getattr(self.kept, f"waiting_{name}"), *(s.rows[name] for s in samples)])
            rows = joined([getattr(self.kept, f"rows_{name}"), new])
            if new.dtype != torch.long:  # buckets are multiplied on the CPU
                family.gram(new, rows)
            setattr(self.kept, f"rows_{name}", rows[len(new) :])  # a view, as in the store
            setattr(self.kept, f"waiting_{name}", new[: -sum(len(s.reward) for s in samples)])
        *_, name = self.families
        rows = getattr(self.kept, f"rows_{name}")
        alpha = torch.zeros(1 + groups, len(rows), dtype=torch.float64, device=rows.device)
        self.fit = Fit(name, self.families[name].weights(alpha, rows), Choice(1.0, 0.5, 1.0, 0.1))
