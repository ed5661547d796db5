"""The command of the entropy probe."""

from __future__ import annotations

import argparse
from pathlib import Path

from grade.cli.options import command, option
from grade.config_files import load_config
from grade.entropy.run import ProbeRunConfig, asked_of, probe_adapter
from grade.files import write_json
from grade.results import environment

SECTION = "probe"
"""Where the experiment's parameters (``params/<profile>/probe.yaml``) hold the probe's own."""


@command(
    "probe",
    option("--adapter", metavar="DIR", help="a trained adapter; default: a new one"),
    option("--optimizer-state", metavar="FILE",
           help="AdamW's state_dict; default: optimizer.pt beside the adapter, or none yet"),
    option("--output", metavar="FILE", default="report.json", help="the report (report.json)"),
    config=ProbeRunConfig,
)  # fmt: skip
def _probe(args: argparse.Namespace) -> None:
    """Predict and verify how the coming optimizer step moves the policy's entropy."""
    config = load_config(ProbeRunConfig, args.config, args.set, section=SECTION)
    batch, length = config.batch_config, config.generation.max_new_tokens
    print(f"probing {config.backbone}: {batch.B} prompts, {batch.G} completions of {length} tokens each", flush=True)
    report = probe_adapter(config, args.adapter, args.optimizer_state)
    output = Path(args.output)
    write_json(output, asked_of(config, args.adapter, args.optimizer_state) | report.as_dict())
    seconds = {name: value for name, value in report.figures.items() if name.startswith("seconds/")}
    write_json(output.with_name(f"timings_{output.name}"), {"environment": environment(), **seconds})
    print(report.as_text())
    print(f"wrote {args.output}")
