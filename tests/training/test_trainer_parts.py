"""`GradeTrainer`, one method at a time: what it counts, seeds, sums and writes."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import Trainer

from grade.errors import InputError
from grade.gradients.objective import GradientStep
from grade.models.prompts import PromptBatch
from grade.training import trainer as module
from grade.training.toy import toy_task
from grade.training.trainer import GradeTrainer
from grade.training.window import Window


def bare(**values):
    """A trainer that was not built: it has what a test gives it."""
    made = GradeTrainer.__new__(GradeTrainer)
    made.__dict__.update(values)
    return made


def settings(**values):
    common = dict(
        max_steps=3, gradient_accumulation_steps=2, world_size=1, process_index=0, batch_prompts=4, seed=5,
        shuffle_dataset=True, group=2, updates=1, device=torch.device("cpu"), max_grad_norm=1.0, learning_rate=0.5,
        batch_completions=8, log_completions=False, should_save=True, save_strategy="steps", output_dir="",
    )  # fmt: skip
    return SimpleNamespace(**common | values)


def gradient_step(loss, n=4):
    return GradientStep(torch.zeros(n, 1).long(), torch.ones(n, 1).long(), torch.arange(float(n)), torch.zeros(n, 1),
                        torch.tensor(loss))  # fmt: skip


# ---- data ----
@pytest.mark.parametrize(("shuffle", "seed"), [(True, 5), (False, None)])
@pytest.mark.parametrize("processes", [1, 3])
def test_rows_are_ordered_for_all_steps_and_processes(shuffle, seed, processes):
    made = bare(args=settings(shuffle_dataset=shuffle, world_size=processes), train_dataset=range(10))
    order = made._get_train_sampler()
    assert (order.rows, order.total, order.seed) == (10, 3 * 2 * 4 * processes, seed)


def test_what_of_the_settings_is_for_reading_prompts():
    args = SimpleNamespace(max_prompt_length=7, truncation="left", chat_template_kwargs={"a": 1}, raw_prompts=True)
    want = {"max_prompt_length": 7, "truncation": "left", "chat_template_kwargs": {"a": 1}, "warn_raw": False}
    assert bare()._reading(args) == want
    args.raw_prompts = False
    assert bare()._reading(args)["warn_raw"] is True


def test_a_dataset_is_checked_with_its_completions(monkeypatch):
    checked = []
    monkeypatch.setattr(module, "check_prompts", lambda tokenizer, dataset, **reading: 5)
    monkeypatch.setattr(module, "check_length", lambda backbone, length: checked.append(length))
    made = bare(backbone=SimpleNamespace(tokenizer=None))
    args = SimpleNamespace(max_completion_length=7, max_prompt_length=None, truncation="error",
                           chat_template_kwargs=None, raw_prompts=False)  # fmt: skip
    made._check_dataset(None, args)
    made._check_dataset([1], args)
    assert checked == [12]
    with pytest.raises(InputError, match="dataset: got 'generator'; allowed: one with a length"):
        made._check_dataset((i for i in range(2)), args)


def test_training_starts_at_the_first_microbatch(monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "train", lambda self, *args: seen.append((self._place, self._pending, *args)) or 3)
    monkeypatch.setattr(module, "nullcontext", lambda: Context(seen))
    made = bare(args=SimpleNamespace(eval_on_start=True), _place=1, _pending=[1], elsewhere=None,
                together=SimpleNamespace(ending=lambda: Context(seen)))  # fmt: skip
    assert made.train() == 3 and made.args.eval_on_start is True
    assert seen == ["in", "in", (0, [], None), "out", "out"]
    made.train("folder")
    assert made.args.eval_on_start is False and seen[7] == (0, [], "folder")


class Context:
    def __init__(self, seen):
        self.seen = seen

    def __enter__(self):
        self.seen.append("in")

    def __exit__(self, *_):
        self.seen.append("out")


# ---- a step ----
def stepping(learner=None, **values):
    together = SimpleNamespace(sum=lambda x: x)
    done = dict(elsewhere=[], sums=0)
    made = bare(
        args=settings(**values), accelerator=SimpleNamespace(sync_gradients=False), learner=learner, elsewhere=None,
        state=SimpleNamespace(global_step=6), rewards=SimpleNamespace(trainer_state=None), _place=0, _pending=[],
        backbone=SimpleNamespace(device=torch.device("cpu")), together=lambda work: work(), done=done, _started=0.0,
    )  # fmt: skip
    made.encode = lambda inputs: inputs
    made._sum_gradients = lambda: done.__setitem__("sums", done["sums"] + 1)
    made.together.sum = together.sum
    return made


def seeded(*words):
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


@pytest.mark.parametrize(("rank", "processes"), [(0, 1), (1, 3)])
def test_a_microbatchs_noise_is_that_of_run_step_and_place(rank, processes):
    made, scales = stepping(process_index=rank, world_size=processes), []
    made._relaxed = lambda scale: scales.append(scale) or [gradient_step(3.0), gradient_step(5.0)]
    losses = [made.training_step(None, "first")]
    assert made._place == 1 and made.rewards.trainer_state is made.state and made._started > 0
    made.rewards.trainer_state, made._started = None, 0.0
    made.accelerator.sync_gradients = True
    losses.append(made.training_step(None, "second"))
    assert made._place == 0 and made.rewards.trainer_state is None and made._started == 0.0
    assert [prompts for prompts, _ in made._pending] == ["first", "second"]
    places = [place * processes + rank for place in (0, 1)]
    assert [g.initial_seed() for _, g in made._pending] == [seeded(5, 7, place) for place in places]
    assert [float(loss) for loss in losses] == [4.0, 4.0]  # 3 + 5, of two microbatches
    assert scales == [1 / (2 * processes)] * 2 and made.done["sums"] == 1  # after the last microbatch alone


def test_a_policy_gradient_takes_its_step_with_the_last_microbatch():
    made, asked = stepping(learner=object(), world_size=2), []
    made._updates = lambda microbatches: asked.append(microbatches) or [gradient_step(3.0)]
    assert float(made.training_step(None, "first")) == 0.0 and asked == []
    made.accelerator.sync_gradients = True
    assert float(made.training_step(None, "second")) == 1.5 and asked == [4] and made.done["sums"] == 1


def test_completions_from_elsewhere_are_drawn_with_the_steps_number():
    drawn = []
    made = stepping(learner=object())
    made.window = "window"
    made.elsewhere = SimpleNamespace(draw=lambda *args: drawn.append(args))
    made.training_step(None, "rows")
    ((prompts, generator, step, window),) = drawn
    assert (prompts, step, window) == ("rows", 7, "window") and generator.initial_seed() == seeded(5, 7, 0)


@pytest.mark.parametrize(("updates", "taken"), [(1, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize(("scores", "given"), [([], [None, None]), (["a", "b"], ["a", "b"]),
                                               (["a", "greedy", "b", "greedy"], ["a", "b"])])  # fmt: skip
def test_the_last_update_of_a_step_is_left_to_the_trainer(updates, taken, scores, given):
    calls, noted = [], []
    parts = [gradient_step(1.0), gradient_step(2.0)]

    def step(pending, shared, context):
        calls.append((pending, context.microbatches))
        assert shared.scores == []
        shared.scores.extend(scores)
        for _ in range(updates):
            context.apply()
        return parts

    prompts = PromptBatch(torch.zeros(2, 1).long(), torch.ones(2, 1).long())
    made = bare(
        args=settings(updates=updates), _pending=[(prompts, None), (prompts, None)], elsewhere=None, model="model",
        learner=SimpleNamespace(step=step, figures={"value_loss": [0.5, 0.25], "none": []}),
        shared=SimpleNamespace(scores=["old"]), together=SimpleNamespace(sum=None, gather=None),
        optimizer=SimpleNamespace(step=lambda: calls.append("step")), window=Window(),
    )  # fmt: skip
    made._sum_gradients = lambda: calls.append("sum")
    made._clip_grad_norm = lambda model: calls.append(("clip", model))
    made.window.note_step = lambda step, prompts, scores: noted.append((step, len(prompts), scores))
    assert made._updates(6) is parts and made._pending == []
    assert calls[0] == ([(prompts, None)] * 2, 6) and calls[1:] == ["sum", ("clip", "model"), "step"] * taken
    assert noted == [(part, 4, score) for part, score in zip(parts, given, strict=True)]
    assert made.window.figures == {"value_loss": [0.5, 0.25]}


def test_the_context_of_a_step():
    together = SimpleNamespace(sum="sum", gather="gather")
    context = bare(args=settings(process_index=2), together=together)._context(6, "apply")
    found = (context.microbatches, context.apply, context.total, context.gather, context.rank)
    assert found == (6, "apply", "sum", "gather", 2)


def optimizer(*groups, lr=0.1):
    parameters = [[torch.nn.Parameter(torch.tensor(value)) for value in group] for group in groups]
    made = torch.optim.SGD([{"params": group} for group in parameters], lr=lr)
    for group in parameters:
        for p in group:
            p.grad = torch.tensor([3.0, 4.0])[: p.numel()].reshape(p.shape).clone()
    return made


def test_gradients_are_summed_over_processes_also_where_this_one_has_none():
    made = bare(optimizer=optimizer([[1.0, 2.0]], [[0.0, 0.0]]), together=SimpleNamespace(sum=lambda x: x + 10))
    first, second = (group["params"][0] for group in made.optimizer.param_groups)
    second.grad = None
    made._sum_gradients()
    assert first.grad.tolist() == [13.0, 14.0] and second.grad.tolist() == [10.0, 10.0]


@pytest.mark.parametrize(("limit", "share"), [(10.0, 1.0), (1.0, 0.2), (0, 1.0), (2.5, 0.5)])
def test_each_group_is_clipped_by_itself_and_the_policys_norm_is_noted(limit, share):
    made = bare(args=settings(max_grad_norm=limit), optimizer=optimizer([[1.0, 2.0]], [[0.0]]), window=Window())
    assert float(made._clip_grad_norm(None)) == 5.0
    first, second = (group["params"][0].grad for group in made.optimizer.param_groups)
    torch.testing.assert_close(first, share * torch.tensor([3.0, 4.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(second, torch.tensor([min(3.0, limit or 3.0)]), atol=1e-5, rtol=0)
    (norm,) = made.window.figures["grad_norm"]
    assert norm.dtype == torch.float64 and float(norm) == 5.0


def test_a_norm_is_taken_where_nothing_is_clipped_and_given_ones_are_kept():
    made = bare(args=settings(), optimizer=optimizer([[1.0, 2.0]], [[9.0]]), window=Window(),
                state=SimpleNamespace(global_step=6))  # fmt: skip
    assert float(made._get_grad_norm(None)) == 5.0 and made.window.figures["grad_norm"][0].dtype == torch.float64
    assert made.optimizer.param_groups[0]["params"][0].grad.tolist() == [3.0, 4.0]
    given = torch.tensor(2.0)
    assert made._get_grad_norm(None, given) is given and len(made.window.figures["grad_norm"]) == 1
    for value in (math.nan, math.inf):
        made.optimizer.param_groups[0]["params"][0].grad[0] = value
        with pytest.raises(InputError, match="gradient norm: got (nan|inf); allowed: a finite number; step 7 was not"):
            made._get_grad_norm(None)


def test_the_optimizer_has_the_adapter_and_a_value_head_apart():
    adapter, head = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    args = SimpleNamespace(weight_decay=0.25, value_learning_rate=0.5)

    def made(learner):
        trainer = bare(args=args, optimizer=None, learner=learner, model=None,
                       backbone=SimpleNamespace(trainable_parameters=lambda: [adapter]))  # fmt: skip
        trainer.get_optimizer_cls_and_kwargs = lambda args, model: (torch.optim.AdamW, {"lr": 0.125})
        return trainer

    for learner, heads in ((None, 0), (SimpleNamespace(parameters=list), 0),
                           (SimpleNamespace(parameters=lambda: [head]), 1)):  # fmt: skip
        trainer = made(learner)
        groups = trainer.create_optimizer().param_groups
        assert [len(g["params"]) for g in groups] == [1] * (1 + heads) and groups[0]["params"][0] is adapter
        assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.125, 0.25), (0.5, 0.25)][: 1 + heads]
        assert trainer.create_optimizer() is trainer.optimizer
    assert trainer.floating_point_ops(None) == 0


def test_a_steps_seconds_are_added_and_its_weights_finite(monkeypatch):
    made = bare(args=settings(), optimizer=optimizer([[1.0, 2.0]], [[9.0]]), window=Window(), seconds=10.0,
                _started=3.0, state=SimpleNamespace(global_step=6))  # fmt: skip
    monkeypatch.setattr(module.time, "perf_counter", lambda: 5.5)
    made.step_ended()
    assert made.seconds == 12.5 and made.window.figures["step_time"] == [2.5]
    made.optimizer.param_groups[1]["params"][0].data[0] = math.inf
    with pytest.raises(InputError, match="learning_rate: got 0.5; allowed: a smaller one: .* after step 6"):
        made.step_ended()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("completions", [False, True])
def test_rows_of_the_log_count_samples_and_epochs(processes, completions, monkeypatch):
    rows, tables = [], []
    monkeypatch.setattr(Trainer, "log", lambda self, logs, start: rows.append((dict(logs), start)))
    made = bare(args=settings(world_size=processes, log_completions=completions), seconds=7.0, window=Window(),
                state=SimpleNamespace(global_step=6, epoch=None), train_dataset=range(16),
                together=SimpleNamespace(mean=sum, gather=list))  # fmt: skip
    made._write_table = lambda name, table: tables.append((name, len(table)))
    made.window.note({"reward": 2.0})
    made.window.rows.append({"prompt": "a"})
    made.log({"loss": 1.0}, 3.0)
    assert rows == [({"loss": 1.0, "reward": 2.0, "num_samples": 6 * 8 * 2 * processes, "seconds": 7.0}, 3.0)]
    assert made.state.epoch == 6 * 4 * 2 * processes / 16
    assert tables == ([("completions_00006", 1)] if completions else [])
    made.train_dataset, made.state.epoch = None, 0.5
    made.log({"eval_reward": 1.0})
    assert rows[1] == ({"eval_reward": 1.0}, None) and made.state.epoch == 0.5 and len(tables) == int(completions)


class Found:
    """An evaluation of so many prompts."""

    def __init__(self, n):
        self.n = n

    def table(self):
        return pd.DataFrame({"n": [self.n]})

    def first(self, n):
        return Found(min(n, self.n))

    def summary(self, beta, prefix):
        return {f"{prefix}_beta": beta, f"{prefix}_over": self.n}


@pytest.mark.parametrize(
    ("step", "during", "ends", "rows", "n", "over"),
    [
        (0, 4, 6, 10, 6, 4), (3, 4, 6, 10, 4, 4), (9, 4, 6, 10, 6, 4), (9, None, None, 10, 10, 10),
        (3, None, 6, 10, 10, 10), (0, 4, None, 10, 10, 4), (0, 40, 60, 10, 10, 10), (3, 40, 6, 10, 10, 10),
    ],
)  # fmt: skip
def test_how_many_prompts_an_evaluation_takes(step, during, ends, rows, n, over, monkeypatch):
    asked, tables, logged, events = [], [], [], []

    def evaluate(backbone, dataset, encode, objective, sampling, judge, share, gather, attempt):
        asked.append((len(dataset), sampling, judge, share))
        return Found(len(dataset))

    monkeypatch.setattr(module, "evaluate_examples", evaluate)
    monkeypatch.setattr(module, "speed_metrics", lambda prefix, start, num_samples: {f"{prefix}_n": num_samples})
    args = settings(
        max_steps=9, final_eval_prompts=ends, eval_prompts=during, max_completion_length=11, min_completion_length=2,
        per_device_eval_batch_size=3, kl_eval_prompts=5, eval_noise_block=8, process_index=1, world_size=2,
    )  # fmt: skip
    made = bare(
        args=args, state=SimpleNamespace(global_step=step), eval_dataset=range(rows), backbone=None, judge="judge",
        objective=SimpleNamespace(beta=0.5), together=SimpleNamespace(gather=None), evaluations={}, learner=None,
        control="before",
        callback_handler=SimpleNamespace(on_evaluate=lambda *a: events.append(a) or "after"),
    )  # fmt: skip
    made.log = logged.append
    made._write_table = lambda name, table: tables.append((name, table["n"].tolist()))
    metrics = made.evaluate()
    assert metrics == {"eval_beta": 0.5, "eval_over": over, "eval_n": n} == logged[0] and made.control == "after"
    ((taken, sampling, judge, share),) = asked
    assert (taken, judge, share) == (n, "judge", (1, 2)) and tables == [(f"eval_{step:05d}", [n])]
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.batch_size) == (11, 2, 3)
    assert (sampling.kl_prompts, sampling.seed, sampling.noise_block) == (5, 1, 8)
    assert made.evaluations[step].n == n and events[0][-1] is metrics
    made.evaluations.clear()
    both = made.evaluate({"a": range(4), "b": range(5)}, None, "test")
    assert {name: both[name] for name in ("test_a_n", "test_b_n")} == {
        "test_a_n": min(4, n if n < rows else 4), "test_b_n": min(5, n if n < rows else 5)
    }  # fmt: skip
    assert made.evaluations == {}  # only the trainer's own set is the run's curve


def test_without_rows_there_is_no_evaluation():
    with pytest.raises(InputError, match="eval_dataset: got None; allowed: rows with a prompt"):
        bare(eval_dataset=None).evaluate()


@pytest.mark.parametrize(
    ("save", "strategy", "rows", "written"),
    [(True, "steps", 1, True), (False, "steps", 1, False), (True, "no", 1, False), (True, "steps", 0, False)],
)
def test_tables_are_written_where_something_is_saved(save, strategy, rows, written, tmp_path):
    made = bare(args=settings(should_save=save, save_strategy=strategy, output_dir=str(tmp_path)))
    made._write_table("eval_00003", pd.DataFrame({"a": list(range(rows))}))
    file = tmp_path / "completions" / "eval_00003.parquet"
    assert file.is_file() is written
    assert not written or list(pd.read_parquet(file).columns) == ["a"]


def test_a_trainer_without_settings_chooses_its_own(tmp_path, monkeypatch, caplog):
    def length(completions, **_):
        return [float(len(text)) for text in completions]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "check_length", lambda *_: None)  # the default is for models with a longer context
    backbone = toy_task().backbone
    made = GradeTrainer(backbone, length, None, [{"prompt": f"Film {i}"} for i in range(10)])
    assert made.args.output_dir == "model-GRADE" and made.args.method == "distilled"
    assert made.args.max_steps == 30  # three passes over 10 prompts, one group of 8 completions in a step
    assert (made._place, made._pending, made._started, made.seconds) == (0, [], 0.0, 0.0)
    assert made.evaluations == {} and made.judge is None and made.elsewhere is None and made.learner is not None
    assert made.window.tokenizer is None and made.objective.beta == made.shared.beta == 0.0
    assert [r.getMessage().partition(":")[0] for r in caplog.records if r.name == module.__name__] == ["method"]
