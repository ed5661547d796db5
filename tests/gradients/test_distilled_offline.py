"""Training along texts: the gradient against dense logits, and beta that follows KL."""

import math

import pytest
import torch
from conftest import make_backbone
from gradients.test_distilled_prior import texts

from grade.gradients.distilled import offline
from grade.gradients.distilled.offline import OfflineGradient, Steering
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import Completions, StepContext
from grade.models.scoring import predicting_hidden

BETA = 0.3


@pytest.mark.parametrize("family", ["counts", "bag"])
def test_the_gradient_is_that_of_dense_expectations_and_kl(family):
    backbone, scored = make_backbone(), texts()
    learner = OfflineGradient(MethodConfig(method="offline", distil_families=[family]), backbone)
    learner.read(scored)
    learner.begin(scored, learner.prior, None, BETA)
    batches = [scored[:8], scored[8:16]]
    given = (Completions(batch.prompts, batch.ids, batch.mask) for batch in batches)
    steps = learner.step(given, Objective(lambda e, m: e.sum((1, 2)), BETA), StepContext(2, lambda: None))
    parameters = backbone.trainable_parameters()
    gradient = [p.grad.clone() for p in parameters]

    losses = []
    for batch in batches:
        s = learner.family.values(learner.prior.all, batch.ids)(torch.arange(batch.ids.numel()))
        logp = backbone.head(predicting_hidden(backbone, batch.prompts, batch.ids)).log_softmax(-1)
        with torch.no_grad(), backbone.reference():
            reference = backbone.head(predicting_hidden(backbone, batch.prompts, batch.ids)).log_softmax(-1)
        expected = (logp.exp() * s.expand(batch.ids.numel(), -1).view(logp.shape)).sum(-1) * batch.mask
        kl = (logp.exp() * (logp - reference)).sum(-1) * batch.mask
        losses.append((BETA * kl.sum(1) / batch.mask.sum(1) - expected.sum(1)).mean())
    for p, found, naive in zip(parameters, gradient, torch.autograd.grad(sum(losses) / 2, parameters), strict=True):
        assert torch.allclose(found, naive, rtol=1e-9, atol=1e-12), p.shape
    assert [float(step.loss) for step in steps] == pytest.approx([float(loss.detach()) for loss in losses], rel=1e-9)


def test_beta_follows_the_distance_that_is_expected_on_the_policys_own_text():
    steering = Steering(16.0, 0.5)
    steering.measure(2.0, 1.0, torch.arange(8.0), torch.arange(8.0))  # own completions are twice as far
    steering.measure(2.0, 1.0, torch.arange(30.0), torch.tensor([torch.nan, 1.0, 2.0] * 10))  # no score, no say
    assert steering.samples == 38 and 0 < steering.evidence.trust <= 1
    steering.follow(8.0, 50)
    # The distance goes from 4 to 4.2 in a step, so it will be 4.2 + 0.2 AHEAD; two steps before the end 4.2 + 0.4.
    before = steering.beta
    assert steering.follow(4.2**2 / 2, 50) == pytest.approx(
        before * math.exp(offline.GAIN * ((4.2 + 0.2 * offline.AHEAD) / 4 - 1)), rel=1e-12
    )
    last, steering.recent = steering.beta, [4.0]
    assert steering.follow(4.2**2 / 2, 2) == pytest.approx(last * math.exp(offline.GAIN * (4.6 / 4 - 1)), rel=1e-12)
    assert Steering(None, 0.5).follow(100.0, 50) == 0.5
    steering.measure(0.01, 1.0, torch.arange(8.0), torch.arange(8.0))  # eight completions may miss what is far
    assert steering.ratio == 0.5
