"""Training on completions that a server samples: every step the present policy's, and held against it."""

import logging

import pytest
import torch
from completions_server import serving
from conftest import EOS, generator, make_prompts, perturb_adapter, tiny_config
from datasets import Dataset
from transformers import AutoModelForCausalLM

from grade import GradeConfig, GradeTrainer
from grade.errors import InputError
from grade.gradients.learner import StepContext
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.rewards.model import load_reward
from grade.training.served import StepSampler, compare

PROMPTS = Dataset.from_list([{"prompt": f"The film was {word}"} for word in ("a", "so", "not", "it", "all", "bad")])
COMMON = dict(
    per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2, max_completion_length=5,
    min_completion_length=1, learning_rate=1e-2, beta=0.1, use_cpu=True, seed=0,
    save_strategy="no", num_generations=2,
)  # fmt: skip
TOKENS = dict(method="reinforce", max_completion_length=8, min_completion_length=3, use_cpu=True)


@pytest.fixture(scope="module")
def server(base):
    with serving(str(base)) as server:
        yield server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny policy in float32 with an adapter that is not zero, and a server of its base."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config())
    model.save_pretrained(folder)
    with serving(folder) as server:
        yield perturb_adapter(Backbone(model, None, LoraSettings(r=2, alpha=4))), server


@pytest.fixture(autouse=True)
def honest(server, tiny):
    """A test may spoil the servers' answers."""
    yield
    server.spoil = tiny[1].spoil = None


def trainer(base, output, method="rloo", **changes):
    backbone = Backbone.load(base, lora=LoraSettings(r=2, alpha=4))
    args = GradeConfig(output_dir=str(output), method=method, **COMMON | changes)
    return GradeTrainer(backbone, load_reward(base.parent / "bag", backbone), args, PROMPTS)


def adapter(made):
    return torch.cat([p.detach().flatten() for p in made.backbone.trainable_parameters()])


class Kept:
    """Gives what another sampler gave."""

    def __init__(self, kept):
        self.kept = list(kept)

    def sample(self, *_):
        return self.kept.pop(0)

    def close(self):
        pass


def test_training_through_a_server_is_training_on_its_completions(base, server, tmp_path):
    """Bit for bit; the adapter is handed over once a step, and nothing is left behind."""
    server.most_adapters, kept = 0, []
    del server.requests[:]
    through = trainer(base, tmp_path / "a", sampler=server.address, sampler_folder=str(tmp_path / "adapters"))
    plain = through.sampler.sample
    through.sampler.sample = lambda *args: kept.append(plain(*args)) or kept[-1]
    through.train()
    paths = [path.rpartition("/")[2] for path, _ in server.requests]
    assert paths.count("load_lora_adapter") == paths.count("unload_lora_adapter") == 2
    assert not server.adapters and server.most_adapters == 2  # the new one is there before the old one goes
    assert not list((tmp_path / "adapters").iterdir())
    given = trainer(base, tmp_path / "b")
    given.sampler = Kept(kept)
    given.train()
    assert torch.equal(adapter(through), adapter(given))
    row = next(row for row in through.state.log_history if "loss" in row)
    # float32, a whole pass against another one with other padding.
    assert row["sampler/mean_ratio"] == pytest.approx(1, abs=1e-4) and 0 < row["sampler/largest_difference"] < 1e-4


def test_a_step_is_the_methods_gradient_of_those_completions(base, server, tmp_path):
    """Of all of its microbatches."""
    made, other = (trainer(base, tmp_path, max_grad_norm=0.0, max_steps=1, sampler=server.address) for _ in range(2))
    for each in (made, other):
        each.optimizer = torch.optim.SGD(each.backbone.trainable_parameters(), lr=0.5)
        each.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(each.optimizer, 1.0)
    start, kept, plain = adapter(made), [], made.sampler.sample
    made.sampler.sample = lambda *args: kept.append(plain(*args)) or kept[-1]
    made.train()
    other.method.step([completions for completions, _ in kept], other.objective, StepContext(2, lambda: None))
    gradient = torch.cat([p.grad.flatten() for p in other.backbone.trainable_parameters()])
    assert gradient.norm() > 1e-4
    torch.testing.assert_close(adapter(made), start - 0.5 * gradient)


