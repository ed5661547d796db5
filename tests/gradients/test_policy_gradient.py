"""Policy gradients against the enumerated gradient of the objective, and against themselves in parts."""

from functools import partial
from itertools import product

import pytest
import torch
from conftest import VOCAB, ToyReward, flat_grad, generator, gradient, make_backbone, tiny_config, tiny_gpt2
from torch.utils._python_dispatch import TorchDispatchMode

from grade.experiments.enumeration import every_completion
from grade.gradients import losses
from grade.gradients.learner import StepContext
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective, sequence_mean
from grade.gradients.policy_gradient import PolicyGradient
from grade.models.batch import Completions
from grade.models.head import CHUNK_ROWS
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.models.scoring import completion_logps, predicting_hidden, sequence_kl, token_kl

BETA, T = 0.3, 2


class Reward(ToyReward):
    """Depends on the order of tokens, and not on how far a batch is padded."""

    def forward(self, embeds, mask):
        position = 1 + 0.3 * mask.cumsum(1)
        return torch.sigmoid((torch.tanh(3 * embeds @ self.w) * position * mask).sum(1) / mask.sum(1))


def policy(vocab=3, eos=1):
    """A tiny GPT-2, whose layer norms are float64 in a float64 model; with 3 tokens, 7 completions of at most 2."""
    sizes = dict(n_layer=1, n_head=2, n_positions=32, initializer_range=0.5)
    config = tiny_gpt2(vocab_size=vocab, bos_token_id=0, eos_token_id=eos, **sizes)
    return make_backbone(config, target_modules=["c_attn"])


def prompt(n=1):
    ids = torch.tensor([[0, 2, 0], [2, 0, 2], [2, 2, 0], [0, 0, 2]])[:n]
    return PromptBatch(ids, torch.ones_like(ids))


def objective():
    return Objective(Reward(16), BETA)


def learner(backbone, method, **options):
    values = dict(max_completion_length=T, num_generations=2 if method in ("rloo", "grpo") else 1)
    return PolicyGradient(MethodConfig(method=method, **{**values, **options}), backbone)


def enumerated(backbone, least=0, length=T):
    """Every completion of one prompt: ids, mask, probabilities, penalised returns, with gradient, from dense logits."""
    ids, mask = every_completion(backbone.vocab_size, length, backbone.eos_token_ids)
    kept = ~((ids[:, :least] == backbone.eos_token_ids[0]) & mask[:, :least].bool()).any(1)
    ids, mask = ids[kept], mask[kept]
    many = PromptBatch(prompt().ids.expand(len(ids), -1), prompt().mask.expand(len(ids), -1))
    logits = backbone.head(predicting_hidden(backbone, many, ids))
    with torch.no_grad(), backbone.reference():
        ref_logits = backbone.head(predicting_hidden(backbone, many, ids))

    def chosen(logits):
        allowed = logits.clone()
        allowed[:, :least, list(backbone.eos_token_ids)] = -torch.inf
        return allowed.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)

    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kl = (logp.exp() * (logp - ref_logp)).sum(-1)
    embeds = backbone.embed(torch.cat([many.ids, ids], 1))
    reward = Reward(16)(embeds, torch.cat([many.mask, mask], 1))
    probability = (chosen(logits) * mask).sum(1).exp()
    assert probability.sum().item() == pytest.approx(1)
    return Completions(many, ids, mask), probability, reward - BETA * (kl * mask).sum(1) / mask.sum(1), chosen(logits)


def exact_gradient(backbone, **options):
    """Of the loss, minus the objective."""
    _, probability, returns, _ = enumerated(backbone, **options)
    return flat_grad(-(probability * returns).sum(), backbone)


def expected_gradient(method, backbone, group, least=0, length=T, earlier=(), **options):
    """The method's own gradient of every tuple of completions, weighted by the tuple's probability."""
    own = learner(backbone, method, num_generations=group, min_completion_length=least,
                  max_completion_length=length, **options)  # fmt: skip
    every, probability, _, _ = enumerated(backbone, least, length)
    total = 0.0
    for rows in map(list, product(range(len(every.ids)), repeat=group)):
        own.means = list(earlier)
        backbone.zero_grad(set_to_none=True)
        own.step([every[rows]], objective(), StepContext(1, lambda: None))
        total = total + probability.detach()[rows].prod() * gradient(backbone)
    return total


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize(
    ("method", "group", "options"),
    [("reinforce", 1, dict(earlier=[0.3, 0.9])), ("remax", 1, {}), ("rloo", 2, {}), ("grpo", 2, {})],
)
def test_the_expected_gradient_is_that_of_the_objective(method, group, options, least):
    """Exactly, with nothing sampled: all completions (or pairs of them), weighted by their probability."""
    backbone = policy()
    want = exact_gradient(backbone, least=least)
    assert want.norm() > 1e-3
    torch.testing.assert_close(expected_gradient(method, backbone, group, least, **options), want)


