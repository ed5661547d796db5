"""Small cases of the probe's estimators by hand, at and around each boundary of what they take."""

import inspect
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_prompts
from scipy.stats import genpareto
from torch.testing import assert_close

from grade.entropy import exact, forward, functional, gradients, samples, snis
from grade.entropy.exact import completion_logps, every_completion, exact_change, exact_entropy
from grade.entropy.forward import Directional, directional
from grade.entropy.functional import scores_at
from grade.entropy.probe import EntropyProbe
from grade.entropy.report import ProbeReport
from grade.entropy.samples import Samples, draw
from grade.entropy.settings import ProbeConfig
from grade.entropy.step import Snapshot, stepped
from grade.entropy.tiny import random_direction, random_prompts, tiny_policy
from grade.entropy.update import UpdateVector, adamw_update, preconditioner
from grade.entropy.ustat import blocks, two_batch, u_statistic
from grade.errors import InputError
from grade.models.parameters import moved, trained_parameters
from grade.models.prompts import PromptBatch


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@cache
def policy():
    """A policy that no test changes."""
    return tiny_policy()


def some_prompts(batch=2):
    made = make_prompts(batch, 4)
    return PromptBatch(made.ids % 5, made.mask)


@cache
def drawn(batch=3, group=2, length=3):
    return draw(policy(), some_prompts(batch), group, length, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (completion_logps, {"temperature": 1.0}),
        (exact_entropy, {"temperature": 1.0}),
        (exact.exact_gradient, {"temperature": 1.0}),
        (exact_change, {"temperature": 1.0}),
        (exact.all_as_samples, {"temperature": 1.0}),
        (directional, {"microbatch": 8}),
        (scores_at, {"vector": None, "eta": 1.0, "microbatch": 8}),
        (gradients.sequence_logps, {"microbatch": 8}),
        (gradients.prompt_gradients, {"microbatch": 2, "allow_full": False}),
        (EntropyProbe, {"config": None, "allow_fresh": False}),
        (Samples, {"temperature": 1.0}),
        (draw, {"temperature": 1.0, "microbatch": 64}),
        (tiny_policy, {"vocab": 5, "width": 16, "layers": 2, "seed": 0}),
        (random_prompts, {"length": 4, "seed": 0}),
        (random_direction, {"seed": 0}),
        (adamw_update, {"max_grad_norm": None, "allow_fresh": False}),
        (stepped, {"max_grad_norm": None}),
        (snis.reweighted_change, {"lengths": None, "clip": None}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_defaults(function, defaults):
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == defaults


# --- enumeration


def test_completions_are_in_order_and_0_after_their_end():
    ids, mask = every_completion(3, 2, (1, 2))
    assert ids.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0]]
    assert mask.tolist() == [[1, 1], [1, 1], [1, 1], [1, 0], [1, 0]]
    ids, mask = every_completion(2, 3, ())
    assert len(ids) == 8 and mask.all()


def test_the_most_completions_that_are_enumerated(monkeypatch):
    assert exact.LARGEST == 100_000
    with pytest.raises(InputError, match="enumerate: got 100001; allowed: at most 100000"):
        every_completion(100_001, 1, ())
    monkeypatch.setattr(exact, "LARGEST", 8)
    assert len(every_completion(2, 3, ())[0]) == len(every_completion(8, 1, ())[0]) == 8
    for vocab, length in ((3, 2), (9, 1)):
        with pytest.raises(InputError, match="got 9; allowed: at most 8"):
            every_completion(vocab, length, ())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_completions_log_probability_is_the_sum_over_its_tokens(temperature):
    prompts = random_prompts(policy(), 2)
    got = completion_logps(policy(), prompts, 2, temperature)
    ids, mask = every_completion(5, 2, (2,))
    assert got.shape == (2, len(ids)) and got.requires_grad
    for n in range(2):
        for length in (1, 2):
            rows = mask.sum(1) == length
            whole = torch.cat([prompts.ids[n].expand(int(rows.sum()), -1), ids[rows, :length]], 1)
            with torch.no_grad():
                logp = (policy().model(input_ids=whole).logits[:, 3:-1] / temperature).log_softmax(-1)
            assert_close(got[n, rows].detach(), logp.gather(2, ids[rows, :length, None]).sum((1, 2)))
    p = got.detach().exp()
    assert float(exact_entropy(policy(), prompts, 2, temperature)) == pytest.approx(float(-(p * p.log()).sum() / 2))


