"""The fit on scored text against dense ridge regression, and what it promises against dense formulas."""

import numpy as np
import pytest
import torch
from conftest import VOCAB, make_backbone

from grade.errors import InputError
from grade.gradients.distilled.families import FAMILIES, make_family
from grade.gradients.distilled.prior import fit_texts, promise
from grade.models.prompts import PromptBatch, ScoredTexts
from grade.models.scoring import predicting_hidden

TEXTS, PROMPT, LENGTH = 60, 3, 5


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


def texts(seed=0, rewards=None, copied=0.0):
    """Random texts; ``copied`` is the chance that a completion's token is one of its prompt's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (TEXTS, PROMPT + LENGTH), generator=generator)
    prompt, completion = ids[:, :PROMPT], ids[:, PROMPT:]
    places = torch.randint(PROMPT, completion.shape, generator=generator)
    same = torch.rand(completion.shape, generator=generator) < copied
    completion = torch.where(same, prompt.gather(1, places), completion)
    mask = torch.ones_like(completion)
    mask[0, 3:] = 0
    worth = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(TEXTS, generator=generator, dtype=torch.float64)
    values = (worth[completion] * mask).sum(1) if rewards is None else rewards(worth, prompt)
    return ScoredTexts(PromptBatch(prompt, torch.ones_like(prompt)), completion, mask, values + noise)


def counts(ids, mask):
    return np.stack([np.bincount(row[kept.bool()], minlength=VOCAB) for row, kept in zip(ids, mask, strict=True)])


@pytest.mark.parametrize("name", ["counts", "bag"])
def test_weights_are_those_of_ridge_regression_on_completion_and_prompt(backbone, name):
    scored, family = texts(), make_family(name, backbone)
    prior = fit_texts({name: family}, scored)
    features = counts(scored.ids, scored.mask)
    if name == "bag":  # dense: another solver
        features = family.matrix(family.rows(scored.ids, scored.mask))
    x = np.hstack([features, counts(scored.prompts.ids, scored.prompts.mask)]).astype(float)
    x, y = x - x.mean(0), scored.rewards.numpy() - scored.rewards.numpy().mean()
    size = features.shape[1]
    weights = np.linalg.solve(x.T @ x + prior.choice.penalty * np.eye(x.shape[1]), x.T @ y)[:size]
    assert np.allclose(prior.weights[0].double(), weights, atol=1e-4 * np.abs(weights).max())
    assert prior.choice.r2 > 0.3  # a linear reward with 60 texts of 5 of some 30 tokens


def test_what_the_prompt_explains_is_not_put_down_to_the_completion(backbone):
    """The reward is of the prompt alone, and completions repeat its tokens."""
    scored = texts(copied=0.9, rewards=lambda worth, prompt: worth[prompt].sum(1))
    prior = fit_texts({"counts": make_family("counts", backbone)}, scored)
    naive = np.linalg.lstsq(counts(scored.ids, scored.mask), scored.rewards.numpy(), rcond=None)[0]
    assert prior.all.abs().max() < 0.35 * np.abs(naive).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_fitted_in_parts(backbone, name):
    scored, family = texts(), make_family(name, backbone)
    prior = fit_texts({name: family}, scored, batch=7)
    whole = fit_texts({name: family}, scored, batch=TEXTS)
    assert torch.allclose(prior.weights, whole.weights, rtol=1e-6, atol=1e-9)
    values = family.token_values(prior.all, scored.ids, scored.mask).sum(1)
    assert np.corrcoef(values.double(), scored.rewards)[0, 1] > 0.5


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: t[:5], "5 with a reward"),
        (lambda t: ScoredTexts(t.prompts, t.ids, t.mask, t.rewards * torch.nan), "0 with a reward"),
        (lambda t: ScoredTexts(t.prompts, t.ids, t.mask, t.rewards * 0 + 0.5), "reward 0.5"),
        (lambda t: ScoredTexts(t.prompts[[0] * TEXTS], t.ids, t.mask, t.rewards), "one prompt"),
    ],
)
def test_texts_that_say_nothing_are_refused(backbone, change, says):
    with pytest.raises(InputError, match=says):
        fit_texts({"counts": make_family("counts", backbone)}, change(texts()))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_promise_is_kl_and_gain_of_the_tilted_policy(backbone, name):
    scored, family = texts(), make_family(name, backbone)
    fit = fit_texts({name: family}, scored)
    promised = promise(family, fit.all, scored)
    values = family.values(fit.all, scored.ids)
    s = torch.stack([values(place.unsqueeze(0)) for place in torch.arange(TEXTS * LENGTH)]).view(TEXTS, LENGTH, -1)
    with torch.no_grad(), backbone.reference():
        logp = backbone.head(predicting_hidden(backbone, scored.prompts, scored.ids)).log_softmax(-1)
    for number in (0, 12, 23):
        tilt = promised.weights[number]
        tilted = (logp + tilt * s).log_softmax(-1)
        kl = (tilted.exp() * (tilted - logp)).sum(-1) * scored.mask
        gain = ((tilted.exp() - logp.exp()) * s).sum(-1) * scored.mask
        assert float(promised.kl[number]) == pytest.approx(float(kl.sum(1).mean()), rel=1e-6)
        assert float(promised.gain[number]) == pytest.approx(float(gain.sum(1).mean()), rel=1e-6)
    gain, beta = promised.at(float(promised.kl[12]))
    assert gain == pytest.approx(float(promised.gain[12])) and beta == pytest.approx(
        float(scored.mask.sum(1).double().mean()) / float(promised.weights[12])
    )
