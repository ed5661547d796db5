"""A batch is its rows: padding, order and what follows the end of a completion change nothing.

Of given completions; that a run with any method is the same in other microbatches is held in
tests/training/test_loop.py.

Hypothesis chooses lengths, paddings, places of end-of-sequence and orders; seeds fill in tokens. A row alone has no
padding at all: no masked prompt token, no token after its end. Everything is in float64 on a GPT-2, whose layer norms
are float64 as well (Llama's are not). Log-probabilities of padded prompts, on the cache and in one pass, are held in
tests/models/zoo.py.
"""

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from conftest import EOS, VOCAB, make_backbone, tiny_gpt2
from gradients.test_policy_gradient import Reward
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from grade.gradients.learner import StepContext
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import PolicyGradient
from grade.models.batch import Completions
from grade.models.prompts import PromptBatch
from grade.rewards.certainty import CertaintyReward

T, BETA = 4, 0.3
ENDS = torch.tensor(EOS)
WORDS = torch.tensor([token for token in range(VOCAB) if token not in EOS])
TOLERANCE = 1e-10  # rounding leaves about 1e-15 of values and gradients of size 1; a wrong position, 1e-3 and more

# The same examples every time, none from earlier runs, and no limit on time: a test cannot fail by chance.
few = partial(
    settings, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


@cache
def policy():
    return make_backbone(tiny_gpt2(), target_modules=["c_attn"])


def objective():
    return Objective(Reward(policy().hidden_size), BETA)


def tokens(among, count, seed):
    return among[torch.randint(len(among), (count,), generator=torch.Generator().manual_seed(seed))]


@dataclass(frozen=True)
class Row:
    """A prompt and its completion, which ends with end-of-sequence or at T."""

    prompt: torch.Tensor
    completion: torch.Tensor


def batch(rows, left=0, right=0, seed=0):
    """Rows side by side, with some more padding than they need; anything may stand where the mask is 0."""
    width = left + max(len(row.prompt) for row in rows)
    length = min(right + max(len(row.completion) for row in rows), T)
    anything = partial(tokens, torch.arange(VOCAB))
    ids, mask = anything(len(rows) * width, seed).view(len(rows), width), torch.zeros(len(rows), width).long()
    out = anything(len(rows) * length, seed + 1).view(len(rows), length)
    valid = torch.zeros(len(rows), length).long()
    for n, row in enumerate(rows):
        ids[n, width - len(row.prompt) :], mask[n, width - len(row.prompt) :] = row.prompt, 1
        out[n, : len(row.completion)], valid[n, : len(row.completion)] = row.completion, 1
    return Completions(PromptBatch(ids, mask), out, valid)


@st.composite
def groups(draw, size=1, least=0):
    """Prompts of 1 to 5 tokens, each with `size` completions that do not end before `least` tokens."""
    found = []
    for _ in range(draw(st.integers(2, 3))):
        prompt = tokens(torch.arange(VOCAB), draw(st.integers(1, 5)), draw(st.integers(0, 99)))
        rows = []
        for _ in range(size):
            length = draw(st.integers(least + 1, T))
            completion = tokens(WORDS, length, draw(st.integers(0, 99))).clone()
            if length < T or draw(st.booleans()):
                completion[-1] = tokens(ENDS, 1, draw(st.integers(0, 9)))[0]
            rows.append(Row(prompt, completion))
        found.append(rows)
    return found


@st.composite
def paddings(draw):
    return dict(left=draw(st.integers(0, 3)), right=draw(st.integers(0, 2)), seed=draw(st.integers(0, 99)))


def flat(groups):
    return [row for group in groups for row in group]


def assert_equal(got, want):
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def learned(microbatches, config, certain=False):
    """Gradients after a step, each update moving the policy a little; nothing stays changed."""
    backbone, generator = policy(), torch.Generator().manual_seed(0)
    learner = PolicyGradient(config, backbone)
    learner.means = [0.4]
    if learner.value_head is not None:  # 0 at first, which would hide most of it
        for value in learner.value_head.linear.parameters():
            value.data.normal_(generator=generator)
    inputs = [*backbone.trainable_parameters(), *learner.parameters()]
    before = [p.detach().clone() for p in inputs]
    for p in inputs:
        p.grad = None

    updates = []

    def apply():
        updates.append(True)
        with torch.no_grad():
            for p in inputs:
                p.sub_(0.05 * p.grad)

    terms = Objective(CertaintyReward(), BETA) if certain else objective()
    steps = learner.step(microbatches, terms, StepContext(len(microbatches), apply))
    with torch.no_grad():
        for p, value in zip(inputs, before, strict=True):
            p.copy_(value)
    assert len(updates) == config.updates
    loss = torch.stack([step.loss for step in steps]).mean()
    return torch.cat([*(p.grad.flatten() for p in inputs), loss.detach().flatten()])


LOSSES = {
    "reinforce": {}, "rloo": {}, "rloo min": dict(min_completion_length=1), "remax": {}, "grpo": {},
    "grpo group": dict(scale_rewards="group"), "grpo self-certainty": {},
    "grpo twice": dict(passes_per_step=2),
    "ppo": dict(passes_per_step=2), "ppo once": dict(passes_per_step=1),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
@few(max_examples=6)
@given(groups(size=2, least=1), paddings(), st.randoms(use_true_random=False))
def test_a_policy_gradient_of_a_padded_batch_is_the_mean_over_prompts_in_any_order(name, prompts, padding, random):
    options = dict(method=name.split()[0], max_completion_length=T, num_generations=2, **LOSSES[name])
    run = partial(learned, config=MethodConfig(**options), certain="self-certainty" in name)
    together = run([batch(flat(prompts), **padding)])
    assert together.norm() > 1e-3
    assert_equal(together, run([batch(group) for group in prompts]))
    mixed = [random.sample(group, len(group)) for group in random.sample(prompts, len(prompts))]
    assert_equal(together, run([batch(flat(mixed))]))
    assert_equal(together, run([batch([row]) for row in flat(prompts)]))  # a prompt's completions apart