def test_exact_changes_and_gradients_use_the_temperature():
    prompts, v = random_prompts(policy(), 1), random_direction(policy())
    for temperature in (1.0, 0.5):
        with torch.no_grad():
            before = exact_entropy(policy(), prompts, 2, temperature)
            with moved(policy(), v, 0.3):
                after = exact_entropy(policy(), prompts, 2, temperature)
        assert exact_change(policy(), prompts, 2, v, 0.3, temperature) == pytest.approx(float(after - before))
        slope = float(exact.exact_gradient(policy(), prompts, 2, temperature) @ v)
        assert exact_change(policy(), prompts, 2, v, 1e-6, temperature) / 1e-6 == pytest.approx(slope, rel=1e-4)


def test_every_completion_as_a_sample():
    prompts = random_prompts(policy(), 2)
    made, p = exact.all_as_samples(policy(), prompts, 2, 0.7)
    ids, mask = every_completion(5, 2, (2,))
    assert all(torch.equal(made.ids[n], ids) and torch.equal(made.mask[n], mask) for n in range(2))
    assert made.temperature == 0.7 and not p.requires_grad
    assert_close(p.sum(1), torch.ones(2, dtype=torch.float64))
    assert_close(p, completion_logps(policy(), prompts, 2, 0.7).exp().detach())


# --- forward mode


TERMS = Directional(
    entropies=tensor([[1.0, 2.0], [3.0, 0.0]], [[0.5, 0.25], [1.0, 4.0]]),
    d_entropies=tensor([[0.1, 0.2], [0.3, 0.0]], [[0.5, 0.6], [0.7, 0.8]]),
    d_logps=tensor([[1.0, -1.0], [2.0, 0.0]], [[3.0, 0.5], [-1.0, 0.2]]),
)


def test_a_sequences_part_by_hand():
    # Later entropies are 2 and 0 for the first prompt's samples, 0.25 and 4 for the second's; each is the other's b.
    want = [[0.3 + (2 - 0) * 1, 0.3 + (0 - 2) * 2], [1.1 + (0.25 - 4) * 3, 1.5 + (4 - 0.25) * -1]]
    assert_close(TERMS.per_sequence(), tensor(*want))
    zero = torch.zeros(2, 2, 2)
    assert_close(TERMS.per_sequence(zero), tensor([0.3 + 2, 0.3 + 0], [1.1 + 0.75, 1.5 - 4]))
    alone = Directional(*(part[:, :1] for part in (TERMS.entropies, TERMS.d_entropies, TERMS.d_logps)))
    assert_close(alone.per_sequence(), tensor([0.3 + 2], [1.1 + 0.75]))  # nothing to compare with


def test_a_baseline_is_the_mean_of_the_others():
    three = tensor([[1.0], [2.0], [6.0]])
    assert_close(forward._others(three), tensor([[4.0], [3.5], [1.5]]))
    assert_close(forward._others(three[:, :1]), tensor([[0.0]]))
    assert_close(forward._later(tensor([1.0, 2.0, 4.0])), tensor(6.0, 4.0, 0.0)[None])


def test_a_part_per_token_by_hand():
    mask = torch.tensor([[[1, 1], [1, 0]], [[1, 1], [1, 1]]])
    # Lengths 2, 1, 2, 2: a mean of 7/4. Tokens left after the first one: 1 and 0, 1 and 1.
    d_length = tensor([(1 - 0) * 1, (0 - 1) * 2], [0, 0])
    want = (TERMS.per_sequence() - 11.75 / 7 * d_length) / (7 / 4)
    assert_close(TERMS.per_token(mask), want)


def test_forward_mode_is_read_in_small_parts_and_leaves_nothing(monkeypatch):
    some, rows, passes = drawn(batch=2, group=25), [], []
    inner, head = forward.functional_call, policy().head
    monkeypatch.setattr(policy(), "head", lambda hidden: rows.append(len(hidden)) or head(hidden))
    monkeypatch.setattr(forward, "functional_call", lambda *args: passes.append(len(args[2][1])) or inner(*args))
    found = directional(policy(), some, random_direction(policy()), 24)
    assert passes == [24, 24, 2] and rows == [64, 8, 64, 8, 6]
    monkeypatch.undo()
    for name in ("entropies", "d_entropies", "d_logps"):
        values = getattr(found, name)
        assert values.dtype == torch.float64 and not values.requires_grad and values.shape == (2, 25, 3)
        assert (values[some.mask == 0] == 0).all() and (values[some.mask == 1] != 0).all()
    v, eta = random_direction(policy()), 1e-5
    up, down = (scores_at(policy(), some, v, sign * eta) for sign in (1, -1))
    assert_close(found.d_entropies, (up.entropies - down.entropies) / (2 * eta), rtol=1e-4, atol=1e-7)
    assert_close(found.d_logps, (up.logps - down.logps) / (2 * eta), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("kind", "fine"), [("sdpa", True), ("eager", True), ("flash_attention_2", False), ("", False)])
