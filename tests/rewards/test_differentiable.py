"""Classifiers through their own embedding table: equal to their ids, and to the unrolled graph."""

from types import MethodType

import pytest
import torch
from conftest import ToyReward
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaConfig

from grade.data.tiny_lm import train_tokenizer
from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import replay
from grade.gradients.unrolled import unrolled
from grade.rewards.base import EmbeddingReward
from grade.rewards.classifier import EmbeddedClassifier
from grade.rewards.rewards import Rewards

KINDS = ["bert", "llama", "gpt2"]
T = 6


def joined(batch):
    prompts, ids, mask = batch
    return torch.cat([prompts.ids, ids], 1), torch.cat([prompts.mask, mask], 1)


def alone(model, rows):
    """Logits of each row by its ids, in a batch of its own."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_gets_what_its_ids_get_alone(kind, make_classifier, make_policy, tokenizer, batch):
    model = make_classifier(kind)
    policy = make_policy(torch.float64)
    reward = EmbeddedClassifier(model, tokenizer, policy)
    ids, mask = joined(batch)
    want = alone(model, [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)])[:, 0]
    assert want.std() > 1e-2, "the rows must differ"
    # Llama's norms are float32 even here
    tolerance = dict(rtol=1e-5, atol=1e-6) if kind == "llama" else dict(rtol=1e-9, atol=1e-9)
    assert_close(reward.differentiable(reward.reads.embed(ids), mask), want, **tolerance)
    assert_close(reward.score(policy, *batch), want, **tolerance)
    noise = torch.where(mask.bool()[..., None], reward.reads.embed(ids), 1e3)
    assert_close(reward.differentiable(noise, mask), want, **tolerance)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
@pytest.mark.parametrize("scope", ["prompt_and_completion", "completion"])
@pytest.mark.parametrize("several", [False, True])
def test_gradient_of_replay_is_the_unrolled_graphs(
    kind, estimator, scope, several, make_classifier, make_policy, tokenizer, batch
):
    policy = make_policy(torch.float64)
    parts = [EmbeddedClassifier(make_classifier(kind), tokenizer, policy, scope=scope)]
    if several:
        parts.append(EmbeddingReward(ToyReward(16), scope, "toy"))
        parts.append(EmbeddedClassifier(make_classifier("bert", 2), tokenizer, policy, "LABEL_1", scope, "other"))
    rewards = Rewards(parts, [0.5, 2.0, -3.0][: len(parts)], scope=scope, dtype=torch.float64)
    objective = Objective(rewards, 0.3, scope)
    config = RelaxationConfig(estimator=estimator, gumbel_topk=20, max_new_tokens=T, tau=0.9)
    gradients, values = [], []
    for engine, options in ((unrolled, {}), (replay, {"hops": T - 1})):
        policy.zero_grad(set_to_none=True)
        step = engine(policy, batch[0], objective, config, torch.Generator().manual_seed(4), **options)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trainable_parameters()]))
        values.append(step.reward)
        assert list(rewards.last.values) == rewards.names and rewards.last.seconds == {}
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error <= (1e-5 if kind == "llama" else 1e-8)  # Llama's norms are float32
    if estimator == "ste":  # hard text: the reward is the one that evaluation sees
        assert_close(rewards.score(policy, batch[0], step.completion_ids, step.completion_mask), values[1])


def test_special_tokens_surround_the_text_where_the_tokenizer_adds_them(make_classifier, make_policy, batch):
    tokenizer = with_specials()
    policy = make_policy(torch.float64)
    policy.tokenizer = tokenizer
    model = make_classifier("bert")
    prompts, ids, mask = batch
    rows = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
    scoped = EmbeddedClassifier(model, tokenizer, policy, scope="completion")
    assert_close(scoped.score(policy, *batch), alone(model, [[2, *row, 3] for row in rows])[:, 0])
    whole = EmbeddedClassifier(model, tokenizer, policy)
    both = [[*p[m.bool()].tolist(), *row, 3] for p, m, row in zip(prompts.ids, prompts.mask, rows, strict=True)]
    assert_close(whole.score(policy, *batch), alone(model, both)[:, 0])


def with_specials():
    from tokenizers.processors import TemplateProcessing

    made = train_tokenizer(["The film was a delight."], 300)
    made._tokenizer.post_processor = TemplateProcessing(
        single="! $A #", special_tokens=[("!", 2), ("#", 3)]
    )  # whichever tokens have these ids
    return made


def test_the_policys_table_may_have_more_or_fewer_rows(make_classifier, make_policy, tokenizer, batch):
    """Models pad their tables beyond the tokenizer's ids, each as it likes."""
    size = len(tokenizer)
    want = None
    for policy_rows, rows in ((size, size), (size + 7, size), (size, size + 5)):
        model = make_classifier("bert", vocab_size=size)
        table = model.get_input_embeddings()
        table.weight = torch.nn.Parameter(torch.cat([table.weight.detach(), torch.ones(rows - size, 24).double()]))
        policy = make_policy(torch.float64, policy_rows)
        reward = EmbeddedClassifier(model, tokenizer, policy)
        assert len(reward.reads.weight) == policy_rows
        want = reward.score(policy, *batch) if want is None else want
        assert_close(reward.score(policy, *batch), want)


@pytest.mark.parametrize("kind", [*KINDS, "roberta"])
def test_a_text_longer_than_the_classifier_reads_is_refused_with_its_row(
    kind, make_classifier, policy, tokenizer, batch
):
    ids, mask = joined(batch)
    longest, unused = int(mask.sum(1).max()), 2 if kind == "roberta" else 0
    name = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    short = EmbeddedClassifier(make_classifier(kind, **{name: unused + longest - 1}), tokenizer, policy)
    with pytest.raises(InputError, match=f"row {int(mask.sum(1).argmax())}.*tokens: got {longest}"):
        short.score(policy, *batch)
    # padding does not count
    exact = EmbeddedClassifier(make_classifier(kind, **{name: unused + longest}), tokenizer, policy)
    assert mask.shape[1] > longest
    assert torch.isfinite(exact.score(policy, *batch)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_treats_embeddings_unlike_ids_is_refused(dtype, make_classifier, policy, tokenizer):
    backwards = make_classifier("bert").to(dtype)

    def mirrored(self, input_ids=None, inputs_embeds=None, attention_mask=None, **others):  # pads on neither side
        if inputs_embeds is not None:
            inputs_embeds, attention_mask = inputs_embeds.flip(1), attention_mask.flip(1)
        return type(self).forward(self, input_ids, attention_mask, inputs_embeds=inputs_embeds, **others)

    backwards.forward = MethodType(mirrored, backwards)
    short = make_classifier("bert", max_position_embeddings=5).to(dtype)  # for the probe
    for unlike in (backwards, short):
        with pytest.raises(InputError, match="reads inputs_embeds as it reads input_ids"):
            EmbeddedClassifier(unlike, tokenizer, policy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_a_sound_model_is_accepted_in_any_type_with_padding_on_its_side(seed, dtype, tokenizer, policy):
    for config, left in ((BertConfig, False), (LlamaConfig, True)):
        torch.manual_seed(seed)
        sizes = dict(hidden_size=96, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_labels=1)
        made = AutoModelForSequenceClassification.from_config(config(vocab_size=len(tokenizer), **sizes), dtype=dtype)
        assert EmbeddedClassifier(made, tokenizer, policy).left is left
