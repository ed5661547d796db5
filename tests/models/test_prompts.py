"""Prompts: what is kept of a review, and padding, masks and positions of a batch."""

import pytest
import torch
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from grade.errors import InputError
from grade.models.prompts import PromptBatch, encode_prompts, position_ids, prompt_text

UNK, BOS, EOS, PAD, A, B, C = range(7)
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def word_tokenizer(template: str = "$A", **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the words a, b and c; ``template`` says which special tokens it adds by default."""
    vocabulary = {"<unk>": UNK, "<s>": BOS, "</s>": EOS, "<pad>": PAD, "a": A, "b": B, "c": C}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(special or SPECIAL))


@pytest.mark.parametrize(
    ("review", "prompt"),
    [
        ("One. Two. Three.", "One. Two"),
        ("One", "One"),
        ("One. ", "One."),  # the second sentence is empty
        (" ...And then? Yes. No.", "And then? Yes. No"),
        ("It scored 3.5 of 5. Fine.", "It scored 3.5 of 5"),  # the paper's rule, right or wrong
        ("x" * 500, "x" * 200),
    ],
)
def test_prompt_text(review, prompt):
    assert prompt_text(review) == prompt


def test_prompt_text_is_not_cut_in_white_space():
    assert prompt_text("ab cd", max_chars=3) == "ab"


@given(st.text(), st.integers(1, 50))
def test_prompt_text_is_short_and_not_empty_or_refused(review, max_chars):
    try:
        prompt = prompt_text(review, max_chars)
    except InputError:
        return
    assert prompt == prompt.strip() != ""
    assert len(prompt) <= max_chars and prompt in review


@pytest.mark.parametrize("review", ["", "  ", "...", ". . ."])
def test_prompt_text_refuses_a_review_without_words(review):
    with pytest.raises(InputError, match="prompt: got"):
        prompt_text(review)


def test_prompts_are_padded_on_the_left():
    batch = encode_prompts(word_tokenizer(), ["a b c", "c", "b a"], max_prompt_tokens=8)
    assert batch.ids.tolist() == [[A, B, C], [PAD, PAD, C], [PAD, B, A]]
    assert batch.mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert batch.ids.dtype == batch.mask.dtype == torch.int64
    assert len(batch) == 3


def test_the_first_tokens_of_a_prompt_are_kept():
    batch = encode_prompts(word_tokenizer(), ["a b c", "c"], max_prompt_tokens=2)
    assert batch.ids.tolist() == [[A, B], [PAD, C]]


def test_pad_to_sets_the_width():
    batch = encode_prompts(word_tokenizer(), ["a b"], max_prompt_tokens=2, pad_to=4)
    assert batch.ids.tolist() == [[PAD, PAD, A, B]] and batch.mask.tolist() == [[0, 0, 1, 1]]
    with pytest.raises(InputError, match="pad_to: got 1; allowed: at least the 2 tokens"):
        encode_prompts(word_tokenizer(), ["a b"], max_prompt_tokens=2, pad_to=1)


@pytest.mark.parametrize(("template", "row"), [("<s> $A", [BOS, A]), ("$A </s>", [A, B]), ("<s> $A </s>", [BOS, A])])
def test_bos_is_the_tokenizers_choice_and_eos_never_ends_a_prompt(template, row):
    assert encode_prompts(word_tokenizer(template), ["a b"], max_prompt_tokens=2).ids.tolist() == [row]
    longer = encode_prompts(word_tokenizer(template), ["a b"], max_prompt_tokens=9).ids.tolist()[0]
    assert longer[-2:] == [A, B]


@pytest.mark.parametrize(("special", "padding"), [({"eos_token": "</s>"}, EOS), ({"unk_token": "<unk>"}, 0)])
def test_a_tokenizer_without_padding_token(special, padding):
    batch = encode_prompts(word_tokenizer(**special), ["a b", "c"], max_prompt_tokens=2)
    assert batch.ids.tolist() == [[A, B], [padding, C]] and batch.mask.tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("text", ["", "  \n"])
@pytest.mark.parametrize("template", ["$A", "<s> $A"])
def test_an_empty_prompt_is_refused_also_where_bos_is_added(text, template):
    with pytest.raises(InputError, match="prompt: got .*at least one token"):
        encode_prompts(word_tokenizer(template), ["a", text], max_prompt_tokens=4)


def test_a_prompt_of_white_space_is_refused_also_where_it_has_tokens():
    spaces = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, " ": 1}, [])))
    assert spaces(" ")["input_ids"] == [1]
    with pytest.raises(InputError, match="prompt: got ' '"):
        encode_prompts(spaces, ["a", " "], max_prompt_tokens=4)


def test_a_prompt_without_tokens_is_refused():
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))  # knows one character; the others vanish
    no_unknown = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with pytest.raises(InputError, match="prompt: got 'zzz'"):
        encode_prompts(no_unknown, ["a", "zzz"], max_prompt_tokens=4)


@pytest.mark.parametrize(("texts", "n", "field"), [([], 4, "prompts"), (["a"], 0, "max_prompt_tokens")])
def test_nothing_to_encode(texts, n, field):
    with pytest.raises(InputError, match=f"^{field}: "):
        encode_prompts(word_tokenizer(), texts, n)


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), min_size=1, max_size=5), st.integers(1, 9))
def test_ids_under_the_mask_are_the_first_tokens(words, n):
    batch = encode_prompts(word_tokenizer(), [" ".join(w) for w in words], n)
    ids = {"a": A, "b": B, "c": C}
    for row, w in enumerate(words):
        assert batch.ids[row][batch.mask[row].bool()].tolist() == [ids[x] for x in w[:n]]
    assert (batch.mask.diff(dim=1) >= 0).all() and batch.mask[:, -1].all()


def test_positions_of_padded_and_bool_masks():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert position_ids(mask).tolist() == position_ids(mask.bool()).tolist() == expected
    assert position_ids(mask.float()).dtype == torch.int64


def test_padding_does_not_change_what_a_model_predicts():
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).double().eval()
    tokenizer = word_tokenizer()

    def last_logits(**kwargs):
        batch = encode_prompts(tokenizer, ["b a"], 4, **kwargs)
        positions = position_ids(batch.mask)
        return model(input_ids=batch.ids, attention_mask=batch.mask, position_ids=positions).logits[:, -1]

    torch.testing.assert_close(last_logits(pad_to=6), last_logits())


def test_to_moves_both_tensors():
    batch = PromptBatch(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)).to("meta")
    assert batch.ids.device.type == batch.mask.device.type == "meta"
