"""One-token counterfactuals: which are drawn, what is asked of the reward, and what the fit makes of the answers."""

import zlib

import numpy as np
import pytest
import torch
from conftest import EOS, VOCAB, ToyReward, make_prompts
from scipy.stats import chisquare
from sklearn.linear_model import Ridge

from grade.errors import InputError
from grade.gradients.distilled import substitutions as module
from grade.gradients.distilled.families import ADDITIVE, Observed
from grade.gradients.distilled.learner import DistilledGradient
from grade.gradients.distilled.ridge import Choice
from grade.gradients.distilled.store import Fit
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import StepContext
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden
from grade.rewards.base import EmbeddingReward, Reward

GROUP, LENGTH, EARLY = 4, 6, 2


class Spy(EmbeddingReward):
    """Keeps what it scored."""

    def __init__(self):
        super().__init__(ToyReward(16), "prompt_and_completion")
        self.texts = []

    def score(self, policy, prompts, ids, mask):
        rewards = super().score(policy, prompts, ids, mask)
        self.texts += list(zip(prompts.ids.tolist(), torch.where(mask.bool(), ids, -1).tolist(), rewards, strict=True))
        return rewards


def learner(backbone, families=("counts",), substitutions=3, **changes):
    values = dict(
        method="distilled", distil_families=list(families), num_generations=GROUP, max_completion_length=LENGTH,
        min_completion_length=EARLY, substitutions=substitutions,
    )  # fmt: skip
    return DistilledGradient(MethodConfig(**values | changes), backbone)


def scored(own, reward=None, prompts=4, seed=0):
    microbatch = make_prompts(prompts, seed=seed), torch.Generator().manual_seed(seed)
    return own.scored(own.sample(*microbatch), Objective(reward or Spy(), 0.0))


