"""Samplers: whose tokens they are, how likely, and one clear error for each way in which a server may be wrong."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from completions_server import serving
from conftest import EOS, VOCAB, generator, make_prompts, perturb_adapter, tiny_config
from models.zoo import build
from peft import LoraConfig, get_peft_model
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from grade.errors import InputError
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.models.samplers import Samples, ServerSampler, make_sampler
from grade.models.sampling import BLOCK, draw, forbid_eos
from grade.models.scoring import completion_logps
from grade.models.server import Server

NAMES = ("own", "shared", "server")
ALL_CASES = bool(os.environ.get("GRADE_ALL_CASES"))
DRAWS = 24_000  # of two tokens; of these more than 20,000 have a second one


def chi_square(counts, probabilities):
    """P of a chi-square test of counts; values that are expected less than five times are one cell."""
    expected = probabilities * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    counts, expected = (np.append(cells[~small], cells[small].sum()) for cells in (counts, expected))
    return float(chisquare(counts[expected > 0], expected[expected > 0]).pvalue)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny policy in float32 with an adapter that is not zero, and a server that has it."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config())
    model.save_pretrained(folder)
    backbone = perturb_adapter(Backbone(model, None, LoraSettings(r=2, alpha=4)))
    with serving(folder) as server:
        sampler = make_sampler(server.address, 300.0)
        sampler.publish(backbone)
        yield backbone, server, sampler
        sampler.close()


@pytest.fixture(autouse=True)
def honest(served, monkeypatch):
    """A test may spoil the server's answers."""
    monkeypatch.setattr(Server, "waits", (0.0, 0.0))
    yield
    served[1].spoil = None


def the(name, served):
    return served[2] if name == "server" else make_sampler(name)


def one_prompt(times):
    return PromptBatch(torch.tensor([[1, 9, 4, 17]]), torch.ones(1, 4, dtype=torch.long)).repeat(times)


# ---- whose tokens ----
@torch.no_grad()
def second_token(backbone, least):
    """Probabilities of the second token after `one_prompt`, given that there is one, from whole passes in float64."""
    prompt = one_prompt(VOCAB)
    first = torch.arange(VOCAB).unsqueeze(1)
    model, temperature = backbone.model, backbone.head.temperature
    logits = model(input_ids=torch.cat([prompt.ids, first], 1)).logits.double() / temperature
    steps = torch.tensor([[0], [1]])
    logits = forbid_eos(logits[:, -2:], None, steps, least, backbone.eos_token_ids).softmax(-1)
    start = logits[0, 0].clone()
    start[list(EOS)] = 0.0
    return start @ logits[:, 1] / start.sum()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("least", "temperature"), [(0, 1.0), (2, 0.7)])
