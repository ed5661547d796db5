"""Runs with a teacher: alone, beside a reward, along text; what they refuse."""

import json

import pandas as pd
import pytest
import torch
from completions_server import serving
from conftest import make_prompts, perturb_adapter, save_toy_base
from training.runs import toy_project
from training.test_offline import TEXTS, more_w_than_s
from training.test_offline import trainer as offline_trainer
from transformers import AutoModelForCausalLM

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.base import FrozenBase
from grade.models.scoring import predicting_hidden
from grade.models.teacher import make_teacher
from grade.training.config import TrainConfig
from grade.training.run import train
from grade.training.toy import toy_task


def trainer(output, reward=None, task=None, texts=None, **changes):
    own = dict(method="auto", min_completion_length=0, per_device_train_batch_size=16, max_steps=12, target_kl=None)
    return offline_trainer(output, reward, texts, task, **own | changes)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A folder of an adapter that says "w"."""
    folder = tmp_path_factory.mktemp("taught")
    run = trainer(folder, more_w_than_s, method="rloo", num_generations=8, max_steps=10)
    run.train()
    run.backbone.save_adapter(folder / "adapter")
    return str(folder / "adapter")


@pytest.mark.parametrize(
    "changes", [{}, {"lmbda": 0.5, "teacher_beta": 0.5}, {"lmbda": 0.0, "teacher_beta": 0.0}], ids=str
)
def test_alone_it_is_learned_along_own_completions_and_text(tmp_path, taught, changes):
    run = trainer(tmp_path, teacher=taught, texts=TEXTS if changes else None, **changes)
    before = run.evaluate()["eval_reward"]
    run.train()
    assert run.args.method == "teacher" and "value of every token" in run.chosen["method"]
    assert run.evaluate()["eval_reward"] > before / 2  # minus the divergence, which at least halves
    assert {"reward", "loss"} <= run.state.log_history[0].keys() and "kl" not in run.state.log_history[0]
    drawn = max(row.get("num_samples", 0) for row in run.state.log_history)
    assert drawn == 192 * run.args.lmbda if run.args.lmbda in (0, 1) else 0 < drawn < 192


def test_a_merged_adapter_has_for_itself_only_the_weights_that_it_changed(tmp_path):
    task, other = toy_task(), perturb_adapter(toy_task().backbone, seed=4)
    base, prompts, ids = task.backbone, make_prompts(3), torch.tensor([[5, 6], [8, 9], [11, 3]])
    changed = {name.replace(".base_layer", "") for name, _ in base.model.named_parameters() if ".base_layer" in name}
    want = predicting_hidden(FrozenBase(merged := other.peft.merge_and_unload()), prompts, ids)
    merged.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    teacher = make_teacher(tmp_path, base)
    shared = {p.data_ptr() for p in base.model.parameters()}
    assert {name for name, p in teacher.own.model.named_parameters() if p.data_ptr() not in shared} == changed
    with base.merged():  # which puts other values in the place of the base's
        assert teacher.hidden(prompts, ids).equal(want)


def test_beside_a_reward_it_is_one_of_its_parts(tmp_path, taught):
    run = trainer(
        tmp_path, more_w_than_s, method="rloo", num_generations=8, teacher=taught, teacher_weight=0.5, max_steps=2
    )
    run.train()
    row = run.state.log_history[0]
    parts = row["rewards/more_w_than_s/mean"] + 0.5 * row["rewards/teacher/mean"]
    assert row["reward"] == pytest.approx(parts, rel=1e-5) and row["rewards/teacher/mean"] < 0


def test_a_context_is_for_the_teacher_alone_and_a_run_goes_on_where_it_was(tmp_path):
    settings = dict(teacher="base", teacher_context="a {tone} film ", save_strategy="steps", save_steps=2, max_steps=4)
    trainer(tmp_path / "one", **settings).train()
    whole = trainer(tmp_path / "one", **settings)
    whole.train(str(tmp_path / "one" / "checkpoint-2"))
    rows = [[r["reward"] for r in run.state.log_history if "reward" in r] for run in (whole,)]
    assert rows[0][0] < 0 and len(rows[0]) == 4
    other = trainer(tmp_path / "one", **settings | {"teacher_context": "a good film "})
    with pytest.raises(InputError, match="teacher_context: got"):
        other.train(str(tmp_path / "one" / "checkpoint-2"))


@pytest.mark.parametrize("by", ["teacher", "sibling"])
def test_with_the_family_hinted_it_predicts_rewards_and_is_none(tmp_path, taught, by):
    hinted = dict(distil_families=["counts", "hinted"], num_generations=4, residual_weight=1.0, save_strategy="steps")
    settings = dict(teacher=taught, max_steps=6, save_steps=3, logging_steps=1) | hinted
    if by == "sibling":
        settings |= {"teacher": "base", "teacher_context": "{sibling} ", "residual_weight": "auto"}
    run = trainer(tmp_path, more_w_than_s, **settings)
    run.train()
    rows = [row for row in run.state.log_history if "reward" in row]
    assert run.args.method == "distilled" and "predict rewards" in run.chosen["teacher"]
    assert run.rewards.names == ["more_w_than_s"] and "distilled/r2/hinted" in rows[-1]
    assert by == "sibling" or rows[-1]["distilled/r2/hinted"] > 0
    again = trainer(tmp_path, more_w_than_s, **settings)
    again.train(str(tmp_path / "checkpoint-3"))
    assert [row["reward"] for row in again.state.log_history if "reward" in row] == [row["reward"] for row in rows]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the base of `toy_task`."""
    folder = tmp_path_factory.mktemp("served")
    save_toy_base(folder)
    with serving(folder) as made:
        made.tokenizer, made.longest = Backbone.load(folder).tokenizer, 512
        yield made


