"""Figures of the experiment on scale, from its tables; what a table does not hold has no figure."""

from grade.experiments.measured import Tables, figures_of
from grade.experiments.scale.measure.sampling import training_differences
from grade.experiments.scale.measure.tables import GIB

OWN = "own"
Values = dict[str, float | int]


def metrics(tables: Tables) -> Values:
    """Every figure that is the same in every run.

    Figures of ``fsdp2`` are the largest over methods, steps and processes, ``gpus/<sharding>_<n>`` those of one of n
    GPUs; ``lean/step_gib`` is what the lean step needs over its weights.
    """
    methods, sharded, gpus, law = (tables[name] for name in ("fsdp2", "sharded", "gpus", "law"))
    values: Values = {}
    if len(methods):
        held = methods[["bytes_0", "bytes_1"]].max(axis=1) - methods.adapter_bytes
        values |= {"fsdp2/max_rel_diff": methods.max_rel_diff.max(), "fsdp2/methods": len(methods),
                   "fsdp2/held_share": (held / (methods.bytes - methods.adapter_bytes)).max()}  # fmt: skip
    if len(sharded):
        values["fsdp2/trace_rel_error"] = sharded.rel_error.abs().max()
    values |= figures_of(gpus.assign(peak_gib=gpus.peak / GIB), "gpus/{sharding}_{gpus}", ["peak_gib"])
    values["lean/step_gib"] = tables["lean"].set_index("phase").over_weights_gib["step"]
    if (law.sampler != OWN).any():
        values["sampler/chi2_p"] = law.p[law.sampler != OWN].min()
    if len(tables["training"]):
        values |= figures_of(training_differences(tables["training"]), "sampler/{sampler}/training_difference",
                             {"": "difference", "_stderr": "stderr", "_n": "n"})  # fmt: skip
    return values
