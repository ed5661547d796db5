"""Features of completions, and what they say of every token, against dense formulas and finite differences."""

from collections import Counter

import pytest
import torch
from conftest import VOCAB, make_backbone, make_prompts, tiny_gpt2
from grade.models.teacher import Teacher

from grade.errors import InputError
from grade.gradients.distilled.families import ADDITIVE, MOST_NATS, SKETCH, Observed, _hash, make_family
from grade.gradients.methods import HINTED
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate

GROUP, LENGTH = 2, 6
MODELS = {"llama": lambda: make_backbone(), "gpt2": lambda: make_backbone(tiny_gpt2(), target_modules=["c_attn"])}
NAMES = (*ADDITIVE, "trunk1", "trunk")


def observe(backbone, prompts, ids, mask):
    return Observed.of(backbone, [make_family(name, backbone) for name in NAMES], prompts, ids, mask)


def observed(backbone, seed=0, length=LENGTH):
    """Two completions of each of three prompts; some end early."""
    prompts = make_prompts(length=5).repeat(GROUP)
    ids, mask = generate(backbone, prompts, length, torch.Generator().manual_seed(seed), 1.0, 0)
    assert (mask == 0).any() and mask.sum(1).max() == length
    return observe(backbone, prompts, ids, mask)


def fitted(family, seen, fits=3, seed=1):
    """Random weights [k, F]."""
    rows = family.rows(seen)
    size = rows.shape[1] if rows.dtype != torch.long else family.size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(fits, size, generator=generator, dtype=torch.float64).to(family.dtype)


def every_value(family, weights, seen):
    """Values [B, T, V], from positions out of order and a few at a time, as the head's chunks come."""
    order = torch.randperm(seen.ids.numel(), generator=torch.Generator().manual_seed(2))
    values = family.values(weights, seen)
    table = torch.empty(len(order), VOCAB, dtype=family.dtype)
    for numbers in order.split(4):
        table[numbers] = values(numbers)
    return table.view(*seen.ids.shape, VOCAB)


