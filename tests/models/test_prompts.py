"""Prompts: what is kept of a text or a row, and padding and masks of a batch."""

from dataclasses import replace

import pytest
import torch
from conftest import word_tokenizer
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from grade.errors import InputError
from grade.models.prompts import check_prompts, encode_examples, encode_prompts

UNK, BOS, EOS, PAD, A, B, C = range(7)
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def abc_tokenizer(template: str = "$A", **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the words a, b and c; ``template`` says which special tokens it adds by default."""
    tokenizer = word_tokenizer(["<unk>", "<s>", "</s>", "<pad>", "a", "b", "c"], "<unk>", **(special or SPECIAL))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return tokenizer


@pytest.mark.parametrize(("template", "row"), [("<s> $A", [BOS, A]), ("$A </s>", [A, B]), ("<s> $A </s>", [BOS, A])])
def test_bos_is_the_tokenizers_choice_and_eos_never_ends_a_prompt(template, row):
    assert encode_prompts(abc_tokenizer(template), ["a b"], max_prompt_tokens=2).ids.tolist() == [row]
    longer = encode_prompts(abc_tokenizer(template), ["a b"], max_prompt_tokens=9).ids.tolist()[0]
    assert longer[-2:] == [A, B]


@pytest.mark.parametrize(("special", "padding"), [({"eos_token": "</s>"}, EOS), ({"unk_token": "<unk>"}, 0)])
def test_a_tokenizer_without_padding_token(special, padding):
    batch = encode_prompts(abc_tokenizer(**special), ["a b", "c"], max_prompt_tokens=2)
    assert batch.ids.tolist() == [[A, B], [padding, C]] and batch.mask.tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("text", ["", "  \n"])
@pytest.mark.parametrize("template", ["$A", "<s> $A"])
def test_an_empty_prompt_is_refused_also_where_bos_is_added(text, template):
    with pytest.raises(InputError, match="prompt in row 1: got .*at least one token"):
        encode_prompts(abc_tokenizer(template), ["a", text], max_prompt_tokens=4)


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), min_size=1, max_size=5), st.integers(1, 9))
def test_ids_under_the_mask_are_the_first_tokens(words, n):
    batch = encode_prompts(abc_tokenizer(), [" ".join(w) for w in words], n)
    ids = {"a": A, "b": B, "c": C}
    for row, w in enumerate(words):
        assert batch.ids[row][batch.mask[row].bool()].tolist() == [ids[x] for x in w[:n]]
    assert (batch.mask.diff(dim=1) >= 0).all() and batch.mask[:, -1].all()


# --- rows of a dataset ---

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('role ' + m.role) }}{% endif %}<s>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}{% if not shout is defined %}{% set shout = false %}{% endif %}"
    "{% if shout %}{% generation %}c{% endgeneration %}{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The words a, b and c; a turn stands between <s> and </s>; plain text begins with <s>."""
    tokenizer = abc_tokenizer("<s> $A")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def turns(*texts):
    """Messages of these texts, the user's first, the assistant's next."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_examples_follow_every_way_to_pick_rows():
    rows = tuple({"prompt": text} for text in "abc")
    batch = encode_examples(abc_tokenizer(), rows)
    assert batch.examples == rows
    picks = [slice(1, None), [2, 0, -1], torch.tensor([1, 1]), torch.tensor([True, False, True]), [False, True, False]]
    for pick in picks:
        picked = batch[pick]
        words = [batch.ids.new_tensor([{"a": A, "b": B, "c": C}[e["prompt"]]]) for e in picked.examples]
        assert torch.equal(torch.stack(words), picked.ids) and len(picked) == len(picked.examples)
        assert tuple(rows[source] for source in picked.sources) == picked.examples
    twice = batch.repeat(2)
    assert twice.ids[:, 0].tolist() == [A, A, B, B, C, C]
    assert twice.examples == (rows[0], rows[0], rows[1], rows[1], rows[2], rows[2])
    once, places = twice[[5, 0, 1, 4]].distinct()
    assert once.examples == (rows[2], rows[0]) and places == [0, 1, 1, 0]
    assert batch.to("meta").examples == rows and twice.to("meta").sources == twice.sources == (0, 0, 1, 1, 2, 2)
    assert replace(twice, ids=twice.ids.flip(0)).sources == tuple(range(6))  # other prompts


def test_a_cut_prompt_is_shown_as_the_model_sees_it():
    rows = [{"prompt": "a  b c", "n": 1}, {"prompt": " c ", "n": 2}]
    tokenizer = abc_tokenizer("<s> $A")
    whole = encode_examples(tokenizer, rows, 4)
    assert whole.ids.tolist() == [[BOS, A, B, C], [PAD, PAD, BOS, C]] and whole.examples == tuple(rows)
    right = encode_examples(tokenizer, rows, 3, "right")
    assert right.ids.tolist() == [[BOS, A, B], [PAD, BOS, C]]
    assert right.examples == ({"prompt": "a b", "n": 1}, rows[1])
    left = encode_examples(tokenizer, rows, 2, "left")
    assert left.ids.tolist() == [[B, C], [BOS, C]] and left.examples == ({"prompt": "b c", "n": 1}, rows[1])
    assert rows[0]["prompt"] == "a  b c"


def test_messages_go_through_the_chat_template():
    rows = [{"prompt": turns("a b")}, {"prompt": turns("a", "b c")}, {"prompt": turns("a", "b", "c"), "x": 1}]
    batch = encode_examples(chat_tokenizer(), rows)
    assert [ids[mask.bool()].tolist() for ids, mask in zip(batch.ids, batch.mask, strict=True)] == [
        [BOS, A, B, EOS, BOS],
        [BOS, A, EOS, BOS, B, C],  # the assistant's turn is left open
        [BOS, A, EOS, BOS, B, EOS, BOS, C, EOS, BOS],
    ]
    assert batch.examples == tuple(rows)
    cut = encode_examples(chat_tokenizer(), rows[:1], 3, "left")
    assert cut.ids.tolist() == [[B, EOS, BOS]] and cut.examples == tuple(rows[:1])
    assert encode_examples(chat_tokenizer(), rows[:1], None, "error", {"shout": True}).ids[0, -2:].tolist() == [BOS, C]
    own = encode_examples(abc_tokenizer(), rows[:1], chat_template_kwargs={"chat_template": "b"})
    assert own.ids.tolist() == [[B]]


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (TEMPLATE, [BOS, A, B, C, EOS, BOS]),  # which would write a list as Python does
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}<pad>{% endfor %}{% endfor %}",
         [A, B, PAD, C, PAD]),
    ],
)  # fmt: skip
def test_parts_of_a_message_are_text(template, want):
    tokenizer, parts = chat_tokenizer(), [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
    tokenizer.chat_template = template
    row = {"prompt": [{"role": "user", "content": parts}]}
    batch = encode_examples(tokenizer, [row])
    assert batch.ids.tolist() == [want] and batch.examples == (row,)
    if template is TEMPLATE:
        chats = [turns("a b\nc", "a"), turns(parts, "a"), turns("a b\nc", parts[1:]), turns("a b\nc", "c")]
        rows = encode_examples(tokenizer, [{"prompt": chat} for chat in chats]).rows()
        assert rows[0] == rows[1] and rows[2] == rows[3]


USER = {"role": "user", "content": "a"}
CHAT = [USER]
BAD = {
    "no column": ("a", {"text": "a"}, "prompt in row 7: got None; allowed: text, or a list of messages"),
    "texts": ("a", {"prompt": ["a", "b"]}, "prompt in row 7: got .*list of messages"),
    "messages": ("a", {"prompt": CHAT}, "prompt in row 7: got .*allowed: text, as in the rows before it"),
    "too long": ("a", {"prompt": "a b c a"}, "tokens of the prompt in row 7: got 5; allowed: at most 4 .*truncation"),
    "images": ("a", {"prompt": "a", "image": b"x"}, "image in row 7: got b'x'; allowed: no such column"),
    "text": (CHAT, {"prompt": "a"}, "prompt in row 7: got 'a'; allowed: messages, as in the rows before it"),
    "no role": (CHAT, {"prompt": [USER, {"content": "a"}]}, "prompt in row 7: .*list of messages"),
    "no content": (CHAT, {"prompt": [{"role": "user"}]}, "prompt in row 7: .*list of messages"),
    "unknown": (CHAT, {"prompt": [{"role": "judge", "content": "a"}]}, r"row 7: .*\(TemplateError: role judge\)"),
    "parts": (CHAT, {"prompt": [{"role": "user", "content": [{"image": "a"}]}]}, "prompt in row 7: .*list of messages"),
    "a long one": (CHAT, {"prompt": turns("a b c")}, "tokens of the prompt in row 7: got 6; allowed: at most 4"),
    "tools": (CHAT, {"prompt": CHAT, "tools": [{"name": "f"}]}, "tools in row 7: got .*allowed: no such column"),
}  # fmt: skip


@pytest.mark.parametrize(("first", "row", "message"), BAD.values(), ids=BAD)
def test_a_bad_row_is_named(first, row, message):
    rows = [{"prompt": first}, row]
    with pytest.raises(InputError, match=message):
        encode_examples(chat_tokenizer(), rows, 4, first_row=6, warn_raw=False)
    with pytest.raises(InputError, match=message):
        check_prompts(chat_tokenizer(), [rows[0]] * 7 + rows[1:], 4, batch_size=8, warn_raw=False)


def test_a_whole_dataset_is_checked_and_its_longest_prompt_is_known():
    rows = [{"prompt": " ".join("abc"[: 1 + i % 3]), "other": i} for i in range(10)]
    for dataset in rows, Dataset.from_list(rows):
        assert check_prompts(abc_tokenizer(), dataset, batch_size=3)[0] == 3
        assert check_prompts(abc_tokenizer(), dataset, 2, "left")[0] == 2
        with pytest.raises(InputError, match="tokens of the prompt in row 2: got 3"):
            check_prompts(abc_tokenizer(), dataset, 2, batch_size=3)
    assert check_prompts(abc_tokenizer(), [*rows, {"prompt": "a b c a", "other": 10}], batch_size=3) == (4, 10)


def test_a_long_prompt_is_cut_here_and_not_by_the_tokenizer():
    """Which has a length of its own, and would cut without a word."""
    tokenizer = abc_tokenizer()
    tokenizer.model_max_length = 2
    assert encode_prompts(tokenizer, ["a b c"], 9).ids.tolist() == [[A, B, C]]
    assert encode_examples(tokenizer, [{"prompt": "a b c"}]).ids.tolist() == [[A, B, C]]
    chat = chat_tokenizer()
    chat.model_max_length = 2
    assert encode_examples(chat, [{"prompt": turns("a b")}]).ids.tolist() == [[BOS, A, B, EOS, BOS]]
    assert check_prompts(tokenizer, [{"prompt": "a b c"}])[0] == 3
