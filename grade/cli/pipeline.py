"""Commands of the pipeline: run it, put its results on one page, hold them against the published ones, publish them."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path

from grade.errors import InputError
from grade.files import write_text
from grade.pipeline.params import DEFAULT_PROFILE, suite_values
from grade.pipeline.profiles import publish, workspace_of
from grade.pipeline.schedule import run
from grade.results import write_metrics

WHOSE = "whose results (default: cpu)"


def add_repro(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("profile", nargs="?", default=DEFAULT_PROFILE, help="folder under params/ (default: cpu)")
    parser.add_argument("stages", nargs="*", help="stages to bring up to date, with all that they need (default: all)")
    parser.add_argument("--jobs", type=int, help="stages at once (default: as in the profile's suite.yaml)")
    parser.add_argument("--force", action="store_true", help="run stages that are up to date as well")
    parser.add_argument("--dry", action="store_true", help="only say what would run")
    return _repro


def _repro(args: argparse.Namespace) -> None:
    code = run(Path.cwd(), args.profile, args.stages, args.jobs, args.force, args.dry)
    if code:
        raise SystemExit(code)
    workspace = workspace_of(Path.cwd(), args.profile)
    outputs = suite_values(Path(), args.profile)["outputs"]
    if args.stages or args.dry or not (workspace / outputs / "README.md").is_file():
        return
    try:
        print(_checked(args.profile, "HEAD")[0])
    except InputError as error:  # nothing published to hold it against
        print(error)
    place = f".workspaces/{args.profile}/{outputs}"
    print(f"Every table: {place}/README.md. Every claim: {place}/claims.md. The notebooks: {place}/*/*.ipynb.")
    print(f"To put them into {outputs}/: grade publish {args.profile}")


def add_results(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help=WHOSE)
    return _results


def _results(args: argparse.Namespace) -> None:
    """Write a profile's README.md, claims.csv, claims.md and headline.json in the working folder."""
    from grade.experiments.claims import to_markdown, verdict_counts, write_claims  # not installed with the library
    from grade.experiments.headline import headline
    from grade.experiments.report import join_claims, report

    suite = suite_values(Path(), args.profile)
    outputs, notebooks = Path(suite["outputs"]), suite["alone"] | suite["experiments"]
    rows = join_claims(outputs, notebooks)
    counts = verdict_counts(rows)
    title = "# Claims of the source documents and verdicts"
    write_claims(outputs / "claims.csv", rows)
    write_text(outputs / "claims.md", f"{title}\n\n{counts}\n{to_markdown(rows)}")
    write_text(outputs / "README.md", report(outputs, args.profile, notebooks))
    write_metrics(outputs / "headline.json", headline(outputs))
    print(counts, end="")


def add_check(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help=WHOSE)
    parser.add_argument("--against", default="HEAD", metavar="REV", help="git revision that publishes (default: HEAD)")
    return _check


def _check(args: argparse.Namespace) -> None:
    """Print one line for each headline figure; exit 1 if one is out of its tolerance."""
    text, holds = _checked(args.profile, args.against)
    print(text)
    if not holds:
        raise SystemExit(1)


def _checked(profile: str, revision: str) -> tuple[str, bool]:
    """The workspace's figures against the published ones; without a workspace, those that ``dvc repro`` left here."""
    from grade.experiments.headline import as_text, check  # not installed with the library

    outputs, workspace = suite_values(Path(), profile)["outputs"], workspace_of(Path.cwd(), profile)
    with contextlib.chdir(workspace if (workspace / outputs).is_dir() else Path()):
        lines = check(outputs, revision)
    return as_text(lines), all(line.holds for line in lines)


def add_publish(parser: argparse.ArgumentParser) -> Callable:
    parser.add_argument("profile", nargs="?", default=DEFAULT_PROFILE, help=WHOSE)
    return _publish


def _publish(args: argparse.Namespace) -> None:
    """Copy the workspace's results into the project, to be committed."""
    names = publish(Path.cwd(), args.profile)
    print(f"wrote {len(names)} results to {suite_values(Path(), args.profile)['outputs']}")
