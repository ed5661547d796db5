"""Parts of the gradients' methods by hand: defaults, boundaries, what is kept, and what has no graph."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, ToyReward, make_backbone, make_prompts, tiny_gpt2
from torch.testing import assert_close

from grade.errors import InputError
from grade.gradients import estimators, losses, methods, objective, rollout, unrolled
from grade.gradients.distilled import blend, families, store
from grade.gradients.distilled.blend import Blend
from grade.gradients.distilled.families import Counts, Observed, _hash, make_family
from grade.gradients.distilled.learner import DistilledGradient
from grade.gradients.distilled.ridge import PENALTIES, Choice, Spectrum, calibrated, centred, choose, coefficients
from grade.gradients.distilled.store import Evidence, Store, growth, joined
from grade.gradients.engines import make_engine
from grade.gradients.estimators import ESTIMATORS, RelaxationConfig, likeliest_support, tau_at
from grade.gradients.importance import importance_weights
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective, check_finite, sequence_mean
from grade.gradients.policy_gradient import ClosedFormValues, Completions, Experience, PolicyGradient, StepContext
from grade.gradients.replay import ReplayGraph, replay, replay_inputs
from grade.gradients.rollout import check_completions
from grade.gradients.unrolled import CHECKPOINTED, UNROLLED, StepwiseOptions, stepwise
from grade.models.head import EmbeddingTable
from grade.models.prompts import PromptBatch
from grade.models.scoring import States


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def policy():
    return make_backbone(tiny_gpt2(), target_modules=["c_attn"])


# --- defaults and constants


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (losses.ema_baseline, {"momentum": 0.9}),
        (losses.grpo, {"normalize_std": False}),
        (losses.gae, {"gamma": 1.0, "gae_lambda": 0.95}),
        (losses.whiten, {"over": None}),
        (make_engine, {"hops": 2, "tolerance": 0.0, "gradient_checkpointing": False}),
        (estimators.conditional_draws, {"draws": 1}),
        (choose, {"penalties": (0.01, 0.1, 1.0, 10.0)}),
        (Objective, {"beta": 0.1, "scope": "prompt_and_completion"}),
        (objective.GradientStep, {"residual": None, "hops": None}),
        (objective.Engine.__call__, {"scale": 1.0}),
        (PolicyGradient.accumulate, {"scale": 1.0}),
        (PolicyGradient._generate, {"temperature": 1.0}),
        (Experience, {"values": None, "advantages": None, "targets": None, "kl_factor": 1.0}),
        (ReplayGraph, {"gradient_checkpointing": False}),
        (ReplayGraph.adjoint, {"tolerance": 0.0}),
        (check_completions, {"min_new_tokens": 0}),
        (stepwise, {"scale": 1.0, "options": UNROLLED, "backward": True}),
        (store.Fit, {"foreseen": True}),
        (
            replay,
            {
                "scale": 1.0, "hops": 2, "tolerance": 0.0, "gradient_checkpointing": False, "rollout": None,
                "completions": None,
            },
        ),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)  # fmt: skip
def test_defaults(function, defaults):
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == defaults


def test_a_training_loop_of_one_process_sums_and_joins_nothing():
    context, values = StepContext(1, lambda: None), tensor(1.0)
    assert context.total(values) is values and context.gather([3]) == [3] and context.rank == 0


def test_the_constants_of_the_published_figures():
    assert (families.SKETCH, families.BUCKETS) == (2048, 32768)
    assert (store.RECENT, store.LARGE, store.TRUST_STEPS) == (1024, 2048, 8)
    assert (blend.DECAY, blend.HORIZON, blend.EVERY) == (0.7, 10, 4)
    assert PENALTIES == (0.01, 0.1, 1.0, 10.0) and losses.STD_EPSILON == 1e-4
    assert methods.TAU_RANGE == (1e-4, 1e6) and methods.FAMILIES == ("counts", "bag")


def test_the_original_and_the_optimised_loop_are_all_of_their_switches():
    off = dict(compact=False, online_kl=False, reference_cache=False, checkpoint=False, drop_lists=False)
    assert vars(UNROLLED) == off | {"reward_embedding": "dense", "head_positions": "all"}
    on = {name: True for name in off}
    assert vars(CHECKPOINTED) == on | {"reward_embedding": "bagged", "head_positions": "all"}


@pytest.mark.parametrize(
    ("name", "hard", "redraws", "dense", "options"),
    [
        ("gumbel", False, False, False, ()),
        ("ste", True, False, False, ()),
        ("gumbel_rao", True, True, False, ("rao_draws",)),
        ("reinmax", True, True, False, ()),
        ("st", True, True, True, ()),
    ],
)
def test_what_an_estimator_is(name, hard, redraws, dense, options):
    made = ESTIMATORS[name]
    assert (made.hard, made.redraws, made.dense, made.options) == (hard, redraws, dense, options)


def test_what_a_family_is(policy):
    kinds = {name: make_family(name, policy) for name in ("counts", "bag", "ngrams", "values", "trunk1")}
    assert [family.additive for family in kinds.values()] == [True, True, True, True, False]
    assert [family.depth for family in kinds.values()] == [None, None, None, None, 1]


# --- estimators


@pytest.mark.parametrize(("step", "tau"), [(0, 2.0), (1, 1.75), (2, 1.5), (4, 1.0), (5, 1.0), (100, 1.0)])
def test_tau_is_linear_until_it_ends(step, tau):
    assert tau_at(step, 2.0, 1.0, 4) == tau
    assert tau_at(step, 2.0, 1.0, 0) == tau_at(step, 2.0, 1.0, -1) == 1.0
    assert tau_at(step, 2.0, 1.0, 1) == (2.0 if step == 0 else 1.0)


@pytest.mark.parametrize(
    ("k", "token", "support"),
    [
        (2, [0, 3], [[0, 2], [3, 0]]),
        (2, [1, 1], [[1, 2], [1, 0]]),  # not among the two largest: it replaces the second
        (1, [1, 0], [[1], [0]]),
        (0, [1, 0], [[0, 1, 2, 3]] * 2),
        (4, [1, 0], [[0, 1, 2, 3]] * 2),
        (3, [1, 0], [[1, 2, 0], [0, 3, 2]]),
    ],
)
def test_the_likeliest_tokens_and_the_one_that_was_drawn(k, token, support):
    logits = tensor([2.0, 0.0, 3.0, 1.0], [3.0, 0.0, 1.0, 2.0])
    got = likeliest_support(logits, torch.tensor(token), k)
    assert [sorted(row) for row in got.tolist()] == [sorted(row) for row in support]


@pytest.mark.parametrize(("vocab", "topk", "fine"), [(5, 5, True), (5, 6, False), (5, 0, True)])
def test_a_support_is_at_most_the_vocabulary(vocab, topk, fine):
    for name in ("ste", "gumbel", "gumbel_rao", "reinmax"):
        config = RelaxationConfig(estimator=name, gumbel_topk=topk)
        if fine:
            config.check(vocab)
        else:
            with pytest.raises(InputError, match="gumbel_topk: got 6; allowed: 0 .full vocabulary. to 5"):
                config.check(vocab)
    RelaxationConfig(estimator="st", gumbel_topk=topk).check(vocab)  # has no support
    RelaxationConfig(min_new_tokens=4, max_new_tokens=4, gumbel_topk=0).check(5)


@pytest.mark.parametrize(("support", "k"), [("top_k", 2), ("perturbed_top_k", 2), ("top_k", 0), ("perturbed_top_k", 5)])
def test_supports_and_noise_are_drawn_without_a_graph(support, k, monkeypatch):
    modes = []
    for name in ("gumbel_noise", "exponential_noise"):
        inner = getattr(estimators, name)

        def note(*args, inner=inner):
            modes.append(torch.is_grad_enabled())
            return inner(*args)

        monkeypatch.setattr(estimators, name, note)
    logits = torch.randn(3, 5, generator=generator(), dtype=torch.float64, requires_grad=True)
    token = torch.tensor([0, 4, 2])
    for name in ("ste", "gumbel", "st"):
        config = RelaxationConfig(estimator=name, support=support, gumbel_topk=k)
        chosen, noise = ESTIMATORS[name].draw(logits, config, generator(1))
        size = 1 if name == "st" else k or 5
        assert chosen.shape == noise.shape == (3, size) and not noise.requires_grad
    for name in ("ste", "gumbel_rao", "reinmax", "st"):
        config = RelaxationConfig(estimator=name, support=support, gumbel_topk=k, rao_draws=2)
        for drawn in (
            estimators.draw_given(logits, token, config, generator(1)),
            ESTIMATORS[name].draw_given(logits, token, config, generator(1)),
        ):
            assert not drawn[1].requires_grad
    draws = estimators.conditional_draws(logits, token, config, generator(1), 3)
    assert len(draws) == 3 and not any(noise.requires_grad for _, noise in draws)
    assert modes and not any(modes)


def test_conditional_noise_by_hand(monkeypatch):
    times = tensor([1.0, 2.0, 0.5], [3.0, 1.0, 2.0])
    monkeypatch.setattr(estimators, "exponential_noise", lambda *_: times)
    logits, chosen = tensor([0.0, math.log(2), 0.0], [math.log(3), 0.0, -math.inf]), torch.tensor([1, 0])
    noise = estimators.conditional_noise(logits, chosen, None)
    # Z = 4: z_c = log Z - log E_c, z_j = log Z - log(E_j Z / exp(l_j) + E_c).
    first = [math.log(4) - math.log(4 + 2), math.log(4) - math.log(2) - math.log(2), math.log(4) - math.log(2 + 2)]
    second = [math.log(4) - math.log(3) - math.log(3), math.log(4) - math.log(4 + 3), 0.0]
    assert_close(noise, tensor(first, second))


def test_a_token_alone():
    support, noise = estimators.alone(torch.tensor([[3, 4]]))
    assert support.tolist() == [[[3], [4]]] and noise.tolist() == [[[0.0], [0.0]]] and noise.dtype == torch.float32


# --- the objective


def test_means_are_over_each_sequences_tokens():
    values, mask = tensor([1.0, 2.0, 6.0], [4.0, 9.0, 9.0]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert sequence_mean(values, mask).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("reward", "loss", "name"),
    [(math.nan, 0.0, "reward"), (math.inf, 0.0, "reward"), (0.0, math.nan, "loss"), (math.nan, math.nan, "reward")],
)
def test_what_is_not_finite_is_named_with_its_first_values(reward, loss, name):
    check_finite(tensor(1.0), tensor(2.0))
    with pytest.raises(InputError, match=f"{name}: got .*; allowed: finite numbers; nothing was updated") as error:
        check_finite(tensor(*range(9), reward), tensor(loss))
    assert str(error.value).count(",") <= 8


def test_the_default_scope_is_prompt_and_completion(policy):
    seen = []

    def reward(embeds, mask):
        seen.append((tuple(embeds.shape), mask.tolist()))
        return embeds.sum((1, 2))

    prompts = make_prompts(2, 3)
    ids, mask = torch.tensor([[5, 6], [7, 8]]), torch.tensor([[1, 1], [1, 0]])
    whole = Objective(reward).score(policy, prompts, ids, mask)
    alone = Objective(reward, scope="completion").score(policy, prompts, ids, mask)
    assert seen[0] == ((2, 5, 16), torch.cat([prompts.mask, mask], 1).tolist()) and seen[1] == (
        (2, 2, 16),
        mask.tolist(),
    )
    assert_close(alone, policy.embed(ids).sum((1, 2)))
    assert_close(whole, alone + policy.embed(prompts.ids).sum((1, 2)))


def test_tables_of_their_own_are_listed_in_order():
    first, second = EmbeddingTable(tensor([1.0])), EmbeddingTable(tensor([2.0]))
    parts = [SimpleNamespace(reads=first), SimpleNamespace(), SimpleNamespace(reads=second)]
    assert Objective(SimpleNamespace(parts=parts)).tables == [first, second]
    assert Objective(parts[1]).tables == [] and Objective(parts[1]).parts == (parts[1],)


# --- methods


@pytest.mark.parametrize(
    ("tau", "why"),
    [(1e-4, None), (1e6, None), (0.99e-4, "rounds to 0 in float32"), (1.01e6, "is less than AdamW's epsilon")],
)
@pytest.mark.parametrize("name", ["tau_start", "tau_end"])
def test_temperatures_at_which_something_is_learned(name, tau, why):
    if why is None:
        assert getattr(MethodConfig(method="ste", **{name: tau}), name) == tau
    else:
        with pytest.raises(
            InputError, match=f"{name}: got .*; allowed: 0.0001 to 1e.06: with this one the gradient {why}"
        ):
            MethodConfig(method="ste", **{name: tau})


@pytest.mark.parametrize(("value", "fine"), [(0, True), (1, True), (0.5, True), ("auto", True), (-0.01, False),
                                             (1.01, False), ("full", False), ("0.5", False)])  # fmt: skip
def test_weights_of_the_residual(value, fine):
    if fine:
        assert MethodConfig(method="distilled", residual_weight=value).residual_weight == value
    else:
        with pytest.raises(InputError, match="residual_weight: got .*0 to 1, or auto"):
            MethodConfig(method="distilled", residual_weight=value)


@pytest.mark.parametrize(
    ("values", "group", "passes", "updates"),
    [
        ({"method": "reinforce"}, 1, 1, 1),
        ({"method": "grpo"}, 8, 1, 1),
        ({"method": "rloo", "num_generations": 3}, 3, 1, 1),
        ({"method": "ppo"}, 1, 4, 4),
        ({"method": "ppo", "num_iterations": 2, "minibatches": 3}, 1, 2, 6),
        ({"method": "auto"}, 8, 1, 1),
        ({"method": "distilled"}, 8, 1, 1),
        ({"method": "ste"}, 1, 1, 1),
        ({"method": "remax"}, 1, 1, 1),
    ],
)
def test_groups_passes_and_updates(values, group, passes, updates):
    config = MethodConfig(**values)
    assert (config.group, config.passes, config.updates) == (group, passes, updates)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "distilled", "distil_window": 15}, "distil_window: got 15; allowed: at least 16: two groups of 8"),
        ({"method": "auto", "distil_window": 15}, "distil_window: got 15"),
        ({"method": "distilled", "num_generations": 2, "distil_window": 3}, "distil_window: got 3; .* at least 4"),
        ({"method": "ste", "min_completion_length": 3, "max_completion_length": 2}, "min_completion_length: got 3"),
        ({"method": "auto", "num_generations": 1}, "num_generations: got 1; allowed: at least 2 for auto"),
        ({"method": "distilled", "num_generations": 1}, "num_generations: got 1; allowed: at least 2 for distilled"),
        ({"method": "ste", "epsilon": 0.1}, "epsilon: got 0.1; allowed: only with grpo, ppo, not with ste"),
        ({"method": "auto", "hops": 3}, "hops: got 3; allowed: only with"),
        ({"method": "ppo", "value_fit": "closed_form", "kl_estimator": "k3"}, "kl_estimator: got 'k3'"),
        ({"method": "st", "tau_start": 1.0}, "tau_start: got 1.0; .* not with st"),
        ({"method": "ste_legacy", "gradient_checkpointing": True}, "gradient_checkpointing: got True"),
        ({"method": "gumbel", "rao_draws": 4}, "rao_draws: got 4; allowed: only with gumbel_rao"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together(values, message):
    with pytest.raises(InputError, match=message):
        MethodConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"method": "distilled", "distil_window": 16}, {"method": "auto", "distil_window": 16},
        {"method": "distilled", "num_generations": 2, "distil_window": 4}, {"method": "auto", "epsilon": 0.1},
        {"method": "ste", "min_completion_length": 2, "max_completion_length": 2}, {"method": "auto", "epsilon": 0.3},
        {"method": "ppo", "value_fit": "closed_form"}, {"method": "ppo", "kl_estimator": "k3"},
        {"method": "auto", "distil_families": ["bag"]}, {"method": "ste_legacy", "hops": 2},
        {"method": "reinforce", "num_generations": 1}, {"method": "grpo", "gradient_checkpointing": True},
    ],
)  # fmt: skip
def test_settings_that_do(values):
    config = MethodConfig(**values)
    assert {name: getattr(config, name) for name in values} == values


def test_a_relaxation_takes_the_methods_settings():
    config = MethodConfig(method="gumbel_rao", support="top_k", gumbel_topk=7, rao_draws=3, max_completion_length=9,
                          min_completion_length=2)  # fmt: skip
    assert config.relaxation(0.75).model_dump() == dict(
        estimator="gumbel_rao", support="top_k", gumbel_topk=7, tau=0.75, rao_draws=3, max_new_tokens=9,
        min_new_tokens=2,
    )  # fmt: skip


def test_engines_by_name():
    made = make_engine("replay", 3, 0.5, True)
    assert made.func is replay and made.keywords == dict(hops=3, tolerance=0.5, gradient_checkpointing=True)
    assert make_engine("checkpointed") is unrolled.checkpointed and make_engine("unrolled") is unrolled.unrolled
    assert unrolled.unrolled.keywords == {"options": UNROLLED}
    assert unrolled.checkpointed.keywords == {"options": CHECKPOINTED}


# --- losses


@pytest.mark.parametrize(("ratio", "share"), [(1.5, 0.0), (1.51, 1.0), (0.5, 0.0), (0.49, 1.0), (1.0, 0.0)])
def test_a_ratio_at_the_clip_range_is_not_clipped(ratio, share):
    new, zero, one = torch.log(tensor([ratio])), tensor([0.0]), torch.ones(1, 1)
    # log and exp leave rounding of 1e-16, which the range is wider by
    assert float(losses.clip_fraction(new, zero, one, 0.5 + 1e-12)) == share


def test_two_values_are_enough_to_whiten():
    got, factor = losses.whiten(tensor([1.0, 3.0]), torch.ones(1, 2))
    assert factor == pytest.approx(1 / math.sqrt(2)) and got.tolist() == [
        [pytest.approx(-(0.5**0.5)), pytest.approx(0.5**0.5)]
    ]
    assert losses.moments(tensor([1.0, 3.0, 9.0]), torch.tensor([[1, 1, 0]])).tolist() == [2.0, 4.0, 10.0]
    # Deviations of 1e-6 of the values are real, those of 1e-8 and less are rounding of the squares.
    assert losses.whiten(tensor([1.0, 1.0 + 1e-6]), torch.ones(1, 2))[1] > 1e6
    with pytest.raises(InputError, match="values to whiten: got '2 equal ones'"):
        losses.whiten(tensor([1.0, 1.0 + 1e-9]), torch.ones(1, 2))
    for mask in ([[1, 0]], [[0, 0]]):
        with pytest.raises(InputError, match="values to whiten: got .; allowed: at least 2"):
            losses.whiten(tensor([1.0, 3.0]), torch.tensor(mask))


def test_gae_by_default_discounts_advantages_by_0_95():
    rewards, values = tensor([1.0, 2.0]), tensor([0.5, 0.25])
    advantages, targets = losses.gae(rewards, values, torch.ones(1, 2))
    last = 2 - 0.25
    first = 1 + 0.25 - 0.5 + 0.95 * last
    assert_close(advantages, tensor([first, last])), assert_close(targets, tensor([first + 0.5, 2.0]))


def test_weights_of_completions_are_constants():
    p, q = tensor([0.5, 0.25]).log().requires_grad_(), tensor([0.25, 0.25]).log()
    for level in ("token", "sequence"):
        assert not importance_weights(p, q, torch.ones(1, 2), level, 9.0).requires_grad


# --- completions that the policy could not have written


def checked(ids, mask, least=0, known=None, vocab=10):
    tokenizer = None if known is None else range(known)
    base = SimpleNamespace(tokenizer=tokenizer, vocab_size=vocab, eos_token_ids=(2,))
    prompts = PromptBatch(torch.ones(len(ids), 1, dtype=torch.long), torch.ones(len(ids), 1, dtype=torch.long))
    check_completions(base, prompts, torch.tensor(ids), torch.tensor(mask), least)


@pytest.mark.parametrize(
    ("ids", "mask", "options"),
    [
        ([[0, 9]], [[1, 1]], {}),
        ([[9, -5]], [[1, 0]], {}),
        ([[9, 99]], [[1, 0]], {}),
        ([[0, 6]], [[1, 1]], {"known": 7}),
        ([[0, 9]], [[1, 1]], {"known": 12}),
        ([[3, 2]], [[1, 1]], {"least": 1}),
        ([[2, 2]], [[1, 0]], {}),
        ([[3, 2, 4]], [[1, 1, 0]], {}),
        ([[3, 2, 2], [4, 4, 4]], [[1, 0, 0], [1, 1, 1]], {"least": 2}),
    ],
)
def test_completions_that_fit(ids, mask, options):
    checked(ids, mask, **options)


@pytest.mark.parametrize(
    ("ids", "mask", "options", "error", "message"),
    [
        ([[0, 10]], [[1, 1]], {}, InputError, r"completion tokens: got \[10\]; allowed: .* 0 to 9"),
        ([[-1, 3]], [[1, 1]], {}, InputError, r"completion tokens: got \[-1\]"),
        ([[0, 7]], [[1, 1]], {"known": 7}, InputError, r"completion tokens: got \[7\]; allowed: .* 0 to 6"),
        ([[11, 10], [12, 10]], [[1, 1], [1, 0]], {}, InputError, r"got \[10, 11, 12\]"),
        ([[2, 3]], [[1, 1]], {}, InputError, "a token after an end-of-sequence"),
        ([[2, 2]], [[1, 1]], {}, InputError, "a token after an end-of-sequence"),
        ([[3, 2]], [[1, 1]], {"least": 2}, InputError, "none before min_new_tokens = 2"),
        ([[3, 2, 4]], [[1, 1, 0]], {"least": 2}, InputError, "none before min_new_tokens = 2"),
        ([[3, 4], [3, 4]], [[1, 1], [0, 1]], {}, ValueError, r"row 1: \[0, 1\] is not ones, at least one"),
        ([[3, 4]], [[0, 0]], {}, ValueError, r"row 0: \[0, 0\]"),
        ([[3, 4, 5]], [[1, 0, 1]], {}, ValueError, r"row 0: \[1, 0, 1\]"),
    ],
)
def test_completions_that_do_not(ids, mask, options, error, message):
    with pytest.raises(error, match=message):
        checked(ids, mask, **options)


def test_noise_given_is_drawn_in_rows_of_chunks(policy, monkeypatch):
    monkeypatch.setattr(rollout, "chunk_rows", lambda vocab, rows: 3)
    sizes = []
    inner = rollout.draw_given
    monkeypatch.setattr(rollout, "draw_given", lambda logits, *rest: sizes.append(len(logits)) or inner(logits, *rest))
    ids, mask = torch.full((2, 4), 5), torch.ones(2, 4, dtype=torch.long)
    hidden = torch.randn(2, 4, 16, generator=generator(), dtype=torch.float64, requires_grad=True)
    for name, shape in (("ste", (2, 4, 6)), ("gumbel_rao", (2, 4, 3, 6))):
        config = RelaxationConfig(estimator=name, gumbel_topk=6, rao_draws=3)
        support, noise = rollout.noise_given(policy, hidden, ids, mask, config, generator())
        assert support.shape == noise.shape == shape and not noise.requires_grad
    assert sizes == [3, 3, 2] * 2
    support, noise = rollout.noise_given(policy, None, ids, mask, RelaxationConfig(estimator="st"), generator())
    assert torch.equal(support[..., 0], ids) and support.shape == noise.shape == (2, 4, 1) and not noise.any()


# --- what the step-by-step engines keep


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_what_a_loop_keeps(compact, online, drop, policy):
    options = StepwiseOptions(compact=compact, online_kl=online, drop_lists=drop)
    config = RelaxationConfig(estimator="ste", gumbel_topk=4, max_new_tokens=3)
    loop = unrolled._Loop(policy, make_prompts(2), config, generator(), options)
    for step in range(3):
        loop.step(step)
    kept = {name: len(getattr(loop, name)) for name in ("soft", "logits", "ref_logits", "kls", "unused")}
    assert kept == {
        "soft": 0 if compact else 3, "logits": 0 if online else 3, "ref_logits": 0 if online else 3,
        "kls": 3 if online else 0, "unused": 0 if drop else 3,
    }  # fmt: skip
    assert all(len(getattr(loop, name)) == 3 for name in ("embeds", "tokens", "masks", "supports", "weights"))
    assert loop.mask.shape == (2, 8) and not loop.prompt_embeds.requires_grad
    assert not any(values.requires_grad for values in (*loop.unused, *loop.ref_logits, *loop.supports))
    assert loop.supports[0].shape == (2, 4) and all(e.requires_grad for e in loop.embeds)


def test_a_rewards_embedding_is_one_sum_however_it_is_made(policy):
    table = EmbeddingTable(torch.randn(VOCAB, 3, generator=generator(), dtype=torch.float64), 0.5)
    config, found = RelaxationConfig(estimator="gumbel", gumbel_topk=4, max_new_tokens=2), []
    for compact in (False, True):
        for kind in ("dense", "gathered", "bagged"):
            options = StepwiseOptions(compact=compact, reward_embedding=kind)
            loop = unrolled._Loop(policy, make_prompts(2), config, generator(), options)
            for step in range(2):
                loop.step(step)
            own, plain = loop.reward_embeds(table), loop.reward_embeds()
            support, weights = torch.stack(loop.supports, 1), torch.stack(loop.weights, 1)
            assert_close(own, (table.weight[support] * weights.unsqueeze(-1)).sum(2) * 0.5)
            found.append(plain)
            assert_close(plain, torch.stack(loop.embeds, 1))
    for other in found[1:]:
        assert_close(other, found[0])


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_without_backward_the_graph_stays_alive(scale, policy):
    config = RelaxationConfig(estimator="ste", gumbel_topk=4, max_new_tokens=2)
    made = Objective(ToyReward(16), 0.3)
    policy.zero_grad(set_to_none=True)
    step = stepwise(policy, make_prompts(2), made, config, generator(), backward=False)
    assert step.loss.requires_grad and all(p.grad is None for p in policy.trainable_parameters())
    want = torch.autograd.grad(step.loss, policy.trainable_parameters())
    for engine, options in ((stepwise, {}), (replay, {"hops": 1})):
        policy.zero_grad(set_to_none=True)
        done = engine(policy, make_prompts(2), made, config, generator(), scale, **options)
        assert not any(value.requires_grad for value in (done.loss, done.reward, done.kl))
        for p, g in zip(policy.trainable_parameters(), want, strict=True):
            assert_close(p.grad, scale * g)
    policy.zero_grad(set_to_none=True)


def test_the_last_token_is_never_fed_back():
    prompts = PromptBatch(torch.ones(1, 2, dtype=torch.long), torch.tensor([[0, 1]]))
    e = torch.arange(6.0).view(1, 3, 2)
    inputs, mask = replay_inputs(prompts, torch.full((1, 2, 2), 9.0), e)
    assert inputs.tolist() == [[[9, 9], [9, 9], [0, 1], [2, 3]]] and mask.tolist() == [[0, 1, 1, 1]]


# --- policy gradients


def test_rows_of_completions_take_their_weights_along():
    prompts = PromptBatch(torch.arange(4).view(4, 1), torch.ones(4, 1, dtype=torch.long))
    ids, mask, weights = torch.arange(8).view(4, 2), torch.ones(4, 2), tensor([1.0], [2.0], [3.0], [4.0])
    some = Completions(prompts, ids, mask, weights).rows(slice(1, None, 2))
    assert some.ids.tolist() == [[2, 3], [6, 7]] and some.weights.tolist() == [[2.0], [4.0]]
    assert some.prompts.ids.tolist() == [[1], [3]]
    assert Completions(prompts, ids, mask).rows(slice(2)).weights is None
    seen = Experience(Completions(prompts, ids, mask), ids, ids, ids, ids[:, 0], advantages=ids, kl_factor=3.0)
    part = seen.rows(slice(0, 1))
    assert part.advantages.tolist() == part.logps.tolist() == [[0, 1]] and part.reward.tolist() == [0]
    assert part.kl_factor == 3.0 and part.values is None and part.completions.ids.tolist() == [[0, 1]]


def test_closed_form_values_shrink_by_a_tenth_a_token_and_not_their_mean(policy):
    head = ClosedFormValues(policy)
    hidden = torch.randn(3, 2, 16, generator=generator(), dtype=torch.float64)
    returns, mask = tensor(1.0, 2.0, 6.0), torch.tensor([[1, 1], [1, 0], [1, 1]])
    head.add(hidden, returns, mask, lambda x: x)
    assert float(head.tokens) == 5 and not any(p.requires_grad for p in head.parameters())
    head.solve()
    x = torch.nn.functional.layer_norm(hidden, (16,))[mask.bool()]
    y = tensor(1.0, 1.0, 2.0, 6.0, 6.0)
    x, centred_y = x - x.mean(0), y - y.mean()
    mean = torch.nn.functional.layer_norm(hidden, (16,))[mask.bool()].mean(0)
    w = torch.linalg.solve(x.T @ x + 0.1 * 5 * torch.eye(16, dtype=torch.float64), x.T @ centred_y)
    assert_close(head.linear.weight[0], w), assert_close(head.linear.bias[0], y.mean() - mean @ w)


def test_a_value_head_is_0_at_first_and_sends_no_gradient_back(policy):
    own = PolicyGradient(MethodConfig(method="ppo"), policy)
    hidden = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    values = own.value_head(hidden)
    assert values.shape == (2, 3) and not values.any() and values.requires_grad
    assert torch.autograd.grad(values.sum(), hidden, allow_unused=True) == (None,)
    assert len(own.parameters()) == 2 and set(own.tensors()) == {"linear.weight", "linear.bias"}
    plain = PolicyGradient(MethodConfig(method="rloo"), policy)
    assert plain.parameters() == [] and plain.tensors() == {} and plain.value_head is None


def test_importance_weights_of_completions_weigh_kl_too_and_those_of_tokens_do_not(policy):
    own, made = PolicyGradient(MethodConfig(method="rloo", num_generations=2), policy), Objective(ToyReward(16), 0.5)
    prompts = make_prompts(2)
    ids, mask = torch.tensor([[5, 6], [7, 8]]), torch.tensor([[1, 1], [1, 0]])
    logps, kl, advantages = tensor([-1.0, -2.0], [-3.0, 0.0]), tensor([0.5, 0.25], [1.0, 0.0]), tensor([2.0], [-1.0])
    for weights, terms, penalty in (
        (None, (2 * -3, -1 * -3), (0.375, 1.0)),
        (tensor([3.0], [0.5]), (3 * 2 * -3, 0.5 * -1 * -3), (3 * 0.375, 0.5)),
        (tensor([3.0, 1.0], [0.5, 9.0]), (2 * (3 * -1 + -2), -1 * 0.5 * -3), (0.375, 1.0)),
    ):
        seen = Experience(Completions(prompts, ids, mask, weights), kl, logps, kl, advantages[:, 0],
                          advantages=advantages, kl_factor=2.0)  # fmt: skip
        loss = own._loss(logps, kl, seen, made)
        assert float(loss) == pytest.approx(-sum(terms) / 2 + 0.5 * 2.0 * sum(penalty) / 2)
    assert own.figures == {}


# --- distilled


@pytest.mark.parametrize(
    ("token", "before", "bucket"),
    [
        (0, None, 0),
        (1, None, 32293),
        (22, None, 22320),
        (151999, None, 5976),
        (0, 0, 26167),
        (5, 9, 29926),
        (9, 5, 21660),
        (151999, 262143, 31926),
    ],
)
def test_buckets_of_a_checkpoint_stay_where_they_are(token, before, bucket):
    # Computed in whole numbers of any size, by Knuth's rule as it is documented.
    previous = None if before is None else torch.tensor(before)
    assert int(_hash(torch.tensor(token), previous, 2**15)) == bucket
    assert int(_hash(torch.tensor(token), previous, 2**10)) == bucket // 32


@pytest.mark.parametrize(
    ("moments", "share", "sound", "weight"),
    [
        ((0.0, 0.0, 0.0), 0.5, 1.0, 1.0),  # no step yet
        ((1.0, 30.0, 1.0), 0.0, 1.0, 1.0),
        ((1.0, 30.0, 1.0), -0.5, 1.0, 1.0),
        ((0.0, 30.0, 1.0), 0.5, 1.0, 1.0),
        ((1.0, 30.0, 1.0), 0.25, 1.0, 0.5),
        ((1.0, 10.0, 1.0), 0.5, 1.0, 0.5),
        ((2.0, 0.0, 1.0), 0.5, 1.0, 1.0),  # no noise: all of what is missing
        ((2.0, 0.0, 1.0), 1.0, 0.75, 0.25),  # nothing is missing and nothing is noise
        ((2.0, 5.0, 1.0), 1.0, 1.0, 0.0),
    ],
)
def test_weights_of_a_blend(moments, share, sound, weight):
    made = Blend()
    made.moments = tensor(*moments)
    assert made.weight(share, sound) == pytest.approx(weight)


def test_a_blend_begins_with_nothing_and_its_noise_is_not_negative():
    made = Blend()
    assert made.moments.tolist() == [0, 0, 0] and len(made.before) == 0
    made.add(tensor(1.0, 0.0), tensor(1.0, 1.0), 0.5, 0.5, 1.0)  # |d|^2 = 2, parts .5: signal 3, more than 2
    assert made.moments.tolist() == [1.0, 0.0, 1.0]
    made.add(tensor(3.0, 4.0), tensor(1.0, 1.0), 2.0, 1.0, 2.0)  # alone: all of it is noise at first
    assert made.moments.tolist() == pytest.approx([0.7 + 25 / 4, 2.0, 1.7])
    made.add(tensor(0.0, 0.0), tensor(2.0, -1.0), 5.0, 1.0, 1.0)  # signal 1 with the one before, of 5
    assert made.moments.tolist() == pytest.approx([0.7 * (0.7 + 25 / 4), 1.4 + 4.0, 1 + 0.7 * 1.7])


@pytest.mark.parametrize(("groups", "teaches"), [(1, False), (2, True), (3, True)])
def test_two_groups_are_enough_to_choose(groups, teaches):
    x = centred(tensor([1.0], [2.0], [4.0], [3.0], [1.0], [5.0])[: 2 * groups], 2)
    choice = choose(Spectrum.of(x @ x.T), x[:, 0], 2)
    assert (choice.r2 > 0) == teaches
    if not teaches:
        assert choice == Choice(10.0, 0.0, 0.0, math.inf)


@pytest.mark.parametrize("r2", [-1.0, 0.0, 0.25, 1.0, 4.0])
def test_what_is_explained_is_a_share(r2):
    assert Choice(1.0, r2, 1.0, 0.0).explained == math.sqrt(min(max(r2, 0), 1))


def test_slopes_and_their_errors_by_hand():
    p, y = tensor(1.0, -1.0, 2.0, -2.0), tensor(2.0, -2.0, 1.0, -1.0)
    # p.y = 8 of p.p = 10: slope 0.8; the rests by group are 2 (2 - 0.8) = 2.4 and 4 (1 - 1.6) = -2.4.
    r2, slope, stderr = calibrated(p, y, 2)
    assert (r2, slope, stderr) == pytest.approx((0.64 * 10 / 10, 0.8, math.sqrt(2 * 2.4**2) / 10))
    assert calibrated(-p, y, 2)[:2] == pytest.approx((-0.64, -0.8))


def test_coefficients_without_groups_are_0_there():
    x = centred(torch.randn(8, 3, generator=generator(), dtype=torch.float64), 2)
    y = centred(torch.randn(8, generator=generator(1), dtype=torch.float64), 2)
    found = coefficients(x @ x.T, y, 2, 0.5, [1, 3])
    penalty = 0.5 * float((x * x).sum(1).mean())
    for row, left in zip(found, ([], [2, 3], [6, 7]), strict=True):
        rest = [i for i in range(8) if i not in left]
        want = torch.zeros(8, dtype=torch.float64)
        want[rest] = torch.linalg.solve(x[rest] @ x[rest].T + penalty * torch.eye(len(rest), dtype=x.dtype), y[rest])
        assert_close(row, want)
        assert all(float(row[i]) == 0 for i in left)
    assert coefficients(x @ x.T, y, 2, 0.5, []).shape == (1, 8)


@pytest.mark.parametrize(
    ("completions", "new"), [(0, 0), (128, 0.5), (1024, 256), (2048, 2048), (2049, 2049), (4096, 4096)]
)
def test_how_many_new_completions_are_worth_a_choice(completions, new):
    assert growth(completions) == new


def test_trust_is_bounded_and_starts_at_1():
    made = Evidence()
    assert made.trust == 1.0 and made.groups == []
    made.add(tensor(1.0, -1.0, 1.0, -1.0), tensor(0.5, -0.5, 0.5, -0.5), 2)
    assert made.trust == pytest.approx(0.5)  # half came true, in every group alike
    made.add(tensor(2.0, -2.0), tensor(0.0, 0.0), 2)
    # 2 of 12; rests 1 - 2/6, 1 - 2/6 and -8/6
    error = math.sqrt(2 * (2 / 3) ** 2 + (8 / 6) ** 2) / 12
    assert made.trust == pytest.approx(2 / 12 + error)


def test_rows_are_joined_at_the_width_of_the_widest():
    got = joined([torch.tensor([[1]]), torch.tensor([[2, 3, 4], [5, 6, 7]]), torch.tensor([[8, 9]])])
    assert got.tolist() == [[1, -1, -1], [2, 3, 4], [5, 6, 7], [8, 9, -1]]


@pytest.mark.parametrize(("window", "group", "kept"), [(12, 4, 12), (15, 4, 12), (16, 4, 16), (3, 4, 8), (8, 4, 8)])
def test_a_window_is_whole_groups_and_two_at_least(window, group, kept):
    made = Store({}, group, window)
    assert made.window == kept and len(made) == 0 and made.fresh == made.dropped == 0


def test_completions_lie_in_equal_runs_one_for_each_fit(policy):
    prompts = PromptBatch(torch.ones(4, 1, dtype=torch.long), torch.ones(4, 1, dtype=torch.long))
    ids = torch.arange(8).view(4, 2)
    seen = Observed(prompts, ids, torch.ones_like(ids), States(torch.zeros(4, 2, 3), {1: torch.arange(4.0)}))
    assert seen.fit_of(2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1] and seen.fit_of(1).tolist() == [0] * 8
    assert seen.fit_of(4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    part = seen[1:3]
    assert part.ids.tolist() == [[2, 3], [4, 5]] and part.states.pooled[1].tolist() == [1, 2]
    assert part.states.predicting.shape == (2, 2, 3) and len(part.prompts) == 2
    weights = torch.arange(2.0 * VOCAB).view(2, VOCAB).double()
    family = Counts(policy)
    assert family.own(weights, seen).tolist() == [[0, 1], [2, 3], [4 + VOCAB, 5 + VOCAB], [6 + VOCAB, 7 + VOCAB]]
    assert torch.equal(family.values(weights, seen)(torch.tensor([0, 7])), weights)


@pytest.mark.parametrize(
    ("rows", "split", "parts"),
    [
        (12, False, [(0, 12)]), (12, True, [(0, 4), (4, 12)]), (16, True, [(0, 8), (8, 16)]),
        (8, True, [(0, 4), (4, 8)]), (4, True, [(0, 4)]),
    ],
)  # fmt: skip
def test_a_microbatch_is_split_between_whole_groups(rows, split, parts, policy):
    own = DistilledGradient(MethodConfig(method="distilled", num_generations=4), policy)
    assert [(part.start, part.stop) for part in own._parts(rows, split)] == parts


def test_a_distilled_learner_begins_without_a_fit(policy):
    own = DistilledGradient(MethodConfig(method="distilled", num_generations=4, distil_window=64), policy)
    assert list(own.families) == ["counts", "bag"] and own.fit is None and own.last is None
    assert (own.level, own.taken, own.trust, own.sound) == (0.0, 0, 1.0, 0.0) and own.parameters() == []
    assert own._weight() == 1.0 and own.liked_tokens() is None and own.store.window == 64
    state = own.tensors()
    assert set(state) >= {"blend", "residual", "level"} and "fitted" not in state


@pytest.mark.parametrize(
    ("count", "rank", "processes", "places"), [(2, 0, 1, [0, 1]), (2, 1, 2, [1, 3]), (1, 2, 3, [2])]
)
def test_microbatches_are_numbered_over_all_processes(count, rank, processes, places, policy, monkeypatch):
    own, seen = DistilledGradient(MethodConfig(method="distilled", num_generations=2), policy), []
    monkeypatch.setattr(own, "sample", lambda *_: SimpleNamespace(seen="seen"))
    monkeypatch.setattr(own, "learn", lambda *_: None)
    monkeypatch.setattr(own, "_accumulate", lambda samples, where, *_: seen.extend(where) or ["step"] * len(samples))
    applied = []
    context = StepContext(count * processes, lambda: applied.append(1), rank=rank)
    assert own.step([(None, None)] * count, None, context) == ["step"] * count
    assert seen == places and applied == [1] and own.last == "seen"
    assert float(own.figures["distilled/seconds"][0]) < 60
