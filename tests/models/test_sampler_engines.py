"""What transformers and a server are asked, and what is made of their answers, one function at a time."""

import http.client
import json
import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import EOS, make_prompts

from grade.errors import InputError
from grade.models.prompts import PromptBatch
from grade.models.samplers import continuous
from grade.models.samplers import http as protocol
from grade.models.samplers import server as module
from grade.models.samplers.continuous import ContinuousBatching, _cheap_collections, _own_random_numbers, _quiet
from grade.models.samplers.http import Client, address_of
from grade.models.samplers.interface import (
    seed_of,
    token_rows,
)
from grade.models.samplers.server import COMPLETIONS, CompletionsServer, _ids, _runs


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


A, END = 3, EOS[0]


# ---- continuous batching ----
class Manager:
    """In place of transformers' manager; ``results`` come one by one, in this order."""

    def __init__(self, results=(), running=True):
        self.results, self.running, self.calls = list(results), running, []

    def add_requests(self, texts, max_new_tokens):
        self.calls.append(("add", texts, max_new_tokens))
        return [f"r{n}" for n in range(len(texts))]

    def start(self):
        self.calls.append("start")

    def get_result(self, timeout):
        return self.results.pop(0) if self.results else None

    def is_running(self):
        return self.running

    def stop(self, hard_stop):
        self.calls.append(("stop", hard_stop))

    def destroy(self):
        self.calls.append("destroy")


def result(number, tokens, finished=True, error=None):
    return SimpleNamespace(
        request_id=f"r{number}", generated_tokens=tokens, logprobs=[-1.0] * len(tokens), error=error,
        is_finished=lambda: finished,
    )  # fmt: skip


def generated(backbone, manager, *arguments):
    asked = []
    backbone.model.init_continuous_batching = lambda *settings: asked.extend(settings) or manager
    try:
        return continuous._generated(backbone, *arguments), asked
    finally:
        del backbone.model.init_continuous_batching


@pytest.mark.parametrize("suppress", [True, False])
@pytest.mark.parametrize("eos", [tuple(EOS), ()])
def test_what_the_manager_is_told(backbone, suppress, eos):
    backbone.eos_token_ids = eos
    manager = Manager([None, result(1, [5, 6]), result(0, [9], False), result(0, [7, 8])])
    rows, (generation, batching) = generated(backbone, manager, [[1] * 14, [2, 3]], 2, 77, suppress)
    assert rows == [([7, 8], [-1.0] * 2), ([5, 6], [-1.0] * 2)]  # in the order of the texts
    assert manager.calls == [("add", [[1] * 14, [2, 3]], 2), "start", ("stop", True), "destroy"]
    assert (generation.do_sample, generation.temperature, generation.top_k, generation.top_p) == (True, 1.0, 0, 1.0)
    assert generation.max_new_tokens == 2
    assert generation.eos_token_id == (list(eos) if eos and not suppress else -1)
    assert generation.suppress_tokens == (list(eos) if eos and suppress else None)
    # 14 + 2 tokens: one page of 16, and one more, for each of two requests.
    assert (batching.page_size, batching.num_blocks, batching.max_batch_tokens) == (16, 2 * 2, 1024)
    assert (batching.max_requests_per_batch, batching.seed, batching.return_logprobs) == (2, 77, True)
    assert batching.allow_block_sharing is False and batching.use_async_batching is False
    assert batching.auto_switch_to_flash is False  # its kernels would come from the hub


@pytest.mark.parametrize(("texts", "length", "batch", "pages"), [(1, 3, 1, 3), (64, 2, 64, 2), (65, 1, 64, 2)])
def test_a_batch_has_room_for_all_of_its_requests(backbone, texts, length, batch, pages):
    manager = Manager([result(n, [5]) for n in range(texts)])
    _, (_, batching) = generated(backbone, manager, [[1] * 14] * texts, length, 0, False)
    assert (batching.max_requests_per_batch, batching.num_blocks) == (batch, batch * pages)


@pytest.mark.parametrize(
    ("manager", "message"),
    [
        (Manager(running=False), "its thread has ended"),
        (Manager([result(0, [], error="too long")]), r"\(too long\)"),
    ],
)
def test_a_manager_that_fails_is_stopped_and_one_line(backbone, manager, message):
    with pytest.raises(InputError, match=f"sampler: got 'transformers'; allowed: a model that it can run .*{message}"):
        generated(backbone, manager, [[1]], 2, 0, False)
    assert manager.calls[-2:] == [("stop", True), "destroy"]


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_a_model_that_the_manager_cannot_run_is_one_line(backbone, kind):
    def refuses(*_):
        raise kind("\n first line\nsecond line")

    backbone.model.init_continuous_batching = refuses
    with pytest.raises(InputError, match=r"a model that it can run \(first line\)$"):
        continuous._generated(backbone, [[1]], 2, 0, False)


