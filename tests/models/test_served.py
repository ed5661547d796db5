"""A teacher behind a server: what it is asked, what it says, and one clear error for each way to be wrong."""

import socket

import pytest
import torch
from completions_server import serving
from conftest import EOS, VOCAB, make_backbone, make_prompts, save_toy_base, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.scoring import predicting_hidden
from grade.models.served import ServedModel
from grade.models.teacher import make_teacher

IDS = torch.tensor([[5, 6, 3], [8, EOS[0], 0], [11, 3, 9]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model in float64, and a server that has it."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float64).save_pretrained(folder)
    with serving(folder, dtype=torch.float64) as server:
        yield folder, server


@pytest.fixture(autouse=True)
def honest(served):
    yield
    served[1].spoil, served[1].tokenizer, served[1].longest = None, None, 64
    served[1].adapters.clear()


def of(teacher, backbone):
    """Divergences of a policy with their gradient."""
    prompts = make_prompts(3, 6)
    hidden = predicting_hidden(backbone, prompts, IDS)
    each = teacher.divergence(hidden, teacher.hidden(prompts, IDS, MASK), MASK)
    return each, torch.autograd.grad(each.sum(), hidden)[0]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_with_every_token_it_is_the_same_teacher_as_here_and_with_fewer_no_further_away(served, beta):
    folder, server = served
    backbone = make_backbone()
    here = make_teacher(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), backbone, beta=beta)
    want = of(here, backbone)
    there = make_teacher(server.address, backbone, beta=beta, topk=VOCAB)
    for got, expected in zip(of(there, backbone), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    assert want[0].max() > 0.1
    few = make_teacher(server.address, backbone, beta=beta, topk=4)
    each, _ = of(few, backbone)
    assert (each <= want[0] + 1e-9).all() and (each > 0)[MASK.bool()].all() and each[1, 2] == 0
    prompts, valid = make_prompts(3, 6), MASK.bool()
    logq = here.head(here.hidden(prompts, IDS)).log_softmax(-1)
    logp = backbone.head(predicting_hidden(backbone, prompts, IDS)).log_softmax(-1)
    inside = torch.zeros_like(logq).scatter_(2, logq.topk(4).indices, 1.0).scatter_(2, IDS.unsqueeze(2), 1.0)
    for name, logs in (("teacher", logq), ("policy", logp)):
        rest = (logs.exp() * (1 - inside)).sum(-1)[valid].mean()
        torch.testing.assert_close(few.figures[0][f"teacher/rest_{name}"], rest.detach(), rtol=0, atol=1e-9)


def test_a_text_goes_there_once_without_its_padding(served):
    _, server = served
    teacher = make_teacher(server.address, make_backbone(), topk=4)
    prompts, rows = make_prompts(3, 6), [0, 0, 1, 2]
    del server.requests[:]
    several = teacher.hidden(prompts[rows], IDS[rows], MASK[rows])
    bodies = [body for _, body in server.requests]
    want = [prompt + ids[mask.bool()].tolist() for prompt, ids, mask in zip(prompts.rows(), IDS, MASK, strict=True)]
    assert sorted(body["prompt"] for body in bodies) == sorted(want)
    assert {(body["model"], body["prompt_logprobs"], body["max_tokens"]) for body in bodies} == {("base", 4, 1)}
    again = teacher.hidden(prompts, IDS, MASK)  # as the gradient of a reward that has been scored
    assert len(server.requests) == 3
    assert all(torch.equal(one[1:], other) for one, other in zip(several, again, strict=True))
    teacher.hidden(prompts, IDS.flip(1))
    assert len(server.requests) == 6


def test_the_model_of_several(served):
    """The base, whatever has been loaded beside it, or the one that is named; it is known by its name everywhere."""
    folder, server = served
    backbone = make_backbone()
    base = make_teacher(server.address + "/v1/", backbone)
    server.adapters["other"] = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float64).eval()
    again, other = (make_teacher(server.address + end, backbone) for end in ("", "#other"))
    assert (base.served.model, again.served.model, other.served.model) == ("base", "base", "other")
    assert base.fingerprint() == again.fingerprint() != other.fingerprint()
    assert base.fingerprint() != make_teacher(server.address, backbone, topk=3).fingerprint()
    assert other.served.max_positions == base.served.max_positions == 62
    assert (of(base, backbone)[0] - of(other, backbone)[0]).abs().max() > 0.1
    alias = make_teacher(server.address + "#alias", backbone)
    assert torch.equal(of(alias, backbone)[0], of(base, backbone)[0])
    with pytest.raises(InputError, match="teacher: got .*#nobody'; allowed: a model of the server: base, alias, other"):
        make_teacher(server.address + "#nobody", backbone)


def places(change):
    """Change what is said of the last token."""

    def spoil(path, status, answer):
        if path == "/v1/completions":
            change(answer["choices"][0]["prompt_logprobs"])
        return status, answer

    return spoil


def answers(change, path="/v1/completions"):
    return lambda asked, status, answer: change(answer) if asked == path else (status, answer)


def last(**values):
    return places(lambda rows: rows[-1].update({"3": {"logprob": values["logprob"]}}))


WRONG = {
    "no prompt_logprobs": (answers(lambda a: (200, {"choices": [{}]})), "choices.0.prompt_logprobs: Field required"),
    "no choice": (answers(lambda a: (200, {"choices": []})), "choices: List should have at least 1"),
    "too short": (places(lambda rows: rows.pop()), "[678] prompt_logprobs'; allowed: one of each token, [789]"),
    "none of a token": (places(lambda rows: rows.__setitem__(-1, None)), "without token .*the text's own token among"),
    "NaN": (last(logprob=float("nan")), "3.logprob: Input should be a finite number"),
    "fewer": (places(lambda rows: [rows[-1].pop(key) for key in list(rows[-1])[2:]]), "got '2 prompt_log.*: 4 .*topk"),
    "more": (
        places(lambda rows: rows[-1].update({str(n): {"logprob": -30.0} for n in range(9)})), "of a token'; .*: 4"
    ),
    "another vocabulary": (
        places(lambda rows: rows[-1].update({str(VOCAB): rows[-1].popitem()[1]})), f"token {VOCAB}'"
    ),
    "no distribution": (places(lambda rows: [v.update(logprob=-0.1) for v in rows[-1].values()]), "with the sum 4.5"),
    "no mass": (places(lambda rows: [v.update(logprob=-9999.0) for v in rows[-1].values()]), "the sum 0'.*none of"),
    "not the likeliest": (
        places(lambda rows: [rows[-1][key].update(logprob=-8.0) for key in list(rows[-1])[1:]]), "the sum 0.*none of"
    ),
    "logits": (places(lambda rows: [v.update(logprob=7.0) for v in rows[-1].values()]), "less than or equal to 1"),
    "another prompt": (
        answers(lambda a: (200, {"choices": [a["choices"][0] | {"prompt_token_ids": [1]}]})), r"ids \[1\]'; .*text"
    ),
    "another model": (
        answers(lambda a: (200, a | {"model": "other"})), "got 'model other'; allowed: model base, which was asked for"
    ),
    "too many asked for": (
        answers(lambda a: (400, "Requested prompt logprobs of 4, which is greater than max allowed: 3")),
        "status 400'; .*--max-logprobs >= teacher_topk.*said: .*max allowed: 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_servers_answer_is_checked(case, served):
    _, server = served
    teacher = make_teacher(server.address, make_backbone(), topk=4)
    server.spoil, says = WRONG[case]
    with pytest.raises(InputError, match=f"teacher.*{says}") as error:
        teacher.hidden(make_prompts(3, 6), IDS, MASK)
    assert server.address in str(error.value)


def test_what_is_no_server_of_models(served):
    _, server = served
    for content in ("[]", '{"data": []}', '{"data": [{"name": "x"}]}'):
        server.spoil = answers(lambda a, content=content: (200, content), "/v1/models")
        with pytest.raises(InputError, match="teacher http://.*; allowed: a list of models, as vLLM's"):
            make_teacher(server.address, make_backbone())
    server.spoil = answers(lambda a: (404, "Not Found"), "/v1/models")
    with pytest.raises(InputError, match="teacher: GET http://.*/v1/models: got 'status 404'"):
        make_teacher(server.address, make_backbone())
    with pytest.raises(InputError, match="teacher: got 'http://a:b'; allowed: the address of a server"):
        make_teacher("http://a:b", make_backbone())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(InputError, match=r"teacher: GET .*no answer for 0.2 s.* sampler_timeout"):
            ServedModel(f"http://127.0.0.1:{silent.getsockname()[1]}", 4, VOCAB, 0.2)


def test_what_a_server_cannot_do(served):
    _, server = served
    backbone = make_backbone()
    with pytest.raises(InputError, match="temperature: got 0.7; allowed: 1.0 with a teacher behind a server"):
        make_teacher(server.address, backbone.view(temperature=0.7))
    with pytest.raises(InputError, match="teacher_dtype: got 'bfloat16'; allowed: None with a teacher behind a server"):
        make_teacher(server.address, backbone, dtype="bfloat16")
    with pytest.raises(InputError, match=f"teacher_topk: got 24; allowed: at most the policy's {VOCAB} tokens"):
        make_teacher(server.address, backbone, topk=24)
    server.spoil = places(lambda rows: [value.update(logprob=value["logprob"] - 1.0) for value in rows[-1].values()])
    with pytest.raises(InputError, match="probabilities with the sum 0.3679'; allowed: 1, or less of some tokens"):
        make_teacher(server.address, backbone, topk=VOCAB).hidden(make_prompts(3, 6), IDS, MASK)
    server.spoil, server.longest = None, 0
    with pytest.raises(InputError, match="got 0; .*data.0.max_model_len: Input should be greater"):
        make_teacher(server.address, backbone)
    server.longest = 10
    teacher = make_teacher(server.address, backbone, topk=4)
    teacher.hidden(make_prompts(3, 6), IDS, MASK)  # 9 tokens, and one that is written
    with pytest.raises(InputError, match="teacher: got .*; allowed: at most 8 tokens, the teacher's context, not 9"):
        teacher.hidden(make_prompts(3, 7), IDS, MASK)


def test_tokens_of_prompts_are_compared_where_the_server_tells_them(served, tmp_path):
    _, server = served
    task = save_toy_base(tmp_path)
    policy, rows = Backbone.load(tmp_path), [{"prompt": text} for text in task.train_prompts[:3]]
    del server.requests[:]
    make_teacher(server.address, policy, rows=rows, topk=3)  # 404
    assert [path for path, _ in server.requests].count("/tokenize") == 3
    server.tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    make_teacher(server.address, policy, rows=rows, topk=3)
    asked = [body for path, body in server.requests if path == "/tokenize"][3:]
    want = [policy.tokenizer.decode(policy.tokenizer(row["prompt"])["input_ids"]) for row in rows]
    assert sorted(body["prompt"] for body in asked) == sorted(want)
    server.spoil = answers(lambda a: (200, {"tokens": a["tokens"][:2] + [5, 5]}), "/tokenize")
    with pytest.raises(
        InputError, match=r"renders prompts .*: row 0 goes on with .* after token 2 for .* \[5, 5\] for"
    ):
        make_teacher(server.address, policy, rows=rows, topk=3)


def test_a_divergence_of_unequal_texts_has_no_part_of_their_padding(served):
    """A row alone and among longer ones, with an end in the middle."""
    _, server = served
    backbone, prompts = make_backbone(), make_prompts(3, 6)
    teacher = make_teacher(server.address, backbone, topk=4)
    together, _ = of(teacher, backbone)
    one = predicting_hidden(backbone, prompts[[1]], IDS[[1], :2])
    alone = teacher.divergence(one, teacher.hidden(prompts[[1]], IDS[[1], :2]), MASK[[1], :2])
    torch.testing.assert_close(together[[1], :2], alone, rtol=0, atol=1e-9)