def test_a_resumed_run_asks_for_the_same(base, server, tmp_path):
    options, asked = dict(sampler=server.address, max_steps=4, save_strategy="steps", save_steps=2), []
    elsewhere = {"sampler": server.address.replace("127.0.0.1", "localhost")}
    for checkpoint, changes in ((None, {}), (str(tmp_path / "checkpoint-2"), elsewhere)):
        del server.requests[:]
        made = trainer(base, tmp_path, **options | changes)
        made.train(resume_from_checkpoint=checkpoint)
        asked.append([body["seed"] for path, body in server.requests if path == "/v1/completions"])
    assert len(set(asked[0])) == 16 and sorted(asked[0][8:]) == sorted(asked[1])
    assert [row["reward"] for row in made.state.log_history if "reward" in row]


def test_another_policy_is_refused_and_nothing_is_updated(base, server, tmp_path):
    """A server that samples at another temperature than it was asked for: its likely tokens are likelier."""
    made = trainer(base, tmp_path, sampler=server.address, sampler_max_difference=0.01, temperature=0.7)
    start, complete = adapter(made), server.complete
    server.complete = lambda body: complete(body | {"temperature": 1.0})
    try:
        with pytest.raises(InputError, match=r"sampler: mean difference: got [\d.]+; .* sampler_max_difference = 0.01"):
            made.train()
    finally:
        server.complete = complete
    assert torch.equal(adapter(made), start) and not server.adapters


def test_log_probabilities_are_those_of_the_tokens(tiny):
    """Each request has one prompt, its tokens and every setting; completions end where the policy ends."""
    backbone, server = tiny
    del server.requests[:]
    sampler, prompts = StepSampler(GradeConfig(sampler=server.address, **TOKENS)), make_prompts(6, 6).repeat(2)
    (completions, figures), (again, _) = (sampler.sample(backbone, prompts, generator(), step) for step in (1, 2))
    sampler.close()
    ids, mask = completions.ids, completions.mask
    assert torch.equal(ids, again.ids) and 4 <= mask.sum(1).min() < 8  # some end
    assert figures["sampler/largest_difference"] < 1e-5 and abs(figures["sampler/mean_ratio"] - 1) < 1e-5
    ends = torch.isin(ids, torch.tensor(EOS)) & mask.bool()
    assert not (ends[:, :-1] & mask[:, 1:].bool()).any()
    bodies = [body for path, body in server.requests if path == "/v1/completions"]
    assert len(bodies) == 12 and {body["n"] for body in bodies} == {2}
    assert sorted(body["prompt"] for body in bodies[:6]) == sorted(prompts.rows()[::2])
    assert {(body["max_tokens"], body["min_tokens"], body["temperature"]) for body in bodies} == {(8, 3, 1.0)}


@pytest.mark.parametrize(("shift", "refused", "warned"), [
    (1e-3, False, False), (0.03, False, False), (0.2, False, True), (2.0, True, False), (float("nan"), True, False),
])  # fmt: skip
def test_a_difference_that_rounding_explains_is_none_of_another_policy(shift, refused, warned, caplog):
    """float32 with TF32 and bfloat16 pass; what cannot be known is a warning; nats per token are another policy."""
    sampler = StepSampler(GradeConfig(sampler="http://a:1", **TOKENS))
    logps = -torch.rand(4, 8, generator=generator()) * 5
    sign = torch.where(torch.rand(4, 8, generator=generator(1)) < 0.5, -1.0, 1.0)
    found = compare(logps + shift * sign, logps, torch.ones(4, 8))
    with caplog.at_level(logging.WARNING, "grade.training.served"):
        if refused:
            with pytest.raises(InputError, match="sampler: mean difference"):
                sampler._check(found)
        else:
            sampler._check(found)
            sampler._check(found)
    assert len(caplog.records) == warned  # once


def test_two_policies_are_compared_on_valid_tokens():
    p, q, mask = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.9, -1.0]]), torch.tensor([[1, 1, 0]])
    found = compare(p, q, mask)
    ratios = torch.tensor([0.5, -0.1], dtype=torch.float64).exp()
    assert found == pytest.approx({"mean_ratio": float(ratios.mean()), "mean_difference": 0.3,
                                   "largest_difference": 0.5})  # fmt: skip


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda *_: (400, "rank 32 is greater than 16"), "v1/load_lora_adapter: status 400.*it said: rank 32 is greater"),
    (None, "a server that answers"),
], ids=["an error", "nobody"])  # fmt: skip
def test_a_server_that_fails_is_one_line(tiny, spoil, says):
    backbone, server = tiny
    server.spoil = spoil
    address = server.address if spoil else "http://127.0.0.1:9"
    sampler = StepSampler(GradeConfig(sampler=address, **TOKENS))
    with pytest.raises(InputError, match=says):
        sampler.sample(backbone, make_prompts(2), generator(), 1)
    sampler.close()
