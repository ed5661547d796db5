"""The tool that puts faults into the core (`make mutants`): its table, its faults and its runner."""

import subprocess
import sys
import textwrap
from pathlib import Path

import mutants
import pytest
from mutants_made import WINGS, replaced, sample

TESTS = Path(__file__).parent
SUMS = """
from __future__ import annotations

Sizes = int | None


def total(a: int, b: int | None = None) -> int | float:
    assert a > 3
    if a < 0:
        raise ValueError(f"{a + 1}")
    return sum(x + y for x, y in zip([a], [b], strict=True))
"""


def test_the_page_is_that_of_the_table():
    assert mutants.PAGE.read_text() == mutants.page(mutants.read_table()), "python tests/mutants.py --page"


def test_the_bar_is_held_and_every_survivor_is_explained():
    rows, known = mutants.read_table(), mutants.explanations()
    drawn = [row for row in rows if row.operator != "by hand"]
    assert len(drawn) >= 300 and len({row.wing for row in drawn}) == len(WINGS)
    assert mutants.share(mutants.shares(rows)["all"]) >= mutants.BAR
    assert all(row.noticed for row in rows if row.operator == "by hand")
    assert set(known) == {row.key for row in rows if not row.noticed}
    assert {verdict for verdict, _ in known.values()} <= {"equivalent", "survives"}
    assert all(reason for _, reason in known.values())


def test_faults_by_hand_are_in_the_sources():
    made = mutants.by_hand()
    assert len(made) == len(mutants.BY_HAND) and all(mutant.source for mutant in made)
    with pytest.raises(ValueError, match="stands there 0 times"):
        replaced(mutants.ROOT, "models", "grade/models/sampling.py", "no such text", "")


def test_faults_are_drawn_by_the_text_around_them_and_only_where_they_matter(tmp_path):
    pytest.importorskip("cosmic_ray", reason="needs the extra mutants")
    (tmp_path / "grade" / "models").mkdir(parents=True)
    file = tmp_path / "grade" / "models" / "sums.py"
    file.write_text(SUMS)
    made = sample(tmp_path, "models", 99, seed=0)
    assert {mutant.before for mutant in made} == {
        "if a < 0:", "return sum(x + y for x, y in zip([a], [b], strict=True))",
    }  # fmt: skip
    assert sorted(mutant.operator.split("_")[0] for mutant in made) == [
        "AddNot", "NumberReplacer", "ReplaceBinaryOperator", "ReplaceComparisonOperator",
    ]  # fmt: skip
    file.write_text(SUMS + "\n\ndef other(n):\n    return -n\n")
    assert [mutant.key for mutant in made] == [
        m.key for m in sample(tmp_path, "models", 99, 0) if m.function == "total"
    ]


def test_the_runner_tells_a_fault_that_is_noticed_from_one_that_is_not(tmp_path):
    root = tmp_path / "project"
    for name, text in {
        "grade/__init__.py": "", "grade/models/__init__.py": "",
        "grade/models/sums.py": "def add(a, b):\n    return a + b\n",
        "tests/models/test_sums.py": (
            "from grade.models.sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
        ),
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", root], check=True)
    script = f"""
        from pathlib import Path
        from mutants_made import replaced
        from mutants_run import Runner
        root = Path({str(root)!r})
        runner = Runner(root, Path({str(tmp_path / "work")!r}))
        runner.warm_up(["models"], ())
        for after in ("a - b", "b + a", "[0] * 2**40"):
            outcome = runner.judge(replaced(root, "models", "grade/models/sums.py", "a + b", after), 60)
            print(outcome.result, outcome.test)
        print((runner.tree / "grade/models/sums.py").read_text() == (root / "grade/models/sums.py").read_text())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=TESTS, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.splitlines()[-4:] == [
        "killed tests/models/test_sums.py::test_add", "survived ", "killed tests/models/test_sums.py::test_add", "True",
    ], done.stderr  # fmt: skip
