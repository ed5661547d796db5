"""How much of a reward each family explains, and what that promises, before anything is trained.

Scored texts are fitted as training would (`grade.gradients.distilled.prior`), n of them for growing n. What is
explained is measured twice: on texts of prompts that were not fitted, and on completions of the reference, within their
prompts. The second is what counts: it says whether what was learned on the texts holds where the policy starts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field

from grade.config import SEEDS, Config
from grade.data.texts import WAIT, read_texts, reference_texts, score_texts
from grade.errors import InputError
from grade.gradients.distilled.families import ADDITIVE, Family, make_family
from grade.gradients.distilled.prior import FEWEST, fit_texts, observed, promise
from grade.gradients.distilled.ridge import calibrated, centred
from grade.gradients.losses import relative
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, ScoredTexts, encode_examples
from grade.results import progress
from grade.rewards.base import RewardScope
from grade.rewards.rewards import make_rewards
from grade.training.logs import token_table

STYLE = ["seaborn-v0_8-whitegrid", "tableau-colorblind10"]
"""Of the figure: matplotlib's own."""
BUDGETS = (2.0, 5.0, 10.0)
"""KL, in nats per completion, at which the promise is told."""
SMALLEST = 256
"""Texts at the beginning of the curve; each point doubles them."""


class ExplainConfig(Config):
    """A reward, texts, and the policy that is to be trained."""

    reward: str | list[str] = Field(description="as for grade train: file.py:function, hf:<id>, a folder; or a list")
    texts: str = Field(description="file or hub id: rows with prompt and completion, or with text")
    model: str = Field("models/backbone", description="folder or Hugging Face id of the base model")
    reward_weights: list[float] | None = Field(None, description="weight of each reward; null: 1 each")
    reward_scope: RewardScope = Field("prompt_and_completion", description="what classifiers and reward models score")
    max_prompt_length: int = Field(12, ge=1, description="prompts are cut to this many tokens, P; also of windows")
    max_completion_length: int = Field(24, ge=1, description="completions are cut to this many tokens, T")
    most_texts: int = Field(8192, ge=16, description="texts that are read, at most")
    families: list[Literal[ADDITIVE]] = Field(
        ["counts", "bag", "ngrams"], min_length=1, description=f"what it may be linear in: {', '.join(ADDITIVE)}"
    )
    reference: int = Field(256, ge=0, description="completions of the reference to measure on; 0: none")
    group: int = Field(4, ge=2, description="completions of each prompt")
    seed: int = Field(0, ge=0, lt=SEEDS, description="of the order of the texts, and of the reference's completions")


@dataclass(frozen=True)
class Explained:
    """What texts explain of a reward."""

    # rows (family, texts, held_out, policy, slope): R2 on texts of other prompts; R2 within prompts, and slope of the
    # reward on its prediction, on completions of the reference
    curve: pd.DataFrame
    # rows (rank, token, value): what the best family gives tokens that occur in the texts, less their mean. Rank 1 is
    # liked most, -1 least.
    tokens: pd.DataFrame
    promise: pd.DataFrame  # rows (kl, gain, reward, beta): what the policies that follow it reach, see `explain`
    best: str  # the family that explains most with all texts
    reward: float  # mean reward of the completions of the reference, or of the texts where there are none
    texts: int  # texts that were fitted

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return vars(self) | {
            name: json.loads(getattr(self, name).to_json(orient="records", double_precision=15))
            for name in ("curve", "tokens", "promise")
        }


