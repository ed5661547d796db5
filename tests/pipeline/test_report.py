"""The page of results says what the metrics say."""

from pathlib import Path

import pytest
from imports import ROOT

from grade.config_files import parse_yaml
from grade.experiments.claims import read_claims, to_markdown, verdict_counts
from grade.pipeline.report import FILE, join_claims, report
from grade.results import read_metrics


@pytest.mark.parametrize("outputs", ["outputs", "outputs/full"])
def test_the_committed_pages_are_those_of_the_committed_metrics(outputs, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder, claims = Path(outputs), join_claims(outputs)
    assert (folder / "README.md").read_text() == report(outputs)
    assert len(claims) == len(read_claims(folder / "claims.csv"))
    assert (folder / "claims.md").read_text().endswith(f"{verdict_counts(claims)}\n{to_markdown(claims)}")


def test_every_row_of_every_section_is_a_metric_of_profile_cpu_or_full():
    for section in parse_yaml(FILE.read_text()):
        files = [ROOT / outputs / section["folder"] / "metrics.json" for outputs in ("outputs", "outputs/full")]
        known = {key for file in files if file.is_file() for key in read_metrics(file)}
        assert [key for _, *keys in section["rows"] for key in keys if key not in known] == [], section["title"]
