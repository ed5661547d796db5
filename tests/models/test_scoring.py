"""Scores of given completions against the plain way, forward and backward, and one hand-checked alignment."""

import pytest
import torch
from conftest import VOCAB, make_backbone, make_prompts

from grade.errors import InputError
from grade.models.scoring import predicting_hidden, score

WHAT = ("logps", "entropy", "self_certainty")


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_the_distribution_that_predicts_the_token(temperature):
    backbone, prompts, (ids, mask) = make_backbone(), make_prompts(), completions()
    logp = (dense(backbone, prompts, ids) / temperature).log_softmax(-1)
    want = {
        "logps": logp.gather(2, ids.unsqueeze(2)).squeeze(2),
        "entropy": -(logp.exp() * logp).sum(-1),
        "self_certainty": -logp.mean(-1) - torch.tensor(float(VOCAB), dtype=logp.dtype).log(),
    }
    parameters = backbone.trainable_parameters()
    for name in WHAT:
        got = getattr(score(backbone, prompts, ids, mask, (name,), temperature), name)
        torch.testing.assert_close(got, want[name] * mask)
        grads = [torch.autograd.grad((x * mask).sum(), parameters, retain_graph=True) for x in (got, want[name])]
        torch.testing.assert_close(*grads)


def test_what_is_not_asked_for_is_not_there_and_nothing_needs_a_gradient_without_grad_mode():
    backbone, prompts, (ids, mask) = make_backbone(), make_prompts(), completions()
    with torch.no_grad():
        found = score(backbone, prompts, ids, mask, ("entropy",))
    assert found.logps is None and found.self_certainty is None and not found.entropy.requires_grad


def test_the_first_token_is_predicted_by_the_last_of_the_prompt():
    backbone, prompts, (ids, _) = make_backbone(), make_prompts(), completions()
    other = ids.clone()
    other[:, -1] = 3 + (other[:, -1] - 2) % (VOCAB - 3)  # the last token predicts nothing
    first = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)[:, -1]
    torch.testing.assert_close(predicting_hidden(backbone, prompts, ids)[:, 0], first)
    torch.testing.assert_close(predicting_hidden(backbone, prompts, ids), predicting_hidden(backbone, prompts, other))


@pytest.mark.parametrize(
    ("batch", "temperature", "error", "named"),
    [(2, 1.0, ValueError, "completions"), (3, 0.0, InputError, "temperature")],
)
def test_what_does_not_fit_is_refused(batch, temperature, error, named):
    backbone, prompts, (ids, mask) = make_backbone(), make_prompts(), completions(batch)
    with pytest.raises(error, match=named):
        score(backbone, prompts, ids, mask, temperature=temperature)
