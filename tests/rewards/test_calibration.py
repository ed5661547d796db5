"""The calibration error's bins: scores of one bin average out, those of neighbours do not."""

import pytest
import torch

from grade.rewards.labels import calibration_error


def test_errors_cancel_within_a_bin_and_not_between_bins():
    labels = torch.tensor([1.0, 0.0])
    assert calibration_error(torch.tensor([0.51, 0.59]), labels) == pytest.approx(0.05)  # (-0.49 + 0.59) / 2
    assert calibration_error(torch.tensor([0.51, 0.61]), labels) == pytest.approx(0.55)  # (0.49 + 0.61) / 2
    assert calibration_error(torch.tensor([0.51, 0.61]), labels, bins=2) == pytest.approx(0.06)


def test_it_is_rounded_to_six_digits():
    # The decimals of a report: those of float32 differ from machine to machine.
    score = torch.tensor([0.1234564], dtype=torch.float64)
    assert calibration_error(score, torch.zeros(1, dtype=torch.float64)) == 0.123456