def test_greedy_completions_are_as_good_as_remaxs_baseline_penalty_included():
    """What is left is KL's own gradient."""
    backbone = policy(vocab=7)
    greedy = Completions(prompt(4), *generate(backbone, prompt(4), 5, torch.Generator(), temperature=0.0))
    learner(backbone, "remax", max_completion_length=5).step([greedy], objective(), StepContext(1, lambda: None))
    hidden = predicting_hidden(backbone, greedy.prompts, greedy.ids)
    with backbone.reference():
        kl = token_kl(backbone, hidden, predicting_hidden(backbone, greedy.prompts, greedy.ids), greedy.mask)
    found = gradient(backbone)
    torch.testing.assert_close(found, flat_grad(BETA * sequence_mean(kl, greedy.mask).mean(), backbone))


def without_whitening(monkeypatch, gae_lambda=1.0):
    monkeypatch.setattr(losses, "gae", partial(losses.gae, gae_lambda=gae_lambda))
    monkeypatch.setattr(losses, "equal", lambda over, dtype: False)
    monkeypatch.setattr(losses, "whiten", lambda values, mask, over: (values, 1.0))


def test_ppo_without_whitening_is_unbiased_where_every_completion_has_the_same_length(monkeypatch):
    """Per-token penalties are divided by the length, which later tokens decide; so only there."""
    backbone = policy()
    without_whitening(monkeypatch)
    got = expected_gradient("ppo", backbone, 1, least=T, passes_per_step=1)
    torch.testing.assert_close(got, exact_gradient(backbone, least=T))


def sampled(backbone, own, n=4, seed=3):
    return own.sample(prompt(n).repeat(own.config.group), torch.Generator().manual_seed(seed))


def test_one_pass_and_scoring_first_give_one_gradient():
    """grpo's clipped ratio against log-probabilities scored before, rloo's score function: equal without moves."""
    backbone = policy()
    found = []
    for method, options in (("rloo", {}), ("grpo", {}), ("grpo", dict(passes_per_step=2))):
        own = learner(backbone, method, **options)
        backbone.zero_grad(set_to_none=True)
        own.step([sampled(backbone, own, 2)], objective(), StepContext(1, lambda: None))
        found.append(gradient(backbone))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_later_passes_clip_and_the_value_head_learns_alone():
    backbone = policy(vocab=7)
    own = learner(backbone, "ppo", max_completion_length=5, passes_per_step=6)
    groups = [dict(params=backbone.trainable_parameters(), lr=0.1), dict(params=own.parameters(), lr=0.05)]
    optimizer = torch.optim.Adam(groups)
    own.step([sampled(backbone, own)], objective(), StepContext(1, optimizer.step))
    assert own.figures["clip_fraction"][0] == 0 and own.figures["clip_fraction"][-1] > 0
    assert own.figures["value_loss"][-1] < own.figures["value_loss"][0]
    hidden = predicting_hidden(backbone, prompt(), torch.zeros(1, 3, dtype=torch.long))
    assert hidden.requires_grad
    value = own.value_head(hidden).sum()
    assert torch.autograd.grad(value, backbone.trainable_parameters()[0], allow_unused=True) == (None,)