def test_attention_without_a_forward_mode_is_refused(kind, fine, monkeypatch):
    monkeypatch.setattr(policy().model.config, "_attn_implementation", kind)
    some, v = drawn(), random_direction(policy())
    if fine:
        assert directional(policy(), some, v).d_logps.any()
    else:
        with pytest.raises(InputError, match=f"attention: got '{kind}'; allowed: sdpa or eager"):
            directional(policy(), some, v)


# --- scores and gradients


@pytest.mark.parametrize(
    "call",
    [
        lambda some: scores_at(policy(), some, microbatch=4).logps,
        lambda some: scores_at(policy(), some, microbatch=4).entropies,
        lambda some: gradients.sequence_logps(policy(), some, 4),
    ],
)
def test_scores_do_not_depend_on_microbatches(call, monkeypatch):
    some, sizes = drawn(), []
    inner = Samples.microbatches
    whole = call(some)
    monkeypatch.setattr(
        Samples, "microbatches", lambda self, size, device: sizes.append(size) or inner(self, 1, device)
    )
    assert_close(call(some), whole)
    assert sizes == [4] and whole.dtype == torch.float64 and not whole.requires_grad and whole.device.type == "cpu"


def test_a_microbatch_has_at_least_one_row_and_coefficients_the_samples_shape():
    some = drawn()
    one = gradients.prompt_gradients(policy(), some, [torch.ones(3, 2)], 1)
    assert_close(one, gradients.prompt_gradients(policy(), some, [torch.ones(3, 2)], 2))
    assert len(one) == 1 and one[0].dtype == torch.float64 and not one[0].requires_grad
    with pytest.raises(InputError, match="microbatch size: got 0; allowed: at least 1"):
        gradients.prompt_gradients(policy(), some, [torch.ones(3, 2)], 0)
    for wrong in ((2, 2), (3, 1), (3, 2, 3)):
        with pytest.raises(ValueError, match="not .B, G. = .3, 2."):
            gradients.prompt_gradients(policy(), some, [torch.ones(3, 2), torch.ones(wrong)])
    for value in (math.nan, math.inf):
        with pytest.raises(InputError, match="coefficients"):
            gradients.prompt_gradients(policy(), some, [torch.ones(3, 2), torch.full((3, 2), value)])


def test_coefficients_by_hand():
    got = gradients.entropy_coefficients(tensor([1.0, 2.0, 6.0], [0.0, 0.0, 3.0]))
    assert_close(got, tensor([-1.0, -0.5, 1.5], [-0.5, -0.5, 1.0]))


def test_trained_parameters_by_name_are_in_order():
    module = functional.HiddenStates(policy())
    assert [id(p) for p in module.trained().values()] == [id(p) for p in trained_parameters(policy())]
    assert all("lora_" in name for name in module.trained())
    names = [name for name, _ in module.named_parameters()]
    assert len(names) == len({id(p) for p in module.parameters()}), "a parameter has one name"


# --- samples


def samples_of(batch, group, length):
    ids = torch.arange(batch * group * length).view(batch, group, length)
    prompts = PromptBatch(torch.arange(batch * 2).view(batch, 2) + 100, torch.ones(batch, 2))
    return Samples(prompts, ids, (ids % 3 != 2).long(), 0.5)