def rewards(run):
    run.train()
    return [row["reward"] for row in run.state.log_history if "reward" in row]


@pytest.mark.parametrize(
    "changes",
    [{}, {"teacher_beta": 0.5, "lmbda": 0.5, "texts": TEXTS},
     {"method": "rloo", "num_generations": 8, "reward": more_w_than_s}],
    ids=["alone", "along texts", "beside a reward"],
)  # fmt: skip
def test_a_server_that_tells_of_every_token_teaches_as_the_model_does_here(tmp_path, server, changes):
    """The policy's base, with a context. Both runs are in float32, through other passes of the same weights."""
    task = toy_task()
    args = dict(max_steps=3, teacher_context="a sad film ") | changes
    here = trainer(tmp_path, task=task, teacher="base", **args)
    there = dict(teacher=server.address, teacher_topk=task.backbone.vocab_size)
    there = trainer(tmp_path, task=toy_task(), **there, **args)
    assert rewards(there) == pytest.approx(rewards(here), abs=1e-4)
    assert there.state.log_history[0]["teacher/rest_policy"] == 0 != rewards(here)[0]


def test_of_a_servers_likeliest_tokens_a_policy_learns_and_a_run_goes_on_at_another_address(tmp_path, server, caplog):
    folder = str(tmp_path / "run")
    settings = dict(teacher=server.address, teacher_context="a {tone} film ", teacher_topk=8, max_steps=12,
                    save_strategy="steps", save_steps=6)  # fmt: skip
    whole = trainer(folder, task=toy_task(), **settings)
    assert "of base's 8 likeliest tokens and the rest as one" in whole.chosen["teacher"]
    before = whole.evaluate()["eval_reward"]
    want = rewards(whole)
    assert before < 0 and whole.evaluate()["eval_reward"] > before / 2
    row = whole.state.log_history[1]
    assert 0 < row["teacher/rest_policy"] < 1 and 0 < row["teacher/rest_teacher"] < 1
    with serving(server.folder) as other:
        other.longest = 512
        resumed = trainer(folder, task=toy_task(), **settings | {"teacher": other.address})
        resumed.train(f"{folder}/checkpoint-6")
        assert [row["reward"] for row in resumed.state.log_history if "reward" in row] == pytest.approx(want, rel=1e-5)
        another = trainer(folder, task=toy_task(), **settings | {"teacher": other.address, "teacher_topk": 4})
        with pytest.raises(InputError, match="teacher_topk: got 4"):
            another.train(f"{folder}/checkpoint-6")
        other.spoil = lambda path, status, answer: (status, answer) if "models" not in path else (
            200, {"data": [{"id": "x"}]})  # fmt: skip
        another = trainer(folder, task=toy_task(), **settings | {"teacher": other.address})
        with pytest.raises(InputError, match="teacher's weights"):
            another.train(f"{folder}/checkpoint-6")


def test_what_a_server_is_refused_for(tmp_path, server):
    for changes, says in (
        ({"distil_families": ["hinted"], "reward": more_w_than_s}, "teacher: got .*; allowed: base or another model w"),
        ({"temperature": 0.5}, "temperature: got 0.5; allowed: 1.0 with a teacher behind a server"),
        ({"teacher": "base", "teacher_topk": 4}, "teacher_topk: got 4; allowed: another value .* only with a server"),
        ({"teacher": None, "teacher_topk": 4, "reward": more_w_than_s}, "teacher_topk: got 4; allowed: .* a teacher"),
    ):
        with pytest.raises(InputError, match=says):
            trainer(tmp_path, task=toy_task(), **{"teacher": server.address} | changes)


