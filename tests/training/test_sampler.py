"""Training on completions that a server samples: every step the present policy's, and held against it."""

import json
import logging
import threading
from contextlib import contextmanager
from unittest.mock import patch

import httpx
import pytest
import torch
from conftest import EOS, generator, make_prompts, perturb_adapter, tiny_config
from datasets import Dataset
from peft import PeftModel
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
ADDRESS = "http://a:1"


class Server:
    """OpenAI's completions protocol with token ids, in the place of the network.

    It shares no code with the package: it loads adapters with PEFT and samples with whole passes of transformers.
    """

    def __init__(self, folder):
        self.folder, self.lock = folder, threading.Lock()
        self.adapters, self.requests, self.most_adapters = {}, [], 0
        self.changed, self.error = {}, None  # by a test

    def __call__(self, request):
        path, body = request.url.path.rpartition("/")[2], json.loads(request.content)
        with self.lock, torch.random.fork_rng(devices=[]):
            self.requests.append((path, body))
            if self.error:
                return httpx.Response(400, text=self.error)
            if path == "completions":
                return httpx.Response(200, json={"choices": self.complete(body | self.changed)})
            if path == "unload_lora_adapter":
                return httpx.Response(200 if self.adapters.pop(body["lora_name"], None) else 404)
            model = AutoModelForCausalLM.from_pretrained(self.folder)
            self.adapters[body["lora_name"]] = PeftModel.from_pretrained(model, body["lora_path"]).eval()
            self.most_adapters = max(self.most_adapters, len(self.adapters))
            return httpx.Response(200)

    @torch.no_grad()
    def complete(self, body):
        assert body["top_p"] == 1 and body["top_k"] == 0 and body["ignore_eos"] and body["return_token_ids"]
        model, n, noise = self.adapters[body["model"]], body["n"], torch.Generator().manual_seed(body["seed"])
        ids, stops, logps = torch.tensor([body["prompt"]] * n), body["stop_token_ids"], []
        for step in range(body["max_tokens"]):
            logits = model(input_ids=ids).logits[:, -1].double() / body["temperature"]
            if step < body["min_tokens"]:
                logits[:, stops] = float("-inf")
            logp = logits.log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1, generator=noise)
            logps.append(logp.gather(1, token))
            ids = torch.cat([ids, token], 1)
        choices = []
        for index, (tokens, values) in enumerate(
            zip(ids[:, len(body["prompt"]) :].tolist(), torch.cat(logps, 1).tolist(), strict=True)
        ):
            end = next((k + 1 for k, token in enumerate(tokens) if token in stops), None)
            choices.append({"index": index, "token_ids": tokens[:end], "logprobs": {"token_logprobs": values[:end]}})
        return choices


@contextmanager
def serving(folder):
    """Every client that is made within speaks to a server of the base in the folder."""
    made, client = Server(folder), httpx.Client
    with patch.object(httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(made))):
        yield made


@pytest.fixture
def server(base):
    with serving(base) as server:
        yield server


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
    kept = []
    through = trainer(base, tmp_path / "a", sampler=ADDRESS, sampler_folder=str(tmp_path / "adapters"))
    plain = through.sampler.sample
    through.sampler.sample = lambda *args: kept.append(plain(*args)) or kept[-1]
    through.train()
    paths = [path for path, _ in server.requests]
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


def test_the_default_method_is_one_whose_policy_an_adapter_holds(base, server, tmp_path):
    assert trainer(base, tmp_path, "auto", sampler=ADDRESS, target_kl=1.0).config.method == "rloo"
    with pytest.raises(InputError, match="sampler"):
        trainer(base, tmp_path, "tilt", sampler=ADDRESS, target_kl=1.0)


def test_a_step_is_the_methods_gradient_of_those_completions(base, server, tmp_path):
    """Of all of its microbatches."""
    made, other = (trainer(base, tmp_path, max_grad_norm=0.0, max_steps=1, sampler=ADDRESS) for _ in range(2))
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
    options, asked = dict(sampler=ADDRESS, max_steps=4, save_strategy="steps", save_steps=2), []
    elsewhere = {"sampler": "http://b:1"}
    for checkpoint, changes in ((None, {}), (str(tmp_path / "checkpoint-2"), elsewhere)):
        del server.requests[:]
        made = trainer(base, tmp_path, **options | changes)
        made.train(resume_from_checkpoint=checkpoint)
        asked.append([body["seed"] for path, body in server.requests if path == "completions"])
    assert len(set(asked[0])) == 16 and sorted(asked[0][8:]) == sorted(asked[1])
    assert [row["reward"] for row in made.state.log_history if "reward" in row]


def test_another_policy_is_refused_and_nothing_is_updated(base, server, tmp_path):
    """A server that samples at another temperature than it was asked for: its likely tokens are likelier."""
    made = trainer(base, tmp_path, sampler=ADDRESS, sampler_max_difference=0.01, temperature=0.7)
    start, server.changed = adapter(made), {"temperature": 1.0}
    with pytest.raises(InputError, match=r"sampler: mean difference: got [\d.]+; .* sampler_max_difference = 0.01"):
        made.train()
    assert torch.equal(adapter(made), start) and not server.adapters


def test_log_probabilities_are_those_of_the_tokens(tmp_path):
    """Each request has one prompt, its tokens and every setting; completions end where the policy ends."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config())
    model.save_pretrained(tmp_path)
    backbone = perturb_adapter(Backbone(model, None, LoraSettings(r=2, alpha=4)))
    with serving(tmp_path) as server:
        sampler, prompts = StepSampler(GradeConfig(sampler=ADDRESS, **TOKENS)), make_prompts(6, 6).repeat(2)
        (completions, figures), (again, _) = (sampler.sample(backbone, prompts, generator(), step) for step in (1, 2))
        sampler.close()
    ids, mask = completions.ids, completions.mask
    assert torch.equal(ids, again.ids) and 4 <= mask.sum(1).min() < 8  # some end
    assert figures["sampler/largest_difference"] < 1e-5 and abs(figures["sampler/mean_ratio"] - 1) < 1e-5
    ends = torch.isin(ids, torch.tensor(EOS)) & mask.bool()
    assert not (ends[:, :-1] & mask[:, 1:].bool()).any()
    bodies = [body for path, body in server.requests if path == "completions"]
    assert len(bodies) == 12 and {body["n"] for body in bodies} == {2}
    assert sorted(body["prompt"] for body in bodies[:6]) == sorted(prompts.rows()[::2])
    assert {(body["max_tokens"], body["min_tokens"], body["temperature"]) for body in bodies} == {(8, 3, 1.0)}


@pytest.mark.parametrize(("shift", "refused", "warned"), [
    (1e-3, False, False), (0.03, False, False), (0.2, False, True), (2.0, True, False), (float("nan"), True, False),
])  # fmt: skip
def test_a_difference_that_rounding_explains_is_none_of_another_policy(shift, refused, warned, caplog):
    """float32 with TF32 and bfloat16 pass; what cannot be known is a warning; nats per token are another policy."""
    sampler = StepSampler(GradeConfig(sampler=ADDRESS, **TOKENS))
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


def test_what_the_server_says_of_an_adapter_is_one_line(base, server):
    sampler, server.error = StepSampler(GradeConfig(sampler=ADDRESS, **TOKENS)), "rank 32 is greater than 16"
    with pytest.raises(InputError, match="v1/load_lora_adapter: status 400.*it said: rank 32 is greater"):
        sampler.sample(Backbone.load(base, lora=LoraSettings(r=2)), make_prompts(2), generator(), 1)
