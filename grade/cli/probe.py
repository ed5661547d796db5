"""The command of the entropy probe."""

from __future__ import annotations

import argparse

from grade.cli.options import command, option
from grade.config_files import load_config
from grade.entropy.run import ProbeRunConfig, probe_adapter
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
    asked = {"adapter": args.adapter or None, "config": config.model_dump()}
    content = {"environment": environment(), **asked, **report.as_dict()}
    write_json(args.output, content)
    print(report.as_text())
    print(f"wrote {args.output}")
