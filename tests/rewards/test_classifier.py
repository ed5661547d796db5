"""Classifiers of text: any tokenizer, labels, chat templates, and what cannot be loaded."""

import pytest
import torch
from conftest import make_prompts
from rewards.test_differentiable import alone as logits_of
from torch.testing import assert_close

from grade.data.tiny_lm import train_tokenizer
from grade.errors import InputError
from grade.models.prompts import PromptBatch
from grade.rewards.classifier import TextClassifier, load_classifier


@pytest.fixture(scope="module")
def other():
    """A tokenizer with another vocabulary than the policy's."""
    return train_tokenizer(["Words that no film review holds, over and over."], 290)


def alone(model, tokenizer, texts, **options):
    return logits_of(model, [tokenizer(text, **options)["input_ids"] for text in texts])


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "gpt2"])
def test_it_reads_decoded_text_with_its_own_tokenizer(kind, make_classifier, policy, other, batch):
    model = make_classifier(kind)
    texts = ["The film was a delight.", "This movie was dull and clumsy, a mess", "The second half of it was not fun"]
    want = alone(model, other, texts)[:, 0]
    assert_close(TextClassifier(model, other).score(policy, *batch), want, rtol=1e-5, atol=1e-6)
    want = alone(model, other, [" a delight.", " was dull and clumsy, a mess", " fun"])[:, 0]
    scoped = TextClassifier(model, other, scope="completion")
    assert_close(scoped.score(policy, *batch), want, rtol=1e-5, atol=1e-6)
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_the_reward_is_the_logit_or_the_named_labels_probability(make_classifier, tokenizer):
    model = make_classifier("bert", 3)
    model.config.id2label = {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    positive = TextClassifier(model, tokenizer, "POSITIVE")
    assert_close(positive.value(logits), logits.softmax(-1)[:, 2])
    model.config.problem_type = "multi_label_classification"
    assert_close(positive.value(logits), logits.sigmoid()[:, 2])
    model.config.problem_type = "regression"
    assert_close(positive.value(logits), logits[:, 2])
    single = TextClassifier(make_classifier("bert"), tokenizer)
    assert_close(single.value(torch.tensor([[-4.0]], dtype=torch.bfloat16)), torch.tensor([-4.0]))


@pytest.mark.parametrize("label", [None, "positive", "LABEL_9", ""])
def test_one_of_several_labels_must_be_named(label, make_classifier, tokenizer):
    with pytest.raises(InputError, match="label: got .*LABEL_0, LABEL_1") as error:
        TextClassifier(make_classifier("bert", 2), tokenizer, label, name="judge")
    assert "'judge'" in str(error.value)


def chat(content="hello"):
    messages = [{"role": "user", "content": content}]
    one = torch.ones(2, 1, dtype=torch.long)
    return PromptBatch(one, one, ({"prompt": messages},) * 2)


def test_messages_go_through_its_own_template_without_more_special_tokens(make_classifier, policy, tokenizer):
    model, ids = make_classifier("bert"), torch.tensor([[70, 71, 72], [73, 0, 1]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    own = train_tokenizer(["Words that no film review holds"], 290)
    own.chat_template = "{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}"
    answers = [tokenizer.decode([70, 71, 72]), tokenizer.decode([73])]
    for scope, start in (("prompt_and_completion", "[user: hello]"), ("completion", "")):
        want = alone(model, own, [f"{start}[assistant: {a}]" for a in answers], add_special_tokens=False)[:, 0]
        for content in ("hello", [{"type": "text", "text": "hello"}]):
            got = TextClassifier(model, own, scope=scope).score(policy, chat(content), ids, mask)
            assert_close(got, want)


def test_an_empty_completion_is_read_as_its_end(make_classifier, policy, tokenizer):
    model, prompts = make_classifier("bert"), make_prompts(1)
    reward = TextClassifier(model, tokenizer, scope="completion")
    got = reward.score(policy, prompts, torch.tensor([[0]]), torch.tensor([[1]]))  # the end-of-sequence token alone
    with torch.no_grad():
        assert_close(got, model(input_ids=torch.tensor([[0]])).logits[:, 0])


def test_rows_of_several_passes_are_those_of_one_row_alone(make_classifier, policy, tokenizer):
    reward, ids = TextClassifier(make_classifier("bert"), tokenizer, scope="completion"), torch.arange(130)
    ids = ids[:, None].expand(-1, 2) % 60 + 70
    got = reward.score(policy, make_prompts(130), ids, torch.ones_like(ids))
    texts = [tokenizer.decode(row) for row in ids[[0, 63, 64, 129]]]
    assert_close(got[[0, 63, 64, 129]], alone(reward.model, tokenizer, texts)[:, 0])


def base_model(folder, classifier, policy):
    policy.peft.unload().save_pretrained(folder)


def fewer_layers(folder, classifier, policy):
    """A config that leaves a layer of the file out."""
    classifier.config.num_hidden_layers = 1
    classifier.save_pretrained(folder)


def pickled(folder, classifier, policy):
    classifier.save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (fewer_layers, r"a classifier whose config has a place for bert.encoder.layer.1"),
        (base_model, "a trained classifier: it has no weights for score.weight"),
        (pickled, "safetensors"),
    ],
)
def test_what_is_no_classifier_is_refused_and_nothing_pickled_is_loaded(
    tmp_path, write, match, make_classifier, policy
):
    write(tmp_path, make_classifier("bert"), policy)
    with pytest.raises((InputError, OSError), match=match):
        load_classifier(str(tmp_path))
