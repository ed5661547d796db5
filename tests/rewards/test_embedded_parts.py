"""Parts of a classifier that reads embeddings: its table, special tokens, ways of padding, and when one is right."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from grade.errors import InputError
from grade.models.embedding import EmbeddingTable
from grade.rewards import differentiable
from grade.rewards.differentiable import EmbeddedClassifier, why_other_vocabulary

NOISE = logging.getLogger("transformers.modeling_layers")


class Vocabulary(dict):
    """A tokenizer that has a vocabulary and nothing else."""

    def get_vocab(self):
        return dict(self)


@pytest.mark.parametrize(
    ("own", "policy", "why"),
    [
        (dict(a=0, b=1), dict(b=1, a=0), None),
        (dict(a=0, b=1), dict(a=0, c=1), "2 tokens, the policy has 2; 'b' is 1 here and unknown there"),
        (dict(a=0, b=1), dict(a=0), "2 tokens, the policy has 1; 'b' is 1 here and unknown there"),
        (dict(a=0), dict(a=0, b=1, c=2), "1 tokens, the policy has 3; 'b' is unknown here and 1 there"),
        # The first id that differs, and of two tokens with this id the first in order.
        (dict(z=0, b=1, a=2), dict(z=0, b=2, a=1), "3 tokens, the policy has 3; 'a' is 2 here and 1 there"),
        (dict(x=5, y=3), dict(x=5, y=4), "2 tokens, the policy has 2; 'y' is 3 here and 4 there"),
    ],
)
def test_the_first_token_that_differs_is_named(own, policy, why):
    why = why and f"a classifier with another vocabulary ({why})"
    assert why_other_vocabulary(Vocabulary(own), Vocabulary(policy)) == why


@pytest.mark.parametrize("pair", ["zy", "yz", "qp", "pq", "ml", "lm", "ts", "st"])
def test_ids_come_before_letters_and_of_one_id_the_first_letter(pair):
    # Sets have no order of their own, so several pairs are tried.
    own, policy = Vocabulary({pair[0]: 0, "a": 5}), Vocabulary({pair[1]: 0, "b": 5})
    assert f"; {min(pair)!r} is " in why_other_vocabulary(own, policy)


def test_a_policy_without_a_tokenizer_cannot_be_compared():
    assert "policy without a tokenizer" in why_other_vocabulary(Vocabulary(a=0), None)


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_a_table_has_the_policys_rows_and_is_copied_only_to_be_longer(rows):
    weight = torch.arange(6.0).view(3, 2) + 1
    table = differentiable._rows(weight, rows)
    assert table.tolist() == [*weight.tolist(), [0, 0], [0, 0]][:rows]
    assert (table.data_ptr() == weight.data_ptr()) == (rows <= 3)


@pytest.mark.parametrize("before", [[], [1], [1, 1]])
@pytest.mark.parametrize("after", [[], [2], [3, 2]])
@pytest.mark.parametrize("text", [[7], [7, 8], [1, 7]])
def test_special_tokens_are_what_stands_around_a_text(before, after, text):
    def tokenize(given, add_special_tokens=True):
        assert given == "a"
        return {"input_ids": [*before, *text, *after] if add_special_tokens else text}

    if text == [1, 7] or not before or before[-1] != text[0]:
        found = differentiable._special_tokens(tokenize)
        assert (*found[0], *text, *found[1]) == (*before, *text, *after)
        assert len(found[0]) == len(before)


class Sums:
    """Logits [B, 3] that depend on the order of a row's tokens; keeps what it is given."""

    device = "cpu"

    def __init__(self, scale=1.0):
        text = SimpleNamespace(pad_token_id=7)
        self.config, self.scale, self.seen = SimpleNamespace(get_text_config=lambda: text), scale, []

    def forward(self, inputs_embeds, attention_mask):
        """What it takes besides ids: no positions."""

    def __call__(self, inputs_embeds=None, attention_mask=None, input_ids=None):
        self.seen.append((inputs_embeds, attention_mask, input_ids))
        by_ids = input_ids is not None
        rows = TABLE.embed(input_ids) if by_ids else inputs_embeds
        kept = torch.ones(rows.shape[:2], dtype=torch.long) if attention_mask is None else attention_mask
        place = kept.cumsum(1) * kept
        sums = (rows * place[..., None]).sum(1)
        return SimpleNamespace(
            logits=torch.stack([sums.sum(1), sums[:, 0], sums[:, 1] ** 2], 1) * (1 if by_ids else self.scale)
        )


TABLE = EmbeddingTable(torch.linspace(-1, 1, 60, dtype=torch.float64).view(30, 2).sin())
IDS = torch.tensor([[0, 0, 4, 5, 0], [6, 7, 8, 0, 0], [0, 9, 0, 3, 2]])
MASK = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1]])