@pytest.fixture(params=MODELS, scope="module")
def backbone(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def seen(backbone):
    return observed(backbone)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_distilled_is_the_sum_of_the_tokens_own_values_if_it_is_additive(backbone, seen, name):
    family = make_family(name, backbone)
    weights, rows = fitted(family, seen), family.rows(seen)
    want = torch.stack([family.predict(weights[b // GROUP], rows[b : b + 1])[0] for b in range(len(rows))])
    got = family.own(weights, seen).sum(1)
    assert family.additive == (name in ADDITIVE)
    assert torch.allclose(got, want, rtol=0, atol=1e-10 * float(want.abs().max())) == family.additive


@pytest.mark.parametrize("name", NAMES)
def test_the_own_value_is_that_of_the_own_token(backbone, seen, name):
    """Each pair of completions by its own fit; 0 where masked."""
    family = make_family(name, backbone)
    weights = fitted(family, seen)
    got = family.own(weights, seen)
    want = every_value(family, weights, seen).gather(2, seen.ids.unsqueeze(2)).squeeze(2) * seen.mask
    assert (got - want).abs().max() <= 1e-10 * want.abs().max()
    assert not got[seen.mask == 0].any() and got.any()
    alone = [family.own(weights[k : k + 1], seen[k * GROUP : (k + 1) * GROUP]) for k in range(3)]
    # The trunk's passes are over batches of another size, which sum in another order.
    assert (torch.cat(alone) - got).abs().max() <= 1e-9 * got.abs().max()


@pytest.mark.parametrize("name", ADDITIVE)
def test_additive_values_do_not_know_the_token_nor_what_comes_after(backbone, seen, name):
    family, at = make_family(name, backbone), 3
    weights = fitted(family, seen)
    before = every_value(family, weights, seen)
    ids, mask = seen.ids.clone(), torch.ones_like(seen.mask)
    ids[:, at:] = (ids[:, at:] + 5) % VOCAB
    after = every_value(family, weights, observe(backbone, seen.prompts, ids, mask))
    known = seen.mask.bool() & (torch.arange(LENGTH) <= at)
    # Llama's norms are float32 in a float64 model: the pass over other rows may round them otherwise.
    assert (after - before)[known].abs().max() <= 1e-5 * before.abs().max()
    later = (after - before)[:, at + 1 :].abs().max() > 1e-2 * before.abs().max()
    assert later == (name in ("ngrams", "values")), "these know what stands before, the others nothing"


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_after_the_end_does_not_count(backbone, seen, name):
    family = make_family(name, backbone)
    ids = torch.where(seen.mask.bool(), seen.ids, (seen.ids + 3) % VOCAB)
    other = observe(backbone, seen.prompts, ids, seen.mask)
    weights, rows, others = fitted(family, seen), family.rows(seen), family.rows(other)
    assert torch.allclose(rows.double(), others.double(), atol=1e-5)  # as above
    assert torch.allclose(family.own(weights, seen), family.own(weights, other), atol=1e-4)


def test_features_by_hand(backbone):
    """Completion 5 6 5 after a prompt that ends with 9, cut after two tokens in the second row."""
    prompts = PromptBatch(torch.tensor([[3, 9]] * 2), torch.ones(2, 2, dtype=torch.long))
    ids, mask = torch.tensor([[5, 6, 5]] * 2), torch.tensor([[1, 1, 1], [1, 1, 0]])
    seen = observe(backbone, prompts, ids, mask)
    assert make_family("counts", backbone).rows(seen).tolist() == [[5, 6, 5], [5, 6, -1]]
    e = backbone.embed(torch.tensor([5, 6])).double()
    bag = make_family("bag", backbone).rows(seen)
    torch.testing.assert_close(bag, torch.stack([2 * e[0] + e[1], e[0] + e[1]]))
    grams = make_family("ngrams", backbone)
    single = [int(_hash(torch.tensor(v), None)) for v in (5, 6)]
    pairs = [int(_hash(torch.tensor(v), torch.tensor(u))) for u, v in ((9, 5), (5, 6), (6, 5))]
    rows = grams.rows(seen)
    assert Counter(rows[0].tolist()) == Counter([single[0], *single, *pairs])
    assert Counter(rows[1].tolist()) == Counter([*single, *pairs[:2], -1, -1])


def test_the_sketch_has_the_kernel_of_state_times_embedding():
    """<phi, phi'> = (<h, h'> + 1) <e, e'> in expectation; its error falls with the root of the number of features."""
    backbone = MODELS["gpt2"]()
    seen = observed(backbone)
    family = make_family("values", backbone)
    h = torch.nn.functional.layer_norm(seen.predicting, seen.predicting.shape[-1:]) / 4  # sqrt(16)
    h = torch.cat([h, torch.ones_like(h[..., :1])], -1)
    e = backbone.embed(seen.ids) * seen.mask.unsqueeze(-1)
    features = torch.einsum("bth,bte->bhe", h, e).flatten(1)
    rows = family.rows(seen)
    assert rows.shape == (6, SKETCH)
    error = rows @ rows.T - features @ features.T
    size = features.norm(dim=1)
    assert (error.abs() / (size.unsqueeze(0) * size.unsqueeze(1))).max() <= 6 / SKETCH**0.5  # ~2 / sqrt(F) a product


@pytest.mark.parametrize("name", ["trunk1", "trunk2"])
def test_the_trunks_directions_are_the_slopes_of_what_is_distilled(name, monkeypatch):
    """Central differences along random directions, of the rows themselves; the base alone is read, not the adapter."""
    backbone = MODELS["gpt2"]()
    seen, family = observed(backbone), make_family(name, backbone)
    weights = fitted(family, seen)
    u = family.directions(weights, seen)
    embed, step = backbone.embed, 1e-5

    def distilled(change):
        with monkeypatch.context() as patch:
            patch.setattr(backbone, "embed", lambda ids: embed(ids) + (change if ids is seen.ids else 0))
            rows = family.rows(observe(backbone, seen.prompts, seen.ids, seen.mask))
        return (rows.view(3, GROUP, -1) * weights.unsqueeze(1)).sum(-1).flatten()

    for seed in range(3):
        d = torch.randn(u.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        want = (distilled(step * d) - distilled(-step * d)) / (2 * step)
        got = (u * d).sum((1, 2))
        assert (got - want).abs().max() <= 1e-7 * want.abs().max()  # step^2 leaves 1e-9
    assert not u[seen.mask == 0].any()


@pytest.mark.parametrize("name", NAMES)
def test_what_it_likes_is_the_mean_of_its_values(backbone, seen, name):
    """Of n-grams the single tokens only: there is one pair a position."""
    family = make_family(name, backbone)
    weights = fitted(family, seen, 1)
    got = family.typical(weights, seen)
    if name == "ngrams":
        want = weights[0, _hash(torch.arange(VOCAB), None)]
    else:
        want = every_value(family, weights, seen)[seen.mask.bool()].mean(0)
    assert got.shape == (VOCAB,) and (got - want).abs().max() <= 1e-10 * want.abs().max()


@pytest.mark.parametrize("name", ["trunk0", "trunk3", "bags"])
def test_a_family_that_there_is_not(backbone, name):
    with pytest.raises(InputError, match="distil_families: got .*counts, bag, ngrams, values, trunk, or trunk1 to tr"):
        make_family(name, backbone)


def test_hinted_is_what_a_teachers_reading_tells_of_the_hint_by_the_dense_formula(backbone, seen):
    """An adapter as teacher, whose log-probabilities differ from the base's as those behind a hint do."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(p.shape, generator=generator).to(p) for p in backbone.trainable_parameters()]
    teacher = Teacher(backbone, "adapter", adapter=values)
    family = make_family(HINTED, backbone, teacher)
    seen = Observed.of(backbone, [family], seen.prompts, seen.ids, seen.mask)
    states = teacher.hidden(seen.prompts, seen.ids), seen.predicting
    q, p = (backbone.head(each).log_softmax(-1) for each in states)
    told = (q - p).double()
    assert told.abs().max() > 2 * MOST_NATS, "both cuts are reached"
    own = told.gather(2, seen.ids.unsqueeze(2)).squeeze(2) * seen.mask
    before = (own.cumsum(1) - own).unsqueeze(2)
    growth = (before + told).clamp(max=MOST_NATS).exp() - before.clamp(max=MOST_NATS).exp()
    weights = fitted(family, seen)
    w = weights[seen.fit_numbers(len(weights))].double()
    want = w[:, 0, None, None] * growth + w[:, 1, None, None] * told.clamp(-MOST_NATS, MOST_NATS)
    got = every_value(family, weights, seen)
    assert torch.allclose(got.double(), want, atol=1e-4 * float(want.abs().max()))  # Llama's norms are float32
    of_own = want.gather(2, seen.ids.unsqueeze(2)).squeeze(2) * seen.mask
    assert torch.allclose(family.own(weights, seen).double(), of_own, atol=1e-4 * float(want.abs().max()))
    sums = torch.stack([family.predict(weights[b // GROUP], row[None])[0] for b, row in enumerate(family.rows(seen))])
    assert torch.allclose(sums.double(), of_own.sum(1), atol=1e-4 * float(want.abs().max()))
    assert torch.allclose(family.typical(weights[:1], seen[:GROUP]).double(),
                          (want[:GROUP] * seen.mask[:GROUP, :, None]).sum((0, 1)) / seen.mask[:GROUP].sum(),
                          atol=1e-4 * float(want.abs().max()))  # fmt: skip
