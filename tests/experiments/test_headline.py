"""`grade check`: figures within their tolerance pass, a changed one does not."""

import subprocess

import pytest

from grade.cli.main import main
from grade.errors import InputError
from grade.experiments import headline
from grade.experiments.headline import as_text, check, figures
from grade.results import write_metrics

TOY = """
- {name: gain, label: gain, file: a/metrics.json, key: gain, stderrs: 2, reason: noise}
- {name: peak, label: peak, file: a/metrics.json, key: peak, share: 0.01, reason: traced}
- {label: error, file: b/metrics.json, key: x/error, at_most: 0.1, reason: claimed}
"""


@pytest.fixture
def published(tmp_path, monkeypatch):
    (tmp_path / "headline.yaml").write_text(TOY)
    rows = figures(tmp_path / "headline.yaml")
    monkeypatch.setattr(headline, "figures", lambda: rows)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params/cpu").mkdir(parents=True)
    (tmp_path / "params/cpu/suite.yaml").write_text("profile: cpu\noutputs: outputs\n")
    write_metrics("outputs/a/metrics.json", {"gain": 0.3, "gain_stderr": 0.01, "peak": 100})
    write_metrics("outputs/b/metrics.json", {"x/error": 0.05})
    commit()
    return tmp_path


def commit():
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
        subprocess.run(["git", *command], check=True)


def test_what_is_published_passes_and_a_changed_figure_fails(published, capsys):
    assert main(["check"]) == 0
    assert "3 of 3 figures are within their tolerance" in capsys.readouterr().out
    write_metrics("outputs/a/metrics.json", {"gain": 0.34, "gain_stderr": 0.01, "peak": 100})
    with pytest.raises(SystemExit, match="1"):
        main(["check"])
    out = capsys.readouterr().out
    assert "2 of 3" in out and out.count("OUT") == 1
    assert max(map(len, out.splitlines())) <= 120


def test_tolerances_by_hand(published):
    # 2 sqrt(2) 0.01 = 0.0283 around 0.3; 1 % of 100; a bound that does not depend on what was published
    table = check("outputs")
    assert table[["low", "high"]].round(4).values[:2].tolist() == [[0.2717, 0.3283], [99, 101]]
    assert table.high[2] == 0.1 and table.holds[2]
    for gain, holds in ((0.328, True), (0.329, False), (0.272, True), (0.271, False)):
        write_metrics("outputs/a/metrics.json", {"gain": gain, "gain_stderr": 0.5, "peak": 100})
        assert check("outputs").holds[0] == holds
    assert "at most 0.1" in as_text(table)


def test_a_figure_that_is_gone_and_a_revision_without_results_are_one_error(published):
    write_metrics("outputs/b/metrics.json", {"x/other": 0.05})
    with pytest.raises(InputError, match="b/metrics.json: figure: got 'x/error'"):
        check("outputs")
    with pytest.raises(InputError, match="revision: got 'HEAD'"):
        check("elsewhere")
