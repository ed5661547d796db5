"""What every experiment's notebook does: tables come back bit by bit, times stay apart, toys are given no verdict."""

import json
import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from pydantic import Field

from grade.config import Config
from grade.errors import InputError
from grade.experiments import run as run_module
from grade.experiments.claims import Claim
from grade.experiments.measured import Tables, measure_all, read_table, write_table
from grade.experiments.run import TOY, Run


class Settings(Config):
    size: int = Field(2, description="rows")


def roots(s):
    n = range(1, s.size + 1)
    return pd.DataFrame({"n": n, "root": [math.sqrt(i) / 3 for i in n], "name": ["a", None][: s.size]})


TOY_EXPERIMENT = SimpleNamespace(
    __name__="grade.experiments.toy.measure.tables", Settings=Settings,
    TABLES={"roots": roots, "counts": lambda s: {"rows": s.size, "third": 1 / 3}, "none": lambda s: None},
    TIMED={"seconds": lambda s: pd.DataFrame({"step": [1], "seconds": [0.123456789]})},
)  # fmt: skip


@pytest.fixture
def shown(monkeypatch):
    """What a notebook would show, as text."""
    seen = []
    monkeypatch.setattr(run_module, "display", lambda value: seen.append(getattr(value, "data", value)))
    return seen


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "dvc.yaml").write_text("")
    for profile in ("cpu", "smoke"):
        (tmp_path / "params" / profile).mkdir(parents=True)
        (tmp_path / "params" / profile / "suite.yaml").write_text(f"profile: {profile}\noutputs: outputs\n")
    (tmp_path / "params/cpu/toy.yaml").write_text("size: 1\n")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


def parameters(**changes):
    return {"profile": "", "measured_dir": "", "output_dir": "out", "size": 2} | changes


CLAIMS = [
    Claim(seed="000", claim="roots", stated="1", found=1.0, unit="", how="measured", verdict="confirmed", note="n"),
    Claim(seed="000", claim="fast", stated="2 s", found=1.7, unit="s", how="measured", verdict="partly", note="1.7 s",
          timed=True),
]  # fmt: skip


def test_a_table_comes_back_bit_by_bit(tmp_path):
    table = roots(Settings())
    write_table(tmp_path / "roots", table)
    pd.testing.assert_frame_equal(read_table(tmp_path / "roots"), table, check_exact=True)
    write_table(tmp_path / "counts", {"third": 1 / 3})
    assert read_table(tmp_path / "counts") == {"third": 1 / 3}
    with pytest.raises(InputError, match="table: got .*lost"):
        read_table(tmp_path / "lost")


def test_measured_tables_are_read_and_times_lie_apart(tmp_path):
    measure_all(TOY_EXPERIMENT, Settings(), tmp_path, log=lambda _: None)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")) == [
        "measured/counts.json", "measured/roots.csv", "timings/measured_on.json", "timings/seconds.csv",
    ]  # fmt: skip
    (tmp_path / "measured/counts.json").write_text('{"rows": 7}')
    tables = Tables(TOY_EXPERIMENT, Settings(), str(tmp_path / "measured"))
    assert tables["counts"] == {"rows": 7} and tables["seconds"].seconds.item() == 0.123456789
    assert Tables(TOY_EXPERIMENT, Settings())["counts"]["rows"] == 2  # no folder: measured here
    assert set(tables) == {"roots", "counts", "none", "seconds"}
    with pytest.raises(KeyError):
        tables["lost"]


def test_a_toy_says_so_and_is_given_no_verdict(project, shown):
    run = Run(TOY_EXPERIMENT, parameters())
    assert run.toy and TOY in shown[0]
    run.verdicts(CLAIMS)
    assert "No verdicts" in shown[1] and len(shown) == 2
    assert Run(TOY_EXPERIMENT, parameters(profile="smoke")).toy


def test_a_profile_gives_the_values_and_the_tables_that_are_measured(project, shown):
    measure_all(TOY_EXPERIMENT, Settings(size=1), project / "outputs/toy", log=lambda _: None)
    run = Run(TOY_EXPERIMENT, parameters(profile="cpu"))
    assert not run.toy and run.settings.size == 1 and not shown
    assert len(run.tables["roots"]) == 1
    with pytest.raises(InputError, match="profile: got 'lost'; allowed: one of cpu, smoke"):
        Run(TOY_EXPERIMENT, parameters(profile="lost"))
    with pytest.raises(InputError, match='profile: got .cpu.; allowed: "", with which sizes'):
        Run(TOY_EXPERIMENT, parameters(profile="cpu", size=3))  # nobody's sizes are dropped without a word


def test_where_nothing_is_published_a_notebook_measures_its_toy(project, shown):
    run = Run(TOY_EXPERIMENT, parameters(profile="cpu"))
    assert run.toy and run.settings == Settings() and TOY in shown[0]


def test_an_executed_notebook_holds_no_times(project, shown, monkeypatch):
    monkeypatch.setenv("GRADE_EXECUTED", "1")
    run = Run(TOY_EXPERIMENT, parameters(size=1))
    run.show(plt.figure(), "plain")
    run.show(plt.figure(), "clock", timed=True)
    run.show_timed(run.tables["seconds"], "seconds")
    run.verdicts(CLAIMS)
    run.finish({"a": 1.0}, {"seconds": 2.0}, CLAIMS)
    text = " ".join(map(str, shown))
    assert "![clock](timings/clock.png)" in text and "timings/seconds.csv" in text
    assert "1.7" not in text and "0.123" not in text
    out = project / "out"
    assert (out / "figures/plain.png").is_file() and (out / "timings/clock.png").is_file()
    assert "1.7" not in (out / "claims.csv").read_text() and "1.7" in (out / "timings/claims.csv").read_text()
    assert json.loads((out / "metrics.json").read_text()) == {"a": 1.0}
    assert json.loads((out / "timings/metrics.json").read_text()) == {"seconds": 2.0}