@pytest.mark.parametrize(
    ("most", "least", "parts"),
    [(5, 0, [(5, False)]), (5, 2, [(2, True), (3, False)]), (5, 5, [(5, True)]), (1, 1, [(1, True)])],
)
def test_the_first_tokens_are_asked_for_without_an_end(backbone, monkeypatch, most, least, parts):
    asked, prompts = [], make_prompts(2)

    def answer(_, texts, length, seed, suppress):
        asked.append((texts, length, seed, suppress))
        torch.manual_seed(9)
        return [([A + len(asked)] * length, [-float(len(asked))] * length) for _ in texts]

    monkeypatch.setattr(continuous, "_generated", answer)
    state = torch.get_rng_state()
    samples = ContinuousBatching().sample(backbone, prompts, most, generator(4), least)
    assert torch.equal(torch.get_rng_state(), state)  # the manager's seeds are its own
    assert [(length, suppress) for _, length, _, suppress in asked] == parts
    source, rows = generator(4), token_rows(prompts)
    assert [seed for _, _, seed, _ in asked] == [seed_of(source) for _ in parts]
    assert asked[0][0] == rows
    if len(parts) > 1:
        assert asked[1][0] == [row + [A + 1] * least for row in rows]
    want = [A + 1 + n for n, (length, _) in enumerate(parts) for _ in range(length)]
    assert samples.ids.tolist() == [want] * 2
    assert samples.logps.tolist() == [[float(A - token) for token in want]] * 2


def test_random_numbers_of_the_process_go_on_as_if_nothing_had_been_drawn():
    state = torch.get_rng_state()
    with _own_random_numbers(torch.device("cpu")):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_warnings_of_the_manager_are_quiet_meanwhile():
    logger = logging.getLogger(continuous.LOGGER)
    before = logger.level
    with pytest.raises(KeyError), _quiet():
        assert logger.level == logging.ERROR
        raise KeyError
    assert logger.level == before


@pytest.mark.parametrize(("before", "calls"), [(0, ["freeze", "inside", "unfreeze"]), (5, ["inside"])])
def test_objects_are_frozen_meanwhile_unless_someone_else_has_frozen_them(before, calls, monkeypatch):
    seen = []
    collector = SimpleNamespace(
        get_freeze_count=lambda: before, freeze=lambda: seen.append("freeze"), unfreeze=lambda: seen.append("unfreeze")
    )
    monkeypatch.setattr(continuous, "gc", collector)
    with pytest.raises(KeyError), _cheap_collections():
        seen.append("inside")
        raise KeyError
    assert seen == calls


# ---- a server ----
def test_equal_prompts_in_a_row_are_one_request_of_at_most_128_completions():
    assert COMPLETIONS == 128
    a, b = [1, 2], [3]
    assert _runs([a, a, b, a]) == [(a, 2), (b, 1), (a, 1)]
    assert _runs([a] * 128) == [(a, 128)] and _runs([a] * 129) == [(a, 128), (a, 1)]
    assert _runs([a] * 300 + [b] * 2) == [(a, 128), (a, 128), (a, 44), (b, 2)] and _runs([]) == []


@pytest.mark.parametrize(
    ("token_ids", "tokens", "want"),
    [
        ([1, 2], None, [1, 2]), ([1, 2], ["token_id:5"], [1, 2]), ([], ["token_id:5"], []), (None, None, None),
        (None, ["token_id:5", "token_id:17"], [5, 17]), (None, ["token_id:5", "a"], None), ("1", ["token_id:5"], [5]),
        (None, ["token_id:5x"], None), (None, ["xtoken_id:5"], None), (None, [], []), (None, [5], None),
    ],
)  # fmt: skip
def test_token_ids_in_either_place(token_ids, tokens, want):
    assert _ids(token_ids, tokens) == want


class Asked(Client):
    """Keeps requests and answers from a function of the path and the body."""

    def __init__(self, answer):
        super().__init__("http://a:1", 1.0)
        self.answer, self.requests, self.lock = answer, [], threading.Lock()

    def post(self, path, body):
        with self.lock:
            self.requests.append((path, body))
        return self.answer(path, body)


def completions(path, body):
    choices = [
        {"index": n, "token_ids": [A + n] * body["max_tokens"],
         "logprobs": {"token_logprobs": [-1.0] * body["max_tokens"]}}
        for n in reversed(range(body["n"]))
    ]  # fmt: skip
    return json.dumps({"choices": choices})


def a_server(answer=completions, **settings):
    sampler = CompletionsServer("http://a:1", **settings)
    sampler.client = Asked(answer)
    return sampler