def test_a_run_from_files_needs_no_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = {name: value for name, value in toy_project(tmp_path).items() if name not in ("reward", "gold")}
    train(TrainConfig.parse(common | {"teacher": "base", "teacher_context": "a good film. ", "output_dir": "run"}))
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    history = pd.read_csv(tmp_path / "run" / "history.csv")
    assert "trained with `teacher`" in card and "- reward: `teacher`" in card
    assert history["val/reward_mean"].iloc[-1] > history["val/reward_mean"].iloc[0]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"teacher": "nowhere"}, "teacher: got 'nowhere'; allowed: a local folder or hub id"),
        ({"teacher": "base", "teacher_context": "{nothing}"}, "teacher_context: got .*{prompt}, {tone}"),
        ({"teacher": "base", "teacher_context": "a " * 500}, "teacher_context: got .*the teacher's context"),
        ({"teacher": "base", "teacher_dtype": "float16"}, "teacher_dtype: got 'float16'; .* for another model"),
        ({"teacher": "base", "teacher_weight": 0.5}, "teacher_weight: got 0.5; allowed: .* not with teacher"),
        ({"teacher": "base", "own_completions": 32}, "own_completions: got 32; allowed: .* not with teacher"),
        ({"teacher": "base", "method": "ste"}, "teacher: got 'base'; allowed: none with ste"),
        ({"teacher": "base", "method": "teacher", "reward": more_w_than_s}, "method: got 'teacher'; allowed: dist"),
        ({"teacher": "base", "lmbda": 0.5, "target_kl": 1.0}, "lmbda: got 0.5; allowed: 1 with a target_kl"),
        ({"teacher": "base", "lmbda": 0.5}, "lmbda: got 0.5; allowed: 1 without texts"),
        ({"teacher": "base", "texts": TEXTS}, "lmbda: got 1.0; allowed: below 1 with texts"),
        ({"teacher": "base", "texts": TEXTS, "reward": more_w_than_s}, "texts: got 'given'; allowed: none beside a"),
        ({"teacher_context": "x", "reward": more_w_than_s}, "teacher_context: got 'x'; allowed: .* with a teacher"),
        ({"method": "teacher", "reward": more_w_than_s}, "teacher: got None; allowed: a model"),
        ({"distil_families": ["hinted"], "reward": more_w_than_s}, "teacher: got None; allowed: base, or another"),
        ({"distil_families": ["hinted"], "method": "distilled", "teacher": "base"}, "reward: got None; allowed: a rew"),
        ({"distil_families": ["hinted"], "teacher_weight": 2.0, "teacher": "base"}, "teacher_weight: got 2.0; allowed"),
        ({"teacher": "base", "teacher_context": "{sibling}: "}, "teacher_context: got .*{sibling} with family hinted"),
        ({"distil_families": ["hinted"], "teacher": "base", "teacher_context": "{sibling}: ", "residual_weight": 1,
          "reward": more_w_than_s}, "residual_weight: got 1; allowed: auto or less with {sibling}"),
        ({"distil_families": ["hinted"], "teacher": "base", "substitutions": 1, "reward": more_w_than_s},
         "distil_families: got 'hinted'; allowed: counts, bag, ngrams, values with substitutions"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        trainer(tmp_path, **changes)


def test_a_teacher_without_a_row_for_each_of_the_policys_tokens_is_refused(tmp_path):
    tokenizer, added = save_toy_base(tmp_path).backbone.tokenizer, tmp_path / "added"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer.add_tokens("<added>")
    for folder in (tmp_path, added):  # the teacher has no such token; it has, but no row of its table
        model.save_pretrained(folder)
    tokenizer.save_pretrained(added)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    policy = Backbone(model, tokenizer)
    for folder in (tmp_path, added):
        with pytest.raises(InputError, match=f"token {len(tokenizer) - 1}, '<added>', is not in both"):
            make_teacher(folder, policy)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path)
    alone.name_or_path = ""
    with pytest.raises(InputError, match=f"teacher '.*': tokens of the tokenizer: got {len(tokenizer)}; allowed: at"):
        make_teacher(alone, policy)


def test_a_teacher_that_reads_other_tokens_is_refused(tmp_path):
    task = save_toy_base(tmp_path)
    policy, rows = Backbone.load(tmp_path), [{"prompt": text} for text in task.train_prompts]
    assert make_teacher(tmp_path, policy, rows=rows).own is not None
    file, token = tmp_path / "tokenizer.json", policy.tokenizer.convert_ids_to_tokens(9)
    rules = json.loads(file.read_text())
    file.write_text(json.dumps(rules | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(
        InputError, match="teacher: got .*; allowed: a model that renders prompts .*: row 0 goes on with"
    ):
        make_teacher(tmp_path, policy, rows=rows)
    rules["model"]["vocab"]["@@"] = rules["model"]["vocab"].pop(token)
    file.write_text(json.dumps(rules))
    with pytest.raises(InputError, match="teacher: got .*; allowed: a model with the policy's vocabulary: token 9"):
        make_teacher(AutoModelForCausalLM.from_pretrained(tmp_path), policy)
