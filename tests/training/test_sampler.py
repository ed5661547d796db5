"""Training on completions of another sampler: the same as on any completions, at every step the present policy's."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from completions_server import serving
from datasets import Dataset
from fresh_process import script
from grade.models.samplers import Sampler, make_sampler, seed_of
from training.runs import assert_equal_adapters

from grade import GradeConfig, GradeTrainer
from grade.errors import InputError
from grade.gradients.policy_gradient import Completions, StepContext
from grade.gradients.replay import replay
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.rewards.model import load_reward

PROMPTS = Dataset.from_list([{"prompt": f"The film was {word}"} for word in ("a", "so", "not", "it", "all", "bad")])
COMMON = dict(
    sampler="http://127.0.0.1:1", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2,
    max_completion_length=5, min_completion_length=1, learning_rate=1e-2, beta=0.1, report_to="none", use_cpu=True,
    disable_tqdm=True, seed=0, save_strategy="no",
)  # fmt: skip
OWN = {"ste": dict(gumbel_topk=8), "rloo": dict(num_generations=2), "distilled": dict(num_generations=2)}


@pytest.fixture(scope="module")
def server(base):
    with serving(str(base)) as server:
        yield server


class Recorded(Sampler):
    """Gives what another sampler gave, or keeps what it gives."""

    name = "recorded"

    def __init__(self, sampler=None, kept=()):
        self.sampler, self.kept = sampler, list(kept)
        for name in ("publish", "use", "close") if sampler else ():
            setattr(self, name, getattr(sampler, name))

    def sample(self, *args):
        if self.sampler is None:
            return self.kept.pop(0)
        self.kept.append(self.sampler.sample(*args))
        return self.kept[-1]


def trainer(base, output, method="rloo", replaced=None, **changes):
    """A trainer of the toy policy; its sampler may be replaced."""
    backbone = Backbone.load(base, lora=LoraSettings(r=2, alpha=4))
    args = GradeConfig(output_dir=str(output), method=method, **{**COMMON, **OWN.get(method, {}), **changes})
    made = GradeTrainer(backbone, load_reward(base.parent / "bag", backbone), args, PROMPTS)
    if replaced is not None:
        made.sampler = replaced
    return made


def adapter(made):
    return torch.cat([p.detach().flatten() for p in made.backbone.trainable_parameters()])


@pytest.mark.parametrize("method", ["ste", "rloo"])
def test_training_through_a_server_is_training_on_its_completions(method, base, server, tmp_path):
    """Bit for bit; the adapter is handed over once a step, and nothing is left behind."""
    server.most_adapters = 0
    del server.requests[:]
    through = trainer(base, tmp_path / "a", method, sampler=server.address)
    through.sampler = recorder = Recorded(through.sampler)
    through.train()
    paths = [path.rpartition("/")[2] for path, _ in server.requests]
    assert paths.count("load_lora_adapter") == paths.count("unload_lora_adapter") == 2
    assert not server.adapters and server.most_adapters == 2  # the new one is there before the old one goes
    given = trainer(base, tmp_path / "b", method, Recorded(kept=recorder.kept))
    given.train()
    assert torch.equal(adapter(through), adapter(given))
    row = next(row for row in through.state.log_history if "loss" in row)
    # float32, a whole pass against another one with other padding.
    assert row["sampler/mean_ratio"] == pytest.approx(1, abs=1e-4) and 0 < row["sampler/largest_difference"] < 1e-4


def by_hand(made, samples):
    """The mean gradient of a first step's microbatches, given their samples, by the method itself."""
    microbatches = []
    for place, (rows, each) in enumerate(zip(made.get_train_dataloader(), samples, strict=True)):
        prompts = made.encode(rows).repeat(made.args.group)
        microbatches.append(Completions(prompts, each.ids, each.mask))
        if made.args.relaxed:
            seed = np.random.SeedSequence([made.args.seed, 1, place]).generate_state(1, np.uint64)[0]
            generator = torch.Generator().manual_seed(int(seed >> 1))
            seed_of(generator)  # of the samples
            config, given = made.args.relaxation(), (each.ids, each.mask)
            replay(made.backbone, prompts, made.objective, config, generator, 1 / len(samples), hops=made.args.hops,
                   completions=given)  # fmt: skip
    if not made.args.relaxed:
        made.learner.step(microbatches, made.objective, StepContext(len(samples), lambda: None))
    return torch.cat([p.grad.flatten() for p in made.backbone.trainable_parameters()])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("method", OWN)
