"""The entropy that a run logs, against full logits in float64."""

import pytest
import torch
from conftest import ToyReward, make_backbone, make_prompts, perturb_adapter, tiny_gpt2

from grade.gradients.methods import METHODS
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import StepContext
from grade.models.base import FrozenBase
from grade.models.parameters import set_values
from grade.models.scoring import predicting_hidden
from grade.plugins import import_object
from grade.rewards.rewards import Rewards
from grade.training.config import GradeConfig
from grade.training.logs import LogBuffer
from grade.training.teacher import Teacher, TeacherReward

TEMPERATURE, LEAST = 0.7, 2
SETTINGS = {
    "ste": {}, "gumbel_rao": {}, "st": {}, "ste_legacy": {}, "reinforce": {}, "remax": {}, "rloo": {"train_bias": True},
    "grpo": {"passes_per_step": 2}, "ppo": {"passes_per_step": 2}, "tilt": {"beta": 0.1},
    "teacher": {}, "teacher near": {"beta": 0.3},
}  # fmt: skip


def objective_of(config, backbone):
    if config.method != "teacher":
        return Objective(ToyReward(backbone.hidden_size), 0.1)
    model = FrozenBase(make_backbone(tiny_gpt2(), seed=3, target_modules=["c_attn"]).peft.unload())
    teacher = Teacher(backbone, model=model)
    return Objective(Rewards([TeacherReward(teacher)], dtype=torch.float64), config.beta, terms=[teacher])


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_the_mean_over_tokens_of_the_policy_that_sampled(name):
    """Over microbatches whose completions have other lengths; with end-of-sequence where it could not be sampled."""
    backbone = make_backbone(tiny_gpt2(), target_modules=["c_attn"]).view(temperature=TEMPERATURE)
    lengths = dict(max_completion_length=8, min_completion_length=LEAST)
    values = SETTINGS[name] | lengths | {"num_generations": 4, "gumbel_topk": 8}
    config = GradeConfig(**GradeConfig.values_for(name.split()[0], values))
    if config.train_bias:
        bias = 0.3 * torch.randn(backbone.vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        backbone.set_token_bias(bias, trainable=True)
    before = [p.detach().clone() for p in backbone.trainable_parameters()]
    batches = [(make_prompts(1, seed=i).repeat(4), torch.Generator().manual_seed(i)) for i in range(2)]
    context = StepContext(2, lambda: perturb_adapter(backbone, seed=9))
    parts = import_object(METHODS[config.method].learner)(config, backbone).step(
        batches, objective_of(config, backbone), context
    )
    set_values(backbone.trainable_parameters(), before)
    if config.method == "tilt":
        backbone.set_token_bias(torch.zeros(backbone.vocab_size))
    total, tokens, buffer = 0.0, 0, LogBuffer()
    for part, (prompts, _) in zip(parts, batches, strict=True):
        hidden, mask = predicting_hidden(backbone, prompts, part.completion_ids), part.completion_mask
        logits = hidden @ backbone.head.weight.T + (0 if backbone.token_bias is None else backbone.token_bias)
        p = (logits / TEMPERATURE).softmax(-1).detach()
        each = -(p * p.log()).sum(-1) * mask
        torch.testing.assert_close(part.entropy, each, rtol=1e-9, atol=1e-12)
        assert not part.entropy.requires_grad
        total, tokens = total + float(each.sum()), tokens + int(mask.sum())
        buffer.add_step(part, prompts)
    lengths = [part.completion_mask.double().sum(1).mean() for part in parts]
    assert lengths[0] != lengths[1] and tokens < 8 * 8, "completions are ragged"
    logged = buffer.drain(lambda values: float(torch.stack([torch.as_tensor(value) for value in values]).mean()))
    assert logged["entropy"] == pytest.approx(total / tokens, rel=1e-9)