@pytest.mark.parametrize(("size", "rows"), [(1, [1] * 6), (4, [4, 2]), (6, [6]), (99, [6])])
def test_microbatches_are_consecutive_rows_with_their_prompts(size, rows):
    some, start = samples_of(2, 3, 3), 0
    parts = list(some.microbatches(size, "cpu"))
    assert [part[0].stop - part[0].start for part in parts] == rows
    for where, prompts, ids, mask in parts:
        assert where.start == start
        start = where.stop
        flat = torch.arange(6)[where]
        assert ids.tolist() == some.ids.view(6, 3)[flat].tolist()
        assert mask.tolist() == some.mask.view(6, 3)[flat].tolist()
        assert prompts.ids.tolist() == some.prompts.ids[flat // 3].tolist()
    assert start == 6
    with pytest.raises(InputError, match="microbatch size: got 0"):
        list(some.microbatches(0, "cpu"))


def test_samples_of_some_prompts():
    some = samples_of(3, 2, 3).of_prompts(slice(1, 3))
    assert some.ids[:, 0, 0].tolist() == [6, 12] and some.mask.shape == (2, 2, 3) and some.temperature == 0.5
    assert some.prompts.ids.tolist() == [[102, 103], [104, 105]]


@pytest.mark.parametrize("empty", [(0, 0), (1, 1)])
def test_no_completion_may_be_empty(empty):
    some = samples_of(2, 2, 3)
    mask = some.mask.clone()
    mask[empty] = torch.tensor([0, 0, 1])
    Samples(some.prompts, some.ids, mask)
    mask[empty] = 0
    with pytest.raises(ValueError, match="a completion is empty"):
        Samples(some.prompts, some.ids, mask)


def test_completions_are_sampled_in_parts_to_their_full_length(monkeypatch):
    asked = []

    def generate(backbone, prompts, length, generator, temperature, **options):
        asked.append((prompts.ids[:, 0].tolist(), length, temperature, options))
        ids = prompts.ids[:, :1] * 10 + torch.arange(length) + 100 * len(asked)
        return ids, torch.ones_like(ids)

    monkeypatch.setattr(samples, "generate", generate)
    prompts = PromptBatch(torch.tensor([[1], [2]]), torch.ones(2, 1))
    made = draw(SimpleNamespace(device="cpu"), prompts, 3, 2, None, 0.5, 4)
    assert asked == [([1, 1, 1, 2], 2, 0.5, {"stop_early": False}), ([2, 2], 2, 0.5, {"stop_early": False})]
    assert made.ids.tolist() == [[[110, 111]] * 3, [[120, 121], [220, 221], [220, 221]]] and made.temperature == 0.5
    assert draw(SimpleNamespace(device="cpu"), prompts, 1, 2, None, microbatch=1).ids.shape == (2, 1, 2)
    for temperature in (0.0, math.inf, math.nan, -1.0):
        asked.clear()
        with pytest.raises(InputError, match="temperature: .* a greedy policy has no entropy"):
            draw(SimpleNamespace(device="cpu"), prompts, 3, 2, None, temperature)
        assert asked == [], "refused before anything is sampled"
    for options, name in ((dict(group=0), "num_generations"), (dict(group=1, microbatch=0), "microbatch size")):
        with pytest.raises(InputError, match=f"{name}: got 0; allowed: at least 1"):
            draw(SimpleNamespace(device="cpu"), prompts, max_new_tokens=2, generator=None, **options)


def test_samples_have_no_graph():
    some = drawn()
    assert not some.ids.requires_grad and some.ids.dtype == torch.long and some.ids.shape == (3, 2, 3)


# --- settings


@pytest.mark.parametrize(
    ("batch", "size", "fine"),
    [(4, 1, True), (4, 2, True), (4, 3, False), (4, 4, False), (6, 2, True), (6, 3, True), (6, 4, False), (8, 1, True),
     (2, 1, True), (2, 2, False), (4, 8, False)],
)  # fmt: skip
def test_blocks_divide_the_prompts_and_are_at_least_two(batch, size, fine):
    values = {"batch_config": {"B": batch}, "probe_config": {"mode": "blocks", "block_size": size}}
    if fine:
        assert ProbeConfig.parse(values).probe_config.block_size == size
    else:
        with pytest.raises(InputError, match=f"block_size: got {size}; allowed: a divisor of B = {batch}"):
            ProbeConfig.parse(values)
    values["probe_config"]["mode"] = "exact"
    assert ProbeConfig.parse(values).probe_config.block_size == size  # not used


# --- importance sampling


def test_weights_have_mean_1_and_are_clipped_at_a_multiple_of_it():
    old, new = torch.zeros(1, 4), tensor([0.0, math.log(2), math.log(4), math.log(9)])
    w, clipped = snis._weights(old, new, None)
    assert_close(w, tensor([0.25, 0.5, 1.0, 2.25])) and clipped == 0.0
    w, clipped = snis._weights(old, new, 1.0)  # the mean is 4 ninths of the largest
    cut = tensor([1.0, 2.0, 4.0, 4.0])
    assert_close(w, cut / cut.mean())
    assert clipped == 0.25
    assert snis._weights(old, new, 2.25)[1] == 0.0
    for clip in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match="clip: got .*; allowed: a factor above 0, or none"):
            snis._weights(old, new, clip)
    assert snis._weights(old, new + 800, None)[0].isfinite().all()  # normalised in log space


def reweighted(old_logps, new_logps, old, new, lengths):
    """Change, standard error and effective sample size from the formulas, sample by sample."""
    w = (new_logps - old_logps).exp()
    w = w / w.mean()
    before, after = old.sum() / lengths.sum(), (w * new).sum() / (w * lengths).sum()
    psi = w * (new - after * lengths) / (w * lengths).mean() - (old - before * lengths) / lengths.mean()
    units = psi.mean(1) if len(psi) > 1 else psi[0]
    return before, after, units.std() / len(units) ** 0.5, w.sum() ** 2 / (w * w).sum()


