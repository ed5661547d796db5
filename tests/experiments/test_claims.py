"""The claims table: what is written and joined."""

from __future__ import annotations

import csv

from grade.cli.main import main
from grade.experiments.claims import COLUMNS, Claim, read_claims, to_markdown, verdict_counts, write_claims

ROW = Claim(seed="000", claim="4 GB of a|b", stated="4 GB", found=8.192, unit="MB", how="derived", verdict="refuted",
            note="1*64*32000*4\nbytes")  # fmt: skip


def row(**changes):
    return Claim.parse(ROW.model_dump() | changes)


def test_the_csv_reads_back(tmp_path):
    path = tmp_path / "new" / "claims.csv"
    write_claims(path, [ROW, row(found=147456.0), row(found="none", unit="")])
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert rows[0] == {name: getattr(ROW, name) for name in COLUMNS} | {"found": "8.192"}
    assert [row["found"] for row in rows] == ["8.192", "147456", "none"]


def test_claims_of_several_documents_are_joined_in_order(tmp_path, capsys):
    results, later = tmp_path / "outputs", row(seed="004", claim="b, c", verdict="partly")
    write_claims(results / "a" / "claims.csv", [later])
    write_claims(results / "b" / "claims.csv", [ROW, ROW])
    write_claims(results / "larger" / "claims.csv", [ROW])  # another folder of results, which has its own page
    (results / "larger" / "README.md").touch()
    assert main(["results", str(results)]) == 0
    joined = read_claims(results / "claims.csv")
    assert [c.seed for c in joined] == ["000", "000", "004"] and joined[2].claim == "b, c"
    text = (results / "claims.md").read_text()
    assert verdict_counts(joined) in text and to_markdown(joined) in text
    # columns: confirmed, refuted, partly, undecided, not testable
    assert verdict_counts(joined).splitlines()[2:] == ["| 000 | 0 | 2 | 0 | 0 | 0 |", "| 004 | 0 | 0 | 1 | 0 | 0 |"]
    assert "| 000 | 0 | 2 | 0 | 0 | 0 |" in capsys.readouterr().out
    assert "| 000 | 0 | 2 | 0 | 0 | 0 |" in (results / "README.md").read_text()
