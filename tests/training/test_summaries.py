"""Evaluations, metrics, tables and cards made of them: their parts at the edges of what they take."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grade.errors import InputError
from grade.training import card, load, toy
from grade.training.config import TrainConfig
from grade.training.evaluate import Evaluation, Sampling, check_finite, evaluate
from grade.training.order import FirstRows, named_sets
from grade.training.run import RunResult, history_rows, run_metrics
from grade.training.tokens import token_table


def evaluation(reward, kl=(0.25,), gold=None, **parts):
    n = len(reward)
    return Evaluation(
        [f"p{i}" for i in range(n)], [f"c{i}" for i in range(n)], np.array(reward, float),
        np.full(n, np.nan) if gold is None else np.array(gold, float), np.array(kl, float), max(kl, default=0.0),
        {name: np.array(values, float) for name, values in parts.items()},
    )  # fmt: skip


# ---- evaluations ----
def test_a_table_of_an_evaluation_gives_it_back():
    made = evaluation([1.0, 2.0, 3.0], kl=(0.5, 0.25), gold=[0.1, 0.2, 0.3], length=[4.0, 5.0, 6.0])
    again = Evaluation.of_table(made.table())
    assert again.kl.tolist() == [0.5, 0.25] and again.kl_max == 0.5
    for name in ("reward", "gold"):
        assert getattr(again, name).tolist() == getattr(made, name).tolist()
    assert {name: values.tolist() for name, values in again.parts.items()} == {"length": [4.0, 5.0, 6.0]}
    assert (again.prompts, again.completions) == (made.prompts, made.completions)


def test_the_first_bad_value_is_named():
    check_finite("kl", np.zeros(0))
    check_finite("kl", np.array([0.0, 1.0]))
    with pytest.raises(InputError, match=r"kl: got inf; allowed: finite numbers in an evaluation; 2 of 4 are not"):
        check_finite("kl", np.array([[0.0, math.inf], [math.nan, 1.0]]))


def test_sizes_of_an_evaluation_by_default():
    assert Sampling() == Sampling(24, 0, 64, 64, 1, 64)


@pytest.mark.parametrize("prompts", [0, 1, 5])
def test_kl_is_of_the_first_prompts_alone(prompts):
    task = toy.toy_task()
    sizes = dict(max_new_tokens=3, max_prompt_tokens=4, batch_size=2)
    found = evaluate(task.backbone, task.validation_prompts[:5], task.reward_model, kl_prompts=prompts, **sizes)
    assert len(found.kl) == prompts and len(found.reward) == 5
    if prompts == 5:  # by default 64 prompts, which are all of these
        default = evaluate(task.backbone, task.validation_prompts[:5], task.reward_model, **sizes)
        assert default.kl.tolist() == found.kl.tolist()


def test_kl_is_of_sixty_four_prompts_by_default():
    task = toy.toy_task()
    found = evaluate(task.backbone, task.validation_prompts[:66], task.reward_model, max_new_tokens=1)
    assert (len(found.kl), len(found.reward)) == (64, 66)


# ---- metrics and history ----
def result(before, after, steps=2):
    history = [{"step": steps, "samples": 16}]
    return RunResult(history, before, after, seconds=3.0, step=steps, method="grpo")


def metrics(before, after, method="rloo"):
    config = TrainConfig(output_dir="run", method=method, use_cpu=True)
    return run_metrics(config, result(before, after), SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32))


def test_the_gain_is_paired_and_needs_both_ends_over_the_same_prompts():
    found = metrics(evaluation([0.0, 1.0]), evaluation([2.0, 5.0]))
    assert (found["gain/reward"], found["gain/reward_stderr"], found["gain/reward_n"]) == (3.0, 1.0, 2)
    assert "gain/gold" not in found  # there is no judge
    assert found["seconds_per_step"] == 1.5 and "method_chosen" not in found
    one, two = evaluation([1.0]), evaluation([1.0, 2.0])
    for before, after in ((None, one), (one, None), (two, one)):
        assert not any(name.startswith("gain/") for name in metrics(before, after))
    assert metrics(None, None, "auto")["method_chosen"] == "grpo"


def test_rows_of_an_evaluation_have_every_figure_with_its_error():
    logged = {"step": 3} | {f"eval_{name}{end}": i + j / 10 for i, name in enumerate(("reward", "gold", "kl"))
                            for j, end in enumerate(("", "_stderr", "_n"))}  # fmt: skip
    assert history_rows([logged, {"step": 9, "other": 1}]) == [
        {"val/reward_mean": 0.0, "val/reward_stderr": 0.1, "val/reward_n": 0.2, "val/gold_mean": 1.0,
         "val/gold_stderr": 1.1, "val/gold_n": 1.2, "val/kl": 2.0, "val/kl_stderr": 2.1, "val/kl_n": 2.2}
    ]  # fmt: skip


# ---- the card ----
def test_rewards_are_listed_when_there_are_several():
    one, two = evaluation([1.0], length=[1.0]), evaluation([1.0], length=[1.0], judge=[2.0])
    parts = lambda before, after: card.Card._parts(SimpleNamespace(before=before, after=after))  # noqa: E731
    assert parts(one, one) == [] and parts(None, None) == []
    assert parts(None, two) == ["length", "judge"]
    assert parts(one, two) == ["length", "judge"]


def test_values_that_did_not_apply_everywhere_have_no_mean():
    made = evaluation([1.0, 3.0], kl=(), length=[1.0, math.nan])
    assert card._values(made, "kl") is None and card._values(made, "length") is None
    assert card._values(made, "gold") is None
    assert card._values(made, "reward").tolist() == [1.0, 3.0]
    assert card._estimate(None) == "" and card._estimate(np.array([1.0, 3.0])) == "2 ± 1 (n=2)"
    assert card._change(np.array([1.0, 3.0]), np.array([2.0, 5.0])) == "1.5 ± 0.5 (n=2)"
    assert card._change(None, np.array([1.0])) == card._change(np.array([1.0]), np.array([1.0, 2.0])) == ""


@pytest.mark.parametrize(("text", "shown"), [
    ("x" * 400, "x" * 400), ("x" * 401, "x" * 400 + " ..."), ("a\nb\x1b[0m", "a\nb\N{REPLACEMENT CHARACTER}[0m"),
])  # fmt: skip
def test_a_sample_is_cut_and_printable(text, shown):
    assert card._fenced(text) == f"```text\n{shown}\n```"


def test_a_fence_is_longer_than_any_in_the_text():
    assert card._fenced("a ```` b", "sh").startswith("`````sh\n")


def test_data_of_the_hub_are_those_that_are_nowhere_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "texts").write_text("")
    names = ("some/texts:train", "other/texts:train", "prompts.jsonl", "a/b/c")
    assert [card._hub_dataset(name) for name in names] == ["", "other/texts", "", ""]


def test_the_command_has_what_is_not_the_default_and_no_secret(tmp_path):
    config = TrainConfig(
        output_dir=str(tmp_path / "run"), method="rloo", use_cpu=True, hub_token="hf_secret", log_level="error",
        beta=0.5, raw_prompts=True, eval_prompts=4, chat_template_kwargs={"a": 1}, reward_weights=[1.0, 2.0],
        reward=["a.py:b", "c.py:d"], seed=7,
    )  # fmt: skip
    command = card.command_of(config).split(" \\\n  ")
    assert command[:3] == ["grade train --method rloo --output-dir run", "--reward a.py:b", "--reward c.py:d"]
    assert set(command[3:]) == {
        "--set beta=0.5", "--set raw_prompts=true", "--set eval_prompts=4", "--set seed=7",
        "--set 'chat_template_kwargs={\"a\": 1}'", "--set 'reward_weights=[1.0, 2.0]'", "--set use_cpu=true",
    }  # fmt: skip


# ---- small parts ----
def test_held_out_prompts_may_be_more_than_the_final_evaluation_takes(monkeypatch):
    task = toy.toy_task()
    monkeypatch.setattr(load.Backbone, "load", lambda *_: task.backbone)
    monkeypatch.setattr(load, "make_rewards", lambda *_: task.reward_model)
    monkeypatch.setattr(load, "load_prompts", lambda _: ["a", "b", "c"])
    for number in (2, 3, None):
        config = TrainConfig(output_dir="run", method="ste", use_cpu=True, final_eval_prompts=number)
        assert len(load.load_task(config, "cpu").validation_prompts) == 3
    with pytest.raises(InputError, match="final_eval_prompts: got 4; allowed: at most 3"):
        load.load_task(TrainConfig(output_dir="run", method="ste", use_cpu=True, final_eval_prompts=4), "cpu")


def test_the_toy_task_is_the_published_one(monkeypatch):
    seen = {}

    def train_reward(kind, config, backbone, train, validation):
        seen.update(kind=kind, config=config, train=len(train), validation=len(validation))
        return None, None

    monkeypatch.setattr(toy, "train_reward", train_reward)
    task = toy.toy_task()
    for part in (seen["config"].bag, seen["config"].trunk):
        assert (part.epochs, part.patience, part.lr, part.batch_size) == (5, 5, 1e-2, 32)
    assert (seen["kind"], seen["train"], seen["validation"], seen["config"].eval_tokens) == ("bag", 200, 80, [16])
    assert (len(task.train_prompts), len(task.validation_prompts)) == (200, 200)
    assert task.backbone.hidden_size == 32
    assert task.backbone.peft.peft_config["default"].r == 4


def test_the_first_rows_and_sets_by_name():
    assert [len(FirstRows([1, 2, 3], 2)), FirstRows([1, 2, 3], 2)[1]] == [2, 2]
    assert named_sets(None) == {} and named_sets([1]) == {"eval": [1]} and named_sets({"a": [1]}) == {"a": [1]}


def test_tokens_are_shown_as_text_or_as_their_numbers():
    task = toy.toy_task()
    learner = SimpleNamespace(
        liked_tokens=lambda: torch.tensor([3.0, 1.0, 2.0, 9.0]),
        store=SimpleNamespace(token_counts=lambda _: torch.tensor([2, 2, 1, 0])),
    )
    with_text = token_table(task.backbone, learner, shown=1)
    assert with_text["token"].tolist() == [task.backbone.tokenizer.decode([i]) for i in (0, 1)]
    assert with_text["rank"].tolist() == [1, -1] and with_text["value"].tolist() == [1.0, -1.0]  # the mean is 2
    task.backbone.tokenizer = None
    assert token_table(task.backbone, learner)["token"].tolist() == ["0", "2", "1"]