def test_a_position_has_the_policys_distribution(name, least, temperature, served):
    """Chi-square of the second token, which a cache has to get right, over at least 20,000 draws; fixed seeds."""
    backbone, draws = served[0].view(temperature=temperature), DRAWS if ALL_CASES or not least else DRAWS // 6
    samples = the(name, served).sample(backbone, one_prompt(draws), 2, generator(), least)
    want = second_token(backbone, least)
    with backbone.reference():
        base = second_token(backbone, least)
    assert torch.equal(samples.mask[:, 0], torch.ones(draws, dtype=torch.long))
    tokens = samples.ids[:, 1][samples.mask[:, 1].bool()]
    assert len(tokens) >= draws * 5 / 6
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert chi_square(counts, want.numpy()) > 0.001
    assert chi_square(counts, base.numpy()) < 1e-9  # the adapter is on: its base is another policy
    if least:
        assert not torch.isin(samples.ids, torch.tensor(EOS)).any()


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_the_tokens(name, served):
    backbone, prompts = served[0], make_prompts(12, 6)
    samples = the(name, served).sample(backbone, prompts, 8, generator(), 3)
    assert samples.ids.shape == samples.mask.shape == samples.logps.shape and samples.mask.sum(1).min() >= 4
    assert samples.mask.sum(1).min() < 8  # some end
    own = completion_logps(backbone, prompts, samples.ids, samples.mask, min_new_tokens=3).detach()
    # float32 in another order of sums.
    torch.testing.assert_close(samples.logps.float(), own, atol=1e-5, rtol=1e-5)
    found = samples.mismatch(own)
    assert found.largest_difference < 1e-5 and abs(found.mean_ratio - 1) < 1e-5
    found.check(name, backbone.dtype, 1e-4)
    ends = torch.isin(samples.ids, torch.tensor(EOS)) & samples.mask.bool()
    assert not (ends[:, :-1] & samples.mask[:, 1:].bool()).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_generator_decides_and_nothing_else(name, served):
    backbone, prompts = served[0], make_prompts(6, 6)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, again, other = (the(name, served).sample(backbone, prompts, 6, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.logps, again.logps)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


def test_shared_prompts_are_read_once_and_copied(served):
    """Groups of 3, 1 and 2, padded; log-probabilities of whole passes, and as many rows read as there are prompts."""
    backbone, prompts = served[0], make_prompts(3, 6)
    prompts, rows = prompts[torch.tensor([0, 0, 0, 1, 2, 2])], []
    decode = backbone.decode
    backbone.decode = lambda embeds, *rest: (rows.append(tuple(embeds.shape[:2])), decode(embeds, *rest))[1]
    try:
        samples = make_sampler("shared").sample(backbone, prompts, 4, generator(), 4)
    finally:
        del backbone.decode
    assert rows == [(3, 6), (6, 1), (6, 1), (6, 1)]
    own = completion_logps(backbone, prompts, samples.ids, samples.mask, min_new_tokens=4)
    torch.testing.assert_close(samples.logps, own.detach(), atol=1e-5, rtol=1e-5)  # float32 in another order of sums


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid"])
def test_a_state_of_linear_attention_is_not_shared(kind):
    backbone = Backbone(build(kind), None, LoraSettings(r=2, alpha=4, target_modules=["q_proj"]))
    with pytest.raises(InputError, match="sampler: got 'shared'; allowed: own for .*linear attention"):
        make_sampler("shared").sample(backbone, make_prompts(2).repeat(3), 4, torch.Generator())


def test_a_token_is_drawn_by_its_probability_across_blocks():
    """Vocabularies of several blocks, the last one not full; every seventh token is forbidden."""
    for vocab in (2 * BLOCK, 600):
        logits = 2 * torch.randn(1, vocab, generator=generator())
        logits[:, ::7] = -torch.inf
        tokens, logps = draw(logits.expand(20_000, vocab), generator(1))
        counts = np.bincount(tokens.numpy(), minlength=vocab)
        assert chi_square(counts, logits[0].double().softmax(-1).numpy()) > 0.001
        torch.testing.assert_close(logps, logits[0].log_softmax(-1)[tokens])


# ---- what a server is asked ----
def test_a_request_has_one_prompt_its_tokens_and_every_setting(served):
    backbone, server, sampler = served
    del server.requests[:]
    prompts = make_prompts(2, 5).repeat(3)
    sampler.sample(backbone, prompts, 4, generator(), 1)
    bodies = sorted((body for _, body in server.requests), key=lambda body: len(body["prompt"]))
    assert [(len(body["prompt"]), body["n"]) for body in bodies] == [(4, 3), (5, 3)]
    assert len({body["seed"] for body in bodies}) == 2
    assert server.headers["Accept-Encoding"] == "identity, gzip, deflate"  # whatever else httpx could read
    assert [body["prompt"] for body in bodies] == [prompts.ids[3, 1:].tolist(), prompts.ids[0].tolist()]
    for body in bodies:
        assert body["model"] == sampler.model and body["stop_token_ids"] == EOS
        assert (body["max_tokens"], body["min_tokens"], body["temperature"], body["top_p"]) == (4, 1, 1.0, 1.0)


# ---- what it may get wrong ----
def choices(change):
    """Change every choice of an answer."""

    def spoil(path, status, answer):
        if path == "/v1/completions":
            for choice in answer["choices"]:
                change(choice)
        return status, answer

    return spoil


def whole(change):
    """Change an answer."""
    return lambda path, status, answer: change(answer) if path == "/v1/completions" else (status, answer)


WRONG = {
    "text only": (choices(lambda c: c.pop("token_ids")), "vLLM >= 0.10.2.*choices.0.token_ids: Field required"),
    "no log-probabilities": (choices(lambda c: c.pop("logprobs")), "choices.0.logprobs: Field required"),
    "NaN": (
        choices(lambda c: c["logprobs"].update(token_logprobs=[float("nan")] * 3)),
        "token_logprobs.0: Input should be a finite number",
    ),
    "another vocabulary": (choices(lambda c: c.update(token_ids=[VOCAB, 3, 3])), f"got {VOCAB}; .* 0 to {VOCAB - 1}"),
    "no whole number": (
        choices(lambda c: c.update(token_ids=[True, 3, 3])),
        "got True; .*token_ids.0: Input should be a valid integer",
    ),
    "an early end": (choices(lambda c: c.update(token_ids=[EOS[0], 3, 3])), "end-of-sequence after 0'.*not before 3"),
    "cut short": (
        choices(lambda c: (c["token_ids"].pop(), c["logprobs"]["token_logprobs"].pop())), "got '2 tokens'; .*: 3"
    ),
    "fewer completions": (whole(lambda a: (200, {"choices": a["choices"][1:]})), "1 choices.*2 choices"),
    "another prompt": (choices(lambda c: c.update(prompt_token_ids=[1])), r"\[1\]'; allowed: the prompt \["),
    "another model": (
        whole(lambda a: (200, a | {"model": "base"})), "got 'model base'; allowed: model grade-.*, which was asked for"
    ),
    "no JSON": (whole(lambda a: (200, "<html>")), "got '<html>'; .* JSON"),
    "an error": (whole(lambda a: (500, "out\x1b[2J")), r"POST .*/v1/completions: got .status 500.; .* said: out\?\[2J"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_servers_answer_is_checked(case, served):
    backbone, server, sampler = served
    server.spoil, says = WRONG[case]
    with pytest.raises(InputError, match=says) as error:
        sampler.sample(backbone, one_prompt(2), 3, generator(), 3)
    assert server.address in str(error.value)


def test_tokens_after_the_end_are_refused(served):
    backbone, server, sampler = served
    server.spoil = choices(
        lambda c: (c.update(token_ids=[3, EOS[0], 3]), c["logprobs"].update(token_logprobs=[-1.0] * 3))
    )
    with pytest.raises(InputError, match="3 tokens, with an end-of-sequence after 1"):
        sampler.sample(backbone, one_prompt(2), 3, generator())


def test_the_index_of_a_completion_counts_and_not_its_place(served):
    backbone, server, sampler = served
    want = sampler.sample(backbone, one_prompt(2), 3, generator())
    server.spoil = whole(lambda a: (200, {"choices": a["choices"][::-1]}))
    assert torch.equal(sampler.sample(backbone, one_prompt(2), 3, generator()).ids, want.ids)


@pytest.mark.parametrize(("status", "requests"), [(429, 3), (503, 3), (500, 1), (404, 1), (201, 1), (307, 1)])
def test_only_a_busy_server_is_asked_again(status, requests, served):
    server, asked = served[1], []
    server.spoil = lambda path, *_: (asked.append(path), (status, "x" * 400))[1]
    with pytest.raises(InputError, match=f"POST .*/v1/unload_lora_adapter: got 'status {status}'; .*: xxx"):
        ServerSampler(server.address, 30.0).post("/v1/unload_lora_adapter", {"lora_name": "x"})
    assert len(asked) == requests
    server.spoil = lambda path, *_: (asked.append(path), (503, "busy") if len(asked) == 1 else (200, "here"))[1]
    asked.clear()
    ServerSampler(server.address, 30.0).post("/v1/unload_lora_adapter", {"lora_name": "x"})
    assert len(asked) == 2


def test_an_adapter_may_have_any_name(served):
    model = AutoModelForCausalLM.from_pretrained(served[1].folder)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
    backbone, sampler, prompts = perturb_adapter(Backbone(model)), make_sampler(served[1].address), make_prompts(4, 6)
    sampler.publish(backbone)
    samples = sampler.sample(backbone, prompts, 8, generator())
    sampler.close()
    own = completion_logps(backbone, prompts, samples.ids, samples.mask).detach()
    assert samples.mismatch(own).largest_difference < 1e-5


def test_an_adapter_whose_load_was_answered_by_nobody_is_not_an_error(served, tmp_path):
    backbone, server, _ = served
    server.spoil = lambda path, *answer: (503, "lost") if len(server.requests) == asked + 1 else answer
    asked, sampler = len(server.requests), make_sampler(server.address, 30.0, tmp_path)
    assert sampler.publish(backbone) in server.adapters
    assert len(server.requests) == asked + 2 and len(list(tmp_path.iterdir())) == 1
    sampler.close()


def test_nobody_there_and_nobody_who_answers(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # what is sent goes to the address that was named
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"POST {address}/v1/.*: got 'ConnectError: .*failed"):
            ServerSampler(address, 5.0).post("/v1/unload_lora_adapter", {"lora_name": "x"})
        taken.listen()  # connections are taken, and nothing follows
        with pytest.raises(InputError, match=r"no answer for 0.2 s.* sampler_timeout"):
            ServerSampler(address, 0.2).post("/v1/unload_lora_adapter", {"lora_name": "x"})


@pytest.mark.parametrize(
    "answer, wait, says",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b" " * 99, 0.1, "no answer for 0.5 s"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[]", None, "Error: "),
        (b"\x00" * 99, None, "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n[]", None, "DecodingError"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: GZip\r\nContent-Length: 2\r\n\r\n[]", None, "DecodingError"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: 2\r\n\r\n[]", None, "gzip, gzip, not"),
    ],
    ids=["a slow body", "too short", "no HTTP", "no gzip", "no GZip", "gzip in gzip"],
)  # fmt: skip
def test_the_time_limit_is_for_the_whole_answer_and_what_is_no_http_is_one_line(answer, wait, says):
    """``wait``: seconds between bytes; None: all at once, and the connection is closed."""

    def serve():
        with listening.accept()[0] as connection, suppress(OSError):
            while not connection.recv(65536).endswith(b"{}"):  # what is left unread would reset the connection
                pass
            for part in [answer] if wait is None else [answer[i : i + 1] for i in range(len(answer))]:
                connection.sendall(part)
                time.sleep(wait or 0)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        limit = 0.5 if wait else 30.0  # long where it is not what is tested: the machine may be busy
        sampler = ServerSampler(f"http://127.0.0.1:{listening.getsockname()[1]}", limit)
        sampler.waits = ()  # it is asked once
        start = time.monotonic()
        with pytest.raises(InputError, match=says):
            sampler.post("/v1/completions", {})
    assert time.monotonic() - start < 4


@pytest.mark.parametrize("end", [InputError, KeyboardInterrupt])
def test_nobody_waits_for_a_server_that_hangs(end, served):
    """Two requests: one is never answered, the other is refused, or the user has had enough."""

    def serve():
        with listening.accept()[0], listening.accept()[0] as connection:
            if end is KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            over.wait(30)

    over, before = threading.Event(), signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        sampler = ServerSampler(f"http://127.0.0.1:{listening.getsockname()[1]}", 20.0)
        start = time.monotonic()
        with pytest.raises(end, match="404" if end is InputError else None):
            sampler.sample(served[0], make_prompts(2, 5), 3, generator())
        assert time.monotonic() - start < 10
        over.set()
    signal.signal(signal.SIGINT, before)


def test_all_attempts_have_one_time_limit(served, monkeypatch):
    server = served[1]
    monkeypatch.setattr(Server, "waits", (20.0,))
    server.spoil = lambda *_: (503, "busy")
    start = time.monotonic()
    with pytest.raises(InputError, match="status 503'.* said: busy"):
        ServerSampler(server.address, 1.0).post("/v1/unload_lora_adapter", {"lora_name": "x"})
    assert time.monotonic() - start < 10


def test_unloading_is_not_worth_a_long_wait(served, tmp_path, monkeypatch):
    backbone, server, _ = served
    monkeypatch.setattr("grade.models.samplers.UNLOAD", 0.2)
    monkeypatch.setattr(Server, "waits", (20.0,))
    sampler = make_sampler(server.address, 60.0, tmp_path)
    sampler.publish(backbone)
    server.spoil = lambda *_: (503, "busy")
    start = time.monotonic()
    sampler.close()
    assert time.monotonic() - start < 10 and not list(tmp_path.iterdir())


def test_the_servers_key_is_sent(served, monkeypatch):
    server = served[1]
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    served[2].sample(served[0], one_prompt(1), 1, generator())
    assert server.headers["Authorization"] == "Bearer secret"
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")  # httpx's own error would show it
    with pytest.raises(InputError, match="^VLLM_API_KEY: got 'another character'; allowed: ASCII without spaces"):
        served[2].sample(served[0], one_prompt(1), 1, generator())


def test_a_server_that_takes_no_adapters_says_what_it_needs(served, tmp_path):
    backbone, server, _ = served
    server.spoil = lambda path, status, answer: (404, json.dumps({"detail": "Not Found"}))
    with pytest.raises(InputError, match="load_lora_adapter: got .*404.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        make_sampler(server.address, 30.0, tmp_path).publish(backbone)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="sampler_folder"):
        make_sampler(server.address, 30.0, tmp_path / "file").publish(backbone)


@pytest.mark.parametrize(
    "name",
    ["vllm", "", "http://", "ftp://a", "http://a:b", "http://a:99999", "http://a:0", "http://me:secret@a", "http://a?b",
     "http://a b", "http://[a"],
)  # fmt: skip
def test_what_is_no_sampler_is_one_line_with_what_there_is(name):
    with pytest.raises(InputError, match="sampler: got .*; allowed: own, shared, or .* http://host:port"):
        make_sampler(name)


@pytest.mark.parametrize(
    ("text", "address"),
    [("https://a:8/", "https://a:8"), ("http://a/b/v1/", "http://a/b"), ("http://[::1]:8", "http://[::1]:8")],
)
def test_an_address_is_without_its_end(text, address):
    assert ServerSampler(text).name == address


def test_lengths_are_checked_before_anyone_is_asked(served):
    for name in ("own", "shared", "server"):
        with pytest.raises(InputError, match="context"):
            the(name, served).sample(served[0], one_prompt(1), 61, generator())
        with pytest.raises(InputError, match="min_new_tokens"):
            the(name, served).sample(served[0], one_prompt(1), 2, generator(), 3)


# ---- how far apart ----
def test_the_mismatch_by_hand():
    """Ratios 2, 1 and 1/4 of valid tokens: mean 13/12, largest |log| log 4; the masked token does not count."""
    q = Samples(
        torch.zeros(2, 2).long(), torch.tensor([[1, 1], [1, 0]]), torch.log(torch.tensor([[0.25, 0.5], [0.4, 1]]))
    )
    p = torch.log(torch.tensor([[0.5, 0.5], [0.1, 0.001]]))
    found = q.mismatch(p)
    assert found.mean_ratio == pytest.approx(13 / 12, rel=1e-6)  # float32
    assert found.largest_difference == pytest.approx(np.log(4), rel=1e-6)
    found.check("x", q.logps.dtype, 1.4)
    found._replace(largest_difference=0.9).check("x", torch.bfloat16)
    with pytest.raises(InputError, match=r"= 0.05 nats .* of x "):
        found.check("x", torch.float32)
    with pytest.raises(InputError, match=r"got '1.39 nats at one token, mean ratio 1.08'; .* = 1.3 nats .* of x "):
        found.check("x", q.logps.dtype, 1.3)
    with pytest.raises(InputError, match="nan nats"):
        q.mismatch(p * float("nan")).check("x", q.logps.dtype, 1.0)
