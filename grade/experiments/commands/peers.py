"""The command that trains a peer."""

import argparse
import json
from functools import partial
from itertools import chain
from pathlib import Path

from grade.cli.options import command, print_metrics
from grade.experiments.compare.measure.peers import PeersConfig, compare_peers
from grade.experiments.compare.measure.steps import METHODS, StepPeersConfig, timed_rows, trl_rows
from grade.experiments.compare.measure.text_peers import TextPeersConfig, compare_text_peers
from grade.experiments.compare.peers import peer_figures, write_peers
from grade.experiments.teachers.measure.peers import TeacherPeersConfig, measure_teacher_peers
from grade.experiments.teachers.metrics import teacher_peer_figures
from grade.experiments.trl_runs import require_peer, write_contest
from grade.experiments.trl_traces import trl_traces
from grade.files import write_text
from grade.results import environment, write_metrics


@command("peers", output_dir="metrics.json and curves.csv go here", config=PeersConfig)
def _peers(args: argparse.Namespace) -> None:
    """Train our methods and TRL's GRPOTrainer on the same task, each in a process of its own."""
    config = PeersConfig.load(args.config, args.set)
    curves, costs, settings = compare_peers(config)
    figures = peer_figures(curves, costs) | settings
    write_peers(args.output_dir, curves, figures)
    print_metrics(figures)


@command("text-peers", output_dir="runs.csv and environment.json go here", config=TextPeersConfig)
def _text_peers(args: argparse.Namespace) -> None:
    """Compare what others do with scored text, or with samples, with this project's methods."""
    config = TextPeersConfig.load(args.config, args.set)
    for rows in compare_text_peers(config):
        write_contest(args.output_dir, {"runs": rows})
    print(f"wrote {args.output_dir}")


@command("teacher-peers", output_dir="curves.csv, metrics.json and environment.json go here", config=TeacherPeersConfig)
def _teacher_peers(args: argparse.Namespace) -> None:
    """Distil a teacher beside TRL's DistillationTrainer, each in a process of its own."""
    config = TeacherPeersConfig.load(args.config, args.set)
    curves, costs = measure_teacher_peers(config)
    traces = trl_traces(layers=config.trace_layers) if config.trace_layers else None
    figures = teacher_peer_figures(curves, costs, traces)
    tables = {"curves": curves, "timings/costs": costs, "trl_traces": traces}
    write_contest(args.output_dir, tables, threads=1)  # of each process that trains
    write_metrics(Path(args.output_dir, "metrics.json"), figures)
    print_metrics(figures)


@command("step-peers", output_dir="grpo.json, teacher.json and trl.json go here", config=StepPeersConfig)
def _step_peers(args: argparse.Namespace) -> None:
    """Run steps of TRL's trainers: traced and real peaks, and seconds beside ours."""
    config, about = StepPeersConfig.load(args.config, args.set), environment()
    require_peer("trl")
    for name, measured in (*((method, partial(timed_rows, method)) for method in METHODS), ("trl", trl_rows)):
        rows = []
        for row in chain.from_iterable(measured(model, config.device) for model in config.models):
            rows.append(row)
            text = json.dumps({"environment": about, "steps": rows}, indent=1) + "\n"
            write_text(Path(args.output_dir, f"{name}.json"), text)
            print(*row.values())
