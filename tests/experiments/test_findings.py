"""What a notebook leaves: its folder, colours of methods, verdicts that are what the row says."""

import numpy as np
import pandas as pd
import pytest
from imports import ROOT

from grade.errors import InputError
from grade.experiments import findings
from grade.experiments.claims import read_claims
from grade.experiments.findings import kept_table, output_folder, save_verdicts
from grade.experiments.plotting import color
from grade.gradients.methods import POLICY_GRADIENTS
from grade.plugins import ESTIMATORS

ROW = ("weights halve", "50%", 49.5, "%", "traced", True, "of float32")


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    found = []
    monkeypatch.setattr(findings, "display", found.append)
    return found


def test_a_relative_folder_is_the_projects_wherever_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert output_folder("outputs") == ROOT / "outputs"
    assert output_folder(tmp_path / "new/one").is_dir()


def test_a_kept_table_is_made_once_for_its_settings_and_comes_back_bit_by_bit(tmp_path):
    rows = pd.DataFrame(dict(number=[0.1 + 0.2, float("nan")], text=["one\r\ntwo", ""], count=[1, 2]))
    made = []

    def make():
        made.append(1)
        return rows

    tables = [kept_table(tmp_path / "runs/a.csv", dict(seed=seed), make) for seed in (0, 0, 1)]
    assert len(made) == 2  # other settings make it anew
    for table in tables:
        pd.testing.assert_frame_equal(table, rows, check_exact=True, check_dtype=False)


def test_verdicts_are_written_in_order_and_shown(tmp_path, shown):
    rows = [
        (*ROW[:5], np.bool_(True), "n"),
        (*ROW[:5], False, "n"),
        ("c", "s", "text", "", "derived", "not testable", "n"),
    ]
    save_verdicts("001", rows, tmp_path)
    claims = read_claims(tmp_path / "claims.csv")
    assert [claim.verdict for claim in claims] == ["confirmed", "refuted", "not testable"]
    assert [claim.found for claim in claims] == ["49.5", "49.5", "text"]
    assert {claim.seed for claim in claims} == {"001"} and claims[0].note == "n"
    assert shown[0].verdict.tolist() == [claim.verdict for claim in claims]
    assert shown[1].to_dict() == {"confirmed": 1, "refuted": 1, "not testable": 1}


@pytest.mark.parametrize(("index", "value"), [(5, "Confirmed"), (2, float("nan")), (4, "guessed")])
def test_a_wrong_row_is_refused(tmp_path, index, value):
    with pytest.raises(InputError, match=f"weights halve: .*got {value!r}"):
        save_verdicts("001", [(*ROW[:index], value, *ROW[index + 1 :])], tmp_path)


def test_every_method_has_a_colour_of_its_own():
    variants = ["ste_legacy", "gumbel_legacy", "ste_trunk", "gumbel_trunk"]
    methods = [*ESTIMATORS, *POLICY_GRADIENTS, *variants]
    assert len({color(name) for name in methods}) == len(methods)
