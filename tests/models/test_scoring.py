"""Scores and states of given completions against the plain way, forward and backward."""

import pytest
import torch
from conftest import VOCAB, make_backbone, make_prompts

from grade.models.scoring import completion_logps


def completions(batch=3, new=4):
    ids = torch.randint(3, VOCAB, (batch, new), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 2:] = 0
    return ids, mask


def dense(backbone, prompts, ids):
    """log softmax at the positions before each token, from one pass over the whole sequence."""
    every = torch.cat([prompts.ids, ids], 1)
    mask = torch.cat([prompts.mask, torch.ones_like(ids)], 1)
    logits = backbone.head(backbone.hidden(backbone.embed(every), mask))
    return logits[:, prompts.ids.shape[1] - 1 : -1]


def test_scores_are_those_of_the_distribution_that_predicts_the_token():
    backbone, prompts, (ids, mask) = make_backbone(), make_prompts(), completions()
    logp = dense(backbone, prompts, ids).log_softmax(-1)
    got, want = completion_logps(backbone, prompts, ids, mask), logp.gather(2, ids.unsqueeze(2)).squeeze(2) * mask
    torch.testing.assert_close(got, want)
    parameters = backbone.trainable_parameters()
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), parameters, retain_graph=True) for x in (got, want)))
    with pytest.raises(ValueError, match="completions"):
        completion_logps(backbone, prompts, ids[:2], mask[:2])
