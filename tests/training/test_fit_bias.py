"""`fit_bias` from each source, what it predicts against what is measured, and the command from end to end."""

import json

import pytest
import torch
from conftest import save_toy_base
from training.test_reference import given_policy
from training.test_tilt import Added, T, noise

from grade import GradeConfig, fit_bias
from grade.cli.main import main
from grade.data.texts import sample_texts
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.head import kl_divergence
from grade.models.prompts import encode_prompts
from grade.models.scoring import predicting_hidden, sequence_kl
from grade.rewards.rewards import make_rewards
from grade.training.fit_bias import LENGTHS, tilted
from grade.training.toy import toy_task

ARGS = GradeConfig(max_completion_length=T, min_completion_length=T, max_prompt_length=6, truncation="right")


def on_held_out(task, reward):
    """Reward and KL of the policy, means over 1,000 completions."""
    prompts = encode_prompts(task.backbone.tokenizer, task.validation_prompts, 6).repeat(5)
    rewards, noise = make_rewards(reward, task.backbone), torch.Generator().manual_seed(5)
    options = dict(completion_tokens=T, min_new_tokens=T, generator=noise)
    texts = sample_texts(prompts, task.backbone, rewards, **options)
    kl = sequence_kl(task.backbone, texts.prompts, texts.ids, texts.mask).sum(1)
    return float(texts.rewards.mean()), float(kl.mean())


@pytest.mark.parametrize("source", ["reference:600", "texts", None])
def test_each_source_reaches_the_kl_on_held_out_prompts_and_predicts_the_gain(source):
    task = toy_task()
    policy, reward = task.backbone, Added(task.backbone.vocab_size)
    gradient, texts = source is None, source
    if gradient:  # the same reward, linear in embeddings
        weight = torch.linalg.lstsq(policy.embedding_weight, reward.values.unsqueeze(1)).solution.squeeze(1)
        reward = torch.nn.Module()
        reward.forward = lambda embeds, mask: ((embeds @ weight) * mask).sum(1)
    if source == "texts":
        words = torch.randint(3, policy.vocab_size, (4000, T), generator=torch.Generator().manual_seed(1)).tolist()
        texts = [{"prompt": task.train_prompts[i % 200], "completion": "x", "completion_ids": ids}
                 for i, ids in enumerate(words)]  # fmt: skip
    found = fit_bias(policy, reward, task.train_prompts, 2.0, texts, ARGS)
    assert found.source == {"reference:600": "reference", "texts": "texts", None: "gradient"}[source]
    assert found.texts == {"reference:600": 640, "texts": 4000, None: 128}[source]
    assert found.r2 > 0.9 and (found.values.norm() > 0)
    bias, lines = policy.token_bias.clone(), []
    for share in LENGTHS:
        policy.set_token_bias(share * bias)
        lines.append(on_held_out(task, reward))
    (before, _), (after, kl) = lines[0], lines[LENGTHS.index(1.0)]
    assert kl == pytest.approx(2.0, rel=0.05) and found.kl.mean == pytest.approx(kl, rel=0.05)
    assert abs(found.gain.mean - (after - before)) < 4 * found.gain.stderr
    for row, (measured, kl) in zip(found.frontier, lines, strict=True):
        assert row["kl"] == pytest.approx(kl, rel=0.08, abs=1e-6)
        assert row["gain"] == pytest.approx(measured - before, rel=0.1, abs=0.1)
    assert found.predicted == pytest.approx(after - before, rel=0.1)
    gains = [law.reward for law in found.limit]
    assert gains and gains == sorted(gains) and all(law.kl < 2 and law.effective >= 8 for law in found.limit)
    scale = {row["kl"]: row["gain"] for row in found.frontier}
    assert scale[0.0] == 0


