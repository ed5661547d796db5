"""The reference of a run is the policy as it was given."""

import copy
import logging

import pytest
import torch
from conftest import generator, perturb_adapter
from safetensors.torch import load_file
from training.runs import settings, toy_project, toy_trainer
from training.test_resume import interrupted, silent

from grade.models.head import kl_divergence
from grade.models.parameters import set_values
from grade.models.scoring import predicting_hidden, sequence_kl
from grade.rewards.model import load_reward
from grade.training.checkpoint import REFERENCE_FILE
from grade.training.kl_budget import BatchKL, scale_adapter
from grade.training.run import train
from grade.training.toy import toy_task

METHODS = {
    "replay": dict(method="ste"), "checkpointed layers": dict(method="gumbel", gradient_checkpointing=True),
    "stepwise": dict(method="ste_legacy"), "rloo": dict(method="rloo"), "grpo": dict(method="grpo"),
    "ppo": dict(method="ppo", gradient_checkpointing=True), "tilt": dict(method="tilt"),
    "teacher": dict(method="teacher", teacher="base"),
    "budget": dict(method="rloo", target_kl=0.05), "tilt in a budget": dict(method="tilt", target_kl=0.05),
    "far beyond its budget": dict(method="rloo", target_kl=1e-5, learning_rate=0.3, max_grad_norm=0),
}  # fmt: skip


def given_policy(adapter=True, bias=True, trunk=False):
    """A task in float64 whose adapter, token bias or both are trained, and a copy of its policy."""
    task = toy_task(dtype="float64", kind="trunk" if trunk else "bag")
    if adapter:
        perturb_adapter(task.backbone, scale=0.1)
    if bias:
        task.backbone.set_token_bias(0.3 * torch.randn(task.backbone.vocab_size, generator=generator()).double())
    return task, copy.deepcopy(task.backbone)


def make_trainer(task, output, **changes):
    own = dict(num_generations=2, max_completion_length=4, beta=0.1, max_steps=3, save_strategy="steps", save_steps=2)
    reward = None if "teacher" in changes else task.reward_model
    return toy_trainer(task, output, reward, logging_steps=1, **own | changes)


def completions(trainer):
    prompts = trainer.encode([trainer.train_dataset[i] for i in range(4)])
    ids = torch.randint(3, trainer.backbone.vocab_size, (4, 5), generator=generator())
    return prompts, ids, torch.ones_like(ids)


@torch.no_grad()
def kl_to(trainer, given):
    """KL of a trainer's policy to a policy in a copy of its own."""
    prompts, ids, mask = completions(trainer)
    hidden, others = (predicting_hidden(policy, prompts, ids).flatten(0, 1) for policy in (trainer.backbone, given))
    return kl_divergence(trainer.backbone.head, hidden, given.head, others).view(mask.shape)


@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS)
def test_kl_is_to_the_policy_as_given(changes, tmp_path):
    task, given = given_policy()
    trainer = make_trainer(task, tmp_path, **changes)
    assert torch.equal(sequence_kl(trainer.backbone, *completions(trainer)), torch.zeros(4, 5).double())
    trainer.train()
    steps = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    # Unrolled one by one, a row's products are rounded otherwise than those of all positions at once.
    assert len(steps) == 3 and steps[0] == pytest.approx(0, abs=1e-15) and steps[2] > 1e-9
    got, want = sequence_kl(trainer.backbone, *completions(trainer)), kl_to(trainer, given)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert want.max() > 1e-6


@pytest.mark.parametrize(("adapter", "bias"), [(True, False), (False, True)])
def test_an_adapter_or_a_bias_alone(adapter, bias, tmp_path, caplog):
    task, given = given_policy(adapter, bias)
    trainer = make_trainer(task, tmp_path)
    assert trainer.evaluate()["eval_kl"] == 0
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert caplog.text.count("reference: the policy as given") == 1
    torch.testing.assert_close(
        sequence_kl(trainer.backbone, *completions(trainer)), kl_to(trainer, given), rtol=0, atol=1e-12
    )