@pytest.mark.parametrize("padding", ["on_the_right", "on_the_left", "_by_length"])
def test_every_way_of_padding_keeps_the_order_of_a_rows_tokens(padding):
    model, rows = Sums(), [[4, 5], [6, 7, 8], [9, 3, 2]]
    got = getattr(differentiable, padding)(model, TABLE.embed(IDS), MASK)
    seen = model.seen
    assert_close(got, torch.cat([Sums()(input_ids=torch.tensor([row])).logits for row in rows]))
    left = [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    if padding == "_by_length":
        assert [tuple(embeds.shape) for embeds, _, _ in seen] == [(1, 2, 2), (2, 3, 2)]
        assert all(mask is None for _, mask, _ in seen)
    else:
        want = left if padding == "on_the_left" else [row[::-1] for row in left]
        assert [mask.tolist() for _, mask, _ in seen] == [want]


def test_positions_on_the_left_are_counted_from_the_first_token():
    seen = {}

    class Placed:
        def forward(self, inputs_embeds, attention_mask, position_ids):
            """What takes positions is told them."""

        def __call__(self, **given):
            seen.update(given)
            return SimpleNamespace(logits=torch.zeros(3, 1))

    differentiable.on_the_left(Placed(), TABLE.embed(IDS), MASK)
    assert (seen["position_ids"] * seen["attention_mask"]).tolist() == [
        [0, 0, 0, 0, 1],
        [0, 0, 0, 1, 2],
        [0, 0, 0, 1, 2],
    ]
    embeds = torch.where(seen["attention_mask"].bool()[..., None], seen["inputs_embeds"], 0)
    assert_close(embeds[0, 3:], TABLE.embed(torch.tensor([4, 5])))


def test_meanwhile_no_id_is_padding_and_no_warning_is_heard():
    model, level = Sums(), NOISE.level
    config = model.config.get_text_config()
    with pytest.raises(KeyError), differentiable._any_batch(model):
        assert config.pad_token_id < 0 and not NOISE.isEnabledFor(logging.WARNING)
        assert NOISE.isEnabledFor(logging.ERROR)
        raise KeyError
    assert config.pad_token_id == 7 and NOISE.level == level


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-4), (torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)],
)
def test_a_way_of_padding_is_right_within_the_tolerance_of_its_type(dtype, tolerance, monkeypatch):
    # The logits by embeddings are off by a factor, so this is the relative error; sums are float64 here.
    table = EmbeddingTable(torch.zeros(30, 2, dtype=dtype))
    monkeypatch.setattr(
        differentiable.EmbeddingTable, "embed", lambda _, ids: torch.nn.functional.embedding(ids, TABLE.weight)
    )
    for factor, fits in ((0.9, True), (1.1, False)):
        model = Sums(1 + factor * tolerance)
        if fits:
            assert differentiable._checked_padding(model, table, 30, "judge") is differentiable.on_the_right
        else:
            with pytest.raises(InputError, match="reward 'judge': got 'logits that differ'"):
                differentiable._checked_padding(model, table, 30, "judge")


@pytest.mark.parametrize(("tokens", "ids"), [(30, range(29, 13, -1)), (5, [4, 3, 2, 1, 0] * 3 + [4])])
def test_the_probe_is_of_the_last_16_tokens(tokens, ids):
    model, ids = Sums(), torch.tensor(list(ids)).view(2, 8)
    assert differentiable._checked_padding(model, TABLE, tokens, "judge") is differentiable.on_the_right
    (_, _, first), (_, _, second), (embeds, mask, _) = model.seen
    assert first.tolist() == [ids[0, 2:].tolist()] and second.tolist() == [ids[1, :5].tolist()]
    assert mask.tolist() == [[1] * 6 + [0] * 2, [1] * 5 + [0] * 3]
    assert_close(embeds[0, :6], TABLE.embed(ids[0, 2:])), assert_close(embeds[1, :5], TABLE.embed(ids[1, :5]))
    assert not any(value.requires_grad for value in (embeds, mask))


def test_where_no_way_is_right_the_first_line_of_the_last_failure_is_told(monkeypatch):
    def fails(*_):
        raise ValueError("  no embeddings here \nand more")

    for way in ("on_the_right", "on_the_left", "_by_length"):
        monkeypatch.setattr(differentiable, way, fails)
    with pytest.raises(InputError, match="reward 'judge': got 'no embeddings here '"):
        differentiable._checked_padding(Sums(), TABLE, 30, "judge")


@pytest.mark.parametrize(("kind", "name", "value"), [("bert", "embed_scale", 3.0), ("bert", "scalar_embed_scale", 2.0)])
def test_a_tables_scale_is_its_layers(kind, name, value, monkeypatch, make_classifier, policy, tokenizer):
    monkeypatch.setattr(differentiable, "_checked_padding", lambda *_: differentiable.on_the_right)
    model = make_classifier(kind, dtype=torch.float32)
    assert EmbeddedClassifier(model, tokenizer, policy).reads.scale == 1.0
    layer = model.get_input_embeddings()
    setattr(layer, name, value)
    reward = EmbeddedClassifier(model, tokenizer, policy)
    assert reward.reads.scale == value
    assert_close(reward.reads.embed(torch.tensor([5])), value * layer.weight[5:6].detach())
    assert not reward.reads.weight.requires_grad


def test_the_probe_has_ids_that_tokenizer_and_table_both_know(monkeypatch, make_classifier, policy, tokenizer):
    asked = []
    monkeypatch.setattr(differentiable, "_checked_padding", lambda *args: asked.append(args[2]))
    size = len(tokenizer)
    for rows in (size, size + 4, size - 4):
        EmbeddedClassifier(make_classifier("bert", vocab_size=rows, dtype=torch.float32), tokenizer, policy)
    assert asked == [size, size, size - 4]


def test_a_score_holds_no_graph_and_a_call_one_of_the_embeddings_alone(make_classifier, policy, tokenizer, batch):
    model = make_classifier("bert", dtype=torch.float32)
    reward = EmbeddedClassifier(model, tokenizer, policy, scope="completion")
    _, ids, mask = batch
    embeds = reward.reads.embed(ids).requires_grad_()
    reward(embeds, mask).sum().backward()
    assert embeds.grad.abs().sum() > 0 and all(p.grad is None for p in model.parameters())
    model.requires_grad_(True)
    assert not reward.score(*batch).requires_grad
