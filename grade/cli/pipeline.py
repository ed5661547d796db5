"""Commands of the pipeline: run it, put its results on one page, hold them against the published ones."""

from __future__ import annotations

import argparse
from pathlib import Path

from grade.errors import InputError
from grade.experiments.claims import to_markdown, verdict_counts, write_claims
from grade.experiments.headline import as_text, check, headline
from grade.experiments.report import join_claims, report
from grade.pipeline.params import DEFAULT_PROFILE, suite_values
from grade.pipeline.profiles import run
from grade.results import replacing, write_metrics


def add_repro_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("profile", nargs="?", default=DEFAULT_PROFILE, help="folder under params/ (default: cpu)")
    parser.add_argument("stages", nargs="*", help="stages to bring up to date, with all that they need (default: all)")
    parser.add_argument("--jobs", type=int, help="stages at once (default: as in the profile's suite.yaml)")
    parser.add_argument("--force", action="store_true", help="run stages that are up to date as well")
    parser.add_argument("--dry", action="store_true", help="only say what would run")


def run_repro(args: argparse.Namespace) -> None:
    """Run the pipeline, then say what it found."""
    options = [f"--{name}" for name in ("force", "dry") if getattr(args, name)]
    code = run(Path.cwd(), args.profile, [*args.stages, *options], args.jobs)
    if code:
        raise SystemExit(code)
    outputs = suite_values(Path(), args.profile)["outputs"]
    if args.stages or args.dry or not Path(outputs, "README.md").is_file():
        return  # a part of the pipeline, or a profile whose results stay in its workspace
    try:
        print(as_text(check(outputs)))
    except InputError as error:  # nothing published to hold it against
        print(error)
    print(f"Every table: {outputs}/README.md. Every claim: {outputs}/claims.md. The notebooks: {outputs}/*/*.ipynb.")


def add_results_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="whose results (default: cpu)")


def run_results(args: argparse.Namespace) -> None:
    """Write a profile's README.md, claims.csv, claims.md and headline.json."""
    suite = suite_values(Path(), args.profile)
    outputs = Path(suite["outputs"])
    notebooks = suite["alone"] | suite["experiments"]
    claims = join_claims(outputs, notebooks)
    write_claims(outputs / "claims.csv", claims)
    counts = verdict_counts(claims)
    texts = {
        "claims.md": f"# Claims of the source documents and verdicts\n\n{counts}\n{to_markdown(claims)}",
        "README.md": report(outputs, args.profile, notebooks),
    }
    for name, text in texts.items():
        with replacing(outputs / name) as file:
            file.write(text)
    write_metrics(outputs / "headline.json", headline(outputs))
    print(counts, end="")


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="whose results (default: cpu)")
    parser.add_argument("--against", default="HEAD", metavar="REV", help="git revision that publishes (default: HEAD)")


def run_check(args: argparse.Namespace) -> None:
    """Print one line for each headline figure; exit 1 if one is out of its tolerance."""
    lines = check(suite_values(Path(), args.profile)["outputs"], args.against)
    print(as_text(lines))
    if not all(line.holds for line in lines):
        raise SystemExit(1)