@pytest.mark.parametrize("shape", [(1, 2), (1, 7), (2, 1), (4, 3)])
@pytest.mark.parametrize("tokens", [False, True])
def test_reweighted_changes_by_formula(shape, tokens):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    lengths = torch.randint(1, 9, shape, generator=generator).double() if tokens else None
    found = snis.reweighted_change(*parts, lengths)
    before, after, stderr, ess = reweighted(
        *parts, torch.ones(shape, dtype=torch.float64) if lengths is None else lengths
    )
    assert (found.before, found.after, found.stderr, found.ess) == pytest.approx(
        tuple(map(float, (before, after, stderr, ess))), rel=1e-12
    )
    assert found.change == pytest.approx(found.after - found.before) and found.pareto_k is None


@pytest.mark.parametrize("wrong", range(5))
def test_reweighted_changes_take_equal_shapes_of_two_samples_or_more(wrong):
    parts = [torch.ones(2, 2)] * 5
    assert snis.reweighted_change(*parts).change == 0
    parts[wrong] = torch.ones(1, 2)
    with pytest.raises(ValueError, match="not equal shapes"):
        snis.reweighted_change(*parts)
    for shape in ((1, 1), (2,), (2, 2, 2)):
        with pytest.raises(ValueError, match="not equal shapes"):
            snis.reweighted_change(*[torch.ones(shape)] * 4)
    for value in (math.nan, math.inf):
        parts = [torch.ones(2, 2)] * 5
        parts[wrong] = torch.tensor([[1.0, 1.0], [1.0, value]])
        with pytest.raises(InputError, match="samples"):
            snis.reweighted_change(*parts)


@pytest.mark.parametrize(("n", "count"), [(49, None), (50, 10), (225, 45), (226, 45), (400, 60)])
def test_the_tails_share_of_the_weights(n, count):
    # min(n / 5, 3 sqrt(n)) of them: equal at n = 225.
    w = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 2
    found = snis._pareto_k(w)
    if count is None:
        assert found is None
    else:
        top = np.sort(w.numpy())[::-1]
        excess = top[:count] - top[count]
        assert found == pytest.approx(float(genpareto.fit(excess / excess.mean(), floc=0)[0]), rel=1e-9)


def test_weights_without_a_tail_have_no_shape():
    w = torch.ones(100, dtype=torch.float64)
    assert snis._pareto_k(w) is None
    w[:21] = 2.0  # the 20 largest and the next one are equal
    assert snis._pareto_k(w) is None
    w[0] = 3.0
    excess = np.array([1.0] + [1e-300] * 19)
    assert snis._pareto_k(w) == pytest.approx(float(genpareto.fit(excess / excess.mean(), floc=0)[0]))


def test_prefixes_of_three_tokens_by_hand():
    # Weights of the prefixes: 1, 2, 2 * 3 and 1, 0.5, 0.5 * 4; the last token's own weight does not count.
    log_w = tensor([[2.0, 3.0, 7.0], [0.5, 4.0, 9.0]]).log()
    old, new = tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), tensor([[1.5, 2.0, 3.0], [2.5, 1.0, 0.5]])
    first = (2 - 1) * (2 - 1) + (6 - 1) * (3 - 0.5) + (6.5 - 3)
    second = (0.5 - 1) * (1 - 2) + (2 - 1) * (0.5 - 3) + (4 - 6)
    assert_close(snis.prefix_change(0 * log_w, log_w, old, new), tensor([first, second]))
    alone = snis.prefix_change(0 * log_w[:, :1], log_w[:, :1], old[:, :1], new[:, :1])
    assert_close(alone, tensor([(2 - 1) * 2 + (6 - 1) * 3 + 3.5]))


@pytest.mark.parametrize("wrong", range(4))
def test_prefixes_take_finite_values_alone(wrong):
    for value in (math.nan, math.inf):
        parts = [torch.ones(2, 2, 2) for _ in range(4)]
        parts[wrong][1, 1, 1] = value
        with pytest.raises(InputError, match="samples"):
            snis.prefix_change(*parts)


# --- the step


def state(*shapes, **options):
    """Parameters of 1, 2, ... in two groups, and an optimizer that has taken two steps."""
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.arange(1.0, 1 + math.prod(s)).view(s).double()) for s in shapes]
    groups = [
        dict(params=made[:1], lr=0.1, weight_decay=0.5, betas=(0.8, 0.9), eps=1e-3),
        dict(params=made[1:], lr=0.01, weight_decay=0.0, betas=(0.5, 0.99), eps=1e-8),
    ]
    optimizer = torch.optim.AdamW(groups, **options)
    for number in (1, 2):
        for p in made:
            p.grad = torch.full_like(p, 0.5 * number)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return made, optimizer


