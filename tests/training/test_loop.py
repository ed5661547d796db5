"""`GradeTrainer`: what people expect of a Trainer."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import float64_throughout
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    TrainerCallback,
)

from grade import GradeConfig, GradeTrainer
from grade.errors import InputError
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.rewards.base import Reward
from grade.training.logs import history_rows

SMALL = dict(
    method="rloo", num_generations=4, per_device_train_batch_size=8, max_completion_length=6, max_steps=2,
    learning_rate=1e-2, beta=0.1, report_to="none", use_cpu=True, seed=0,
)  # fmt: skip
PROMPTS = Dataset.from_list([{"prompt": f"The film was {i}", "number": i} for i in range(10)])


@pytest.fixture
def base(base):
    return str(base)


def length(completions, **_):
    return [float(len(text)) for text in completions]


class Recorded(Reward):
    """A direction in the mean embedding; what is scored is noted, as lists of tokens."""

    scope = "completion"

    def __init__(self, direction, drawn):
        self.direction, self.drawn = direction, drawn

    def score(self, policy, prompts, ids, mask):
        self.drawn += [row[: int(n)].tolist() for row, n in zip(ids, mask.sum(1), strict=True)]
        return super().score(policy, prompts, ids, mask)

    def differentiable(self, embeds, mask):
        return ((embeds @ self.direction) * mask).sum(1) / mask.sum(1)


def trainer(model, output, reward=length, dataset=PROMPTS, held_out=None, callbacks=None, **changes):
    values = GradeConfig.values_for(changes.get("method", SMALL["method"]), {**SMALL, **changes})
    args = GradeConfig(output_dir=str(output), **values)
    return GradeTrainer(model, reward, args, train_dataset=dataset, eval_dataset=held_out, callbacks=callbacks)


# ---- what it takes ----
def test_it_takes_a_name_a_model_a_peft_model_and_a_backbone(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    models = {
        "name": base,
        "model": AutoModelForCausalLM.from_pretrained(base),
        "peft": get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora),
        "backbone": Backbone(AutoModelForCausalLM.from_pretrained(base), tokenizer, LoraSettings(r=2, alpha=4)),
    }
    for name, model in models.items():
        made = trainer(model, tmp_path / name, max_steps=1, save_strategy="no")
        made.train()
        assert isinstance(made.model, PeftModel), name
        assert all(p.requires_grad == ("lora_" in n) for n, p in made.model.named_parameters()), name
        assert max(float(p.abs().max()) for n, p in made.model.named_parameters() if "lora_B" in n) > 0, name


# ---- what a Trainer does ----
def test_the_log_has_trls_names_and_every_rewards_own_mean(base, tmp_path):
    def zero(completions, **_):
        return [0.0 for _ in completions]

    made = trainer(base, tmp_path, [length, zero], reward_weights=[0.5, 3.0], save_strategy="no")
    made.train()
    row = made.state.log_history[0]
    assert {"loss", "reward", "reward_std", "kl", "grad_norm", "learning_rate", "completions/mean_length"} <= set(row)
    assert row["reward"] == pytest.approx(0.5 * row["rewards/length/mean"], rel=1e-6)
    assert row["rewards/zero/mean"] == 0.0 and row["rewards/length/seconds"] >= 0


@pytest.mark.filterwarnings("ignore:a completion whose rewards are all None")
@pytest.mark.parametrize("method", ["rloo", "ste"])
def test_a_reward_with_weight_0_is_a_metric_and_trains_nothing(base, tmp_path, method):
    """To the bit, where the learned one is None too; where tokens are relaxed it is asked in evaluations alone."""
    calls, runs = [], []

    def words(completions, **_):
        calls.append(len(completions))
        return [float(len(text.split())) for text in completions]

    def some(completions, **_):
        return [None if number % 4 == 1 else float(len(text)) for number, text in enumerate(completions)]

    for weights in ([2.0], [2.0, 0.0]):
        policy = Backbone.load(base, lora=LoraSettings(), seed=0)
        learned = some if method == "rloo" else Recorded(policy.embedding_weight[5].detach(), [])
        made = trainer(policy, tmp_path, [learned, words][: len(weights)], held_out=PROMPTS, method=method,
                       reward_weights=weights, reward_scope="completion", save_strategy="no")  # fmt: skip
        made.train()
        (row, *_), metrics = made.state.log_history, made.evaluate()
        runs.append([row["reward"], metrics["eval_reward"], *(p.detach() for p in policy.trainable_parameters())])
    for one, two in zip(*runs, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))
    assert calls == ([8, 8, 10] if method == "rloo" else [10]) and ("rewards/words/mean" in row) == (method == "rloo")
    values = made.evaluations[2].parts["words"]
    assert metrics["eval_rewards/words/mean"] == pytest.approx(values.mean())
    assert metrics["eval_rewards/words/stderr"] == pytest.approx(values.std(ddof=1) / 10**0.5)


@pytest.mark.filterwarnings("ignore:all reward functions returned None")
@pytest.mark.parametrize("method", ["rloo", "ppo"])
def test_what_no_function_scored_has_no_part_in_logged_means(base, tmp_path, method):
    def some(completions, trainer_state, **_):
        return [None if i % 2 or trainer_state.global_step == 1 else 4.0 for i in range(len(completions))]

    changes = dict(method=method, num_generations=4, eval_on_start=True)
    made = trainer(base, tmp_path, some, held_out=PROMPTS, **changes)
    made.train()
    start, first, second, *_ = made.state.log_history
    assert start["eval_reward"] == first["reward"] == 4.0 and start["eval_reward_n"] == 5
    assert first["reward_std"] == start["eval_reward_stderr"] == 0.0 and "reward" not in second


@pytest.mark.parametrize("method", ["ppo", "rloo"])
def test_a_run_goes_on_where_no_completion_of_the_first_step_has_a_reward(base, tmp_path, method):
    """And a callback given at construction sees passes over the prompts: two of ten in a step."""
    seen = []

    class Epochs(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(state.epoch)

    def late(completions, trainer_state, **_):
        return [float(len(text)) if trainer_state.global_step else None for text in completions]

    made = trainer(base, tmp_path, late, method=method, num_generations=4, save_strategy="no", callbacks=[Epochs()])
    made.train()
    first, second = made.state.log_history
    assert "reward" not in first and first["grad_norm"] == 0 < second["grad_norm"] and second["reward"] > 0
    assert seen == [0.2, 0.4]


def test_rows_of_the_log_are_means_over_their_steps(base, tmp_path):
    rows = {}
    for every in (1, 2):
        made = trainer(base, tmp_path / str(every), max_steps=4, logging_steps=every, save_strategy="no")
        made.train()
        rows[every] = [row for row in made.state.log_history if "loss" in row]
    for name in ("reward", "kl", "grad_norm"):
        pairs = np.array([row[name] for row in rows[1]]).reshape(2, 2).mean(1)
        assert [row[name] for row in rows[2]] == pytest.approx(pairs.tolist(), rel=1e-6)


RELAXED = ["ste", "gumbel", "gumbel_rao", "reinmax", "st", "ste_legacy"]
METHODS = {method: {} for method in ("rloo", "grpo", "reinforce", "remax", "tilt", *RELAXED)}
METHODS |= {"grpo twice": dict(scale_rewards="group", passes_per_step=2), "ppo": dict(passes_per_step=2)}


@pytest.mark.parametrize("name", METHODS)
def test_however_a_step_is_cut_into_microbatches_it_is_one_run(base, tmp_path, name):
    """Two prompts of four completions, all at once or one after the other; prompts and completions are ragged."""
    found, method, relaxed = [], name.split()[0], name in RELAXED
    prompts = PROMPTS.map(lambda row: {"prompt": "The film was " + "so " * (row["number"] % 3)})
    for batch, accumulation in ((8, 1), (1, 8)):
        policy = Backbone.load(base, dtype="float64", lora=LoraSettings(), seed=0)
        drawn, mean = [], policy.embedding_weight.detach().mean(0)
        reward = Recorded(mean, drawn)
        changes = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
        changes |= dict(reward_scope="completion") | ({} if relaxed else dict(num_generations=4))
        made = trainer(policy, tmp_path / str(batch), reward, prompts, method=method, **changes | METHODS[name])
        with float64_throughout():  # one completion has its prompt read by itself, four have theirs read once
            made.train()
        rows = [row for row in made.state.log_history if "loss" in row]
        samples = [row["num_samples"] for row in rows]
        assert samples == ([10, 20] if method == "remax" else [8, 16])
        figures = [row[name] for row in rows for name in ("loss", "grad_norm", "reward", "kl")]
        found.append((drawn, torch.cat([p.flatten() for p in policy.trainable_parameters()]), figures))
    (drawn, weights, figures), (others, moved, again) = found
    assert again == pytest.approx(figures, rel=1e-6, abs=1e-9)
    assert sorted(others) == sorted(drawn) and (relaxed or len(drawn) == samples[-1])
    assert torch.allclose(moved, weights, rtol=0, atol=1e-9)  # AdamW divides a gradient by its size


def test_early_stopping_and_the_best_model(base, tmp_path):
    def train(resume=None):
        made = trainer(
            base, tmp_path, held_out=PROMPTS.select(range(4)), callbacks=[EarlyStoppingCallback(2)], max_steps=6,
            learning_rate=1e-9, eval_strategy="steps", eval_steps=1, save_steps=1,
            metric_for_best_model="eval_reward",
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume)
        assert made.state.is_world_process_zero
        assert made.state.global_step == 3  # nothing moves, so later evaluations are no better than the first
        assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")

    train()
    log = tmp_path / "checkpoint-2" / "trainer_state.json"
    saved = json.loads(log.read_text())
    assert saved["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")
    log.write_text(json.dumps(saved | {"is_world_process_zero": False}))  # another process's
    train(str(tmp_path / "checkpoint-2"))


def test_the_best_policy_is_kept_whenever_it_is_found(base, tmp_path):
    """Between two checkpoints too; what was given, before the first step, is no result of training."""
    made = trainer(
        base, tmp_path, held_out=PROMPTS.select(range(4)), max_steps=6, eval_strategy="steps", eval_steps=2,
        eval_on_start=True, save_steps=5, metric_for_best_model="reward",
    )  # fmt: skip
    values = iter([9.0, 1.0, 3.0, 2.0])
    made.evaluate = lambda: {"eval_reward": next(values)}
    made.train()
    assert made.kept_step == 4 and not list(values)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} >= {"checkpoint-4", "checkpoint-5"}


def test_a_metric_that_no_evaluation_has_is_named(base, tmp_path):
    options = dict(eval_strategy="steps", eval_on_start=True, save_steps=1, metric_for_best_model="rewrad")
    made = trainer(base, tmp_path, held_out=PROMPTS, **options)
    with pytest.raises(InputError, match="metric_for_best_model: got 'rewrad'; allowed: .*eval_reward"):
        made.train()


def test_evaluations_need_held_out_prompts(base, tmp_path):
    with pytest.raises(InputError, match="eval_strategy"):
        trainer(base, tmp_path, eval_strategy="steps")


def test_of_so_many_checkpoints_one_is_the_best(base, tmp_path):
    made = trainer(
        base, tmp_path, held_out=PROMPTS.select(range(4)), max_steps=4, learning_rate=1e-9, eval_strategy="steps",
        eval_steps=1, save_steps=1, save_total_limit=2, metric_for_best_model="reward",
    )  # fmt: skip
    made.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-4"}


@pytest.mark.parametrize("changes", [dict(method="remax"), dict(temperature=0.1, gradient_accumulation_steps=2)])
def test_completions_are_written_as_tables(base, tmp_path, changes):
    """Those that were sampled, not what else was scored: at a low temperature unequally often in two microbatches."""

    def reward(completions, log_extra, **_):
        log_extra("shout", [text.upper() for text in completions])
        return [float(len(text)) for text in completions]

    options = dict(log_completions=True, logging_steps=2, save_steps=4, held_out=PROMPTS, eval_on_start=True)
    trainer(base, tmp_path, reward, **options, **changes).train()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert len(table) == 16 * changes.get("gradient_accumulation_steps", 1)
    assert (table["shout"] == table["completion"].str.upper()).all()
    assert table["reward"].tolist() == table["completion"].str.len().tolist() == table["rewards/reward"].tolist()
    held_out = pd.read_parquet(tmp_path / "completions" / "eval_00002.parquet")
    assert len(held_out) == 10 and held_out["reward"].tolist() == held_out["completion"].str.len().tolist()


def test_several_evaluation_sets_have_their_own_names(base, tmp_path):
    made = trainer(base, tmp_path, held_out={"a": PROMPTS.select(range(3)), "b": PROMPTS.select(range(3, 6))})
    metrics = made.evaluate()
    assert {"eval_a_reward", "eval_b_reward", "eval_a_kl"} <= set(metrics)
    assert metrics["eval_a_kl"] == 0


def test_an_evaluation_of_other_rows_takes_no_place_of_the_runs(base, tmp_path):
    made = trainer(base, tmp_path, held_out=PROMPTS, eval_on_start=True)
    made.train()
    end, table = made.evaluations[2], tmp_path / "completions" / "eval_00002.parquet"
    assert made.evaluate(PROMPTS.select(range(3)))["eval_reward_n"] == 3
    assert made.evaluations[2] is end and len(pd.read_parquet(table)) == 10
    assert [row["val/reward_n"] for row in history_rows(made.state.log_history) if "val/reward_n" in row] == [10, 10]
    made.evaluate(PROMPTS.select(range(3)), "test")
    assert len(pd.read_parquet(table.with_name("test_00002.parquet"))) == 3


def test_a_run_that_a_callback_ends_logs_and_evaluates_its_last_step(base, tmp_path):
    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    options = dict(max_steps=6, logging_steps=5, held_out=PROMPTS, eval_on_start=True, callbacks=[Enough()])
    made = trainer(base, tmp_path, **options)
    made.train()
    assert [row["num_samples"] for row in made.state.log_history if "loss" in row] == [3 * 8]
    assert list(made.evaluations) == [0, 3]


def test_temperature_changes_the_policy_everywhere(base, tmp_path):
    """Sampling, log-probabilities and KL are of softmax(l / T): at the first step the clipped ratio is exactly 1."""
    made = trainer(base, tmp_path, method="grpo", passes_per_step=2, temperature=0.5, max_steps=1, save_strategy="no")
    assert made.backbone.head.temperature == 0.5
    hidden = torch.randn(3, made.backbone.hidden_size, requires_grad=True)
    plain = torch.nn.functional.linear(hidden, made.backbone.head.weight)
    assert torch.equal(made.backbone.head(hidden), plain / 0.5)
    made.train()
    assert made.state.log_history[0]["kl"] <= 1e-3


def test_bf16_casts_the_base_and_not_the_adapter(base, tmp_path):
    made = trainer(base, tmp_path, bf16=True, save_strategy="no")
    kinds = {("lora_" in name, p.dtype) for name, p in made.model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    made.train()


def test_a_limit_of_zero_does_not_clip(base, tmp_path):
    """In none of a step's updates: clipped to 0, the first would not move the policy, and no ratio would differ."""
    rows = []
    for limit in (0.0, 1e9):
        made = trainer(base, tmp_path, method="grpo", passes_per_step=2, max_grad_norm=limit, save_strategy="no")
        made.train()
        rows.append([row["grad_norm"] for row in made.state.log_history if "loss" in row])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("updates", [1, 2])
