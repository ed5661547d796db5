"""How much of a reward scored texts explain, by their number: on other texts, and on completions of the reference."""

import time
from functools import partial
from typing import Annotated

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.data.reviews import load_reviews, prompt_text
from grade.data.texts import read_texts, reference_texts, score_texts
from grade.experiments.rewards import GROUP, FamilyName, Models, Policy, RewardName, load_subject, source_values
from grade.gradients.distilled.families import make_family
from grade.rewards.rewards import make_rewards
from grade.training.explained import explained_curve


class TextFits(Config):
    """Fits of a policy's reward from growing numbers of texts."""

    policy: Policy = "tiny"
    reward: RewardName = "gold"
    sizes: list[Annotated[int, Field(ge=16)]] = Field(min_length=1)  # windows of reviews, n
    families: list[FamilyName] = Field(["counts", "bag"], min_length=1)  # what the reward may be linear in
    completions: int = Field(256, ge=8, multiple_of=GROUP)  # of the reference, to measure on


def explained_table(models: Models, name: str, of: TextFits) -> pd.DataFrame:
    """R2 by family and number of texts: on texts of other prompts, and within prompts on the reference's own."""
    subject = load_subject(models, of.policy, [of.reward])
    backbone, length = subject.backbone, subject.length
    kept = dict(completion_tokens=length, encode=partial(models.encode, backbone))
    scored = partial(score_texts, backbone=backbone, rewards=make_rewards(subject.rewards[of.reward], backbone), **kept)
    windows = source_values(models, str(max(of.sizes)))
    texts = scored(read_texts(windows["texts"], backbone.tokenizer, models.prompt_tokens, length, max(of.sizes)))
    reviews = load_reviews(models.reviews_dir, "validation")[: of.completions // GROUP]
    asked = [{"prompt": prompt_text(review.text), "place": place} for place, review in enumerate(reviews)]
    drawn = reference_texts(asked, of.completions, backbone, min_new_tokens=subject.min_length, **kept)
    own = scored(sorted(drawn, key=lambda row: row["place"]))
    table = []
    for family in of.families:
        made = {family: make_family(family, backbone)}
        for n in sorted({min(size, len(texts)) for size in of.sizes}):
            start = time.perf_counter()
            (row,) = explained_curve(made, texts[:n], own, GROUP, [n]).to_dict("records")
            table.append(dict(
                subject=name, policy=of.policy, reward=of.reward, family=family, texts=n,
                held_out=row["held_out"], r2=row["policy"], slope=row["slope"], seconds=time.perf_counter() - start,
            ))  # fmt: skip
    return pd.DataFrame(table)
