"""Weighted sums, what is logged of them, and rewards by name."""

import pytest
import torch
from conftest import ToyReward
from torch.testing import assert_close

from grade.data.tiny_lm import train_tokenizer
from grade.errors import InputError
from grade.gradients.objective import Objective
from grade.models.prompts import PromptBatch
from grade.rewards.base import EmbeddingReward, Reward
from grade.rewards.classifier import EmbeddedClassifier, TextClassifier
from grade.rewards.functions import FunctionReward
from grade.rewards.model import HeadSettings, RewardModel
from grade.rewards.rewards import Rewards, make_reward, make_rewards


def length(completions, **_):
    return [float(len(c)) for c in completions]


def third_only(completions, log_extra, log_metric, trainer_state, **_):
    log_extra("first", [c[:1] for c in completions])
    log_metric("seen", trainer_state)
    return [None, None, 0.25]


def with_answers(batch):
    prompts, ids, mask = batch
    return PromptBatch(prompts.ids, prompts.mask, tuple({"prompt": "p"} for _ in range(3))), ids, mask


def test_the_sum_is_weighted_and_none_adds_nothing(policy, batch):
    rewards = make_rewards([length, third_only], policy, [0.5, -2.0])
    rewards.trainer_state = 7
    completions = [" a delight.", " was dull and clumsy, a mess", " fun"]
    want = [0.5 * len(c) for c in completions]
    assert rewards.score(policy, *with_answers(batch)).tolist() == [want[0], want[1], want[2] - 0.5]
    last = rewards.last
    assert list(last.values) == ["length", "third_only"] and last.values["length"].tolist() == [11, 28, 4]
    assert last.values["third_only"].isnan().tolist() == [True, True, False]
    assert last.columns == {"first": [" ", " ", " "]} and last.metrics == {"seen": [7]}
    assert set(last.seconds) == {"length", "third_only"} and min(last.seconds.values()) >= 0


def test_a_row_without_any_reward_is_nan_with_a_warning(policy, batch):
    rewards = make_rewards(third_only, policy)
    rewards.trainer_state = 7
    with pytest.warns(UserWarning, match="rewards are all None"):
        values = rewards.score(policy, *batch)
    assert values.isnan().tolist() == [True, True, False] and values[2] == 0.25


def test_equal_names_are_numbered(policy, batch):
    rewards = make_rewards([length, length, third_only, length], policy)
    assert rewards.names == ["length", "length_2", "third_only", "length_3"]
    assert Rewards([FunctionReward(length, "mine")]).names == ["mine"]


def test_every_kind_in_one_list(policy, make_classifier, tokenizer, tmp_path, batch):
    classifier = make_classifier("bert", dtype=torch.float32)
    classifier.save_pretrained(tmp_path / "judge"), tokenizer.save_pretrained(tmp_path / "judge")
    torch.manual_seed(0)
    bag = RewardModel("bag", policy, HeadSettings())
    given = [length, f"hf:{tmp_path / 'judge'}", classifier, bag, ToyReward(16, torch.float32)]
    rewards = make_rewards(given, policy, None, [None, None, tokenizer, None, None])
    assert rewards.names == ["length", "judge", "BertForSequenceClassification", "bag", "reward"]
    kinds = [FunctionReward, EmbeddedClassifier, EmbeddedClassifier, EmbeddingReward, EmbeddingReward]
    assert [type(part) for part in rewards.parts] == kinds
    total = rewards.score(policy, *batch)
    assert_close(total, sum(rewards.last.values.values()))
    assert_close(rewards.last.values["judge"], rewards.last.values["BertForSequenceClassification"])
    assert make_rewards(rewards, policy) is rewards


def test_a_vocabulary_of_its_own_makes_a_classifier_of_text_that_says_why(policy, make_classifier):
    other = train_tokenizer(["Words that no film review holds"], 290)
    (part,) = make_rewards(make_classifier("bert"), policy, None, other).parts
    assert type(part) is TextClassifier
    with pytest.raises(InputError, match="got 'a classifier with another vocabulary'") as error:
        Objective(Rewards([part])).require_gradient("gumbel")
    assert "for gumbel a differentiable reward" in str(error.value)


class Brevity(Reward):
    """The recipe of CONTRIBUTING: a reward that is computed from ids."""

    name = "brevity"

    def score(self, policy, prompts, ids, mask):
        return -mask.sum(1).float()


class Warmth(Reward):
    """The same of embeddings."""

    name, scope = "warmth", "completion"

    def differentiable(self, embeds, mask):
        return (embeds.sum(-1) * mask).sum(1)


def test_a_reward_of_ones_own_is_a_subclass(policy, batch):
    prompts, ids, mask = batch
    rewards = make_rewards([Brevity(), Warmth()], policy, [2.0, 1.0], scope="completion")
    warmth = (policy.embed(ids).sum(-1) * mask).sum(1)
    assert_close(rewards.score(policy, *batch), warmth - 2.0 * mask.sum(1))
    assert rewards.names == ["brevity", "warmth"]
    with pytest.raises(InputError, match="reward 'brevity': got 'a reward of text, which has no gradient'"):
        Objective(rewards, scope="completion").require_gradient("ste")
    Objective(Warmth(), scope="completion").require_gradient("ste")
    with pytest.raises(InputError, match="reward_scope: got 'prompt_and_completion'; allowed: completion, for which"):
        make_rewards(Warmth(), policy)


SHAPES = [
    (lambda values: values.sum(1, keepdim=True), r"shape \[3, 1\], with gradient"),
    (lambda values: values.sum(1).detach(), "shape .*, without gradient.*allowed: .*, with gradient"),
]


@pytest.mark.parametrize(("change", "says"), SHAPES)
def test_values_of_another_shape_or_without_gradient_are_refused_not_broadcast(change, says, policy, batch):
    prompts, ids, mask = batch
    shaped = EmbeddingReward(lambda embeds, mask: change(embeds.sum(-1) * mask), "completion", "shaped")
    rewards = make_rewards([Warmth(), shaped], policy, scope="completion")
    embeds = policy.embed(ids).detach().requires_grad_()
    with pytest.raises(InputError, match=f"reward 'shaped': got .*{says}"):
        Objective(rewards, scope="completion").reward(policy.embed(prompts.ids), prompts, embeds, mask)


def test_functions_and_folders_by_name(tmp_path, policy, make_classifier, tokenizer, batch, monkeypatch):
    monkeypatch.chdir(folder := tmp_path)
    assert make_rewards("rewards.test_rewards:length", policy).score(policy, *batch).tolist() == [11, 28, 4]
    RewardModel("bag", policy, HeadSettings()).save(folder / "bag")
    assert isinstance(make_reward("bag", policy).function, RewardModel)
    model = make_classifier("llama", 2, dtype=torch.float32)
    model.save_pretrained(folder / "judge@home"), tokenizer.save_pretrained(folder / "judge@home")
    named = make_reward(f"hf:{folder}/judge@home@LABEL_1", policy)
    assert isinstance(named, EmbeddedClassifier) and named.column == 1 and named.name == "judge@home"
    values = named.score(policy, *batch)
    assert ((values > 0) & (values < 1)).all()
