"""The page of results says what the metrics say."""

import pytest
import yaml
from imports import ROOT

from grade.experiments.claims import read_claims, to_markdown, verdict_counts
from grade.experiments.headline import headline
from grade.experiments.report import FILE, join_claims, report
from grade.pipeline.profiles import profile_values
from grade.results import read_metrics


def notebooks_of(profile):
    suite = profile_values(ROOT, profile, "suite")
    return suite["alone"] | suite["experiments"] | {name: name for name in suite["studies"]}


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
