"""The README's numbers are the pipeline's, its example runs, and what it names exists."""

import re
from pathlib import Path

from grade.results import read_metrics

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_the_default_profiles_metrics():
    metrics = read_metrics(ROOT / "outputs/exp6/metrics.json")
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| `([^`]+)` \|$", README, re.M)
    rows = [(value.strip(), key) for value, key in rows if key in metrics or key.count("/")]
    rows = [(value, key) for value, key in rows if re.fullmatch(r"[-\d.e]+", value)]
    assert len(rows) > 15
    for value, key in rows:
        found = metrics[key]
        assert value == (str(found) if isinstance(found, int) else f"{found:.3g}"), key


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(example, "README.md", "exec"), {})
    assert "tensor" in capsys.readouterr().out


def test_files_and_links_that_it_names_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
    for module in re.findall(r"\b(\w+\.py)\b", README):
        assert list((ROOT / "grade").rglob(module)), module