# ---- what is drawn, and asked ----
@pytest.mark.parametrize(("temperature", "least"), [(1.0, 0), (0.6, 1)])
def test_draws_have_the_policys_law(policy, temperature, least):
    """At both places of the same completion of 4,000 tokens of one law each; the own token is not tried."""
    backbone, n = policy.view(None, temperature), 4000
    prompts = make_prompts(1).repeat(n)
    ids = torch.tensor([[5, 9]]).expand(n, 2)
    seen = Observed(prompts, ids, torch.ones_like(ids), torch.zeros(n, 2, 0), {})
    rows, places, tokens = module.draw_substitutions(backbone, seen, 1, least)
    assert len({*zip(rows.tolist(), places.tolist(), strict=True)}) == len(rows)
    logits = backbone.head(predicting_hidden(backbone, prompts[:1], ids[:1]))[0].detach()
    logits[:least, EOS] = -torch.inf
    for place, law in enumerate(logits.softmax(-1)):
        own = ids[0, place]
        drawn = torch.bincount(tokens[places == place], minlength=VOCAB)
        assert drawn[own] == 0 and (place >= least or not drawn[EOS].any())
        drawn[own] = n - drawn.sum()
        possible = law > 0
        assert chisquare(drawn[possible].numpy(), n * law[possible].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("name", ADDITIVE)
def test_a_row_is_the_tokens_value_less_that_of_what_it_replaced(policy, name):
    """Texts that were scored differ from the own completion in one token, or end with it."""
    own, reward = learner(policy, [name]), Spy()
    sample = scored(own, reward)
    seen, new, family = sample.seen, sample.substituted, own.families[name]
    size = new.rows[name].shape[1]
    weights = torch.randn(1, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    each = family.values(weights, seen)(torch.arange(seen.ids.numel()))
    table = each.expand(seen.ids.numel(), VOCAB).view(*seen.ids.shape, VOCAB)
    values, cut = family.own(weights, seen), 0
    texts = reward.texts[len(seen.ids) :]
    assert (
        len(texts) == len(new.changes) == len({(n, *text[1]) for n, text in zip(new.completions, texts, strict=True)})
    )
    assert len(texts) > 0.9 * EARLY * GROUP * 4
    found = new.rows[name] @ weights[0].numpy()
    for row, (number, change, (prompt, text, value)) in enumerate(
        zip(new.completions, new.changes, texts, strict=True)
    ):
        before = seen.tokens[number].tolist()
        place = next(t for t in range(LENGTH) if text[t] != before[t])
        ends = text[place] in EOS
        rest = before[place + 1 :]
        assert prompt == seen.prompts.ids[number].tolist()
        assert text[place + 1 :] == ([-1] * len(rest) if ends else rest) and (place >= EARLY or not ends)
        cut += ends and rest[:1] not in ([], [-1])
        assert change == pytest.approx(float(value - sample.reward[number]), abs=1e-15)
        replaced = values[number, place:].sum() if ends else values[number, place]
        assert found[row] == pytest.approx(float(table[number, place, text[place]] - replaced), abs=1e-10)
    assert cut > 3


def test_a_reward_that_skips_rows_and_columns_that_it_reads(policy):
    """A substitution without a score is no row, though it was a call; the prompt's columns come along."""

    class Parity(Reward):
        name, asked = "parity", 0

        def score(self, policy, prompts, ids, mask):
            self.asked += len(ids)
            rewards = (ids * mask).sum(1) / 9 + torch.tensor([row["number"] for row in prompts.examples])
            self.last = type("Last", (), {"values": {"parity": rewards.masked_fill(ids[:, 0] == 5, torch.nan)}})
            return self.last.values["parity"].double()

    own, reward = learner(policy), Parity()
    prompts = make_prompts(4)
    prompts = PromptBatch(prompts.ids, prompts.mask, tuple({"number": 100 * row} for row in range(4)))
    sample = own.scored(own.sample(prompts, torch.Generator().manual_seed(0)), Objective(reward, 0.0))
    changes = sample.substituted.changes
    assert np.isnan(changes).any() and np.nanmax(np.abs(changes)) < 99 and reward.asked == 16 + len(changes)
    own.update_fit([sample], StepContext(1, lambda: None))
    assert own.figures["distilled/substitutions"][0] == len(changes)
    assert own.fit.all.isfinite().all() and own.fit.choice.substitutions > 0


# ---- the fit ----
@pytest.mark.parametrize("name", ["counts", "bag"])
@pytest.mark.parametrize("prior", [False, True])
def test_the_fit_is_ridge_regression_on_rows_of_both_kinds(policy, monkeypatch, name, prior):
    """On everything, and without completions and substitutions of each of the newest groups."""
    monkeypatch.setattr("grade.gradients.distilled.store.choose", lambda *_: Choice(1.0, -9.0, 0.0, np.inf))
    own = learner(policy, {name, "counts"})
    worth = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    own.prior = Fit("counts", worth, Choice(1.0, 0.3, 1.0, 0.0)) if prior else None
    samples = []
    for seed in (0, 1):
        sample = own.scored(
            own.sample(make_prompts(4, seed=seed), torch.Generator().manual_seed(seed)), Objective(Spy(), 0.0)
        )
        own.update_fit([sample], StepContext(1, lambda: None))
        samples.append(sample)
    choice, weight = own.store.choices[name], own.store.prior_weight
    fit = own.store.fit_of(name, 4)
    assert fit.choice == choice and (0 < weight < 1 or not prior)
    dense = [each.toarray() if name == "counts" else each for each in (s.substituted.rows[name] for s in samples)]
    family = own.families[name]
    x = [np.asarray(family.matrix(s.rows[name]).todense() if name == "counts" else s.rows[name]) for s in samples]
    x = np.concatenate(x)
    x = (x.reshape(-1, GROUP, x.shape[1]) - x.reshape(-1, GROUP, x.shape[1]).mean(1, keepdims=True)).reshape(x.shape)
    y = torch.cat([s.reward for s in samples]).view(-1, GROUP)
    y = (y - y.mean(1, keepdim=True)).flatten().double().numpy()
    z, d = np.concatenate(dense), np.concatenate([s.substituted.changes for s in samples])
    if prior:
        counts = torch.cat([torch.nn.functional.one_hot(s.seen.tokens + 1, VOCAB + 1).sum(1)[:, 1:] for s in samples])
        known = (counts.double() @ worth[0]).view(-1, GROUP)
        y = y - weight * (known - known.mean(1, keepdim=True)).flatten().numpy()
        d = d - weight * np.concatenate([s.substituted.rows["counts"] @ worth[0].numpy() for s in samples])
    root = choice.substitutions**0.5
    groups = [np.arange(32) // GROUP, samples[0].substituted.completions // GROUP,
              4 + samples[1].substituted.completions // GROUP]  # fmt: skip
    rows, targets, groups = np.concatenate([x, root * z]), np.concatenate([y, root * d]), np.concatenate(groups)
    for weights, left in zip(fit.weights, (-1, 4, 5, 6, 7), strict=True):
        ridge = Ridge(choice.penalty, fit_intercept=False).fit(rows[groups != left], targets[groups != left])
        torch.testing.assert_close(weights, torch.from_numpy(ridge.coef_), rtol=1e-6, atol=1e-7)  # CG: 1e-8


class Sum(Reward):
    """A sum over tokens."""

    name = "sum"

    def __init__(self, scale=1.0):
        self.worth = scale * torch.randn(VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def score(self, policy, prompts, ids, mask):
        return (self.worth[ids] * mask).sum(1)


class Noise(Reward):
    """A number of its own for every text."""

    name = "noise"

    def score(self, policy, prompts, ids, mask):
        texts = torch.where(mask.bool(), ids, -1).tolist()
        seeds = (zlib.crc32(str(text).encode()) for text in texts)
        return torch.tensor([np.random.default_rng(seed).standard_normal() for seed in seeds])


def test_they_explain_what_few_completions_cannot(policy):
    """Of a reward that is a sum over tokens, from 8 completions; the weight is the quotient of the variances."""
    r2 = {}
    for number in (0, 4):
        own = learner(policy, substitutions=number)
        sample = scored(own, Sum(), prompts=2)
        own.update_fit([sample], StepContext(1, lambda: None))
        r2[number] = own.fit.choice.r2
    within = sample.reward.view(2, GROUP).var(1).mean()
    assert own.fit.choice.substitutions == pytest.approx(float(within) / np.square(sample.substituted.changes).mean())
    assert r2[0] < 0.6 < 0.9 < r2[4]


def test_noise_is_not_explained(policy):
    """Changes of one completion share its own noise, so all of them are left out together."""
    own = learner(policy, substitutions=4)
    own.update_fit([scored(own, Noise(), prompts=16)], StepContext(1, lambda: None))
    assert own.fit.choice.r2 < 0.02, own.fit.choice


# ---- the rest ----


def test_only_the_newest_are_kept(policy, monkeypatch):
    monkeypatch.setattr(module, "MOST", 50)
    own = learner(policy, ["counts", "bag"], distil_window=24)
    for seed in range(3):
        own.update_fit([scored(own, seed=seed)], StepContext(1, lambda: None))
    kept = own.store.substitutions
    assert kept.about.shape[1] == kept.rows["counts"].shape[0] == len(kept.rows["bag"]) == 50 < kept.calls
    assert own.fit.weights.isfinite().all() and set(kept.about[0]) <= set(range(8, 12))


def test_those_of_completions_that_were_dropped_are_in_no_fit(policy):
    fits = []
    for scale in (1.0, 3.0):
        own = learner(policy, distil_window=16)
        for seed, reward in enumerate((Sum(scale), Sum(), Sum())):
            own.update_fit([scored(own, reward, seed=seed)], StepContext(1, lambda: None))
        fits.append(own.fit)
    assert torch.equal(fits[0].weights, fits[1].weights) and fits[0].choice == fits[1].choice


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(families=["counts", "trunk"]), "distil_families: got 'trunk'; allowed: counts, .* with substitutions"),
        (dict(method="rloo"), "substitutions: got 3; allowed: only with distilled, not with rloo"),
        (dict(substitutions=65), "substitutions: got 65; allowed: .*64"),
    ],
)
def test_what_cannot_use_them_is_refused(policy, changes, says):
    if changes.get("method"):
        with pytest.raises(InputError, match=says):
            MethodConfig(substitutions=3, **changes)
        return
    with pytest.raises(InputError, match=says):
        learner(policy, **changes)