def test_every_parameter_is_sent_and_none_changes_the_distribution(backbone):
    prompts, sampler = make_prompts(2).repeat(2), a_server()
    samples = sampler.sample(backbone, prompts, 3, generator(5), 1)
    assert samples.ids.tolist() == [[A] * 3, [A + 1] * 3] * 2
    source, rows = generator(5), token_rows(make_prompts(2))
    seeds = [seed_of(source) for _ in rows]
    want = [
        dict(prompt=row, n=2, seed=seed, max_tokens=3, min_tokens=1, temperature=1.0, stop_token_ids=EOS, top_p=1.0,
             top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, ignore_eos=True,
             logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, skip_special_tokens=False,
             add_special_tokens=False, stream=False)
        for row, seed in zip(rows, seeds, strict=True)
    ]  # fmt: skip
    sent = sorted((body for _, body in sampler.client.requests), key=lambda body: seeds.index(body["seed"]))
    assert sent == want and {path for path, _ in sampler.client.requests} == {"/v1/completions"}
    for one, two in zip(sent, want, strict=True):
        assert {name: type(value) for name, value in one.items()} == {name: type(v) for name, v in two.items()}
    sampler.use("mine")
    sampler.sample(backbone, prompts, 3, generator(5))
    assert sampler.client.requests[-1][1]["model"] == "mine" and sampler.client.requests[-1][1]["min_tokens"] == 0


@pytest.mark.parametrize(("prompts", "workers"), [(1, 1), (5, 5), (64, 64), (70, 64)])
def test_at_most_64_requests_are_under_way(prompts, workers, backbone, monkeypatch):
    pools, pool = [], module.ThreadPoolExecutor
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda most: pools.append(most) or pool(2))
    ids = torch.arange(3, 3 + prompts).unsqueeze(1) % 20 + torch.tensor([[0, 1]])
    batch = PromptBatch(ids, torch.ones_like(ids))
    assert len(a_server().sample(backbone, batch, 1, generator()).ids) == prompts and pools == [workers]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("x" * 200, f"got '{'x' * 100}'; allowed: an answer in JSON"),
        (json.dumps("y" * 200), f"""got '"{"y" * 99}'; allowed: an object with 2 choices"""),
        ('{"choices": [1, 2]}', "an object with 2 choices"),
        ('{"choices": [{"index": 0}]}', "got '1 choices'; allowed: 2 choices with indices 0 to 1"),
        ('{"choices": [{"index": 0}, {"index": "a"}]}', "2 choices with indices 0 to 1"),
        ('{"choices": [{"index": 0}, {}]}', "2 choices with indices 0 to 1"),
        ('{"choices": [{"index": 0, "token_ids": [3]}, {"index": 1}]}', "got 'no log-probabilities'"),
        ('{"choices": [{"index": 0, "logprobs": [1]}, {"index": 1}]}', "got 'text without token ids'"),
        ('{"choices": [{"index": 0, "prompt_token_ids": [2]}, {"index": 1}]}', r"got 'prompt_token_ids \[2\]'"),
        ('{"choices": [{"index": 0, "prompt_token_ids": null}, {"index": 1}]}', "got 'text without token ids'"),
        ('{"choices": [{"index": 0, "prompt_token_ids": [1]}, {"index": 1}]}', "got 'text without token ids'"),
    ],
)
def test_an_answer_that_is_none_is_named(answer, message):
    sampler = a_server(lambda path, body: answer)
    with pytest.raises(InputError, match=f"sampler http://a:1: .*{message.removeprefix('got ')}"):
        sampler._completions({"prompt": [1], "n": 2})


def test_an_adapter_is_published_under_a_new_name_and_the_one_before_goes(backbone, tmp_path):
    seen = []

    def answer(path, body):
        place = body.get("lora_path")
        files = sorted(p.name for p in module.Path(place).iterdir()) if place else None
        mode = oct(module.Path(place).stat().st_mode & 0o777) if place else None
        seen.append((path, body["lora_name"], files and "adapter_config.json" in files, mode))
        return "ok"

    sampler = a_server(answer, folder=tmp_path / "a" / "b")
    first, second = sampler.publish(backbone), sampler.publish(backbone)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert seen == [(load, first, True, "0o755"), (load, second, True, "0o755"), (unload, first, None, None)]
    assert first != second and len(first) == len("grade-") + 16 and sampler.model == second
    (left,) = (tmp_path / "a" / "b").iterdir()
    sampler.close()
    assert seen[3:] == [(unload, second, None, None)] and not left.exists()
    sampler.close()
    assert len(seen) == 4 and sampler._loaded is None


