"""What completions are like, beside their reward: an outside judge, fluency under the reference, and diversity.

A policy that is pushed far from its reference writes text that the reference finds unlikely (perplexity rises) or says
the same again and again (perplexity and distinct-n fall). Both depend on how many completions are looked at and how
long they are: compare only at equal n and length.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.prompts import encode_prompts
from grade.models.sampling import generate
from grade.models.scoring import completion_logps


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct-n (Li et al. 2016, arXiv:1510.03055): different n-grams of lower-case words over all, or 0.

    >>> distinct_n(["a b a b", "A b"], 1), distinct_n(["a b a b", "A b"], 2)
    (0.3333333333333333, 0.5)
    """
    words = [text.lower().split() for text in texts]
    grams = [tuple(row[i : i + n]) for row in words for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


@functools.cache
def _lexicon() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError:
        raise InputError("outside judge", "vaderSentiment", "an installed package: pip install -e '.[test]'") from None
    return SentimentIntensityAnalyzer()


def outside(texts: Sequence[str]) -> np.ndarray:
    """Sentiment [n] in -1..1 by a judge to which nothing here was fitted: VADER's lexicon and its rules.

    Hutto and Gilbert 2014, ``vaderSentiment``; it knows words like "not", "but" and "very".

    >>> outside(["A wonderful film.", "Not a wonderful film.", "A film."]).round(2).tolist()
    [0.57, -0.46, 0.0]
    """
    return np.array([_lexicon().polarity_scores(text)["compound"] for text in texts])


def qualities(texts: Sequence[str]) -> dict[str, float]:
    """What texts are like on average: ``outside``'s sentiment, ``distinct`` bigrams, ``length`` in words."""
    words = sum(len(text.split()) for text in texts)
    return {"outside": outside(texts).mean(), "distinct": distinct_n(texts, 2), "length": words / len(texts)}


@torch.no_grad()
def reference_nats(
    backbone: Backbone, texts: Sequence[str], max_new_tokens: int, max_prompt_tokens: int, min_new_tokens: int = 0,
    batch_size: int = 64,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Minus the reference's log-likelihood of the policy's completions, one per prompt, in nats [n], and tokens [n]."""
    generator, nats, tokens = torch.Generator(backbone.device).manual_seed(2), [], []
    for start in range(0, len(texts), batch_size):
        chunk = list(texts[start : start + batch_size])
        prompts = encode_prompts(backbone.tokenizer, chunk, max_prompt_tokens).to(backbone.device)
        ids, mask = generate(backbone, prompts, max_new_tokens, generator, min_new_tokens=min_new_tokens)
        with backbone.reference():
            logps = completion_logps(backbone, prompts, ids, mask)
        nats.append(-logps.sum(-1).double().cpu())
        tokens.append(mask.sum(-1).double().cpu())
    return torch.cat(nats).numpy(), torch.cat(tokens).numpy()


def perplexity(nats: np.ndarray, tokens: np.ndarray) -> float:
    """``exp(sum of nats / sum of tokens)``.

    >>> import numpy as np
    >>> round(perplexity(np.log([8.0, 2.0]), np.array([3, 1])), 12)
    2.0
    """
    return float(np.exp(nats.sum() / tokens.sum()))
