"""How a classifier of text reads a batch: its limit, rows in one pass, empty rows, and what is asked of its files."""

from types import SimpleNamespace

import pytest
import torch
from conftest import make_prompts
from torch.testing import assert_close

from grade.errors import InputError
from grade.rewards import classifier
from grade.rewards.classifier import TextClassifier, load_classifier, load_tokenizer


@pytest.fixture
def reward(make_classifier, tokenizer):
    """A classifier, with the shapes of what it is given."""
    made = TextClassifier(make_classifier("bert"), tokenizer, tokenizer, scope="completion")
    made.shapes = []
    made.model.register_forward_pre_hook(
        lambda _, args, options: made.shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    return made


@pytest.mark.parametrize(
    ("positions", "length", "limit"),
    [
        (64, 10**30, 64),
        (64, 10, 10),
        (64, 64, 64),
        (None, 12, 12),
        (None, 10**30, 10**9),  # transformers' number for a tokenizer without a limit
        (None, None, 10**9),
        (7, None, 7),
    ],
)
def test_the_limit_is_the_models_or_the_tokenizers(positions, length, limit, reward):
    config = SimpleNamespace(max_position_embeddings=positions)
    reward.model.config.get_text_config = lambda: config
    reward.tokenizer = SimpleNamespace() if length is None else SimpleNamespace(model_max_length=length)
    assert reward.limit == limit


def test_a_text_as_long_as_the_limit_is_read(reward):
    reward.tokenizer = SimpleNamespace(model_max_length=9)
    reward.check_length(9, 0)
    with pytest.raises(InputError, match="reward 'classifier', row 2, 'so': tokens: got 10; allowed: at most 9"):
        reward.check_length(10, 2, ", 'so'")


@pytest.mark.parametrize(("number", "batches"), [(1, [1]), (64, [64]), (65, [64, 1]), (130, [64, 64, 2])])
def test_at_most_64_rows_are_read_in_one_pass(number, batches, reward, tokenizer):
    ids = torch.arange(number)[:, None].expand(-1, 2) % 60 + 70
    got = reward.score(make_prompts(number), ids, torch.ones_like(ids))
    assert [rows for rows, _ in reward.shapes] == batches and got.shape == (number,)
    for row in (0, number - 1):
        own = tokenizer([tokenizer.decode(ids[row])])["input_ids"]
        with torch.no_grad():
            assert_close(got[row], reward.model(input_ids=torch.tensor(own)).logits[0, 0])


def test_without_a_padding_token_rows_are_read_alone(make_classifier, tokenizer, batch):
    model = make_classifier("gpt2", 3)
    reward, shapes = TextClassifier(model, tokenizer, tokenizer, "LABEL_2", "completion"), []
    model.register_forward_pre_hook(
        lambda _, args, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    got = reward.score(*batch)
    rows = tokenizer([" a delight.", " was dull and clumsy, a mess", " fun"])["input_ids"]
    assert shapes == [(1, len(row)) for row in rows] and got.shape == (3,)


def test_padding_is_the_models_and_masked(reward, monkeypatch):
    seen = []
    monkeypatch.setattr(
        reward, "model", lambda **given: seen.append(given) or SimpleNamespace(logits=torch.zeros(2, 1))
    )
    reward.model.device, reward.model.config = (
        "cpu",
        SimpleNamespace(get_text_config=lambda: SimpleNamespace(pad_token_id=9)),
    )
    reward._logits([[5, 6, 7], [8]])
    assert seen[0]["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert seen[0]["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(("end", "read"), [(5, [5]), (None, [0]), (0, [0])])
def test_an_empty_text_is_read_as_the_end_or_as_token_0(end, read, reward, monkeypatch):
    made = SimpleNamespace(__call__=None, eos_token_id=end)
    monkeypatch.setattr(reward, "tokenizer", type("Made", (), {"__call__": lambda *_: {"input_ids": [[], [3]]}})())
    reward.tokenizer.eos_token_id = made.eos_token_id
    texts = SimpleNamespace(prompts=["a", "b"], completions=["", "c"])
    assert reward._encode(texts) == [read, [3]]


def test_a_score_holds_no_graph_even_of_a_classifier_that_is_trained_elsewhere(reward, batch):
    reward.model.requires_grad_(True)
    assert not reward.score(*batch).requires_grad


def test_files_are_safetensors_without_code_of_their_own(monkeypatch, make_classifier, tokenizer):
    asked, model = [], make_classifier("bert", dtype=torch.float32)
    info = dict(missing_keys=[], mismatched_keys=[], unexpected_keys=[])

    def give(name, **options):
        asked.append((name, options))
        return (model, info) if options.get("output_loading_info") else tokenizer

    for kind in ("AutoModelForSequenceClassification", "AutoTokenizer"):
        monkeypatch.setattr(classifier, kind, SimpleNamespace(from_pretrained=give))
    assert load_classifier("judge") == (model, tokenizer)
    assert asked == [
        ("judge", dict(use_safetensors=True, trust_remote_code=False, output_loading_info=True)),
        ("judge", dict(trust_remote_code=False)),
    ]
    info["mismatched_keys"] = [("classifier.weight", (1, 2), (2, 2))]
    with pytest.raises(InputError, match="it has no weights for .'classifier.weight', "):
        load_classifier("judge")


@pytest.mark.parametrize(
    ("left", "refused"),
    [
        ("bert.encoder.layer.9.weight", True),
        ("bert.pooler.dense.weight", True),
        ("roberta.encoder.layer.9.weight", False),  # another trunk's
        ("cls.predictions.bias", False),
        ("bert.embeddings.position_ids", False),
        ("bert.rotary.inv_freq", False),
        ("bert.h.0.masked_bias", False),
    ],
)
def test_what_a_file_has_more_must_not_be_the_trunks(left, refused, monkeypatch, make_classifier, tokenizer):
    model = make_classifier("bert", dtype=torch.float32)
    info = dict(missing_keys=[], mismatched_keys=[], unexpected_keys=[left])
    give = SimpleNamespace(from_pretrained=lambda *_, **options: (model, info))
    monkeypatch.setattr(classifier, "AutoModelForSequenceClassification", give)
    monkeypatch.setattr(classifier, "load_tokenizer", lambda _: tokenizer)
    if refused:
        with pytest.raises(InputError, match=f"a classifier whose config has a place for {left}"):
            load_classifier("judge")
    else:
        assert load_classifier("judge")[0] is model


@pytest.mark.parametrize(("tokens", "refused"), [(0, True), (2, True), (3, False)])
def test_a_tokenizer_of_special_tokens_alone_is_none(tokens, refused, monkeypatch):
    made = type("Made", (), {"__len__": lambda _: tokens, "all_special_tokens": ["<s>", "</s>"]})()
    monkeypatch.setattr(classifier, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda *_, **__: made))
    if refused:
        with pytest.raises(InputError, match="its files are missing"):
            load_tokenizer("judge")
    else:
        assert load_tokenizer("judge") is made


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError("first\nsecond\nthird"), "(first)"), (OSError("  \n"), "(OSError)"), (OSError(), "(OSError)")],
)
def test_of_an_error_the_first_line_is_shown(error, said, monkeypatch):
    def fail(*_, **__):
        raise error

    for kind in ("AutoModelForSequenceClassification", "AutoTokenizer"):
        monkeypatch.setattr(classifier, kind, SimpleNamespace(from_pretrained=fail))
    for load in (load_classifier, load_tokenizer):
        with pytest.raises(InputError) as caught:
            load("judge")
        assert str(caught.value).endswith(said)


def test_the_only_label_is_column_0_and_a_named_one_its_own(make_classifier, tokenizer):
    assert TextClassifier(make_classifier("bert"), tokenizer, tokenizer).column == 0
    assert TextClassifier(make_classifier("bert"), tokenizer, tokenizer, "LABEL_0").column == 0
    for column in range(3):
        named = TextClassifier(make_classifier("bert", 3), tokenizer, tokenizer, f"LABEL_{column}")
        assert named.column == column and type(named.column) is int


def test_of_a_long_conversation_the_last_message_is_named(reward):
    chat = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "last"}]
    reward.tokenizer = SimpleNamespace(apply_chat_template=lambda chat, tokenize: {}[0])
    with pytest.raises(InputError, match="row 3: messages: got .*'last'"):
        reward._render(3, chat)
    reward.tokenizer = SimpleNamespace(apply_chat_template=lambda chat, tokenize: (chat[0]["content"], tokenize))
    assert reward._render(3, chat) == ("first", False)