def test_a_new_adapter_has_the_bare_base_as_reference(tmp_path, caplog):
    task, _ = given_policy(adapter=False, bias=False)
    with caplog.at_level(logging.WARNING):
        (trainer := make_trainer(task, tmp_path)).train()
    assert trainer.backbone.given == {} and "reference" not in caplog.text
    assert not (tmp_path / "checkpoint-2" / REFERENCE_FILE).exists()


def test_a_trunk_reward_and_other_views_still_have_the_bare_base(tmp_path):
    task, given = given_policy(trunk=True)
    prompts, ids, mask = completions(trainer := make_trainer(task, tmp_path))
    with given.reference():
        base = predicting_hidden(given, prompts, ids)
        want = given.head(base)
    for policy, context in ((trainer.backbone, trainer.backbone.bare), (task.backbone, task.backbone.reference)):
        with torch.no_grad(), context():
            assert torch.equal(policy.head(predicting_hidden(policy, prompts, ids)), want)
    with trainer.backbone.reference(), torch.no_grad():
        assert not torch.equal(predicting_hidden(trainer.backbone, prompts, ids), base)
    task.reward_model.save(tmp_path / "trunk")
    reward = load_reward(tmp_path / "trunk", trainer.backbone)
    assert torch.equal(reward.score_ids(ids, mask), task.reward_model.score_ids(ids, mask))


def test_inputs_of_the_reference_have_its_gradient_after_it_is_left(tmp_path):
    task, given = given_policy()
    trainer = make_trainer(task, tmp_path)
    perturb_adapter(task.backbone, seed=1, scale=0.1)
    ids = torch.arange(3, 9)[None]

    def gradient_of(policy, context):
        embeds = policy.embed(ids).detach().requires_grad_()
        with context():
            hidden = policy.hidden(embeds, torch.ones_like(ids))
        hidden.square().sum().backward()
        return embeds.grad

    got = gradient_of(trainer.backbone, trainer.backbone.reference)
    assert all(p.grad is None for p in trainer.backbone.trainable_parameters())
    torch.testing.assert_close(got, gradient_of(given, torch.enable_grad), rtol=0, atol=1e-12)


def test_a_policy_is_scaled_towards_the_one_given(tmp_path):
    task, _ = given_policy()
    trainer = make_trainer(task, tmp_path, train_bias=True)
    perturb_adapter(trainer.backbone, seed=1, scale=0.05)
    batch = BatchKL(trainer.backbone, [completions(trainer)])
    landed = scale_adapter(trainer.backbone, batch, 0.01, 1e-6)
    assert landed == pytest.approx(0.01 * batch.start, rel=1e-3) and landed == pytest.approx(batch.measure())
    set_values(trainer.backbone.trainable_parameters(), trainer.backbone.reference_values())
    assert batch.measure() == 0


# ---- runs from files ----
@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """A project whose runs continue from the adapter of another, with a token bias."""
    root = tmp_path_factory.mktemp("project")
    values = toy_project(root) | {"max_steps": 4, "train_bias": True, "save_total_limit": None}
    train(settings("rloo", values, root / "first"), silent)
    return values | {"adapter": str(root / "first" / "adapter")}


def test_a_resumed_run_keeps_its_reference(common, tmp_path, monkeypatch):
    assert train(settings("rloo", common, tmp_path / "whole"), silent).before.kl.max() == 0
    interrupted(common, tmp_path / "again", monkeypatch, "rloo")
    reference = load_file(tmp_path / "again" / "checkpoint-2" / REFERENCE_FILE)
    bias = load_file(tmp_path.joinpath(common["adapter"], "token_bias.safetensors"))["token_bias"]
    assert torch.equal(reference["token_bias"], bias)
    assert train(settings("rloo", common, tmp_path / "again"), silent, "yes").step == 4
    for name in ("adapter/adapter_model.safetensors", "history.csv", "metrics.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