def test_kl_and_gain_of_a_length_are_those_of_the_distributions():
    policy = toy_task().backbone.view(temperature=0.7)
    values = torch.randn(policy.vocab_size, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(5, policy.hidden_size, generator=torch.Generator().manual_seed(1))
    p = policy.ref_head(hidden).double().log_softmax(-1)
    q = (p + 0.6 / 0.7 * values).log_softmax(-1)
    exact = [(q.exp() * (q - p)).sum(), ((q.exp() - p.exp()) * values).sum()]
    assert torch.allclose(tilted(policy.ref_head, hidden, values, [0.6])[0], torch.stack(exact), rtol=1e-4)


@pytest.mark.parametrize("reward", [noise, lambda completions, **_: [None if len(c) % 3 else 1.0 for c in completions]])
def test_a_reward_that_tokens_do_not_explain_is_said_to_be_one(reward):
    task = toy_task()
    found = fit_bias(task.backbone, reward, task.train_prompts[:5], 1.0, args=ARGS)
    assert found.r2 < 0.02 and abs(found.predicted) < 0.1  # a third of a standard deviation; an explained one has 1.4
    assert "tokens alone explain nothing of this reward: train with --method rloo" in found.summary()
    if reward is not noise:
        assert not task.backbone.token_bias.any() and found.kl.mean == 0 and not found.limit
        assert "limit of any policy unknown: some completions have no reward" in found.summary()


@pytest.mark.parametrize("bias", [False, True])
def test_kl_is_to_the_policy_as_given_whose_adapter_and_bias_stay(bias):
    task, given = given_policy(bias=bias)
    policy, before = task.backbone, 0 if not bias else task.backbone.token_bias.detach().clone()
    found = fit_bias(policy, lambda completions, **_: [1.0] * len(completions), task.train_prompts, 0.5, args=ARGS)
    assert found.kl.mean == 0 and torch.equal(policy.token_bias - before, torch.zeros(policy.vocab_size).double())
    found = fit_bias(policy, Added(policy.vocab_size), task.train_prompts, 0.5, args=ARGS)
    texts = sample_texts(
        encode_prompts(policy.tokenizer, task.validation_prompts, 6).repeat(5), policy, None, completion_tokens=T,
        min_new_tokens=T, generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    own, other = (predicting_hidden(one, texts.prompts, texts.ids).flatten(0, 1) for one in (policy, given))
    kl = kl_divergence(policy.head, own, given.head, other).detach().view(texts.mask.shape).sum(1).mean()
    assert float(kl) == pytest.approx(0.5, rel=0.05) and found.kl.mean == pytest.approx(float(kl), rel=0.05)
    change = policy.token_bias - before - found.values * (policy.token_bias - before).norm() / found.values.norm()
    assert change.norm() < 1e-6


REWARD = """
def vowels(completions, **columns):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]
"""


def test_the_command_from_the_bias_to_a_model_and_to_further_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = save_toy_base("base")
    for name, prompts in (("train", task.train_prompts), ("held_out", task.validation_prompts)):
        with open(f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps({"prompt": text}) + "\n" for text in prompts[:40])
    with open("reward.py", "w") as file:
        file.write(REWARD)
    common = ["--model", "base", "--reward", "reward.py:vowels", "--max-completion-length", "8", "--use-cpu"]
    assert main(["tilt", *common, "--prompts", "train.jsonl", "--target-kl", "1.5", "--output-dir", "found"]) == 0
    printed = capsys.readouterr().out
    told = json.loads(open("found/tilt.json").read())
    assert told["kl"] == pytest.approx(1.5, rel=0.1) and told["r2"] > 0.8 and told["gain"] > 3 * told["gain_stderr"]
    assert main(["show", "found"]) == 0
    assert capsys.readouterr().out.splitlines() == told["summary"] == printed.splitlines()[:-1]

    def written(*options):
        assert main(["generate", "--prompt", "The film", "--samples", "200", "--max-new-tokens", "8", *options]) == 0
        return sum(letter in "aeiou" for letter in capsys.readouterr().out)

    assert main(["merge", "found", "plain"]) == 0 and "sequence_bias" in capsys.readouterr().out
    biased = written("--backbone", "base", "--adapter", "found/adapter")
    assert biased > 1.2 * written("--backbone", "base")

    rest = ["--train-dataset", "train.jsonl", "--eval-dataset", "held_out.jsonl"]
    metrics = ["--output", "metrics.json"]
    assert main(["evaluate", *common, *rest, "--adapter", "found/adapter", *metrics]) == 0
    start = json.loads(open("metrics.json").read())["val"]
    assert start["kl"] * 8 == pytest.approx(1.5, rel=0.15)
    go_on = ["--adapter", "found/adapter", "--method", "rloo", "--max-steps", "2", "--num-generations", "4"]
    assert main(["train", *common, *rest, *go_on, "--output-dir", "more"]) == 0
    capsys.readouterr()
    reached = json.loads(open("more/metrics.json").read())
    assert reached["before"]["val"]["reward_mean"] == start["reward_mean"]
    found, more = (Backbone.load("base", adapter=f"{folder}/adapter") for folder in ("found", "more"))
    assert torch.equal(found.token_bias, more.token_bias) and found.peft is None
    assert any(p.any() for name, p in more.model.named_parameters() if "lora_B" in name)


def test_a_few_completions_give_the_direction_of_many_where_the_reward_is_linear_in_embeddings():
    found = {}
    for source in ("gradient:8", "gradient"):
        task, args = toy_task(), GradeConfig(max_completion_length=8)
        found[source] = fit_bias(task.backbone, task.reward_model, task.train_prompts, 0.5, source, args)
    assert [fit.texts for fit in found.values()] == [8, 128]
    few, many = (fit.values for fit in found.values())
    # R = sigmoid(z), z linear: every gradient has one direction, and only its length differs
    assert torch.cosine_similarity(few - few.mean(), many - many.mean(), 0) > 0.999
    assert 2 / 3 < float(few.norm() / many.norm()) < 1.5  # of 8 completions: its standard error is about 0.1


def test_texts_of_which_none_is_long_enough_are_refused():
    task, config = toy_task(), GradeConfig(max_completion_length=4, max_prompt_length=6, truncation="left")
    with pytest.raises(InputError, match="texts: got 'no row'; allowed: .* at least 8 tokens"):
        fit_bias(task.backbone, task.reward_model, task.train_prompts, texts=[{"text": "a"}], args=config)