def explain(config: ExplainConfig) -> Explained:
    """Score the texts, fit n of them for growing n, measure each fit.

    The promise is that of policies tilted token by token (`grade.gradients.distilled.prior.promise`), its gain times
    the slope that was measured on completions of the reference, at most 1.
    """
    if config.reference % config.group:
        raise InputError("reference", config.reference, f"a multiple of group = {config.group}")
    backbone = Backbone.load(config.model)
    rewards = make_rewards(config.reward, backbone, config.reward_weights, None, config.reward_scope)
    families = {name: make_family(name, backbone) for name in config.families}
    length = config.max_completion_length

    def encode(rows: Sequence[Mapping[str, Any]]) -> PromptBatch:
        return encode_examples(backbone.tokenizer, rows, config.max_prompt_length, "left", warn_raw=False)

    def scored(rows: Sequence[Mapping[str, Any]]) -> ScoredTexts:
        return score_texts(rows, backbone, rewards, completion_tokens=length, encode=encode)

    rows = read_texts(config.texts, backbone.tokenizer, config.max_prompt_length, length, config.most_texts)
    rows = [rows[i] for i in np.random.default_rng(config.seed).permutation(len(rows))]
    prompts = {json.dumps(row["prompt"]): row for row in reversed(rows)}  # of equal ones the first
    asked = dict(itertools.islice(reversed(prompts.items()), config.reference // config.group))
    rest = [row for row in rows if not any(row is other for other in asked.values())] if asked else rows
    if len(asked) * config.group < config.reference or len(rest) < FEWEST:
        allowed = f"at least {config.reference // config.group} different prompts for the reference, and {FEWEST} texts"
        raise InputError("texts", f"{len(rows)} from {config.texts}", allowed)
    texts, own = scored(rest), None
    if asked:
        drawn = reference_texts(
            list(asked.values()), config.reference, backbone, completion_tokens=length, encode=encode,
            seed=config.seed,
        )  # fmt: skip
        places = {prompt: place for place, prompt in enumerate(asked)}
        own = scored(sorted(drawn, key=lambda row: places[json.dumps(row["prompt"])]))
    curve = explained_curve(families, texts, own, config.group)
    fit = fit_texts(families, texts)
    best, shown = families[fit.family], texts[:SMALLEST] if own is None else own
    level, slopes = float(shown.rewards.nanmean()), curve[curve["family"] == fit.family]["slope"]
    share = 1.0 if own is None else min(max(float(slopes.iloc[-1]), 0.0), 1.0)
    promised = promise(best, fit.all, shown)
    table = [(kl, share * gain, level + share * gain, beta) for kl in BUDGETS for gain, beta in [promised.at(kl)]]
    counts = torch.bincount(texts.ids[texts.mask.bool()].cpu(), minlength=backbone.vocab_size)
    liked = best.typical(fit.all, observed(best, texts[:SMALLEST]))
    return Explained(
        curve, token_table(backbone.tokenizer, liked, counts),
        pd.DataFrame(table, columns=["kl", "gain", "reward", "beta"]), fit.family, level, len(texts),
    )  # fmt: skip


@torch.no_grad()
def explained_curve(
    families: Mapping[str, Family], texts: ScoredTexts, own: ScoredTexts | None, group: int, sizes: Sequence[int] = ()
) -> pd.DataFrame:
    """`Explained.curve`, by family and number of texts (default: doubling to all)."""
    powers = (SMALLEST << power for power in range(32))
    sizes = sizes or [size for size in powers if size < len(texts)] + [len(texts)]
    features = {} if own is None else {name: family.rows(observed(family, own)) for name, family in families.items()}
    rows = []
    for name, size in progress(list(itertools.product(families, sizes)), "fits", delay=WAIT):
        fit = fit_texts({name: families[name]}, texts[:size])
        rows.append({"family": name, "texts": size, "held_out": fit.choice.r2})
        if own is not None:
            predicted = families[name].predict(fit.all[0], features[name]).double().cpu()
            differences = relative(own.rewards.view(-1, group)).flatten().nan_to_num(0.0).cpu()
            r2, slope, _ = calibrated(centred(predicted, group), differences, group)
            rows[-1] |= {"policy": r2, "slope": slope}
    return pd.DataFrame(rows, columns=["family", "texts", "held_out", "policy", "slope"])


def figure(explained: Explained) -> Figure:
    """R2 against the number of texts by family, and the promised reward against KL."""
    with plt.style.context(STYLE):
        result, (left, right) = plt.subplots(1, 2, figsize=(10.0, 4.0), width_ratios=(3, 2), layout="constrained")
        curve, known = explained.curve, bool(explained.curve["policy"].notna().any())
        for number, (name, table) in enumerate(curve.groupby("family", sort=False)):
            color = f"C{number}"
            left.plot(table["texts"], table["held_out"], "--", color=color, label=None if known else name)
            left.plot(table["texts"], table["policy"], "o-", color=color, label=name if known else None)
        judged = "on completions of the reference (dashed: on other texts)" if known else "on texts of other prompts"
        left.set(
            xscale="log", xlabel="scored texts", ylabel=f"R2 {judged}", title="How much of the reward texts explain"
        )
        left.yaxis.label.set_size("small")
        sizes = curve["texts"].unique()
        left.set_xticks(sizes, [f"{size:,}" for size in sizes])
        left.minorticks_off()
        left.legend()
        points = explained.promise
        right.plot([0, *points["kl"]], [explained.reward, *points["reward"]], "o-")
        right.set(xlabel="KL (nats per completion)", ylabel="reward", title=f"What {explained.best} promises")
    return result