def test_parts_of_adamws_step_by_hand():
    parameters, optimizer = state((2,), (3,))
    gradients = [tensor(3.0, -1.0), tensor(0.0, 2.0, 4.0)]
    found = adamw_update(optimizer, parameters, gradients)
    momentum, gradient, decay = [], [], []
    for p, g, lr, wd, (b1, b2), eps in (
        (parameters[0], gradients[0], 0.1, 0.5, (0.8, 0.9), 1e-3),
        (parameters[1], gradients[1], 0.01, 0.0, (0.5, 0.99), 1e-8),
    ):
        m = b1 * (1 - b1) * 0.5 + (1 - b1) * 1.0
        v = b2 * (b2 * (1 - b2) * 0.25 + (1 - b2) * 1.0) + (1 - b2) * g**2
        divided = -lr / (1 - b1**3) / ((v / (1 - b2**3)).sqrt() + eps)
        momentum.append(divided * b1 * m), gradient.append(divided * (1 - b1) * g)
        decay.append(-lr * wd * p.detach())
    for name, parts in (("momentum", momentum), ("gradient", gradient), ("decay", decay)):
        assert_close(getattr(found, name), torch.cat(parts))
        assert not getattr(found, name).requires_grad
    assert_close(found.total, torch.cat(momentum) + torch.cat(gradient) + torch.cat(decay))
    assert found.clipped == 1.0 and not optimizer.state[parameters[0]]["exp_avg"].requires_grad
    want = [1 / ((v / (1 - b2**2)) ** 0.5 + eps) for v, b2, eps in (
        (0.9 * 0.1 * 0.25 + 0.1, 0.9, 1e-3), (0.99 * 0.01 * 0.25 + 0.01, 0.99, 1e-8))]  # fmt: skip
    got = preconditioner(optimizer, parameters)
    assert_close(got, tensor(*[want[0]] * 2, *[want[1]] * 3))
    assert not got.requires_grad


@pytest.mark.parametrize(("norm", "factor"), [(None, 1.0), (1e9, 1.0), (5.0, 1 - 2e-7), (2.5, 0.5 - 1e-7), (0.0, 0.0)])
def test_clipping_is_torchs(norm, factor):
    parameters, optimizer = state((1,), (1,))
    found = adamw_update(optimizer, parameters, [tensor(3.0), tensor(4.0)], norm)
    assert found.clipped == pytest.approx(factor, abs=1e-12)
    tiny = adamw_update(optimizer, parameters, [tensor(3e-6), tensor(4e-6)], 3e-6)
    assert tiny.clipped == pytest.approx(0.5, rel=1e-9)  # 3 / (5 + 1): torch's epsilon of 1e-6


def test_a_fresh_optimizers_first_step():
    p = torch.nn.Parameter(tensor(2.0))
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.5)
    found = adamw_update(optimizer, [p], [tensor(3.0)], allow_fresh=True)
    assert float(found.momentum) == 0 and float(found.decay) == pytest.approx(-0.1)
    assert float(found.gradient) == pytest.approx(-0.1 * 3 / (3 + 1e-8), rel=1e-12)
    assert preconditioner(optimizer, [p]) is None


def test_options_of_another_step_and_other_parameters_are_refused():
    p = torch.nn.Parameter(tensor(2.0))
    for option in ("amsgrad", "maximize"):
        with pytest.raises(InputError, match=f"{option}: got True"):
            adamw_update(torch.optim.AdamW([p], **{option: True}), [p], [tensor(1.0)], allow_fresh=True)
    with pytest.raises(InputError, match="optimizer: got 'Adam'; allowed: AdamW"):
        adamw_update(torch.optim.Adam([p]), [p], [tensor(1.0)], allow_fresh=True)
    with pytest.raises(ValueError, match="none of the optimizer's parameters"):
        adamw_update(torch.optim.AdamW([p]), [torch.nn.Parameter(tensor(2.0))], [tensor(1.0)], allow_fresh=True)
    for value in (math.nan, math.inf):
        with pytest.raises(InputError, match="gradients"):
            adamw_update(torch.optim.AdamW([p]), [p], [tensor(value)], allow_fresh=True)


@pytest.mark.parametrize("devices", [0, 1, 2])
def test_a_snapshot_keeps_the_random_states_of_the_devices_that_are_there(devices, monkeypatch):
    states = [torch.full((2,), i, dtype=torch.uint8) for i in range(devices)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states or [torch.zeros(9)])
    optimizer = torch.optim.AdamW(trained_parameters(policy()))
    snapshot = Snapshot.of(policy(), optimizer)
    assert torch.equal(snapshot.random[0], torch.get_rng_state())
    assert [id(kept) for kept in snapshot.random[1:]] == [id(one) for one in states]


