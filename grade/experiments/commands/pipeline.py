"""Commands of the pipeline: run it, put its results on one page, hold them against the published ones, publish them."""

import argparse
import contextlib
from pathlib import Path

from grade.cli.options import command, option
from grade.errors import InputError
from grade.experiments import claims, headline, report
from grade.files import write_text
from grade.pipeline.profiles import DEFAULT_PROFILE, publish, repro, suite_values, workspace_of
from grade.results import write_metrics

WHOSE = "whose results (default: cpu)"


@command(
    "repro",
    option("profile", nargs="?", default=DEFAULT_PROFILE, help="folder under params/ (default: cpu)"),
    option("stages", nargs="*", help="stages to bring up to date, with all that they need (default: all)"),
)
def _repro(args: argparse.Namespace) -> None:
    if code := repro(Path.cwd(), args.profile, args.stages):
        raise SystemExit(code)
    if not args.stages:
        with contextlib.suppress(InputError):  # nothing published to hold it against
            print(_checked(args.profile, "HEAD")[0])
        place = workspace_of(Path.cwd(), args.profile) / suite_values(Path(), args.profile)["outputs"]
        print(f"Every table: {place}/README.md. To put them into the checkout: grade publish {args.profile}")


@command("results", option("--profile", default=DEFAULT_PROFILE, help=WHOSE))
def _results(args: argparse.Namespace) -> None:
    """Write a profile's README.md, claims.csv, claims.md and headline.json in the working folder."""
    suite = suite_values(Path(), args.profile)
    outputs, studies = Path(suite["outputs"]), {name: name for name in suite["studies"]}
    notebooks = suite["alone"] | suite["experiments"] | studies
    if not outputs.is_dir():
        raise InputError("--profile", args.profile, f"a profile with results in {outputs}: grade repro makes them")
    rows = report.join_claims(outputs, notebooks)
    counts = claims.verdict_counts(rows)
    page, figures = report.report(outputs, args.profile, notebooks), headline.headline(outputs)
    title = "# Claims of the source documents and verdicts"
    claims.write_claims(outputs / "claims.csv", rows)
    write_text(outputs / "claims.md", f"{title}\n\n{counts}\n{claims.to_markdown(rows)}")
    write_text(outputs / "README.md", page)
    write_metrics(outputs / "headline.json", figures)
    print(counts, end="")


@command(
    "check",
    option("--profile", default=DEFAULT_PROFILE, help=WHOSE),
    option("--against", default="HEAD", metavar="REV", help="git revision that publishes (default: HEAD)"),
)
def _check(args: argparse.Namespace) -> None:
    """Print one line for each headline figure; exit 1 if one is out of its tolerance."""
    text, holds = _checked(args.profile, args.against)
    print(text)
    if not holds:
        raise SystemExit(1)


def _checked(profile: str, revision: str) -> tuple[str, bool]:
    """The workspace's figures against the published ones; without a workspace, those that ``dvc repro`` left here."""
    outputs, workspace = suite_values(Path(), profile)["outputs"], workspace_of(Path.cwd(), profile)
    with contextlib.chdir(workspace if (workspace / outputs).is_dir() else Path()):
        table = headline.check(outputs, revision)
    return headline.as_text(table), table.holds.all()


@command("publish", option("profile", nargs="?", default=DEFAULT_PROFILE, help=WHOSE))
def _publish(args: argparse.Namespace) -> None:
    """Copy the workspace's results into the project, to be committed."""
    names = publish(Path.cwd(), args.profile)
    print(f"wrote {len(names)} results to {suite_values(Path(), args.profile)['outputs']}")
