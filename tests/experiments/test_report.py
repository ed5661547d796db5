"""The page of results says what the metrics say."""

import pytest
import yaml
from imports import ROOT

from grade.experiments.claims import Claim, read_claims, to_markdown, verdict_counts, write_claims
from grade.experiments.headline import headline
from grade.experiments.report import FILE, join_claims, report
from grade.pipeline.params import profile_values
from grade.results import read_metrics, write_metrics


def notebooks_of(profile):
    suite = profile_values(ROOT, profile, "suite")
    return suite["alone"] | suite["experiments"]


@pytest.mark.parametrize(("profile", "outputs"), [("cpu", "outputs"), ("full", "outputs/full")])
def test_the_committed_pages_are_those_of_the_committed_metrics(profile, outputs):
    folder, notebooks = ROOT / outputs, notebooks_of(profile)
    assert (folder / "README.md").read_text() == report(folder, profile, notebooks)
    claims = join_claims(folder, notebooks)
    assert len(claims) == len(read_claims(folder / "claims.csv"))
    assert (folder / "claims.md").read_text().endswith(f"{verdict_counts(claims)}\n{to_markdown(claims)}")
    assert read_metrics(folder / "headline.json") == headline(folder)


def test_every_row_of_every_section_is_a_metric_of_profile_cpu_or_full():
    for section in yaml.safe_load(FILE.read_text()):
        files = [ROOT / outputs / section["folder"] / "metrics.json" for outputs in ("outputs", "outputs/full")]
        known = {key for file in files if file.is_file() for key in read_metrics(file)}
        assert [key for _, *keys in section["rows"] for key in keys if key not in known] == [], section["title"]


def test_a_value_stands_with_its_standard_error_and_what_is_missing_is_left_out(tmp_path):
    key = "validation/slope_forward"
    write_metrics(tmp_path / "validation/metrics.json", {key: 0.98765, f"{key}_stderr": 0.0123})
    page = report(tmp_path, "mine", {})
    assert f"| 0.988 ± 0.012 | `{key}` |" in page and "profile `mine`" in page
    assert page.count("\n## ") == 1 and "coverage" not in page


def test_methods_and_worth_have_tables_of_their_own(tmp_path):
    gain = {"gain/ste": 0.4, "gain/ste_stderr": 0.01, "gain/rloo": 0.1, "gain/rloo_stderr": 0.02}
    write_metrics(tmp_path / "c/metrics.json", gain | {"frontier/ste/kl5": 0.7, "frontier/ste/kl5_stderr": 0.01})
    write_metrics(tmp_path / "e/metrics.json", {"worth/bag": 30.0, "worth/bag_low": 12.0, "worth/bag_high": 80.0})
    page = report(tmp_path, "mine", {"c": "compare", "e": "estimators"})
    assert "| `ste` | 0.4 ± 0.01 | not reached | 0.7 ± 0.01 |" in page
    assert "| worth/bag | 30 | 12 to 80 |" in page


def test_a_second_setting_of_a_notebook_gives_no_second_verdict(tmp_path):
    claim = Claim(seed="paper", claim="c", stated="1", found=1.0, unit="", how="measured", verdict="partly", note="n")
    for key in ("compare", "compare_larger"):
        write_claims(tmp_path / key / "claims.csv", [claim])
    assert len(join_claims(tmp_path, {"compare": "compare", "compare_larger": "compare"})) == 1
