"""Three engines, one gradient."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import EOS, ToyReward, make_backbone, make_prompts, tiny_gpt2

from grade.engines import Objective, StepwiseOptions, checkpointed, replay, unrolled
from grade.engines.stepwise import stepwise
from grade.errors import InputError
from grade.relaxation import RelaxationConfig
from grade.rollout import sample

T = 6


def gradient(engine, backbone, prompts, objective, config, seed=0, **kwargs):
    backbone.zero_grad(set_to_none=True)
    step = engine(backbone, prompts, objective, config, torch.Generator().manual_seed(seed), **kwargs)
    return step, torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()])


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


def config(**changes):
    return RelaxationConfig(**{**dict(estimator="ste", gumbel_topk=7, max_new_tokens=T, tau=0.9), **changes})


@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
@pytest.mark.parametrize("support", ["top_k", "perturbed_top_k"])
@pytest.mark.parametrize("topk", [7, 0])
@pytest.mark.parametrize("engine", [checkpointed, partial(replay, hops=T)])
def test_engines_agree_with_the_unrolled_graph(backbone, prompts, reward, estimator, support, topk, engine):
    """float64, KL on, EOS on: values equal, relative gradient error <= 1e-6 (rounding leaves ~1e-13)."""
    cfg = config(estimator=estimator, support=support, gumbel_topk=topk)
    objective = Objective(reward, beta=0.3)
    want, want_grad = gradient(unrolled, backbone, prompts, objective, cfg, seed=4)
    got, got_grad = gradient(engine, backbone, prompts, objective, cfg, seed=4)
    assert (want.completion_mask == 0).any(), "the case must contain an early end of sequence"
    assert torch.equal(got.completion_ids * got.completion_mask, want.completion_ids * want.completion_mask)
    assert torch.equal(got.completion_mask, want.completion_mask)
    torch.testing.assert_close(got.reward, want.reward)
    torch.testing.assert_close(got.kl, want.kl)
    torch.testing.assert_close(got.loss, want.loss)
    assert relative_error(got_grad, want_grad) <= 1e-6


@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
def test_unrolled_gumbel_matches_finite_differences(prompts, reward, estimator):
    """With soft tokens and fixed noise the loss is a smooth function of the parameters: check its gradient.

    GPT-2, because its layer norm is float64 in a float64 model; Llama's is not, and too coarse for a difference.

    The reference is a constant of the loss, so its inputs are frozen at the unperturbed soft tokens by beta = 0 here;
    KL's own gradient is checked in test_vocab. A straight-through gradient is not a derivative, so it must differ.
    """
    backbone = make_backbone(tiny_gpt2(), target_modules=["c_attn"])
    cfg = config(estimator=estimator, gumbel_topk=0)
    objective = Objective(reward, beta=0.0)
    _, grad = gradient(unrolled, backbone, prompts, objective, cfg, seed=4)
    direction = torch.randn(grad.shape, dtype=grad.dtype, generator=torch.Generator().manual_seed(1))

    def loss(eps):
        offset = 0
        with torch.no_grad():
            for p in backbone.trainable_parameters():
                p.add_(eps * direction[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
        return gradient(unrolled, backbone, prompts, objective, cfg, seed=4)[0].loss.item()

    eps = 1e-6
    plus, minus = loss(eps), loss(-2 * eps)
    loss(eps)
    numeric, analytic = (plus - minus) / (2 * eps), (grad @ direction).item()
    error = abs(numeric - analytic) / abs(analytic)
    # central difference: truncation ~ eps^2, rounding ~ 1e-16 / eps = 1e-10
    assert error < 1e-5 if estimator == "gumbel" else error > 1e-2


@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
def test_hops_converge_and_residual_reports_it(backbone, prompts, reward, estimator):
    cfg = config(estimator=estimator)
    objective = Objective(reward, beta=0.3)
    want = gradient(unrolled, backbone, prompts, objective, cfg)[1]
    steps = [gradient(replay, backbone, prompts, objective, cfg, hops=hops) for hops in range(T)]
    errors = [relative_error(grad, want) for _, grad in steps]
    assert errors[0] > 1e-3, "the feedback must matter in this case"
    assert errors[-1] <= 1e-6
    assert steps[0][0].residual is None
    assert steps[1][0].residual > 1e-4
    # hops = T - 1 already exhausts the nilpotent chain, and one more hop would change nothing
    more = gradient(replay, backbone, prompts, objective, cfg, hops=T + 3)
    assert more[0].hops == T - 1
    torch.testing.assert_close(more[1], steps[-1][1])


def test_tolerance_stops_early(backbone, prompts, reward):
    objective = Objective(reward, beta=0.3)
    step, _ = gradient(replay, backbone, prompts, objective, config(), hops=T, tolerance=0.5)
    assert 1 <= step.hops < T - 1 and step.residual <= 0.5


def test_layer_checkpointing_changes_nothing(backbone, prompts, reward):
    objective = Objective(reward, beta=0.3)
    want = gradient(replay, backbone, prompts, objective, config(), hops=3)[1]
    got = gradient(replay, backbone, prompts, objective, config(), hops=3, gradient_checkpointing=True)[1]
    torch.testing.assert_close(got, want)
    assert not backbone.model.training and not any(m.training for m in backbone.modules() if m is not backbone)


@pytest.mark.parametrize(
    "options",
    [
        StepwiseOptions(compact=True),
        StepwiseOptions(online_kl=True),
        StepwiseOptions(reference_cache=True),
        StepwiseOptions(reward_embedding="gathered"),
        StepwiseOptions(reward_embedding="bagged"),
        StepwiseOptions(compact=True, reward_embedding="gathered"),
        StepwiseOptions(checkpoint=True),
        StepwiseOptions(drop_lists=True),
        StepwiseOptions(head_positions="last"),
        StepwiseOptions(compact=True, head_positions="last"),
    ],
    ids=lambda o: "+".join(k for k, v in vars(o).items() if v != getattr(StepwiseOptions(), k)),
)
def test_each_optimisation_alone_keeps_the_gradient(backbone, prompts, reward, options):
    objective = Objective(reward, beta=0.3)
    want = gradient(unrolled, backbone, prompts, objective, config())[1]
    got = gradient(partial(stepwise, options=options), backbone, prompts, objective, config())[1]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("engine", [unrolled, checkpointed, partial(replay, hops=2)])
def test_accumulated_microbatches_equal_one_big_batch(backbone, reward, engine):
    """Gradients of two microbatches, each scaled by 1/2, add up to the gradient of all four prompts."""
    prompts, objective = make_prompts(4), Objective(reward, beta=0.3)
    cfg = config(support="top_k", gumbel_topk=1)  # one candidate: the noise cannot change the sample
    big = gradient(engine, backbone, prompts, objective, cfg)[1]
    backbone.zero_grad(set_to_none=True)
    for rows in (slice(0, 2), slice(2, 4)):
        half = replace(prompts, ids=prompts.ids[rows], mask=prompts.mask[rows])
        engine(backbone, half, objective, cfg, torch.Generator().manual_seed(9), scale=0.5)
    got = torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()])
    torch.testing.assert_close(got, big)


@pytest.mark.parametrize("engine", [unrolled, checkpointed, replay])
def test_kl_is_zero_at_every_position_before_training(prompts, engine):
    backbone = make_backbone(perturb=False)
    step, _ = gradient(engine, backbone, prompts, Objective(ToyReward(16)), config())
    assert step.kl.abs().max() <= 1e-12


def test_left_padding_does_not_change_the_gradient(backbone, reward):
    """A prompt alone, unpadded, gives the same step as inside a padded batch (completion scope: same reward inputs)."""
    objective = Objective(reward, beta=0.3, scope="completion")
    prompts = make_prompts(1, length=4)
    padded = replace(
        prompts,
        ids=torch.cat([torch.zeros(1, 3, dtype=torch.long), prompts.ids], 1),
        mask=torch.cat([torch.zeros(1, 3, dtype=torch.long), prompts.mask], 1),
    )
    want, want_grad = gradient(replay, backbone, prompts, objective, config())
    got, got_grad = gradient(replay, backbone, padded, objective, config())
    torch.testing.assert_close(got.kl, want.kl)
    torch.testing.assert_close(got_grad, want_grad)


def test_min_new_tokens_forbids_an_early_end(backbone, reward):
    prompts = make_prompts(3)
    cfg = config(min_new_tokens=4, gumbel_topk=0)
    for engine in (unrolled, replay):
        for seed in range(8):
            step, _ = gradient(engine, backbone, prompts, Objective(reward), cfg, seed=seed)
            assert not torch.isin(step.completion_ids[:, :4], torch.tensor(EOS)).any()
    objective = Objective(reward, beta=0.3)
    want = gradient(unrolled, backbone, prompts, objective, cfg)[1]
    assert relative_error(gradient(replay, backbone, prompts, objective, cfg, hops=T)[1], want) <= 1e-6


def test_nothing_after_the_end_matters(backbone, reward):
    """Change what was drawn after the first end-of-sequence: reward, KL and gradient stay."""
    prompts, objective = make_prompts(3), Objective(reward, beta=0.3)
    rollout = sample(backbone, prompts, config(), torch.Generator().manual_seed(4))
    dead = rollout.completion_mask == 0
    assert dead.any()
    changed = replace(
        rollout,
        embeds=torch.where(dead.unsqueeze(-1), rollout.embeds.flip(0) + 1, rollout.embeds),
        noise=torch.where(dead.unsqueeze(-1), rollout.noise.flip(-1), rollout.noise),
    )
    want, want_grad = gradient(replay, backbone, prompts, objective, config(), rollout=rollout)
    got, got_grad = gradient(replay, backbone, prompts, objective, config(), rollout=changed)
    torch.testing.assert_close(got.reward, want.reward)
    torch.testing.assert_close(got.kl, want.kl)
    torch.testing.assert_close(got_grad, want_grad)


def test_only_the_adapter_gets_a_gradient(backbone, prompts, reward):
    gradient(unrolled, backbone, prompts, Objective(reward), config())
    trainable = {id(p) for p in backbone.trainable_parameters()}
    assert trainable
    assert all((p.grad is not None) == (id(p) in trainable) for p in backbone.model.parameters())


@pytest.mark.parametrize("engine", [unrolled, checkpointed, replay])
def test_a_reward_that_is_not_finite_updates_nothing(backbone, prompts, engine):
    class Broken(ToyReward):
        def forward(self, embeds, mask):
            return super().forward(embeds, mask) * float("nan")

    with pytest.raises(InputError, match="reward: got .*nan.*; allowed: finite"):
        engine(backbone, prompts, Objective(Broken(16)), config(), torch.Generator().manual_seed(0))
    assert all(p.grad is None for p in backbone.trainable_parameters())


def test_negative_hops_are_refused(backbone, prompts, reward):
    with pytest.raises(InputError, match="hops: got -1"):
        replay(backbone, prompts, Objective(reward), config(), torch.Generator(), hops=-1)
