"""One optimizer step to trace or to measure: the trainers' own code on a backbone without a task.

All code that allocates is the trainers': `grade.gradients`, the reward models, AdamW. Prompts and weights are random,
as memory does not depend on values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig

from grade.errors import InputError
from grade.gradients.engines import make_engine
from grade.gradients.learner import StepContext
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import PolicyGradient
from grade.gradients.unrolled import UNROLLED, stepwise
from grade.memory.models import build_backbone, model_config
from grade.memory.records import Category, LiveTracker
from grade.memory.settings import Microbatch, StepConfig, TracedConfig, generator_on
from grade.models.backbone import Backbone
from grade.rewards.model import HeadSettings, RewardModel

Program = Callable[[Callable[[], None]], None]
"""A whole step: adds gradients and calls the function it is given wherever an update of the parameters is due."""

_KL = 0.1
"""Weight of KL to the reference; any but 0 takes the same memory."""
_PAIR = torch.tensor([2.0, 0.0, 2.0], dtype=torch.float64)
"""Count, sum and sum of squares of a pair that PPO can whiten, in place of sums that are not known."""


@dataclass
class Step:
    """An optimizer step that can be run again and again."""

    backbone: Backbone
    optimizer: torch.optim.AdamW  # with its state, as in every step of a run but the first
    program: Program
    others: list[nn.Module]  # further modules that stay in memory: a reward model, a value head
    copies: list[Tensor]  # of the base, which only take up memory

    def run(self, tracker: LiveTracker | None = None) -> None:
        """Gradients, clipping and the optimizer's updates, as in training."""
        groups = [group["params"] for group in self.optimizer.param_groups]

        def apply() -> None:
            with self.backbone.phase("optimizer"):
                for group in groups:
                    torch.nn.utils.clip_grad_norm_(group, 1.0)
                self.optimizer.step()
            if tracker:
                tracker.tag((p.grad for group in groups for p in group), "gradients")

        self.optimizer.zero_grad(set_to_none=True)
        with self.backbone.watched_by(tracker):
            self.program(apply)
        self.optimizer.zero_grad(set_to_none=True)

    def existing(self) -> dict[Category, list[Tensor]]:
        """Tensors that exist before the step, by category."""
        lora = self.backbone.trainable_parameters() if self.backbone.peft is not None else []
        adapter = {id(p) for p in lora}
        tensors = [t for m in (self.backbone, *self.others) for t in (*m.parameters(), *m.buffers())]
        weights = [t for t in tensors if id(t) not in adapter]
        return {"weights": [*weights, *self.copies], "adapter": lora, "optimizer": states_of(self.optimizer)}


def build(
    config: TracedConfig, model: PretrainedConfig | None = None, device: str = "meta"
) -> tuple[Backbone, list[nn.Module]]:
    """Backbone and further modules of a step with random weights, on meta without data; frozen but for the adapter.

    ``model`` is the configuration of another model than ``config`` names: of fewer layers, for example.
    """
    model = model_config(config.model) if model is None else model
    length, most = config.prompt_tokens + config.max_new_tokens, getattr(model, "max_position_embeddings", None)
    if most and length > most:
        raise InputError("prompt_tokens + max_new_tokens", length, f"at most {most}, the context of {config.model}")
    backbone = build_backbone(
        model, config.dtype, config.adapter, config.lora, config.attention, device, config.train_bias,
        config.quantization_config,
    )  # fmt: skip
    if not isinstance(config, StepConfig):
        return backbone, []
    head = HeadSettings(hidden=64 if config.reward == "trunk" else 0)
    return backbone, [_RewardInPhase(config.reward, backbone, head).requires_grad_(False)]


def make_step(config: TracedConfig, backbone: Backbone, others: list[nn.Module]) -> Step:
    """The step on the modules from `build`, on real tensors or without data; its optimizer state is filled."""
    trained_too: list[nn.Module] = []
    if not isinstance(config, StepConfig):
        program = _updated_once(config.microbatch(backbone))
    elif not config.policy_gradient:
        program = _updated_once(_relaxed(config, backbone, others[0]))
    else:
        program, trained_too = _policy_gradient(config, backbone, others[0])
    groups = [backbone.trainable_parameters(), *(list(module.parameters()) for module in trained_too)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, weight_decay=0.0)
    _fill_state(optimizer)
    trained = {id(p) for p in groups[0]}
    base = [p for p in backbone.parameters() if config.adapter == "full" or id(p) not in trained]
    copies = [torch.empty_like(p, requires_grad=False) for _ in range(config.base_copies - 1) for p in base]
    return Step(backbone, optimizer, program, [*others, *trained_too], copies)


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that an optimizer keeps between steps."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that it has in every step of a run but the first."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _updated_once(microbatch: Microbatch) -> Program:
    def program(apply: Callable[[], None]) -> None:
        microbatch()
        apply()

    return program


def _relaxed(config: StepConfig, backbone: Backbone, reward: nn.Module) -> Microbatch:
    if config.explicit_freeing:
        engine = partial(stepwise, options=replace(UNROLLED, drop_lists=True))
    else:
        engine = make_engine(config.engine_name, config.hops, gradient_checkpointing=config.gradient_checkpointing)
    relaxation, objective, prompts = config.trainer.relaxation(), Objective(reward, _KL), config.prompts(backbone)
    layers = config.gradient_checkpointing and config.engine_name == "unrolled"  # replay has a switch of its own

    def run() -> None:
        with config.casting(backbone), backbone.checkpointed_layers(layers):
            engine(backbone, prompts, objective, relaxation, generator_on(backbone), 1.0)

    return run


def _policy_gradient(config: StepConfig, backbone: Backbone, reward: nn.Module) -> tuple[Program, list[nn.Module]]:
    """The step's code, and modules beside the backbone that are trained."""
    learner, objective = PolicyGradient(config.trainer, backbone), Objective(reward, _KL)
    group = config.trainer.group
    prompts = config.prompts(backbone, config.batch_size // group)

    def program(apply: Callable[[], None]) -> None:
        with config.casting(backbone):
            microbatches = [(prompts.repeat(group), generator_on(backbone))]
            learner.step(microbatches, objective, StepContext(1, apply, total=_total))

    return program, [] if learner.value_head is None else [learner.value_head]


def _total(values: Tensor) -> Tensor:
    """The sum over one process; a placeholder where there is no data and the method reads it."""
    without_data = values.is_meta or isinstance(values, FakeTensor)
    return _PAIR if without_data and values.shape == _PAIR.shape else values


class _RewardInPhase(RewardModel):
    def forward(self, embeds: Tensor, mask: Tensor) -> Tensor:
        with self.backbone.phase("reward"), _layers_not_checkpointed(self.backbone):
            return super().forward(embeds, mask)


@contextlib.contextmanager
def _layers_not_checkpointed(backbone: Backbone) -> Iterator[None]:
    """A reward's pass has the adapter off, but checkpointed layers would be recomputed with it on."""
    layers = [m for m in backbone.model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True
