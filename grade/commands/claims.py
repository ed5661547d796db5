"""``python -m grade claims``."""

from __future__ import annotations

import argparse
from pathlib import Path

from grade.claims import read_claims, to_markdown, verdict_counts, write_claims
from grade.results import replacing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("files", nargs="+", metavar="CLAIMS.CSV", help="claims of each document")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="claims.csv and claims.md go here")


def run(args: argparse.Namespace) -> None:
    """Join the documents' claims into one table."""
    claims = sorted((c for file in args.files for c in read_claims(file)), key=lambda c: c.seed)
    write_claims(Path(args.output_dir) / "claims.csv", claims)
    counts = verdict_counts(claims)
    with replacing(Path(args.output_dir) / "claims.md") as file:
        file.write("# Claims of the source documents and verdicts\n\n" + counts + "\n" + to_markdown(claims))
    print(counts, end="")
