"""Method `tilt`: it lands on its budget, uses what explains a reward, and gives way where nothing does."""

import pytest
import torch
from training.runs import noise, toy_trainer
from transformers import TrainerCallback

from grade.errors import InputError
from grade.gradients.learner import StepContext
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
from grade.models.batch import Completions
from grade.models.prompts import encode_prompts
from grade.models.sampling import generate
from grade.rewards.base import Reward
from grade.rewards.rewards import make_rewards
from grade.training.config import GradeConfig as Config
from grade.training.logs import history_rows
from grade.training.tilt import TiltLearner
from grade.training.toy import toy_task

T = 8


class Added(Reward):
    """A sum of values of tokens, which are known."""

    def __init__(self, vocab, seed=0):
        self.values = torch.randn(vocab, generator=torch.Generator().manual_seed(seed))

    def score(self, policy, prompts, ids, mask):
        return (self.values[ids] * mask).sum(1)


class Neighbours(Added):
    """Whether neighbouring tokens have values of one sign: each token is as good as any."""

    def score(self, policy, prompts, ids, mask):
        signs = self.values[ids].sign() * mask
        return (signs[:, 1:] * signs[:, :-1]).sum(1)


class Watch(TrainerCallback):
    """The adapter's B and the token bias after each step."""

    def __init__(self, policy):
        self.policy, self.adapter, self.bias = policy, [], []

    def on_step_end(self, args, state, control, **_):
        b = [p for name, p in self.policy.model.named_parameters() if "lora_B" in name]
        self.adapter.append(float(sum(p.detach().abs().sum() for p in b)))
        if self.policy.token_bias is not None:
            self.bias.append(self.policy.token_bias.detach().clone())


def run(folder, task, reward, steps=4, batch=64, **settings):
    watch, held_out = Watch(task.backbone), [{"prompt": text} for text in task.validation_prompts]
    sizes = dict(max_steps=steps, per_device_train_batch_size=batch, min_completion_length=T, kl_eval_prompts=200)
    values = {"method": "tilt", **sizes, **settings}
    trainer = toy_trainer(task, folder, reward, None, held_out, [watch], **values)
    trainer.watch = watch
    return trainer


@pytest.mark.parametrize("kind", ["values alone", "gradient"])
def test_a_run_ends_at_its_target_with_more_reward_and_leaves_the_adapter_alone(kind, tmp_path):
    task = toy_task()
    reward = task.reward_model if kind == "gradient" else Added(task.backbone.vocab_size)
    trainer = run(tmp_path, task, reward, target_kl=1.0)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_kl"] * T == pytest.approx(1.0, rel=0.1)
    assert after["eval_reward"] > before["eval_reward"] + 3 * after["eval_reward_stderr"]
    assert not any(trainer.watch.adapter)
    trainer.save_model(tmp_path / "saved")
    bare = toy_task().backbone.peft.unload()
    again = Backbone(bare, task.backbone.tokenizer, adapter=tmp_path / "saved")
    assert torch.equal(again.token_bias, task.backbone.token_bias) and again.token_bias.any()
    assert "token_bias.safetensors" in (tmp_path / "saved" / "README.md").read_text()


@pytest.mark.parametrize("then", ["ste", "rloo", "ppo"])
def test_the_method_that_follows_trains_the_adapter_in_the_second_half_and_only_there(then, tmp_path):
    task = toy_task()
    own = {"gumbel_topk": 16} if then == "ste" else {}
    trainer = run(tmp_path, task, task.reward_model, 6, 16, target_kl=1.0, then=then, **own)
    trainer.train()
    adapter, bias = trainer.watch.adapter, trainer.watch.bias
    assert not any(adapter[:3]) and 0 < adapter[3] and len(set(adapter[3:])) == 3
    assert not torch.equal(bias[1], bias[2]) and all(torch.equal(bias[2], each) for each in bias[3:])
    assert trainer.evaluate()["eval_kl"] * T == pytest.approx(1.0, rel=0.25)  # batches of 8 completions


