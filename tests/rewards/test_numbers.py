"""Losses, measures and constants of reward models by hand, at and around each boundary."""

import hashlib
import json
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_backbone
from torch import nn
from torch.testing import assert_close

from grade.errors import InputError
from grade.rewards import model as model_module
from grade.rewards.gold import GoldJudge
from grade.rewards.labels import (
    accuracy,
    calibration_error,
    head_loss,
    head_measure,
    held_out_measures,
    label_tensor,
    r2,
)
from grade.rewards.model import (
    HeadSettings,
    RewardModel,
    load_reward,
    masked_mean,
    table_moments,
    tokenizer_fingerprint,
)


def tensor(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


@cache
def base(dtype=torch.float64):
    """A base that no test changes."""
    return make_backbone(dtype=dtype)


def head(labels="binary", dtype=torch.float64, kind="bag", **settings):
    return RewardModel(kind, base(dtype), HeadSettings(**settings), labels)


def numbers():
    """A head of numbers with mean 5 and deviation 2."""
    made = head("number")
    made.standardise_labels(tensor(3, 5, 7))
    return made


@pytest.mark.parametrize("label", [0, 1, 0.0, 1.0, True, False])
def test_binary_labels(label):
    got = label_tensor([SimpleNamespace(label=label)], head())
    assert got.tolist() == [float(label)] and got.dtype == torch.float64
    assert label_tensor([SimpleNamespace(label=label)], head(dtype=torch.float32)).dtype == torch.float32


@pytest.mark.parametrize("label", [-1, 2, 0.5, "1", None, math.nan])
def test_labels_that_are_not_binary(label):
    with pytest.raises(InputError, match="label: got .*; allowed: 0 .negative. or 1 .positive."):
        label_tensor([SimpleNamespace(label=0), SimpleNamespace(label=label)], head())


@pytest.mark.parametrize("label", [0, -3, 2.5, 10**9, True])
def test_labels_of_any_number(label):
    assert label_tensor([SimpleNamespace(label=label)], numbers()).tolist() == [float(label)]


def test_the_loss_is_log_loss_or_the_squared_error_of_standardised_labels():
    logits, labels = tensor(0.0, 2.0, -1.0), tensor(1, 1, 0)
    want = (math.log(2) + math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 3
    assert float(head_loss(head(), logits, labels)) == pytest.approx(want, rel=1e-12)
    # Labels 3 and 9 are -1 and 2 deviations from the mean.
    assert float(head_loss(numbers(), tensor(-2.0, 2.5), tensor(3, 9))) == pytest.approx((1 + 0.25) / 2)


def test_rewards_are_probabilities_or_in_units_of_the_label():
    assert numbers().rewards_of(tensor(-1, 0, 2)).tolist() == [3, 5, 9]
    assert_close(head().rewards_of(tensor(-1, 0)), tensor(1 / (1 + math.e), 0.5))


def test_the_held_out_measure_has_its_name():
    assert head_measure(head(), tensor(1, 1, -1, 0), tensor(1, 0, 0, 0)) == ("accuracy", 0.75)
    name, value = head_measure(numbers(), tensor(-1, 0, 2), tensor(3, 5, 7))  # 3, 5 and 9 for 3, 5 and 7
    assert name == "r2" and value == pytest.approx(1 - 4 / 8)


@pytest.mark.parametrize(("logit", "label", "right"), [(0, 0, 1), (0, 1, 0), (1e-9, 1, 1), (1e-9, 0, 0), (-1e-9, 0, 1)])
def test_log_odds_of_0_count_as_negative(logit, label, right):
    assert accuracy(tensor(logit), tensor(label)) == right
    assert accuracy(tensor(0.9), tensor(0.6)) == 1 and accuracy(tensor(0.9), tensor(0.5)) == 0


@pytest.mark.parametrize("labels", [[], [1.0], [1.0, 2.0], [2.0] * 4, [2.0, 2.0, 2.0, 9.0]])
def test_r2_needs_three_labels_that_still_differ_without_any_one(labels):
    with pytest.raises(InputError, match=f"labels: got '{len(labels)} labels'; allowed: at least three"):
        r2(tensor(*labels), tensor(*labels))


def test_r2_of_three_labels():
    # f = (1, 2, 4) for y = (1, 2, 3): error 1 of 2. Without a row: 1 - 1/0.5, 1 - 1/2, and 1 (no error).
    value, stderr = r2(tensor(1, 2, 4, dtype=torch.float32), tensor(1, 2, 3, dtype=torch.float32))
    without = np.array([-1.0, 0.5, 1.0])
    assert value == pytest.approx(0.5, rel=1e-12)
    assert stderr == pytest.approx(math.sqrt(2 / 3 * ((without - without.mean()) ** 2).sum()), rel=1e-12)


def test_calibration_bins():
    assert calibration_error(tensor(0.05, 0.15), tensor(1, 0)) == pytest.approx((0.95 + 0.15) / 2)
    assert calibration_error(tensor(0.05, 0.09), tensor(1, 0)) == pytest.approx(0.86 / 2)
    assert calibration_error(tensor(0.85, 0.95), tensor(1, 0)) == pytest.approx((0.15 + 0.95) / 2)
    assert calibration_error(tensor(0.95, 1.0), tensor(1, 0)) == pytest.approx(0.95 / 2)


def test_measures_of_probabilities_by_hand():
    logits, labels = tensor(2, -1, 0.5, -3), tensor(1, 1, 0, 0)
    score = [1 / (1 + math.exp(-x)) for x in (2, -1, 0.5, -3)]
    loss = -(math.log(score[0]) + math.log(score[1]) + math.log(1 - score[2]) + math.log(1 - score[3])) / 4
    gaps = (1 - score[0]) + (1 - score[1]) + score[2] + score[3]  # each in a bin of its own
    assert held_out_measures(head(), logits, labels) == pytest.approx(
        {
            "accuracy": 0.5, "accuracy_stderr": 0.25, "log_loss": loss, "mean_score": sum(score) / 4,
            "calibration_error": round(gaps / 4, 6),
        }
    )  # fmt: skip


def test_measures_of_numbers_by_hand():
    got = held_out_measures(numbers(), tensor(-1, 0, 2), tensor(3, 5, 7))
    # Without a row: 1 - 4/2, 1 - 4/8, and no error.
    stderr = math.sqrt(2 / 3 * sum((x - 0.5 / 3) ** 2 for x in (-1, 0.5, 1)))
    assert got == pytest.approx({"r2": 0.5, "r2_stderr": stderr, "rmse": math.sqrt(4 / 3), "mean_score": 17 / 3})


# --- the head


@pytest.mark.parametrize(
    ("kind", "settings", "convolves", "layers"),
    [
        ("bag", {}, False, [nn.Dropout, (16, 1)]),
        ("bag", {"hidden": 5}, False, [nn.Dropout, (16, 5), nn.Tanh, nn.Dropout, (5, 1)]),
        ("bag", {"channels": 4, "kernel": 3}, True, [nn.Dropout, (4, 1)]),
        ("bag", {"channels": 1, "hidden": 1}, True, [nn.Dropout, (1, 1), nn.Tanh, nn.Dropout, (1, 1)]),
        ("trunk", {"channels": 4, "kernel": 3}, False, [nn.Dropout, (16, 1)]),
        ("trunk", {"hidden": 3}, False, [nn.Dropout, (16, 3), nn.Tanh, nn.Dropout, (3, 1)]),
    ],
)
def test_the_layers_of_a_head(kind, settings, convolves, layers):
    made = head(kind=kind, dropout=0.4, **settings)
    assert made.convolves is convolves and not made.training
    found = [(x.in_features, x.out_features) if isinstance(x, nn.Linear) else type(x) for x in made.head]
    assert found == layers
    assert {x.p for x in made.head if isinstance(x, nn.Dropout)} == {0.4}
    names = {name for name, _ in made.named_parameters() if not name.startswith("head.")}
    assert names == ({"project.weight", "bias"} if convolves else set())
    if convolves:
        assert made.project.weight.shape == (made.settings.kernel * settings["channels"], 16)
        assert made.bias.tolist() == [0] * settings["channels"]
    assert made.center.tolist() == [0] * 16 and made.spread.tolist() == [1] * 16
    assert {p.dtype for p in made.state_dict().values()} == {torch.float64}


def test_only_a_head_of_numbers_keeps_mean_and_deviation():
    assert {"label_mean", "label_std"} <= set(head("number").state_dict())
    assert not {"label_mean", "label_std"} & set(head().state_dict())
    assert float(head("number").label_mean) == 0 and float(head("number").label_std) == 1


@pytest.mark.parametrize(("labels", "mean", "std"), [((1, 2), 1.5, math.sqrt(0.5)), ((3, 5, 7), 5, 2)])
def test_labels_are_standardised_by_the_sample(labels, mean, std):
    made = head("number")
    made.standardise_labels(tensor(*labels))
    assert float(made.label_mean) == mean and float(made.label_std) == pytest.approx(std)


@pytest.mark.parametrize("labels", [(4,), (4, 4)])
def test_labels_without_a_deviation(labels):
    with pytest.raises(InputError, match="label: got 4.0; allowed: labels of different values"):
        head("number").standardise_labels(tensor(*labels))
    head().standardise_labels(tensor(*labels))  # binary ones have none


def test_features_are_standardised_and_a_constant_one_is_not_divided_by_0():
    made, tiny = head(), torch.finfo(torch.float64).tiny
    mean, std = torch.arange(16.0, dtype=torch.float64), torch.full((16,), 2.0, dtype=torch.float64)
    std[3], std[4] = 0.0, 1e-7
    made.standardise(mean, std)
    assert_close(made.center, mean)
    least = 1e-6 * float(std.mean())
    assert made.spread.tolist() == [2.0] * 3 + [least] * 2 + [2.0] * 11
    made.standardise(mean, 0 * std)
    assert made.spread.tolist() == [tiny] * 16
    pooled = torch.ones(2, 16, dtype=torch.float64)
    made.standardise(mean, std)
    assert_close(made.pooled_logits(pooled), made.head((pooled - mean) / made.spread)[:, 0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_constants_must_be_finite(value, which):
    constants = [torch.ones(16), torch.ones(16)]
    constants[which][5] = value
    with pytest.raises(InputError, match="bag reward features"):
        head().standardise(*constants)


def test_a_masked_mean_by_hand():
    values = torch.tensor([[[1.0, 4], [3, 8], [math.nan, 1]], [[5, 6], [math.inf, 0], [1, 2]]])
    got = masked_mean(values, torch.tensor([[1, 2, 0], [1, 0, 1]]), torch.float64)
    assert got.tolist() == [[2, 6], [3, 4]] and got.dtype == torch.float64
    assert masked_mean(values[:, :1], torch.zeros(2, 1), torch.float32).isnan().all()


def test_root_pooling_agrees_with_the_mean_at_48_tokens():
    root, mean = head(pooling="root"), head()
    for length, factor in ((12, 0.5), (48, 1.0), (192, 2.0)):
        features = torch.randn(1, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        mask = torch.ones(1, length)
        assert_close(root.mean_pool(features, mask), factor * mean.mean_pool(features, mask))
    trunk = head(kind="trunk", pooling="root")
    assert_close(trunk.mean_pool(features, mask), mean.mean_pool(features, mask))


def test_ids_are_scored_a_batch_at_a_time(monkeypatch):
    made, rows = head(), []
    inner = made.forward
    monkeypatch.setattr(made, "forward", lambda embeds, mask: rows.append(len(embeds)) or inner(embeds, mask))
    ids = torch.arange(130).remainder(23)[:, None].expand(-1, 3)
    got = made.score_ids(ids, torch.ones_like(ids))
    assert rows == [64, 64, 2] and not got.requires_grad
    assert_close(made.score_ids(ids, torch.ones_like(ids), batch_size=100), got)
    assert rows[3:] == [100, 30]


# --- the base


def table_base(table):
    sizes = []

    def embed(ids):
        sizes.append(len(ids))
        return table[ids]

    return SimpleNamespace(vocab_size=len(table), device="cpu", embed=embed), sizes


@pytest.mark.parametrize(("rows", "parts"), [(5, [5]), (8192, [8192]), (20000, [8192, 8192, 3616])])
def test_moments_of_a_table_are_summed_in_parts(rows, parts):
    table = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.0, 5.0, -5.0])
    given, sizes = table_base(table)
    mean, std = table_moments(given)
    assert sizes == parts and mean.dtype == std.dtype == torch.float64
    assert_close(mean, table.double().mean(0)), assert_close(std, table.double().std(0, correction=0))


def test_a_constant_column_has_no_deviation():
    # 3 * 0.1^2 / 3 - 0.1^2 is negative by rounding.
    values = torch.full((3, 50), 0.1, dtype=torch.float64) * torch.arange(1, 51)
    squares = values.square().sum(0) / 3 - (values.sum(0) / 3).square()
    assert squares.min() < 0, "no rounding here"
    _, std = table_moments(table_base(values)[0])
    assert (std >= 0).all() and std.max() < 1e-6


def test_a_tokenizers_fingerprint_is_of_its_sorted_pairs():
    assert tokenizer_fingerprint(None) is None
    made = SimpleNamespace(get_vocab=lambda: {"b": 0, "a": 1, "\u00e9": 2})
    pairs = '[["a", 1], ["b", 0], ["\\u00e9", 2]]'
    assert tokenizer_fingerprint(made) == hashlib.sha256(pairs.encode()).hexdigest()


def test_what_identifies_a_base():
    about = model_module._identity(base(), "bag")
    table = base().embedding_weight.double()
    assert about["vocab_size"] == 23 and about["hidden_size"] == 16 and about["tokenizer"] is None
    assert about["embedding_rms"] == pytest.approx(float(table.square().mean().sqrt()), rel=1e-12)
    assert about["fingerprint"] != model_module._identity(base(), "trunk")["fingerprint"]


@pytest.mark.parametrize(
    ("factor", "fits"), [(1.0, True), (0.991, True), (1.009, True), (0.989, False), (1.011, False)]
)
def test_the_tables_norm_may_differ_by_a_hundredth(factor, fits, tmp_path):
    head().save(tmp_path)
    about = json.loads((tmp_path / "reward.json").read_text())
    about["base"]["embedding_rms"] *= factor
    (tmp_path / "reward.json").write_text(json.dumps(about))
    if fits:
        load_reward(tmp_path, base())
    else:
        with pytest.raises(InputError, match="embedding_rms of the base"):
            load_reward(tmp_path, base())


def test_of_several_differences_the_width_is_named_first():
    here = dict(hidden_size=16, vocab_size=23, tokenizer="a", embedding_rms=1.0, fingerprint={})
    for name in ("tokenizer", "vocab_size", "hidden_size"):
        here = here | {name: "other"}
        trained = dict(hidden_size=16, vocab_size=23, tokenizer="a", embedding_rms=1.0, fingerprint={})
        with pytest.raises(InputError, match=f"reward model: {name} of the base: got 'other'"):
            model_module._check_same_base(trained, here)


# --- the judge


def judge(coef, intercept):
    fitted = GoldJudge.fit(["aa xx", "aa yy", "bb zz", "bb aa"], [1, 1, 0, 0], n_crops=0)
    return GoldJudge(fitted.vectorizer, np.array(coef, dtype=float), intercept)


def test_the_judges_accuracy_counts_a_score_of_a_half_as_negative():
    assert judge([0, 0], 0.0).accuracy(["aa", "bb"], [0, 0]).mean == 1
    assert judge([0, 0], 0.0).accuracy(["aa", "bb"], [1, 0]).mean == 0.5
    assert judge([1, -1], 0.0).accuracy(["aa", "bb", "bb"], [1, 0, 1]).mean == pytest.approx(2 / 3)


def test_every_review_has_its_crops_and_each_crop_its_label(monkeypatch):
    from grade.rewards import gold

    texts, labels, fits = ["aa " * 40, "bb " * 40, "aa bb cc " * 20, "cc bb " * 9], [1, 0, 1, 0], []
    rng = np.random.default_rng(7)
    crops = [gold._crop(text, rng) for _ in range(3) for text in texts]

    class Regression:
        coef_, intercept_ = np.zeros((1, 5)), np.zeros(1)

        def __init__(self, **options):
            self.options = options

        def fit(self, features, labels):
            fits.append((features, labels, self.options))
            return self

    monkeypatch.setattr(gold, "LogisticRegression", Regression)
    made = GoldJudge.fit(texts, labels, n_crops=3, seed=7)
    features, given, options = fits[0]
    assert given == labels * 4 and options == {"C": 3.0, "solver": "liblinear"}
    want = made.vectorizer.transform([*texts, *crops])
    assert features.shape == want.shape and abs(features - want).max() == 0


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"idf": np.ones(3)}, False),
        ({"coef": np.ones((2, 1))}, False),
        ({"intercept": np.zeros(1)}, False),
        ({"intercept": np.float64(math.inf)}, False),
        ({"idf": np.array([1.0, math.nan])}, False),
        ({"coef": np.array([math.inf, 1.0])}, False),
        ({"terms": np.frombuffer(b"a\na", dtype=np.uint8)}, False),
    ],
)
def test_a_judges_file_has_a_finite_weight_for_each_term(changes, fits, tmp_path):
    whole = dict(terms=np.frombuffer(b"a\nb", dtype=np.uint8), idf=np.ones(2), coef=np.ones(2), intercept=np.float64(0))
    np.savez(tmp_path / "judge.npz", **(whole | changes))
    if fits:
        assert GoldJudge.load(tmp_path / "judge.npz").coef.tolist() == [1, 1]
    else:
        with pytest.raises(InputError, match="as many finite weights as terms"):
            GoldJudge.load(tmp_path / "judge.npz")


def test_words_and_pairs_are_found_without_accents():
    texts = ["un caf\u00e9 noir", "caf\u00e9 noir", "the cafe", "noir un"]
    terms = GoldJudge.fit(texts, [1, 0, 1, 0], n_crops=0).vectorizer.get_feature_names_out().tolist()
    assert terms == ["cafe", "cafe noir", "noir", "un"]
