"""Completions from a file: the same tokens as were sampled, and one clear error for each line that is none."""

import json

import pytest
import torch

from grade.errors import InputError
from grade.gradients.completions import read_completions
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import replay
from grade.models.prompts import encode_prompts
from grade.models.sampling import generate
from grade.training.toy import toy_task


@pytest.fixture(scope="module")
def task():
    return toy_task()


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_another_engines_tokens_come_back_and_give_a_gradient(task, tmp_path):
    policy, texts = task.backbone, task.validation_prompts[:4]
    prompts = encode_prompts(policy.tokenizer, texts, 6)
    ids, mask = generate(policy, prompts, 5, torch.Generator().manual_seed(0))
    rows = [{"prompt": t, "completion_ids": i[m.bool()].tolist()} for t, i, m in zip(texts, ids, mask, strict=True)]
    found = read_completions(write(tmp_path / "samples.jsonl", *rows), policy, 6)
    assert torch.equal(found[0].ids, prompts.ids) and torch.equal(found[0].mask, prompts.mask)
    width = found[1].shape[1]
    assert torch.equal(found[1], (ids * mask)[:, :width]) and torch.equal(found[2], mask[:, :width])
    assert read_completions(tmp_path / "samples.jsonl", policy, 6, 2)[1].shape == (4, 2)

    config = RelaxationConfig(estimator="ste", gumbel_topk=8, max_new_tokens=5)
    generator = torch.Generator().manual_seed(1)
    replay(policy, found[0], Objective(task.reward_model), config, generator, completions=found[1:])
    assert all(p.grad.isfinite().all() for p in policy.trainable_parameters())
    assert sum(p.grad.norm() for p in policy.trainable_parameters()) > 0


def test_text_is_tokenised_without_special_tokens(task, tmp_path):
    tokenizer, text = task.backbone.tokenizer, task.train_prompts[0]
    short = {"prompt": text, "completion": text[:4]}
    path = write(tmp_path / "samples.jsonl", {"prompt": text, "completion": text}, "", short)
    _, ids, mask = read_completions(path, task.backbone, 4)
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0].tolist() == wanted and mask[0].all()
    assert ids[1][mask[1].bool()].tolist() == tokenizer(text[:4], add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("no JSON", r"line 2: got 'no JSON'; allowed: a JSON object"),
        ({"prompt": "a"}, r'line 2: .* with "completion": text or "completion_ids"'),
        ({"prompt": "a", "completion": "b", "completion_ids": [5]}, "line 2: "),
        ({"completion": "b"}, "line 2: "),
        ({"prompt": "a", "completion": 5}, "line 2, completion: got 5; allowed: text"),
        ({"prompt": "a", "completion": ""}, "line 2, completion: got 'empty'"),
        ({"prompt": "a", "completion_ids": "5"}, "line 2, completion_ids: .* a list of token ids"),
        ({"prompt": "a", "completion_ids": []}, "line 2, completion_ids: got 'empty'"),
        (
            {"prompt": "a", "completion_ids": [10**6]},
            r"completion tokens: got \[1000000\]; allowed: ids of",
        ),
        ({"prompt": " ", "completion_ids": [5]}, "prompt: got ' '"),
    ],
)
def test_a_line_that_does_not_fit_is_named(task, tmp_path, row, message):
    # A blank line is skipped, and counted.
    path = write(tmp_path / "samples.jsonl", "", row)
    with pytest.raises(InputError, match=message):
        read_completions(path, task.backbone, 4)


def test_a_tokenizer_that_does_not_know_a_word_and_files_without_lines(task, tmp_path):
    row = write(tmp_path / "samples.jsonl", {"prompt": "a", "completion": "b"})
    tokenizer = task.backbone.tokenizer
    known = tokenizer("b", add_special_tokens=False)["input_ids"][0]
    before, tokenizer.unk_token = tokenizer.unk_token, tokenizer.convert_ids_to_tokens(known)
    try:
        with pytest.raises(InputError, match="text that the policy's tokenizer knows"):
            read_completions(row, task.backbone, 4)
    finally:
        tokenizer.unk_token = before
    with pytest.raises(InputError, match="completions: got .*missing"):
        read_completions(tmp_path / "missing", task.backbone, 4)
    with pytest.raises(InputError, match="at least one line"):
        read_completions(write(tmp_path / "none", ""), task.backbone, 4)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="text in UTF-8"):
        read_completions(tmp_path / "latin", task.backbone, 4)