def test_whitening_keeps_the_balance_of_reward_and_kl(monkeypatch):
    """At V = 0 it only shifts and scales advantages; KL's own gradient is scaled alike. A shift costs no bias."""
    backbone = policy(vocab=7)
    batch, found = None, {}
    for whiten in (False, True):
        own = learner(backbone, "ppo", max_completion_length=5, passes_per_step=1)
        batch = batch or sampled(backbone, own)
        backbone.zero_grad(set_to_none=True)
        with monkeypatch.context() as patch:
            if not whiten:
                without_whitening(patch, gae_lambda=0.95)
            own.step([batch], objective(), StepContext(1, lambda: None))
        found[whiten] = gradient(backbone)
    logps = completion_logps(backbone, batch.prompts, batch.ids, batch.mask)
    reward = objective().score(backbone, batch.prompts, batch.ids, batch.mask)
    kl = sequence_kl(backbone, batch.prompts, batch.ids, batch.mask).detach()
    rewards = losses.token_rewards(reward, kl, batch.mask, BETA)
    advantages, _ = losses.gae(rewards, torch.zeros_like(rewards), batch.mask, 1.0, 0.95)
    n, total, _ = losses.moments(advantages, batch.mask)
    _, factor = losses.whiten(advantages, batch.mask)
    shift = flat_grad(-(total / n * logps * batch.mask).sum(1).mean(), backbone)
    torch.testing.assert_close(found[True], factor * (found[False] - shift))


def test_the_running_baseline_is_of_earlier_steps_only():
    backbone = policy()
    own = learner(backbone, "reinforce")
    found = []
    for _ in range(2):
        backbone.zero_grad(set_to_none=True)
        (step,) = own.step([sampled(backbone, own)], objective(), StepContext(1, lambda: None))
        found.append(gradient(backbone))
    assert own.means == [pytest.approx(-float(step.loss))] * 2
    logps = completion_logps(backbone, *(lambda c: (c.prompts, c.ids, c.mask))(sampled(backbone, own)))
    shift = flat_grad(own.means[0] * logps.sum(1).mean(), backbone)
    torch.testing.assert_close(found[1] - found[0], shift)


@pytest.mark.parametrize("method", ["rloo", "ppo"])
def test_what_stands_where_a_mask_is_0_changes_nothing(method):
    backbone, found = policy(vocab=7), []
    batch = sampled(backbone, learner(backbone, method, max_completion_length=5))
    assert (batch.mask == 0).any()
    for filler, width in ((0, 0), (5, 2)):
        left, own = torch.full((len(batch.ids), width), filler), learner(backbone, method, max_completion_length=5)
        ids, mask = torch.cat([left, batch.prompts.ids], 1), torch.cat([0 * left, batch.prompts.mask], 1)
        padded = Completions(PromptBatch(ids, mask), torch.where(batch.mask > 0, batch.ids, filler), batch.mask)
        backbone.zero_grad(set_to_none=True)
        own.step([padded], objective(), StepContext(1, lambda: None))
        found.append(gradient(backbone))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("method", ["rloo", "ppo"])
def test_logits_of_all_positions_never_exist_and_layer_checkpointing_changes_nothing(method):
    backbone = policy(vocab=29)
    rows, found = [], []

    class Widest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == backbone.vocab_size:
                rows.append(out.numel() // backbone.vocab_size)
            return out

    for checkpointing in (False, True):
        own = learner(backbone, method, max_completion_length=9, min_completion_length=9,
                      gradient_checkpointing=checkpointing)  # fmt: skip
        many = PromptBatch(prompt(2).ids.repeat(8, 1), prompt(2).mask.repeat(8, 1))
        batch = own.sample(many, torch.Generator().manual_seed(0))
        backbone.zero_grad(set_to_none=True)
        with Widest():
            own.step([batch], objective(), StepContext(1, lambda: None))
        found.append(gradient(backbone))
    assert batch.ids.numel() == 144 and max(rows) == CHUNK_ROWS
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(("method", "recomputed"), product(("rloo", "grpo"), (False, True)))
def test_policy_and_reference_are_equal_to_the_bit_before_anything_is_learned(method, recomputed):
    """AdamW would make whole steps of a difference; at these lengths a product on a cache is rounded otherwise."""
    sizes = dict(hidden_size=144, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=128)
    backbone = make_backbone(tiny_config(**sizes, num_hidden_layers=4), torch.float32, perturb=False)
    ids = torch.randint(3, VOCAB, (2, 37), generator=generator())
    lengths = dict(max_completion_length=40, min_completion_length=33)
    learned = learner(backbone, method, num_generations=8, gradient_checkpointing=recomputed, **lengths)
    microbatch = PromptBatch(ids, torch.ones_like(ids)).repeat(8), generator()
    (step,) = learned.step([microbatch], Objective(ToyReward(144, torch.float32), BETA), StepContext(1, lambda: None))
    assert not step.kl.any()
