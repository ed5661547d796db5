"""Models, prompts and text to measure on; a tiny invented task by default."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from grade.data.reviews import load_reviews, prompt_text
from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Engine, GradientStep, Objective
from grade.gradients.replay import replay, replay_inputs
from grade.gradients.rollout import Rollout, sample
from grade.gradients.unrolled import checkpointed, unrolled
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.head import kl_divergence
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch, encode_prompts
from grade.rewards.model import RewardModel, load_reward
from grade.training.toy import toy_reviews, toy_task

TRAINED_RUN = "ste-0"
"""Name of the training run whose adapter stands for a policy after training."""


def load_models(
    backbone_dir: str, reward_dir: str, reviews_dir: str, dtype: str = "float32", device: str = "cpu"
) -> tuple[Backbone, RewardModel, list[str]]:
    """The base with a fresh adapter, a reward model and held-out texts; all tiny ones if no folder is named."""
    if not backbone_dir:
        task = toy_task(dtype=dtype)
        return task.backbone, task.reward_model, [r.text for r in toy_reviews(64, seed=1)]
    backbone = Backbone.load(backbone_dir, dtype, LoraSettings(), device=device)
    return backbone, load_reward(reward_dir, backbone).to(device), [r.text for r in load_reviews(reviews_dir, "test")]


@dataclass(frozen=True)
class Setting:
    """What the measurements of one run have in common."""

    backbone: Backbone
    prompts: PromptBatch
    objective: Objective
    relaxation: RelaxationConfig

    def relaxed(self, **changes: Any) -> Self:
        """The same with other values of the relaxation."""
        return replace(self, relaxation=self.relaxation.model_copy(update=changes))

    def noise(self, step: int = 0) -> torch.Generator:
        """The noise of a step, the same for every engine."""
        return torch.Generator(self.backbone.device).manual_seed(step)

    def run(self, engine: Engine) -> tuple[GradientStep, Tensor]:
        """One gradient, flattened, without an optimizer step."""
        self.backbone.zero_grad(set_to_none=True)
        step = engine(self.backbone, self.prompts, self.objective, self.relaxation, self.noise())
        grad = flatten(p.grad for p in self.backbone.trainable_parameters())
        self.backbone.zero_grad(set_to_none=True)
        return step, grad

    def rollout(self) -> Rollout:
        """A rollout with the same noise."""
        return sample(self.backbone, self.prompts, self.relaxation, self.noise())


def make_setting(
    backbone: Backbone, reward_model: RewardModel, texts: Sequence[str], batch: int, prompt: int, new: int, k: int,
    tau: float = 1.0,
) -> Setting:  # fmt: skip
    """A setting to measure on: real prompts that are exactly ``prompt`` tokens long, straight-through tokens."""
    chosen = _long_enough(backbone, map(prompt_text, texts), batch, prompt)
    prompts = encode_prompts(backbone.tokenizer, chosen, prompt).to(backbone.device)
    relaxation = RelaxationConfig(gumbel_topk=min(k, backbone.vocab_size), tau=tau, max_new_tokens=new)
    return Setting(backbone, prompts, Objective(reward_model, 0.1), relaxation)


def kl_at_start(setting: Setting) -> dict[str, float]:
    """KL of the untrained policy: aligned (0 for every method and position) and one position late, as published.

    The largest absolute aligned KL at any position of any method, and the mean KL of policy at t to reference at t + 1.
    """
    largest = 0.0
    for estimator in ("ste", "gumbel"):
        for engine in (unrolled, checkpointed, partial(replay, hops=0)):
            largest = max(largest, float(setting.relaxed(estimator=estimator).run(engine)[0].kl.abs().max()))
    rollout, backbone = setting.rollout(), setting.backbone
    with torch.no_grad(), backbone.reference():
        inputs, mask = replay_inputs(setting.prompts, backbone.embed(setting.prompts.ids), rollout.embeds)
        h = backbone.hidden(inputs, mask)[:, setting.prompts.ids.shape[1] - 1 :]
        late = kl_divergence(backbone.head, h[:, :-1].flatten(0, 1), backbone.head, h[:, 1:].flatten(0, 1))
    valid = rollout.completion_mask[:, 1:].flatten().to(late.dtype)
    return {"kl_at_init_max": largest, "kl_at_init_misaligned": float((late * valid).sum() / valid.sum())}


_TOY_SCALE = 0.05  # standard deviation of the toy adapter's B, which would otherwise be 0 and without effect


def load_policy(backbone_dir: str, adapter_dir: str, reviews_dir: str) -> tuple[Backbone, list[str]]:
    """A policy in float32 on the CPU, and held-out texts."""
    if backbone_dir:
        backbone = Backbone.load(backbone_dir, "float32", adapter=adapter_dir or None)
        return backbone, [r.text for r in load_reviews(reviews_dir, "test")]
    backbone = toy_task().backbone
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in backbone.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, _TOY_SCALE, generator=generator)
    return backbone, [r.text for r in toy_reviews(64, seed=1)]


def text_sequences(
    backbone: Backbone, texts: Sequence[str], batch: int, prompt: int, new: int
) -> tuple[PromptBatch, Tensor]:
    """Prompts [B, P] without padding, and completions [B, T]: the first P + T tokens of texts that are long enough."""
    length = prompt + new
    rows = backbone.tokenizer(_long_enough(backbone, texts, batch, length))["input_ids"]
    ids = torch.tensor([row[:length] for row in rows], device=backbone.device)
    return PromptBatch(ids[:, :prompt], torch.ones_like(ids[:, :prompt])), ids[:, prompt:]


def _long_enough(backbone: Backbone, texts: Iterable[str], batch: int, tokens: int) -> list[str]:
    """The first texts that have so many tokens."""
    long = (text for text in texts if len(backbone.tokenizer(text)["input_ids"]) >= tokens)
    if len(chosen := list(itertools.islice(long, batch))) < batch:
        raise InputError("tokens", tokens, f"a length that {batch} of the texts have")
    return chosen
