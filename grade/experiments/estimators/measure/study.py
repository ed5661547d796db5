"""When do reward gradients win? Gradient quality on a language model, without the exact gradient.

At fixed weights and prompts, repeated batches give a policy gradient (`rloo`, unbiased, the stand-in for the truth)
and the relaxed gradients of the same completions; `grade.experiments.moments` turns them into
signal-to-noise, cosine, worth, crossover and the gain of a blend. Gradients of all parameters are kept through a
sketch, which is the same for all rows and estimators and distorts cosines by about one per cent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from torch import nn

from grade.data.reviews import load_reviews, prompt_text
from grade.errors import InputError
from grade.experiments.estimators.measure.enumerated import tiny_rewards
from grade.experiments.estimators.measure.rows import Rows, Setting, Variant
from grade.experiments.intervals import interval
from grade.experiments.moments import (
    Moments,
    crossover,
    hybrid_gain,
    moments,
    pair_moments,
    sketch,
    worth_interval,
)
from grade.experiments.setting import load_policy
from grade.experiments.shallow import ShallowReward
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import encode_prompts
from grade.rewards.model import load_reward
from grade.training.toy import toy_reviews

UNBIASED = "rloo"
SKETCH = 2**15
"""Numbers that are kept of a gradient."""


def load_setting(
    backbone_dir: str, adapter_dir: str, reviews_dir: str, reward_dirs: dict[str, str], depths: Sequence[int],
    variants: Sequence[Variant], prompts: int, prompt_tokens: int, group: int, length: int,
    depth_reviews: int = 400, dtype: str = "float32", device: str = "cpu",
) -> Setting:  # fmt: skip
    """A policy, prompts and rewards to take gradients of."""
    if backbone_dir:
        lora = None if adapter_dir else LoraSettings()
        backbone = Backbone.load(backbone_dir, dtype, lora, adapter_dir or None, device)
        rewards: dict[str, nn.Module] = {name: load_reward(path, backbone).to(device) for name, path in
                                         reward_dirs.items()}  # fmt: skip
        texts, labelled = load_reviews(reviews_dir, "policy"), load_reviews(reviews_dir, "reward") if depths else []
    else:
        backbone, _ = load_policy("", "", "")
        rewards, texts, labelled = tiny_rewards(backbone), toy_reviews(64, seed=1), toy_reviews(200, seed=2)
    for depth in depths:
        data, held = labelled[:depth_reviews], labelled[depth_reviews : depth_reviews + depth_reviews // 4]
        if not held:
            raise InputError("depth_reviews", depth_reviews, f"less than {len(labelled)}, the size of the split")
        rewards[f"trunk{depth}"] = ShallowReward(backbone, depth, data, held, tokens=64 if backbone_dir else 12)
    if len(texts) < prompts:
        raise InputError("prompts", prompts, f"at most {len(texts)}, the size of the split")
    batch = encode_prompts(backbone.tokenizer, [prompt_text(r.text) for r in texts[:prompts]], prompt_tokens)
    size = sum(p.numel() for p in backbone.trainable_parameters())
    return Setting(backbone, batch.to(backbone.device), group, length, rewards, variants, (UNBIASED,),
                   project=sketch(size, SKETCH))  # fmt: skip


def _all_moments(rows: Rows) -> dict[tuple[str, str], Moments]:
    """Moments of every reward and estimator, against the unbiased one's rows."""
    return {(reward, name): moments(gradients, rows.gradients[reward, UNBIASED], rows.size)
            for (reward, name), gradients in rows.gradients.items()}  # fmt: skip


def summary(rows: Rows) -> pd.DataFrame:
    """What one sample of each estimator is worth.

    One row per reward and estimator: worth in samples of the unbiased one, at n = 1, with its 95 % interval;
    crossover batch size with its interval; snr; cosine of one sample, of 64 and of the mean; n samples in all.
    """
    by_key, table = _all_moments(rows), []
    for (reward, name), m in by_key.items():
        base = by_key[reward, UNBIASED]
        value, cross = worth_interval(m, base), interval(crossover(m, base), geometric=True)
        table.append(dict(
            reward=reward, estimator=name, worth=value.value, worth_low=value.low, worth_high=value.high,
            crossover=cross.value, crossover_low=cross.low, crossover_high=cross.high,
            snr=m.snr[0], cosine_1=m.cosine(1)[0], cosine_64=m.cosine(64)[0], cosine_mean=m.cosine(math.inf)[0],
            n=len(rows.gradients[reward, name]) * rows.size,
        ))  # fmt: skip
    return pd.DataFrame(table)


def speed_table(rows: Rows) -> pd.DataFrame:
    """What a second of each estimator is worth.

    Columns reward, estimator, milliseconds of a sample, and worth_per_second: worth per second of computing over
    that of the unbiased estimator.
    """
    table = []
    for row in summary(rows).itertuples():
        seconds = rows.seconds[row.reward, row.estimator]
        rate = row.worth * rows.seconds[row.reward, UNBIASED] / seconds
        table.append(dict(reward=row.reward, estimator=row.estimator, milliseconds=1e3 * seconds / rows.size,
                          worth_per_second=rate))  # fmt: skip
    return pd.DataFrame(table)


def cosine_curves(rows: Rows, batches: Sequence[int]) -> pd.DataFrame:
    """Expected cosine with the true gradient against the number of samples.

    Columns reward, estimator, n, cosine, low, high (95 %; None where there is no interval).
    """
    table = []
    for (reward, name), m in _all_moments(rows).items():
        for n in batches:
            cosine = interval(m.cosine(n))
            table.append(dict(reward=reward, estimator=name, n=n, cosine=cosine.value, low=cosine.low,
                              high=cosine.high))  # fmt: skip
    return pd.DataFrame(table)


def hybrid_table(rows: Rows, relaxed: str, batches: Sequence[int]) -> pd.DataFrame:
    """Gain of the blend over the better of its parts.

    Columns reward, n, ratio of expected cosines (blend over the better part, cross-fitted) with low and high, and
    share, the relaxed gradient's weight over the sum of weights.
    """
    table = []
    for reward in dict.fromkeys(reward for reward, _ in rows.gradients):
        pg, other = rows.gradients[reward, UNBIASED], rows.gradients[reward, relaxed]
        pair = pair_moments(pg, other, rows.size)
        for n in batches:
            gain = hybrid_gain(pg, other, n, rows.size)
            a, b = pair.weights(n)
            table.append(dict(reward=reward, n=n, ratio=gain.value, low=gain.low, high=gain.high,
                              share=b / (a + b) if a + b > 0 else 0.0))  # fmt: skip
    return pd.DataFrame(table)


def spread_table(rows: Rows) -> pd.DataFrame:
    """The paper's "gradient variance" beside the variance of the gradient.

    Columns reward, estimator, tensor_spread (the paper's: sd over parameter tensors of norms), sd (square root of
    the trace of the covariance of a row's gradient), norm (root mean square of a row's), relative: variance over
    the squared mean (1 / SNR of a row), which does not change with the gradient's scale.
    """
    table = []
    for (reward, name), gradients in rows.gradients.items():
        m = moments(gradients, gradients, rows.size)
        variance = m.noise[0] / rows.size
        spread = float(rows.norms[reward, name].double().std(1, correction=0).mean())
        table.append(dict(reward=reward, estimator=name, tensor_spread=spread, sd=math.sqrt(variance),
                          norm=math.sqrt(m.norm2[0] + variance),
                          relative=variance / m.norm2[0] if m.norm2[0] > 0 else np.inf))  # fmt: skip
    return pd.DataFrame(table)
