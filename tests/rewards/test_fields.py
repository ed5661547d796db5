"""Defaults and bounds of the reward models' settings: every published figure was made with these."""

import pytest
from field_table import table

from grade.rewards.fit import BagSettings, FitSettings, RewardConfig, TrunkSettings
from grade.rewards.model import HeadSettings

HEAD = {
    "channels": (0, ">= 0"), "kernel": (1, ">= 1, <= 15"), "pooling": "mean", "hidden": (0, ">= 0"),
    "dropout": (0.3, ">= 0, < 1"),
}  # fmt: skip
FIT = HEAD | {
    "lr": (1e-3, "> 0, <= 1e+30"), "weight_decay": (0.1, ">= 0"), "batch_size": (64, ">= 1"), "epochs": (60, ">= 1"),
    "patience": (10, ">= 1"), "train_size": (5000, ">= 2"), "validation_size": (2000, ">= 2"),
    "min_tokens": (16, ">= 1"), "max_tokens": (128, ">= 1"), "eval_size": (2000, ">= 2"),
}  # fmt: skip
BAG = FIT | {"batch_size": (256, ">= 1"), "min_tokens": (24, ">= 1"), "max_tokens": (256, ">= 1")}
TRUNK = FIT | {"hidden": (64, ">= 0"), "dropout": (0.7, ">= 0, < 1")}
REWARD = {
    "bag": BagSettings(), "trunk": TrunkSettings(), "eval_tokens": [32, 64, 128], "feature_batch_size": (32, ">= 1"),
    "labels": "binary", "seed": (0, ">= 0, < 4.29497e+09"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "fields"),
    [(HeadSettings, HEAD), (FitSettings, FIT), (BagSettings, BAG), (TrunkSettings, TRUNK), (RewardConfig, REWARD)],
)
def test_defaults_and_bounds(settings, fields):
    found = table(settings)
    assert {name: found[name] for name in fields} == fields
