"""Training of reward models, step by step: what a head is fed, how it is fitted, and what the report says."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import make_backbone
from torch.testing import assert_close

from grade.data.base_model import train_tokenizer
from grade.errors import InputError
from grade.rewards import fit
from grade.rewards.fit import (
    BagSettings,
    FitSettings,
    RewardConfig,
    TrunkSettings,
    encode,
    evaluate_reward,
    prefix_lengths,
    prefix_logits,
    prefix_means,
    right_pad,
    train_reward,
)
from grade.rewards.model import HeadSettings, RewardModel, table_moments


def review(text, label=1):
    return SimpleNamespace(text=text, label=label)


@cache
def backbone():
    """A base whose tokenizer gives a text of n letters the n ids 3, 4, ..., as far as they are asked for."""
    made = make_backbone()

    def tokenize(texts, truncation, max_length):
        return {"input_ids": [[3 + ord(c) - ord("a") for c in t][: max_length if truncation else None] for t in texts]}

    made.tokenizer = tokenize
    return made


REVIEWS = [review("abcdefghijkl", 1), review("klmno", 0), review("aaab", 1), review("ponmlkjih", 0)]


@pytest.mark.parametrize(
    ("shortest", "longest", "lengths"),
    [
        (16, 128, [16, 23, 32, 45, 64, 91, 128]),
        (24, 256, [24, 34, 47, 66, 93, 130, 183, 256]),
        (1, 2, [1, 1, 2]),
        (4, 5, [4, 5]),
        (100, 101, [100, 101]),  # at least one step
        (7, 7, [7]),
        (1, 16, [1, 1, 2, 3, 4, 6, 8, 11, 16]),
    ],
)
def test_prefix_lengths_grow_by_the_root_of_two(shortest, longest, lengths):
    assert prefix_lengths(shortest, longest) == lengths


def test_reviews_are_padded_with_0_on_the_right():
    ids, mask = right_pad([[5, 6, 9], [7], [8, 8]])
    assert ids.tolist() == [[5, 6, 9], [7, 0, 0], [8, 8, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert ids.dtype == mask.dtype == torch.long


def test_reviews_are_cut_and_must_not_be_empty():
    assert encode(backbone(), REVIEWS, 3) == [[3, 4, 5], [13, 14, 15], [3, 3, 3], [18, 17, 16]]
    assert encode(backbone(), REVIEWS[:2], 99) == [list(range(3, 15)), [13, 14, 15, 16, 17]]
    with pytest.raises(InputError, match="review: got ''"):
        encode(backbone(), [review("a"), review("")], 3)
    with pytest.raises(InputError, match="reviews"):
        encode(backbone(), [], 3)


def noted(monkeypatch, name):
    """The sequences of each call of a function of the module, and what it returned."""
    calls, inner = [], getattr(fit, name)

    def note(*args):
        calls.append((args, inner(*args)))
        return calls[-1][1]

    monkeypatch.setattr(fit, name, note)
    return calls


def test_prefix_features_are_read_in_batches_and_only_as_far_as_needed(monkeypatch):
    model, padded = RewardModel("bag", backbone(), HeadSettings()), noted(monkeypatch, "right_pad")
    sequences = encode(model.backbone, REVIEWS, 99)
    features = prefix_means(model, sequences, [2, 6], 3)
    assert [[len(s) for s in args[0]] for args, _ in padded] == [[6, 5, 4], [6]]
    table = model.backbone.embedding_weight
    want = [[table[s[:n]].mean(0) for n in (2, 6)] for s in sequences]
    assert_close(features, torch.stack([torch.stack(row) for row in want]))
    assert not features.requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_must_be_finite(value, monkeypatch):
    model = RewardModel("bag", backbone(), HeadSettings())
    table = model.backbone.embedding_weight.clone()
    table[13, 2] = value
    monkeypatch.setattr(model, "_backbone", (SimpleNamespace(device="cpu", embed=lambda ids: table[ids]),))
    assert prefix_means(model, [[3, 4]], [2], 1).isfinite().all()  # of a token that is not there
    with pytest.raises(InputError, match="bag reward features"):
        prefix_means(model, [[3, 4], [13, 3]], [2], 1)


def test_logits_at_prefixes_with_a_convolution_take_a_pass_for_each_length(monkeypatch):
    model = RewardModel("bag", backbone(), HeadSettings(channels=3, kernel=3))
    padded, sequences = noted(monkeypatch, "right_pad"), encode(model.backbone, REVIEWS, 99)
    logits = prefix_logits(model, sequences, [2, 6], 3)
    assert [[len(s) for s in args[0]] for args, _ in padded] == [[2, 2, 2], [2], [6, 5, 4], [6]]
    assert logits.shape == (4, 2) and not logits.requires_grad
    for i, sequence in enumerate(sequences):
        for j, length in enumerate((2, 6)):
            alone = model.logits_of_ids(torch.tensor([sequence[:length]]), torch.ones(1, len(sequence[:length])))
            assert_close(logits[i, j], alone[0].detach())


def drawn(generator, rows, shortest, longest, sequences):
    """Crops: a length for the batch, then a start for each row, from one generator."""
    length = int(torch.randint(shortest, longest + 1, (), generator=generator))
    crops = []
    for row, part in zip(rows, torch.rand(len(rows), generator=generator).tolist(), strict=True):
        whole = sequences[row]
        possible = [whole[start : start + length] for start in range(len(whole)) if start + length <= len(whole)]
        crops.append(possible[int(part * len(possible))] if possible else whole)
    return crops


def test_crops_of_a_convolution_start_anywhere_and_short_reviews_are_read_whole(monkeypatch):
    settings = BagSettings(channels=2, min_tokens=3, max_tokens=5)
    model = RewardModel("bag", backbone(), settings)
    config = RewardConfig(bag=settings, eval_tokens=[4, 2], feature_batch_size=3)
    long = [review("abcdefghijklmnopqrst" * 2), *REVIEWS]
    asked = []
    monkeypatch.setattr(fit, "prefix_logits", lambda *args: asked.append(args))
    padded = noted(monkeypatch, "right_pad")
    batch, validation = fit._crop_problem(model, config, settings, long, REVIEWS, torch.Generator().manual_seed(0))
    mean, std = table_moments(model.backbone)
    assert_close(model.center, mean), assert_close(model.spread, std)
    sequences = encode(model.backbone, long, 20)  # four times the longest crop
    again, seen = torch.Generator().manual_seed(0), set()
    for _ in range(30):
        got = batch(torch.tensor([2, 0, 3]))
        ((crops, _), (ids, mask)) = padded[-1]
        assert crops == drawn(again, [2, 0, 3], 3, 5, sequences)
        assert_close(got, model.logits_of_ids(ids, mask))
        seen |= {(len(crop), crop[0] - 3) for crop in crops[1:2]}
        assert len(crops[0]) == len(crops[1]) and (len(crops[2]) == 4 or len(crops[2]) == len(crops[1]))
        assert len(crops[2]) < 4 or crops[2] == [3, 3, 3, 4], "a review as long as the crop or shorter is whole"
    assert {length for length, _ in seen} == {3, 4, 5} and max(start for _, start in seen) > 10
    validation()
    assert asked == [(model, encode(model.backbone, REVIEWS, 4), [4, 2], 12)]


def test_a_crop_may_end_with_the_review(monkeypatch):
    settings = BagSettings(channels=2, min_tokens=3, max_tokens=3)
    model, padded = RewardModel("bag", backbone(), settings), noted(monkeypatch, "right_pad")
    config = RewardConfig(bag=settings)
    batch, _ = fit._crop_problem(model, config, settings, REVIEWS, REVIEWS, torch.Generator().manual_seed(0))
    for _ in range(40):
        batch(torch.tensor([1]))
    assert {tuple(args[0][0]) for args, _ in padded} == {(13, 14, 15), (14, 15, 16), (15, 16, 17)}


def test_heads_without_a_convolution_learn_from_random_prefixes():
    settings = TrunkSettings(min_tokens=2, max_tokens=8)
    model = RewardModel("bag", backbone(), settings)
    config = RewardConfig(trunk=settings, eval_tokens=[12, 4, 9], feature_batch_size=3)
    batch, validation = fit._prefix_problem(
        model, config, settings, REVIEWS, REVIEWS[:2], torch.Generator().manual_seed(0)
    )
    lengths, table = [2, 3, 4, 6, 8], model.backbone.embedding_weight
    sequences = encode(model.backbone, REVIEWS, 8)
    features = torch.stack([torch.stack([table[s[:n]].mean(0) for n in lengths]) for s in sequences]).detach()
    rows = features.flatten(0, 1)
    assert_close(model.center, rows.mean(0)), assert_close(model.spread, rows.std(0))
    again, rows = torch.Generator().manual_seed(0), torch.tensor([3, 0, 0, 2])
    for _ in range(3):
        prefix = torch.randint(len(lengths), (4,), generator=again)
        assert_close(batch(rows), model.pooled_logits(features[rows, prefix]))
    # Validation is cut like training: 4 tokens, and 8 for both of the longer lengths.
    want = torch.stack([torch.stack([table[s[:n]].mean(0) for n in (4, 8)]) for s in sequences[:2]])
    assert_close(validation(), model.pooled_logits(want))


def fitted(settings, batch, validation, labels, seed=0, kind="bag"):
    model = RewardModel(kind, backbone(), settings)
    size = model.center.numel()
    features = torch.linspace(-1, 1, len(labels) * size, dtype=torch.float64).view(len(labels), size).sin()
    report = fit._fit(
        model, settings, lambda rows: batch(model, features[rows], rows), labels,
        lambda: validation(model, features), labels, torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return model, features, report


def test_the_head_is_fitted_by_adamw_on_shuffled_batches_and_its_best_weights_are_kept():
    settings = FitSettings(lr=0.1, weight_decay=0.2, batch_size=2, epochs=3, patience=9, dropout=0.0)
    labels, seen = torch.tensor([1.0, 0, 1, 1, 0], dtype=torch.float64), []
    torch.manual_seed(1)

    def batch(model, features, rows):
        seen.append((rows.tolist(), model.training))
        return model.pooled_logits(features)

    def validation(model, features):
        assert not model.training and not torch.is_grad_enabled()
        logits = model.pooled_logits(features)
        return torch.stack([-logits, logits], 1)  # two lengths; accuracy is of the last

    torch.manual_seed(1)
    model, features, report = fitted(settings, batch, validation, labels)
    torch.manual_seed(1)
    other = RewardModel("bag", backbone(), settings)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.2)
    generator, losses, order = torch.Generator().manual_seed(0), [], []
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    for _ in range(3):
        for rows in torch.randperm(5, generator=generator).split(2):
            order.append((rows.tolist(), True))
            optimizer.zero_grad()
            loss_of(other.pooled_logits(features[rows]), labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            logits = other.pooled_logits(features)
            loss = (loss_of(logits, labels) + loss_of(-logits, labels)) / 2
        losses.append((float(loss), float(((logits > 0) == (labels > 0.5)).double().mean()), logits))
    best = min(range(3), key=lambda i: losses[i][0])
    assert seen == order
    assert report == {
        "best_epoch": best + 1, "validation_log_loss": pytest.approx(losses[best][0]),
        "validation_accuracy": losses[best][1], "epochs": 3,
    }  # fmt: skip
    assert_close(model.pooled_logits(features).detach(), losses[best][2])
    assert not model.training


def test_the_report_counts_reviews_and_seconds(monkeypatch):
    clock = iter([10.0, 13.0, 20.0])
    monkeypatch.setattr(fit.time, "perf_counter", lambda: next(clock))
    settings = BagSettings(train_size=3, validation_size=2, epochs=1, min_tokens=4, max_tokens=4)
    config = RewardConfig(bag=settings, eval_tokens=[4])
    more = [*REVIEWS, review("a" * 9, 2)]  # one that may not be read: its label is neither 0 nor 1
    model, report = train_reward("bag", config, backbone(), more, [*REVIEWS[:2], more[-1]])
    assert report["train_n"] == 3 and report["validation_n"] == 2
    assert report["feature_seconds"] == 3 and report["fit_seconds"] == 7
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


def test_held_out_measures_are_named_by_length(monkeypatch):
    model, calls = RewardModel("bag", backbone(), HeadSettings()), noted(monkeypatch, "prefix_logits")
    report = evaluate_reward(model, REVIEWS, (2, 6), 3)
    ((_, sequences, lengths, batch_size), logits) = calls[0]
    assert (sequences, lengths, batch_size) == (encode(model.backbone, REVIEWS, 6), (2, 6), 3)
    names = ("accuracy_{}", "accuracy_{}_stderr", "log_loss_{}", "mean_score_{}", "calibration_error_{}")
    assert set(report) == {"n", *(name.format(n) for name in names for n in (2, 6))} and report["n"] == 4
    labels = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64)
    for column, length in zip(logits.T, (2, 6), strict=True):
        share = float(((column > 0) == (labels > 0.5)).double().mean())
        assert report[f"accuracy_{length}"] == share
        assert report[f"accuracy_{length}_stderr"] == pytest.approx((share * (1 - share) / 4) ** 0.5)
        assert report[f"mean_score_{length}"] == pytest.approx(float(column.sigmoid().mean()))


def test_a_crop_range_may_be_one_length_and_a_real_tokenizer_cuts_too():
    base = make_backbone()
    base.tokenizer = train_tokenizer(["a fine film, and a dull one"], 275)
    assert [len(ids) for ids in encode(base, [review("a fine film"), review("a")], 2)] == [2, 1]
    settings = BagSettings(min_tokens=4, max_tokens=4, epochs=1)
    model, _ = train_reward("bag", RewardConfig(bag=settings, eval_tokens=[4]), backbone(), REVIEWS, REVIEWS)
    assert model.kind == "bag"
