"""Held-out evaluation by ordinary sampling: reward, gold judge, KL.

Prompts, noise and batch order are fixed by a seed, so two policies are compared on the same prompts and the same noise,
and their difference can be paired. Every metric is a mean with its standard error and n.

Left out: perplexity and diversity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from grade.gradients.objective import Objective, RewardScope, sequence_mean
from grade.models.backbone import Backbone
from grade.models.prompts import decode, encode_prompts
from grade.models.sampling import generate
from grade.models.scoring import sequence_kl
from grade.stats import Estimate

if TYPE_CHECKING:
    from grade.rewards.gold import GoldJudge
    from grade.rewards.model import RewardModel


@dataclass(frozen=True)
class Evaluation:
    """Values of one policy on n held-out prompts, one completion each.

    Attributes:
        prompts: Prompt texts, as cut for the model.
        completions: Completion texts.
        reward: Trained reward [n].
        gold: Gold judge's P(positive) [n], NaN without a judge.
        kl: Mean KL(policy || reference) over each completion's tokens, in nats per token, on the first m prompts [m].
        kl_max: Largest absolute KL at any position of those completions.
    """

    prompts: list[str]
    completions: list[str]
    reward: np.ndarray
    gold: np.ndarray
    kl: np.ndarray
    kl_max: float

    def metrics(self) -> dict[str, float | int]:
        """Flat metrics ``val/...``: mean, standard error and n."""
        flat: dict[str, float | int] = {}
        for name, values in (("reward", self.reward), ("gold", self.gold), ("kl", self.kl)):
            if len(values) and np.isfinite(values).all():
                estimate = Estimate.of(values)
                key = "kl" if name == "kl" else f"{name}_mean"
                flat[f"val/{key}"] = estimate.mean
                flat[f"val/{name}_stderr"] = estimate.stderr
                flat[f"val/{name}_n"] = estimate.n
        return flat


@torch.no_grad()
def evaluate(
    backbone: Backbone,
    texts: Sequence[str],
    reward_model: RewardModel,
    judge: GoldJudge | None = None,
    *,
    max_new_tokens: int = 24,
    max_prompt_tokens: int = 12,
    min_new_tokens: int = 0,
    scope: RewardScope = "prompt_and_completion",
    batch_size: int = 64,
    kl_prompts: int = 64,
    seed: int = 1,
) -> Evaluation:
    """Sample one completion per prompt at temperature 1 and score it.

    Args:
        backbone: The policy.
        texts: Prompt texts.
        reward_model: The reward that training sees.
        judge: The gold judge, which scores the decoded prompt and completion.
        max_new_tokens: T.
        max_prompt_tokens: Prompts are cut to this many tokens.
        min_new_tokens: End-of-sequence is not sampled before this many tokens.
        scope: What the reward scores.
        batch_size: Prompts sampled at once.
        kl_prompts: Number of prompts, from the first, on which KL is computed (it needs a pass of the reference).
        seed: Seed of the noise.

    Returns:
        The values, prompt by prompt.
    """
    generator = torch.Generator(backbone.device).manual_seed(seed)
    objective = Objective(reward_model, scope=scope)
    prompts_out, completions, rewards, golds, kls, kl_max = [], [], [], [], [], 0.0
    for start in range(0, len(texts), batch_size):
        chunk = list(texts[start : start + batch_size])
        prompts = encode_prompts(backbone.tokenizer, chunk, max_prompt_tokens).to(backbone.device)
        ids, mask = generate(backbone, prompts, max_new_tokens, generator, min_new_tokens=min_new_tokens)
        rewards.append(objective.score(backbone, prompts, ids, mask).cpu())
        before = [decode(backbone.tokenizer, i, m) for i, m in zip(prompts.ids, prompts.mask, strict=True)]
        after = [decode(backbone.tokenizer, i, m) for i, m in zip(ids, mask, strict=True)]
        prompts_out += before
        completions += after
        if judge is not None:
            golds.append(judge.score([p + c for p, c in zip(before, after, strict=True)]))
        with_kl = min(len(chunk), kl_prompts - start)
        if with_kl > 0:
            rows = slice(0, with_kl)
            kl = sequence_kl(backbone, prompts[rows], ids[rows], mask[rows])
            kls.append(sequence_mean(kl, mask[rows]).cpu())
            kl_max = max(kl_max, float(kl.abs().max()))
    gold = np.concatenate(golds) if golds else np.full(len(texts), np.nan)
    kl = torch.cat(kls).double().numpy() if kls else np.zeros(0)
    return Evaluation(prompts_out, completions, torch.cat(rewards).double().numpy(), gold, kl, kl_max)
