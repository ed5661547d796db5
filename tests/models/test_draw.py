"""Drawing a token by inverse transform: its law, across blocks of the vocabulary, and that of a policy's positions."""

import numpy as np
import pytest
import torch
from conftest import EOS, VOCAB, generator, make_backbone, perturb_adapter
from scipy.stats import chisquare

from grade.models.prompts import PromptBatch
from grade.models.sampling import BLOCK, draw, forbid_eos, generate

DRAWS = 4_000


def chi_square(counts, probabilities):
    """P of a chi-square test of counts; values that are expected less than five times are one cell."""
    expected = probabilities * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    counts, expected = (np.append(cells[~small], cells[small].sum()) for cells in (counts, expected))
    return float(chisquare(counts[expected > 0], expected[expected > 0]).pvalue)


def one_prompt(times):
    return PromptBatch(torch.tensor([[1, 9, 4, 17]]), torch.ones(1, 4, dtype=torch.long)).repeat(times)


@torch.no_grad()
def second_token(backbone, least):
    """Probabilities of the second token after `one_prompt`, given that there is one, from whole passes."""
    prompt, model = one_prompt(VOCAB), backbone.model
    logits = model(input_ids=torch.cat([prompt.ids, torch.arange(VOCAB).unsqueeze(1)], 1)).logits.double()
    logits = forbid_eos(logits[:, -2:] / backbone.head.temperature, None, torch.tensor([[0], [1]]), least,
                        backbone.eos_token_ids).softmax(-1)  # fmt: skip
    start = logits[0, 0].clone()
    start[list(EOS)] = 0.0
    return start @ logits[:, 1] / start.sum()


@pytest.mark.parametrize(("least", "temperature"), [(0, 1.0), (2, 0.7)])
def test_a_position_has_the_policys_distribution(least, temperature):
    """Chi-square of the second token, which a cache has to get right; fixed seeds."""
    backbone = perturb_adapter(make_backbone()).view(temperature=temperature)
    ids, mask = generate(backbone, one_prompt(DRAWS), 2, generator(), min_new_tokens=least)
    want = second_token(backbone, least)
    with backbone.reference():
        base = second_token(backbone, least)
    counts = np.bincount(ids[:, 1][mask[:, 1].bool()].numpy(), minlength=VOCAB)
    assert chi_square(counts, want.numpy()) > 0.001
    assert chi_square(counts, base.numpy()) < 1e-9  # the adapter is on: its base is another policy
    if least:
        assert not torch.isin(ids, torch.tensor(EOS)).any()


def test_a_token_is_drawn_by_its_probability_across_blocks():
    """Vocabularies of several blocks, the last one not full; every seventh token is forbidden."""
    for vocab in (2 * BLOCK, 600):
        logits = 2 * torch.randn(1, vocab, generator=generator())
        logits[:, ::7] = -torch.inf
        numbers = torch.rand(20_000, generator=generator(1), dtype=torch.float64)
        tokens, logps = draw(logits.expand(20_000, vocab), numbers)
        counts = np.bincount(tokens.numpy(), minlength=vocab)
        assert chi_square(counts, logits[0].double().softmax(-1).numpy()) > 0.001
        torch.testing.assert_close(logps, logits[0].log_softmax(-1)[tokens])
        places = numbers * logits[0].exp().double().sum()
        ends = logits[0].exp().double().cumsum(0)
        near = (ends[tokens] - places).minimum(places - (ends - logits[0].exp().double())[tokens])
        assert near.min() > -1e-3  # the token's own stretch of the cumulative sum, to float32's rounding of its weights
