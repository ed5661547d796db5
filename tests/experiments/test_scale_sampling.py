"""The tables of samplers at toy size, and their arithmetic."""

import json

import numpy as np
import pandas as pd
import pytest
from completions_server import serving

from grade.experiments.scale.measure.sampling import law_rows, sampling_ratios, training_differences, training_rows

TEXTS = [f"The film was {word}" for word in ("a", "so", "not", "it", "all", "bad", "good", "new")]


def test_the_law_of_samplers_of_this_process_and_of_a_server(base):
    with serving(str(base)) as server:
        samplers = ("own", "shared", server.address)
        rows = law_rows(1500, str(base), samplers)
    for sampler, (name, n, p, mean_ratio, largest_difference) in zip(samplers, rows, strict=True):
        assert name == sampler and n >= 1500 and p > 0.001
        assert largest_difference < 1e-4 and mean_ratio == pytest.approx(1, abs=1e-4)  # float32


def test_training_on_samples_of_two_samplers(base, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    data = {name: str(tmp_path / "prompts.jsonl") for name in ("train_dataset", "eval_dataset")}
    table = pd.DataFrame(training_rows(
        (0, 1), ("own", "shared"), max_steps=1, eval_prompts=8, final_eval_prompts=8, model=str(base),
        reward=str(base.parent / "bag"), per_device_train_batch_size=8, max_completion_length=4,
        min_completion_length=0, lora={"r": 2, "alpha": 4}, **data,
    ))  # fmt: skip
    assert list(zip(table["seed"], table["sampler"], strict=True)) == [
        (0, "own"), (0, "shared"), (1, "own"), (1, "shared")
    ]  # fmt: skip
    own, shared = (table[table["sampler"] == name] for name in ("own", "shared"))
    assert own["before"].tolist() == shared["before"].tolist() and own["after"].tolist() != shared["after"].tolist()
    assert own["largest_difference"].isna().all() and (shared["largest_difference"] < 1e-4).all()  # float32
    found = training_differences(table)
    assert list(found["sampler"]) == ["shared"] and found["n"].tolist() == [2]
    difference = shared["after"].to_numpy() - own["after"].to_numpy()
    assert found["difference"][0] == pytest.approx(difference.mean())
    assert found["stderr"][0] == pytest.approx(difference.std(ddof=1) / 2**0.5)


def test_ratios_by_hand():
    """Seconds 1, 2 over 2, 2: 3/4; without each round 2/2 and 1/2, so the error of the logarithm is log(2) / 2."""
    rows = [(8, 0, "a", 1.0, 1.0), (8, 0, "trl", 2.0, 2.0), (8, 1, "trl", 2.0, 2.0), (8, 1, "a", 2.0, 1.0)]
    table = sampling_ratios(pd.DataFrame(rows, columns=["batch", "round", "sampler", "seconds", "cpu_seconds"]))
    (a,) = table.to_dict("records")
    assert (a["sampler"], a["seconds"], a["ratio"], a["cpu_ratio"]) == ("a", 1.5, 0.75, 0.5)
    # Student's 0.975 quantile with one degree of freedom.
    assert np.log(a["ratio_high"] / a["ratio"]) == pytest.approx(12.7062 * np.log(2) / 2, rel=1e-4)
