"""What a completion costs: vLLM, our samplers and transformers' `generate`, on one core, in one run."""

import os
import time

import pandas as pd
import pytest
import torch
from conftest import perturb_adapter
from vllm_server import prompts_of, save_base

from grade.experiments.scale.measure.sampling import COMPLETION, GROUP, sampling_ratios
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.samplers import make_sampler
from grade.models.scoring import completion_logps

SMOLLM2 = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64, vocab_size=49152, initializer_range=0.02,
)  # fmt: skip
"""Its shape; with random weights, since a completion of a given length costs the same."""
BATCH, ROUNDS = 16, 5


def of_transformers(backbone, prompts, number):
    """The call that TRL's trainer makes, with the adapter beside the base."""
    torch.manual_seed(number)
    ids = backbone.peft.generate(
        input_ids=prompts.ids, attention_mask=prompts.mask, do_sample=True, top_k=0, temperature=1.0,
        max_new_tokens=COMPLETION, min_new_tokens=COMPLETION,
    )  # fmt: skip
    return ids[:, prompts.ids.shape[1] :]


@pytest.fixture
def one_core():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    yield
    os.sched_setaffinity(0, cores)


@torch.no_grad()
def test_the_cost_of_a_completion(engines, one_core, tmp_path, capsys):
    """Processor seconds, the server's included, are compared as well as the clock, which other work slows down."""
    engine, folder = engines(), save_base(tmp_path / "base", **SMOLLM2)
    engine.start(folder)  # and inherits the core
    backbone = perturb_adapter(Backbone.load(folder, lora=LoraSettings()), scale=0.05)
    server = make_sampler(engine.address, 600.0, tmp_path)
    server.publish(backbone)
    samplers = {"vllm": server, "own": make_sampler("own"), "shared": make_sampler("shared")}
    processes, rows = engine.processes(), []

    def spent():
        times = [process.cpu_times() for process in processes]
        return time.perf_counter(), time.process_time() + sum(each.user + each.system for each in times)

    prompts = prompts_of(BATCH // GROUP, 12).repeat(GROUP)
    for number in range(-1, ROUNDS):
        for name in (*samplers, "transformers"):
            start = spent()
            if name == "transformers":
                ids = of_transformers(backbone, prompts, number + 1)
            else:
                generator = torch.Generator().manual_seed(number + 1)
                samples = samplers[name].sample(backbone, prompts, COMPLETION, generator, COMPLETION)
                ids = samples.ids
            seconds = [(after - before) / BATCH for before, after in zip(start, spent(), strict=True)]
            assert ids.shape == (BATCH, COMPLETION)
            if name == "vllm" and number < 0:  # which also compiles what it needs
                own = completion_logps(backbone, prompts, ids, samples.mask, min_new_tokens=COMPLETION)
                assert samples.mismatch(own).largest_difference < 1e-3
            if number >= 0:
                rows.append((BATCH, number, name, *seconds))
    server.close()
    table = pd.DataFrame(rows, columns=["batch", "round", "sampler", "seconds", "cpu_seconds"])
    ratios = sampling_ratios(table, "vllm")
    with capsys.disabled():
        print(f"\n{ROUNDS} rounds, one core; ratios to vLLM:\n{ratios.to_string(index=False, float_format='%.3g')}")
    assert (ratios["cpu_seconds"] > 0).all()
