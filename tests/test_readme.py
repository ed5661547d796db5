"""The README's numbers are the pipeline's, its example runs, and what it names exists."""

import re
from pathlib import Path

import pandas as pd

from grade.experiments.claims import read_claims, verdict_counts
from grade.results import read_metrics

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_the_two_profiles_metrics():
    rows = re.findall(r"^\| [^|]+ \| ([-\d.e]+) \| ([-\d.e]+) \| `([^`]+)` \|$", README, re.M)
    assert len(rows) > 15
    for column, folder in enumerate(("outputs/exp6", "outputs/full/exp6")):
        metrics = read_metrics(ROOT / folder / "metrics.json")
        for *values, key in rows:
            found = metrics[key]
            assert values[column] == (str(found) if isinstance(found, int) else f"{found:.3g}"), (folder, key)


def test_the_memory_table_is_the_default_profiles_metrics():
    rows = re.findall(r"^\| [^|]+ \| ([-\d.e]+) \| `(\w+/metrics.json)`: `([^`]+)` \|$", README, re.M)
    assert len(rows) > 10
    for value, file, key in rows:
        found = read_metrics(ROOT / "outputs" / file)[key]
        assert value == (str(found) if isinstance(found, int) else f"{found:.3g}"), key


def test_the_comparisons_are_those_of_profile_full():
    """Columns by their place: gain, gold judge's gain, reward at KL 2, 5 and 10, each with its standard error."""
    rows = iter(re.findall(r"^\| `(\w+)` \| (.+ ± .+) \|$", README, re.M))
    for folder in ("compare", "compare_larger"):  # the tiny language model, then SmolLM2
        metrics = read_metrics(ROOT / "outputs/full" / folder / "metrics.json")
        methods = re.findall(r"^final/(\w+)/samples$", "\n".join(metrics), re.M)
        table = dict(next(rows) for _ in methods)
        assert set(table) == set(methods)
        for method, cells in table.items():
            names = ("gain/{}", "gold_gain/{}", "frontier/{}/kl2", "frontier/{}/kl5", "frontier/{}/kl10")
            for cell, key in zip(cells.split(" | "), (name.format(method) for name in names), strict=True):
                value, stderr = metrics.get(key), metrics.get(f"{key}_stderr")
                assert cell == ("not reached" if value is None else f"{value:.3f} ± {stderr:.3f}"), key
    assert not list(rows)


def test_the_worth_of_a_sample_is_that_of_profile_full():
    """Columns by their place: worth, the blend at 8, 64 and 512 samples, each with its interval."""
    metrics = read_metrics(ROOT / "outputs/full/estimators/metrics.json")
    rows = re.findall(r"^\| `(bag|trunk)`, (untrained|trained) \| (.+) \|$", README, re.M)
    assert len(rows) == 4
    for reward, policy, cells in rows:
        keys = [f"worth/{reward}", *(f"hybrid/{reward}/{size}" for size in (8, 64, 512))]
        for cell, key in zip(cells.split(" | "), keys, strict=True):
            value, low, high = (
                metrics[f"{'after/' if policy == 'trained' else ''}{key}{end}"] for end in ("", "_low", "_high")
            )
            assert cell == f"{value:.3g} [{low:.3g}, {high:.3g}]", key


def test_worth_by_depth_is_that_of_profile_full():
    estimators = [f"{name}_k64_hops0" for name in ("ste_tau2", "gumbel_rao_m8_tau1", "gumbel_tau1")]
    tables = {
        policy: pd.read_csv(ROOT / f"outputs/full/estimators_{policy}/worth.csv").set_index(
            ["reward", "estimator"]
        )
        for policy in ("before", "after")
    }
    rows = re.findall(r"^\| `(\w+)`, (?:embeddings|1 layer|\d+ layers|all 30) \| (.+) \|$", README, re.M)
    assert [reward for reward, _ in rows] == ["bag", "trunk1", "trunk4", "trunk12", "trunk"]
    for reward, cells in rows:
        columns = [(policy, estimator) for estimator in estimators for policy in ("before", "after")]
        for cell, (policy, estimator) in zip(cells.split(" | "), columns, strict=True):
            row = tables[policy].loc[(reward, estimator)]
            assert cell == f"{row.worth:.3g} [{row.worth_low:.3g}, {row.worth_high:.3g}]", (reward, policy, estimator)


def test_the_verdicts_are_counted_from_the_claims():
    assert verdict_counts(read_claims(ROOT / "outputs/claims.csv")) in README


def test_the_examples_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for example in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(compile(example, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "tensor" in out and "predicted change" in out


def test_files_and_links_that_it_names_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
    for module in re.findall(r"\b(\w+\.py)\b", README):
        assert list((ROOT / "grade").rglob(module)), module