@pytest.mark.parametrize(("norm", "largest"), [(None, 2.0), (0.5, 0.5)])
def test_a_step_that_is_undone_clips_copies_of_the_gradients(norm, largest):
    made = tiny_policy()
    parameters = trained_parameters(made)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    gradients = [torch.zeros_like(p) for p in parameters]
    gradients[0][0, 0] = 2.0
    kept = [torch.ones_like(p) for p in parameters]
    for p, g in zip(parameters, kept, strict=True):
        p.grad = g
    before = [p.detach().clone() for p in parameters]
    with stepped(made, optimizer, gradients, norm):
        assert float(parameters[0].grad[0, 0]) == pytest.approx(largest, rel=1e-5)
        assert optimizer.state[parameters[0]]["step"] == 1
        assert not torch.equal(parameters[0], before[0])
    assert float(gradients[0][0, 0]) == 2.0, "the caller's gradients stay as they are"
    assert all(p.grad is g for p, g in zip(parameters, kept, strict=True)) and not optimizer.state
    assert all(torch.equal(p, q) and p.requires_grad for p, q in zip(parameters, before, strict=True))


# --- pairs of prompts


def test_the_u_statistic_of_three_prompts_by_hand():
    x, y = tensor([1.0], [2.0], [4.0]), tensor([1.0], [0.0], [3.0])
    found = u_statistic(x, y)
    # r_n = (x_n mean of the others' y + y_n mean of the others' x) / 2
    rows = [(1 * 1.5 + 1 * 3) / 2, (2 * 2 + 0) / 2, (4 * 0.5 + 3 * 1.5) / 2]
    assert_close(found.rows, tensor(*rows))
    assert found.value == pytest.approx(2.5) and found.plain == pytest.approx(7 / 3 * 4 / 3)
    assert found.plug_in == pytest.approx(math.sqrt(4 * np.var(rows, ddof=1) / 3))
    without = np.array([3 * 2.5 - 2 * r for r in rows])
    assert found.jackknife == pytest.approx(math.sqrt(2 / 3 * ((without - without.mean()) ** 2).sum()))


def test_two_prompts_have_no_jackknife():
    found = u_statistic(tensor([1.0], [2.0]), tensor([3.0], [5.0]))
    assert found.value == pytest.approx((1 * 5 + 2 * 3) / 2) and found.jackknife is None and found.plug_in == 0.0


@pytest.mark.parametrize(("x", "y"), [((2, 3), (2, 4)), ((2, 3), (3, 3)), ((2,), (2,)), ((2, 3, 1), (2, 3, 1))])
def test_pairs_take_equal_shapes(x, y):
    with pytest.raises(ValueError, match="not the same"):
        u_statistic(torch.ones(x), torch.ones(y))
    if x != (2, 3) or y != (3, 3):
        with pytest.raises(ValueError, match="not the same width"):
            two_batch(torch.ones(x), torch.ones(y))


def test_two_batches_by_hand():
    x, y = tensor([1.0, 0.0], [3.0, 2.0]), tensor([2.0, 1.0], [4.0, 0.0], [0.0, 5.0])
    found = two_batch(x, y)  # means (2, 1) and (2, 2)
    assert found.value == pytest.approx(6)
    along_x, along_y = np.var([2, 10], ddof=1) / 2, np.var([5, 8, 5], ddof=1) / 3
    assert found.stderr == pytest.approx(math.sqrt(along_x + along_y))
    assert found.stderr_given_y == pytest.approx(math.sqrt(along_x))
    for few in ((x[:1], y), (x, y[:1])):
        with pytest.raises(InputError, match="prompts of a batch: got 1; allowed: at least 2"):
            two_batch(*few)


@pytest.mark.parametrize(
    ("size", "means"), [(1, [0, 1, 2, 3]), (2, [0.5, 2.5]), (4, [1.5]), (3, None), (0, None), (-2, None)]
)
def test_blocks_of_prompts(size, means):
    x = torch.arange(4.0)[:, None] * torch.tensor([1.0, 10.0])
    if means is None:
        with pytest.raises(InputError, match=f"block size: got {size}; allowed: a divisor of the 4 prompts"):
            blocks(x, size)
    else:
        assert blocks(x, size).tolist() == [[m, 10 * m] for m in means]


# --- tiny policies


def test_a_tiny_policys_configuration():
    config = policy().model.config
    assert (config.vocab_size, config.n_embd, config.n_layer, config.n_head, config.n_positions) == (5, 16, 2, 4, 64)
    assert (config.bos_token_id, config.initializer_range) == (1, 0.3) and policy().eos_token_ids == (2,)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.0
    assert policy().tokenizer is None and policy().dtype == torch.float64
    (adapter,) = policy().peft.peft_config.values()
    assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (2, 4, ["c_attn"])
    other = tiny_policy(7, 8, 1, 3)
    assert (other.vocab_size, other.hidden_size, other.model.config.n_layer) == (7, 8, 1)