def test_the_policy_is_clipped_by_its_own_norm_not_with_the_value_head(base, tmp_path, updates):
    """In each of a step's updates, whose gradients are nearly the same: the policy hardly moves."""
    limit = 1e-3
    made = trainer(
        base, tmp_path, method="ppo", passes_per_step=updates, max_grad_norm=limit, lr_scheduler_type="constant",
        max_steps=1, save_strategy="no",
    )  # fmt: skip
    weights = [*made.backbone.trainable_parameters(), *made.method.parameters()]
    made.optimizer = torch.optim.SGD(weights, lr=1.0)
    before = [p.detach().clone() for p in made.backbone.trainable_parameters()]
    made.train()
    pairs = zip(made.backbone.trainable_parameters(), before, strict=True)
    moved = torch.cat([(p.detach() - q).flatten() for p, q in pairs]).norm()
    assert made.state.log_history[0]["grad_norm"] > limit
    assert float(moved) == pytest.approx(updates * limit, rel=1e-3)  # float32: a small change of weights of about 0.1


def test_a_reward_that_fails_leaves_the_last_checkpoint(base, tmp_path):
    def reward(completions, trainer_state, **_):
        return [float("nan") if trainer_state.global_step == 2 else 0.0 for _ in completions]

    made = trainer(base, tmp_path, reward, max_steps=4, save_steps=1)
    with pytest.raises(InputError, match="reward .reward.: got .nan"):
        made.train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_completions_end_with_the_given_tokenizers_end(base, tmp_path):
    given, seen = AutoTokenizer.from_pretrained(base), []

    def reward(completion_ids, **_):
        seen.extend(completion_ids)
        return [0.0 for _ in completion_ids]

    trainer(base, tmp_path / "a", reward, save_strategy="no").train()
    end = next(i for ids in seen for i in ids[:-1] if i not in given.all_special_ids)
    given.eos_token = given.convert_ids_to_tokens(end)
    seen.clear()
    args = GradeConfig(str(tmp_path / "b"), **SMALL | {"save_strategy": "no"})
    GradeTrainer(base, reward, args, PROMPTS, processing_class=given).train()
    assert any(end in ids for ids in seen) and not any(end in ids[:-1] for ids in seen)


@pytest.mark.parametrize("progress", ["0", "1"])
def test_a_row_of_the_log_is_a_line_without_times_in_a_notebook(base, tmp_path, capsys, monkeypatch, progress):
    monkeypatch.setenv("GRADE_PROGRESS", progress)
    made = trainer(base, tmp_path, held_out=PROMPTS, eval_strategy="steps", eval_steps=2, save_strategy="no")
    made.train()
    out = capsys.readouterr().out
    lines = [line.split()[:2] for line in out.splitlines() if line.startswith("step")]
    assert lines == [["step", "1/2"], *[["step", "2/2"]] * 2]
    assert bool(re.search(r"\d s ", out)) == (progress == "1")