def test_a_step_is_the_methods_gradient_of_those_completions(method, microbatches, base, tmp_path):
    """Of all of its microbatches, however many the batch is divided into."""
    plain = dict(optim="sgd", learning_rate=0.5, max_grad_norm=0.0, max_steps=1, lr_scheduler_type="constant")
    plain["gradient_accumulation_steps"] = microbatches
    made, other = (trainer(base, tmp_path, method, Recorded(make_sampler("own")), **plain) for _ in range(2))
    start = adapter(made)
    made.train()
    gradient = by_hand(other, made.sampler.kept)
    assert gradient.norm() > 1e-4
    torch.testing.assert_close(adapter(made), start - 0.5 * gradient)


def test_a_resumed_run_asks_for_the_same(base, server, tmp_path):
    options = dict(sampler=server.address, max_steps=4, save_strategy="steps", save_steps=2)
    asked = []
    elsewhere = dict(sampler=server.address.replace("127.0.0.1", "localhost"), sampler_timeout=99.0,
                     sampler_folder=str(tmp_path / "adapters"))  # fmt: skip
    for checkpoint, changes in ((None, {}), (str(tmp_path / "checkpoint-2"), elsewhere)):
        del server.requests[:]
        made = trainer(base, tmp_path, **options | changes)
        made.train(resume_from_checkpoint=checkpoint)
        bodies = [body for path, body in server.requests if path == "/v1/completions"]
        asked.append(([sorted((body["seed"], body["prompt"]) for body in bodies)], adapter(made)))
    (all_of_them,), (rest,) = asked[0][0], asked[1][0]
    assert len(all_of_them) == 2 * len(rest) and set(map(str, rest)) < set(map(str, all_of_them))
    assert torch.equal(asked[0][1], asked[1][1])
    assert len({seed for seed, _ in all_of_them}) == len(all_of_them)  # no two requests have the same noise


@pytest.mark.skipif(not os.environ.get("GRADE_ALL_CASES"), reason="starts three processes: GRADE_ALL_CASES=1")
def test_two_processes_ask_for_what_one_asks_for(base, server, tmp_path):
    """Each for its own prompts; one of them hands over the adapter."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    values = COMMON | OWN["rloo"] | {
        "sampler": server.address, "model": str(base), "reward": str(base.parent / "bag"), "gold": "",
        "eval_dataset": "", "train_dataset": str(tmp_path / "prompts.jsonl"), "lora": {"r": 2, "alpha": 4},
        "method": "rloo", "save_strategy": "steps",
    }  # fmt: skip
    del server.requests[:]
    done, errors = script(Path(__file__).with_name("processes.py"), tmp_path, "--settings", json.dumps(values))
    assert done.returncode == 0, done.stdout + errors[-2000:]
    asked = [(body["seed"], body["prompt"]) for path, body in server.requests if path == "/v1/completions"]
    half = len(asked) // 2
    assert sorted(asked[:half]) == sorted(asked[half:]) and len(set(map(str, asked))) == half
    assert [path.rpartition("/")[2] for path, _ in server.requests].count("load_lora_adapter") == 4
    assert_equal_adapters(tmp_path / "1", tmp_path / "2")


def test_another_policy_is_refused_and_nothing_is_updated(base, server, tmp_path):
    """A server that samples at another temperature than it was asked for: its likely tokens are likelier."""
    made = trainer(base, tmp_path, sampler=server.address, sampler_max_difference=0.01, temperature=0.7)
    start, complete = adapter(made), server.complete
    server.complete = lambda body: complete(body | {"temperature": 1.0})
    try:
        with pytest.raises(InputError, match=r"largest difference: got '[\d.]+ nats .* mean ratio [\d.]+'; .* = 0.01 "):
            made.train()
    finally:
        server.complete = complete
    assert torch.equal(adapter(made), start) and not server.adapters


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (dict(method="gumbel"), "method: got 'gumbel'; allowed: ste, gumbel_rao, reinmax, st, or .* soft ones"),
        (dict(sampler="vllm"), "sampler: got 'vllm'; allowed: .*own, shared, or .* http://host:port"),
        (dict(sampler="shared", sampler_folder="x"), "sampler_folder: got 'x'; allowed: None with sampler = shared"),
        (dict(sampler="own", sampler_max_difference=0.1), "sampler_max_difference: got 0.1; .* sampler = own"),
        (dict(use_vllm=True), "use_vllm: .*sampler: http://host:port"),
    ],
)
def test_settings_that_do_not_fit(values, says, tmp_path):
    with pytest.raises(InputError, match=says):
        GradeConfig(output_dir=str(tmp_path), **{"sampler": "http://a:1", "report_to": "none", **values})