def test_an_adapter_that_is_not_taken_leaves_the_one_before(backbone, tmp_path):
    refuse = []

    def answer(path, body):
        if refuse:
            raise InputError("sampler: POST", "status 404", "an answer with status 200")
        return "ok"

    sampler = a_server(answer, folder=tmp_path)
    first = sampler.publish(backbone)
    refuse.append(True)
    with pytest.raises(InputError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        sampler.publish(backbone)
    assert sampler.model == first and sampler._loaded[0] == first and list(tmp_path.iterdir()) == [sampler._loaded[1]]
    sampler.close()  # a server that is gone is no error
    assert not list(tmp_path.iterdir())


# ---- the protocol ----
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://a", "http://a"), ("https://a:8/", "https://a:8"), ("http://a:8/v1", "http://a:8"),
        ("http://a/b/v1/", "http://a/b"), ("http://a/b/", "http://a/b"), ("http://[::1]:8", "http://[::1]:8"),
        ("http://a/v1/b", "http://a/v1/b"),
    ],
)  # fmt: skip
def test_an_address_is_without_its_end(text, address):
    assert address_of(text) == address


@pytest.mark.parametrize(
    "text",
    ["http://a:0", "http://a#b", "http://a?", "http://:pw@a", "http://u@a", "http://ä", "http://a\tb", "http://a\x01",
     "http://[a", "http://a:-1", "//a"],
)  # fmt: skip
def test_what_is_no_address(text):
    if text == "http://a?":
        assert address_of(text) == "http://a"  # nothing follows
        return
    with pytest.raises(InputError, match="sampler: got"):
        address_of(text)


class Connection:
    """In place of a connection: what is asked, and what is answered."""

    made = []

    def __init__(self, host, port, timeout):
        self.made.append([type(self).__name__, host, port, timeout])

    def request(self, method, path, body, headers):
        self.made[-1].append((method, path, body, headers))
        if isinstance(self.answer, Exception):
            raise self.answer

    def getresponse(self):
        status, content = self.answer
        return SimpleNamespace(status=status, read=lambda most: content[:most])

    def close(self):
        self.made[-1].append("closed")


@pytest.fixture
def connections(monkeypatch):
    Connection.made = []
    monkeypatch.setattr(http.client, "HTTPConnection", type("Plain", (Connection,), {}))
    monkeypatch.setattr(http.client, "HTTPSConnection", type("Secure", (Connection,), {}))
    monkeypatch.delenv(protocol.KEY, raising=False)
    return Connection


def test_a_request_goes_to_the_address_that_was_named(connections, monkeypatch):
    connections.answer = (200, "ä".encode() + b"\xff")
    headers = {"Content-Type": "application/json"}
    assert Client("http://a:8/b", 3.5).post("/v1/x", {"n": 1}) == "ä\ufffd"
    monkeypatch.setenv(protocol.KEY, "secret")
    Client("https://a", 3.5).post("/v1/x", {"n": 1})
    assert connections.made == [
        ["Plain", "a", 8, 3.5, ("POST", "/b/v1/x", b'{"n": 1}', headers), "closed"],
        ["Secure", "a", None, 3.5,
         ("POST", "/v1/x", b'{"n": 1}', headers | {"Authorization": "Bearer secret"}), "closed"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "attempts", "message"),
    [
        ((429, b"a"), 3, "status 429: a"), ((502, b"a"), 3, "status 502"), ((503, b"a"), 3, "status 503"),
        ((504, b"a"), 3, "status 504"), ((500, b"a"), 1, "status 500: a"), ((201, b"a"), 1, "status 201"),
        ((404, b"x" * 400), 1, "status 404: xxx.*; allowed: an answer with status 200"),
        (ConnectionResetError("gone"), 3, "ConnectionResetError: gone"),
        (http.client.BadStatusLine("z"), 3, "BadStatusLine: z"), (TimeoutError(), 1, "no answer for 3.5 s"),
    ],
)  # fmt: skip
def test_only_what_may_pass_is_asked_again(answer, attempts, message, connections, monkeypatch):
    waited = []
    monkeypatch.setattr(protocol.time, "sleep", waited.append)
    connections.answer = answer
    with pytest.raises(InputError, match=f"sampler: POST http://a/x: .*{message}") as caught:
        Client("http://a", 3.5).post("/x", {})
    if message.startswith("status 404"):
        assert caught.value.value == "status 404: " + 288 * "x"  # the beginning of the answer
    assert waited == [0.5, 2.0][: attempts - 1] and len(connections.made) == attempts
    assert all(made[-1] == "closed" for made in connections.made)


def test_an_answer_has_a_largest_size(connections, monkeypatch):
    assert protocol.LARGEST == 2**30  # a gibibyte
    monkeypatch.setattr(protocol, "LARGEST", 4)
    connections.answer = (200, b"abcd")
    assert Client("http://a", 3.5).post("/x", {}) == "abcd"
    connections.answer = (200, b"abcde")
    with pytest.raises(InputError, match="got 'more than 4 bytes'; allowed: a shorter answer"):
        Client("http://a", 3.5).post("/x", {})
