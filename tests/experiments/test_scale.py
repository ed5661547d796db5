"""Figures of the experiment on scale, by hand."""

import pandas as pd
import pytest

from grade.experiments.scale.metrics import GIB, metrics


def test_figures_by_hand():
    empty = {name: pd.DataFrame(columns=["sampler"]) for name in ("sharded", "training", "fits", "sampling")}
    tables = empty | {
        "fsdp2": pd.DataFrame([
            dict(method="ste", max_rel_diff=1e-7, bytes=110, bytes_0=60, bytes_1=62, adapter_bytes=10),
            dict(method="grpo", max_rel_diff=3e-7, bytes=110, bytes_0=60, bytes_1=60, adapter_bytes=10),
        ]),
        "sharded": pd.DataFrame(
            [dict(step="replay", rank=0, rel_error=-0.01), dict(step="ppo", rank=1, rel_error=0.004)]
        ),
        "gpus": pd.DataFrame([dict(gpus=2, sharding="ddp", peak=GIB, received=GIB / 2)]),
        "lean": pd.DataFrame([dict(phase="forward", over_weights_gib=0.1), dict(phase="step", over_weights_gib=0.19)]),
        "law": pd.DataFrame([
            dict(sampler="own", n=9, p=0.01, mean_ratio=1.0, largest_difference=0.0),
            dict(sampler="shared", n=9, p=0.4, mean_ratio=1.0, largest_difference=1e-6),
        ]),
        "training": pd.DataFrame([
            dict(seed=seed, sampler=name, after=after)
            for seed, pair in enumerate([(0.5, 0.6), (0.5, 0.5), (0.6, 0.8)])
            for name, after in zip(("own", "shared"), pair, strict=True)
        ]),
    }  # fmt: skip
    found = metrics(tables)
    assert found["fsdp2/max_rel_diff"] == 3e-7 and found["fsdp2/methods"] == 2
    assert found["fsdp2/held_share"] == pytest.approx(52 / 100)
    assert found["fsdp2/trace_rel_error"] == 0.01
    assert found["gpus/ddp_2/peak_gib"] == 1 and found["lean/step_gib"] == 0.19
    assert found["sampler/chi2_p"] == 0.4, "our own sampler is no other"
    assert found["sampler/shared/training_difference"] == pytest.approx(0.1)
    assert found["sampler/shared/training_difference_n"] == 3