def test_a_reward_without_gradient_is_refused_before_the_first_half_for_what_needs_one(tmp_path):
    task = toy_task()
    trainer = run(tmp_path, task, Added(task.backbone.vocab_size), target_kl=1.0, then="ste", gumbel_topk=16)
    with pytest.raises(InputError, match="for ste a differentiable reward"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_without_a_target_beta_is_the_price_of_kl(temperature, tmp_path):
    task = toy_task()
    trainer = run(tmp_path, task, Added(task.backbone.vocab_size), 2, beta=8.0, temperature=temperature)
    trainer.train()
    values = trainer.method.values
    assert torch.allclose(task.backbone.token_bias, values * (T / 8.0) * temperature, atol=1e-6)
    # The maximum of E[s] - beta / T KL at one position, among multiples of the bias.
    logits = torch.randn(5, task.backbone.vocab_size, generator=torch.Generator().manual_seed(0))
    p = (logits / temperature).log_softmax(-1)

    def objective(factor):
        q = ((logits + factor * task.backbone.token_bias.detach()) / temperature).log_softmax(-1)
        return float((q.exp() * (values - 8.0 / T * (q - p))).sum())

    assert objective(1.0) > max(objective(0.9), objective(1.1))


EPOCHS = {"steps": -1, "num_train_epochs": 8 * 8 / 200}


@pytest.mark.parametrize(
    ("kind", "length"), [("additive", {"steps": 8}), ("neighbours", EPOCHS), ("noise", {"steps": 8})], ids=str
)
def test_auto_takes_the_bias_where_tokens_explain_the_reward_and_is_rloo_elsewhere(kind, length, tmp_path, caplog):
    task = toy_task()
    vocab = task.backbone.vocab_size
    reward = {"additive": Added(vocab), "neighbours": Neighbours(vocab), "noise": noise}[kind]
    trainer = run(tmp_path, task, reward, method="auto", target_kl=1.0, **length)
    trainer.train()
    adapter, bias = trainer.watch.adapter, trainer.watch.bias
    assert trainer.config.method == "tilt" and len(bias) == 8
    assert not any(each.any() for each in bias[:2]) and 0 < adapter[0] < adapter[1]
    if kind == "additive":
        assert all(each.any() for each in bias[2:]) and len(set(adapter[1:])) == 1
    else:
        plain = run(tmp_path / "rloo", toy_task(), reward, method="rloo", target_kl=1.0, **length)
        plain.train()
        assert adapter == pytest.approx(plain.watch.adapter, rel=1e-6)
    told = ["takes over from step 3"] if kind == "additive" else [f"rloo goes on from step {step}" for step in (3, 5)]
    looks = [record.getMessage() for record in caplog.records if record.getMessage().startswith("token bias:")]
    assert len(looks) == len(told) and all(what in look for what, look in zip(told, looks, strict=True))
    explained = [row["train/tilt_r2"] for row in history_rows(trainer.state.log_history) if "train/tilt_r2" in row]
    assert len(explained) == (7 if kind == "additive" else 3)  # not before the first fit
    assert trainer.evaluate()["eval_kl"] * T == pytest.approx(1.0, rel=0.25)


def test_auto_looks_again_after_half_of_the_steps(tmp_path):
    class Late(Added):
        """Says nothing in the first two steps, on which the first look goes by."""

        steps = 0

        def score(self, policy, prompts, ids, mask):
            self.steps += 1
            return super().score(policy, prompts, ids, mask) * (self.steps > 2)

    task = toy_task()
    trainer = run(tmp_path, task, Late(task.backbone.vocab_size), method="auto", target_kl=1.0, steps=8)
    trainer.train()
    assert [bool(bias.any()) for bias in trainer.watch.bias] == 4 * [False] + 4 * [True]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_completions_without_a_reward_are_left_out(share, tmp_path):
    task = toy_task()
    draws = torch.Generator().manual_seed(0)

    def reward(completions, **_):
        missing = torch.rand(len(completions), generator=draws) < share
        return [None if no else float(text.count("e")) for no, text in zip(missing, completions, strict=True)]

    trainer = run(tmp_path, task, reward, target_kl=1.0)
    with pytest.warns(UserWarning, match="rewards are all None"):
        trainer.train()
    kl = trainer.evaluate()["eval_kl"] * T
    assert kl == pytest.approx(1.0, rel=0.1) if share < 1 else kl == 0 and not task.backbone.token_bias.any()


@pytest.mark.parametrize("kind", ["values alone", "gradient", "groups over two microbatches"])
def test_two_processes_have_the_values_of_one(kind):
    task = toy_task()
    policy = task.backbone
    rewards = make_rewards(task.reward_model if kind == "gradient" else Added(policy.vocab_size), policy)
    prompts = encode_prompts(policy.tokenizer, task.train_prompts[:16], 6)
    parts = []
    for number in range(4):
        own = prompts[4 * number : 4 * number + 4].repeat(4)
        parts.append(Completions(own, *generate(policy, own, T, torch.Generator().manual_seed(number))))
    first, second = parts[::2], parts[1::2]
    if kind.startswith("groups"):
        parts = [part[start : start + 2] for part in parts for start in range(0, 16, 2)]
        first, second = ([part for i, part in enumerate(parts) if i // 2 % 2 == rank] for rank in range(2))
    config = Config("", method="tilt", target_kl=1.0, max_steps=2, num_generations=4, max_completion_length=T)

    def values(own, gather, total):
        learner = TiltLearner(config, policy)
        learner.step(own, Objective(rewards, 0.0), StepContext(len(parts), lambda: None, total, gather))
        return learner.values

    rows, sums = [], []
    values(second, lambda each: rows.extend(each) or each, lambda each: sums.append(each) or each)
    both = values(first, lambda each: each + rows, lambda each: each + sums[0])
    one = values(parts, lambda each: each, lambda each: each)
    assert torch.allclose(both, one, rtol=1e-5, atol=1e-7) and one.any()
