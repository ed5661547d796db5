"""What is kept of scored completions: Gram matrices by rows, a window, and whether predictions came true."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from grade.gradients.distilled.families import Family, make_family
from grade.gradients.distilled.ridge import Spectrum, centred, choose
from grade.gradients.distilled.store import Evidence, Store

GROUP, SIZE, TOKENS = 3, 4, 11


class Base:
    """What families read of a backbone here."""

    dtype, device, vocab_size = torch.float64, torch.device("cpu"), TOKENS


def families():
    return {"dense": Family(Base()), "counts": make_family("counts", Base())}


def batch(groups=2, length=5, seed=0, noise=0.1):
    """Rows of both families, rewards that are linear in the dense ones, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups * GROUP, SIZE, generator=generator, dtype=torch.float64)
    tokens = torch.randint(TOKENS, (len(x), length), generator=generator)
    tokens[0, length // 2 :] = -1
    noisy = noise * torch.randn(len(x), generator=generator, dtype=torch.float64)
    return {"dense": x, "counts": tokens}, x @ torch.arange(1.0, SIZE + 1).double() + noisy, tokens


def filled(window=1000, batches=4, **options):
    store = Store(families(), GROUP, window)
    for seed in range(batches):
        store.add(*batch(seed=seed, length=4 + seed, **options))
    return store


def dense_counts(tokens):
    return torch.stack([torch.bincount(row[row >= 0], minlength=TOKENS) for row in tokens]).double()


def everything(batches=4):
    """Features of all batches at once, centred."""
    parts = [batch(seed=seed, length=4 + seed) for seed in range(batches)]
    x = centred(torch.cat([rows["dense"] for rows, _, _ in parts]), GROUP)
    counts = centred(torch.cat([dense_counts(tokens) for _, _, tokens in parts]), GROUP)
    return {"dense": x, "counts": counts}, centred(torch.cat([rewards for _, rewards, _ in parts]), GROUP)


@pytest.mark.parametrize(("window", "kept", "dropped"), [(24, 24, 0), (23, 21, 3), (12, 12, 12), (1, 6, 18)])
def test_a_window_drops_the_oldest_groups_and_says_how_many(window, kept, dropped):
    """23 are 7 whole groups; there are at least two, of which one judges the other."""
    store, (features, rewards) = filled(window), everything()
    assert (len(store), store.dropped) == (kept, dropped)
    torch.testing.assert_close(store.kept["rewards"], rewards[-kept:])
    for name, x in features.items():
        assert len(store.kept[name]) == kept
        torch.testing.assert_close(store.grams[name], x[-kept:] @ x[-kept:].T, rtol=1e-12, atol=1e-12)
    assert store.token_counts(TOKENS).sum() == (store.kept["tokens"] >= 0).sum() and len(store.kept["tokens"]) == kept


@pytest.mark.parametrize("name", ["dense", "counts"])
def test_weights_are_those_of_ridge_on_the_features(name):
    """Also without each of the newest groups, at the one penalty that was chosen."""
    store = filled(noise=2.0)
    parts = [batch(seed=seed, length=4 + seed, noise=2.0) for seed in range(4)]
    x = torch.cat([rows["dense"] if name == "dense" else dense_counts(tokens) for rows, _, tokens in parts])
    x, y = centred(x, GROUP), centred(torch.cat([rewards for _, rewards, _ in parts]), GROUP)
    assert store.fit(2) is not None
    fit = store.fit_of(name, 2)
    assert fit.choice == choose(Spectrum.of(store.grams[name]), y, GROUP)
    penalty = fit.choice.penalty
    every, eye = list(range(24)), torch.eye(x.shape[1], dtype=x.dtype)
    for weights, left in zip(fit.weights, ([], every[18:21], every[21:]), strict=True):
        rest = [i for i in every if i not in left]
        want = torch.linalg.solve(x[rest].T @ x[rest] + penalty * eye, x[rest].T @ y[rest])
        torch.testing.assert_close(weights, want, rtol=1e-9, atol=1e-9)
    assert fit.weights.shape[0] == 3
    torch.testing.assert_close(fit.all[0], fit.weights[0] * fit.choice.slope)
    torch.testing.assert_close(fit.without(0, 2), fit.weights[1:] * fit.choice.slope)


# ---- completions that wait ----
@pytest.mark.parametrize("window", [1000, 12])
def test_what_waited_is_in_the_next_fit_as_if_it_had_not_waited(window):
    eager, late = filled(window), Store(families(), GROUP, window)
    for seed in range(4):
        late.append(*batch(seed=seed, length=4 + seed))
    assert len(late) == 24 and torch.equal(late.token_counts(TOKENS), filled().token_counts(TOKENS))
    fits = [store.fit(2) for store in (eager, late)]
    torch.testing.assert_close(fits[0].weights, fits[1].weights, rtol=1e-12, atol=1e-12)
    assert (len(late), late.dropped, late.waiting) == (len(eager), eager.dropped, [])
    assert all(torch.equal(late.kept[name], eager.kept[name]) for name in ("tokens", "rewards"))


# ---- predictions made in advance ----
def test_trust_by_hand():
    """Groups of two: p = (1, -1 | 2, -2 | 1, -1) and y = (1, -1 | 0, 0 | 0, 0), sum py = 2 of sum pp = 12.

    The slope is 1/6; the groups' py - slope pp are 2 - 2/6, -8/6, -2/6, so the error is sqrt(168) / 6 / 12.
    """
    evidence = Evidence()
    assert evidence.trust == 1.0
    p, y = torch.tensor([[1.0, -1, 2, -2, 1, -1], [1, -1, 0, 0, 0, 0]], dtype=torch.float64)
    evidence.add(p, y, 2)
    assert evidence.trust == pytest.approx(1 / 6 + math.sqrt(100 + 64 + 4) / 6 / 12)
    true = Evidence()
    true.add(p, 3 * p, 2)
    assert true.trust == 1.0, "never above 1"
    wrong = Evidence()
    wrong.add(p, -p, 2)
    assert wrong.trust == 0.0
    silent = Evidence()
    silent.add(-1e-14 * y, y, 2)
    assert silent.trust == 1.0, "rounding predicts nothing"


@pytest.mark.parametrize("window", [1000, 15])
def test_a_store_that_was_restored_makes_the_same_fits(window, tmp_path):
    whole = filled(window)
    whole.fit(2)
    whole.add(*batch(seed=8, length=9))  # new since the choice
    whole.append(*batch(seed=11, length=7))
    whole.append(*batch(seed=12, length=8))
    save_file(whole.state(), tmp_path / "state.safetensors")
    again = Store(families(), GROUP, window)
    again.restore(load_file(tmp_path / "state.safetensors"))
    assert (again.since_choice, again.dropped, len(again)) == (whole.since_choice, whole.dropped, len(whole))
    assert again.choices == whole.choices
    for seed in (9, 10):
        fits = []
        for store in (whole, again):
            store.add(*batch(seed=seed, length=6))
            fits.append(store.fit(2))
        assert fits[0].family == fits[1].family and fits[0].choice == fits[1].choice
        assert torch.equal(fits[0].weights, fits[1].weights)
    for name in whole.families:
        assert torch.equal(whole.kept[name], again.kept[name])
        assert torch.equal(whole.grams[name], again.grams[name])
    assert torch.equal(whole.token_counts(TOKENS), again.token_counts(TOKENS))