def test_a_tiny_policy_is_its_seeds_and_leaves_the_random_state():
    before = torch.get_rng_state()
    again, other = tiny_policy(), tiny_policy(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), policy().parameters(), strict=True))
    assert not torch.equal(other.embedding_weight, policy().embedding_weight)
    b = torch.cat([p.detach().flatten() for n, p in policy().model.named_parameters() if "lora_B" in n])
    # Drawn with a deviation of 0.3 around 0: 4 standard errors of 192 numbers.
    assert float(b.std()) == pytest.approx(0.3, rel=4 / math.sqrt(2 * b.numel()))
    assert abs(float(b.mean())) < 4 * 0.3 / math.sqrt(b.numel())


def test_random_prompts_and_directions():
    made = random_prompts(policy(), 300)
    assert made.ids.shape == (300, 4) and made.mask.all() and set(made.ids.flatten().tolist()) == {3, 4}
    assert not torch.equal(random_prompts(policy(), 300, seed=1).ids, made.ids)
    assert random_prompts(policy(), 1, 7).ids.shape == (1, 7)
    v = random_direction(policy(), 1)
    assert float(v.norm()) == pytest.approx(1) and not torch.equal(v, random_direction(policy()))
    assert v.numel() == sum(p.numel() for p in trained_parameters(policy()))


# --- the report


def report(**more):
    figures = dict(
        entropy=3.14159, entropy_per_token=1.5, delta_h1=0.25, delta_h1_stderr=0.0125, delta_h1_forward=-0.5,
        delta_h1_forward_stderr=0.01, delta_h=0.125, delta_h_stderr=0.03, resampled=0.0, ess=31.4, samples=64,
        delta_h_prefix=0.1, delta_h_prefix_stderr=0.02, delta_h1_momentum=0.2, delta_h1_gradient=0.06,
        delta_h1_decay=-0.01,
    )  # fmt: skip
    modules = {"m.layers.0.q": 0.1, "m.layers.10.q": -0.3, "m.layers.2.v": 0.2, "m.layers.0.v": 0.05, "head": 0.04,
               "m.layers.2.q": -0.06}  # fmt: skip
    values = dict(figures=figures, warnings=["too large"], modules=modules, sequences=tensor([1.0, 2.0]),
                  notes=["unfused"], sweep=[], samples=None, step=None)  # fmt: skip
    return ProbeReport(**(values | more))


def test_a_reports_text():
    lines = report().as_text().split("\n")
    assert lines == [
        "entropy 3.142 nats a completion (1.5 a token)",
        "predicted change +0.25 +- 0.013 (gradients), -0.5 +- 0.01 (forward mode)",
        "true change      +0.125 +- 0.03 (importance sampling; effective sample size 31 of 64), +0.1 +- 0.02 "
        "(weights of prefixes)",
        "of the predicted change: momentum +0.2, gradient +0.06, weight decay -0.01",
        "largest parts",
        "  -0.3  m.layers.10.q",
        "  +0.2  m.layers.2.v",
        "  +0.1  m.layers.0.q",
        "  -0.06  m.layers.2.q",
        "  +0.05  m.layers.0.v",
        "note: unfused",
        "warning: too large",
    ]
    figures = report().figures | {"resampled": 1.0}
    row = dict(multiple=0.5, delta_h1_forward=1e-3, delta_h=2e-3, delta_h_stderr=1e-4, delta_h_prefix=3e-3,
               delta_h_prefix_stderr=2e-4, ess_share=0.875)  # fmt: skip
    text = report(figures=figures, sweep=[row]).as_text()
    assert "(sampled anew; effective sample size 31 of 64)" in text
    assert text.split("\n")[4].split() == "step (x learning rate) predicted true by prefixes effective share".split()
    assert text.split("\n")[5].split() == "0.5 +1.000e-03 +2.000e-03 +- 1e-04 +3.000e-03 +- 2e-04 0.88".split()


def test_layers_are_summed_in_order_and_the_rest_is_minus_1():
    assert list(report().layers().items()) == [
        (-1, 0.04), (0, pytest.approx(0.15)), (2, pytest.approx(0.14)), (10, -0.3),
    ]  # fmt: skip


def test_a_report_as_plain_values():
    made = report(sweep=[{"multiple": 1.0}]).as_dict()
    assert set(made) == {"figures", "warnings", "notes", "modules", "sequences", "sweep"}
    assert made["sequences"] == [[1.0, 2.0]] and made["sweep"] == [{"multiple": 1.0}]


def test_an_update_is_the_sum_of_its_parts():
    assert UpdateVector(tensor(1.0), tensor(2.0), tensor(4.0), 0.5).total.tolist() == [7.0]
