"""Figures of the experiment with the probe, and verdicts on document 003 (``claims.yaml``)."""

from collections.abc import Mapping
from typing import Any

from grade.experiments.claims import Claim, judge
from grade.experiments.formulas import lora_parameters, rows_bytes
from grade.experiments.measured import Tables, figures_of
from grade.memory.shapes import ModelShape

SWEEP = ("delta_h1_forward", "delta_h1_forward_stderr", "delta_h", "delta_h_stderr", "delta_h_prefix",
         "delta_h_prefix_stderr", "linearity_error", "linearity_error_stderr", "ess_share")  # fmt: skip
"""Columns of the sweep that are published."""
SAME = 0.02  # peaks within 2 % of each other are the same
EQUAL = 1e-6


def metrics(tables: Tables) -> dict[str, float | str]:
    """``probe/*`` on the document's proposals, peaks in decimal GB; ``study/*`` on a policy, nats per completion."""
    sweep, traces = tables["sweep"], tables["traces"]
    step, ways = traces.set_index("name").step_bytes, traces[~traces.name.str.contains(",")]  # of one size
    return {
        **{f"probe/{name}": value for name, value in tables["effects"].items()},
        **figures_of(ways.assign(peak_gb=ways.peak / 1e9), "probe/traced_{name}_peak_gb", {"": "peak_gb"}),
        "probe/large_over_small": step["streamed, large"] / step["streamed, small"],
        "probe/whole_over_streamed": step["whole, large"] / step["streamed, large"],
        **figures_of(sweep, "study/step{step}/x{multiple:g}", SWEEP),
        "study/sign_agrees_all": float(((sweep.delta_h > 0) == (sweep.delta_h1_forward > 0)).mean()),
    }


def probe_claims(shape: ModelShape, m: Mapping[str, Any]) -> list[Claim]:
    """A verdict on each claim of document 003, from the model that its probe ran on and the figures of ``metrics``."""
    whole, chunked = m["probe/traced_whole_peak_gb"], m["probe/traced_chunked_peak_gb"]
    parameters, everything = m["probe/restore_parameters_only"], m["probe/restore_everything"]
    buffers = {rank: 2 * 4 * lora_parameters(shape, rank, every=True) for rank in (16, 64)}
    sequences, graphs = 2 * 8 * 4 * 264 * 8, rows_bytes(32 * 8, 200, shape.vocab)
    figures = {
        **m, "chunked lower": chunked <= whole * (1 - SAME),
        "cross_entropy lower": m["probe/saved_cross_entropy"] <= m["probe/saved_log_softmax"] * (1 - SAME),
        "no error": not m["probe/buffer_error"], "buffer error": m["probe/buffer_error"] or "no error",
        "rank 16": buffers[16], "rank 64": buffers[64], "buffers double": buffers[16] / 1e9 >= 0.5 * whole,
        "rank 64 M": lora_parameters(shape, 64, every=True) / 1e6,
        "restore/verdict": "refuted" if m["probe/restore_as_coded"] > 0 else "partly",
        "parameters/verdict": "partly" if parameters > EQUAL >= everything else "confirmed",
        "sequences KB": sequences / 1e3, "sequences matter": sequences / 1e9 >= 0.01 * whole,
        "all graphs": graphs, "cause/verdict": "refuted" if graphs / 1e9 > whole else "partly",
        "diagnosis GB": rows_bytes(8, 512, shape.vocab, 2) / 1e9, "validation": rows_bytes(4, 264, shape.vocab, 2),
    }  # fmt: skip
    return judge("probe", figures)
