"""What a step of training is made of, one function at a time, by hand."""

import math
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grade.gradients.objective import GradientStep
from grade.models.prompts import PromptBatch
from grade.rewards.rewards import Scores
from grade.training.callbacks import Lines, StepEnd, StopOnSignal
from grade.training.kl_target import KLTarget, Targeting
from grade.training.order import FirstRows, PromptOrder
from grade.training.tokens import SHOWN, token_table
from grade.training.window import Window


# ---- beta's controller ----
def moved(target, *kls, start=1.0):
    """log of beta after the last of these KLs, over that before it."""
    controller, before = KLTarget(target, start), start
    for kl in kls:
        before = controller.beta
        controller.update(kl)
    return math.log(controller.beta / before)


@pytest.mark.parametrize(
    ("target", "kls", "change"),
    [
        (16.0, (16.0,), 0.0),
        (16.0, (16.0, 4.2**2), 0.2 * 0.55),  # 4.2 and ten steps of 0.2: 6.2 of 4
        (16.0, (16.0, 3.9**2), 0.2 * -0.275),  # 3.9 less ten steps of 0.1: 2.9
        (16.0, (10_000.0,), 0.2),  # an error counts up to 1
        (16.0, (16.0, 0.0), -0.2),  # both ways
        (16.0, (16.0, 16.0, 16.0, 16.0, 4.3**2), 0.2 * (5.3 / 4 - 1)),  # a slope over three steps: 0.1 a step
        (16.0, (9.0, 16.0, 16.0, 16.0, 16.0), 0.0),  # what is older does not count
        (16.0, (16.0, 4.1**2, 4.2**2), 0.2 * (5.2 / 4 - 1)),
        (16.0, (16.0, 16.0, 4.2**2), 0.2 * (5.2 / 4 - 1)),  # over as many steps as there were
        # On the first way up: within 40 steps of 0.123 from 0.123 it is beyond 5, of 0.1215 it is not.
        (25.0, (0.0, 0.123**2), 0.0),
        (25.0, (0.0, 0.1215**2), 0.2 * (11 * 0.1215 / 5 - 1)),
        (25.0, (0.0, 0.5**2), 0.2 * 0.1),  # 0.5 and ten steps of 0.5: 5.5
        (25.0, (25.0, 9.0, 3.1**2), 0.2 * -1.0),  # it was there before: an error counts again
        (25.0, (-3.0,), -0.2),  # below 0 by rounding: a distance of 0
        (4.0, (1.0,), 0.2 * -0.5),
        (4.0, (0.25,), 0.2 * -0.75),
    ],
)
def test_a_step_changes_log_beta_by_a_fifth_of_the_error(target, kls, change):
    assert moved(target, *kls) == pytest.approx(change, abs=1e-12)


def test_beta_stays_within_a_hundred_times_its_start():
    for kl, end in ((0.0, 0.003), (1e6, 30.0)):
        controller = KLTarget(4.0, 0.3)
        controller.update(4.0)
        assert [controller.update(kl) for _ in range(40)][-1] == pytest.approx(end, rel=1e-12) == controller.beta


def test_what_a_controller_remembers():
    controller = KLTarget(4.0, 0.3)
    assert controller.state() == {"beta": 0.3, "recent": [], "climbing": True}
    for kl, climbing in ((1.0, True), (0.25, True), (3.99, True), (4.0, False), (1.0, False), (0.0, False)):
        controller.update(kl)
        assert controller.climbing is climbing
    assert controller.recent == [math.sqrt(3.99), 2.0, 1.0, 0.0]
    state = controller.state()
    other = KLTarget(4.0, 0.3)
    other.restore(state)
    assert other.state() == state and other.recent is not state["recent"]


def test_beta_of_the_next_step_is_adjusted_to_this_ones_kl():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Weighed:
        beta: float

    def trainer(target):
        made = SimpleNamespace(
            kl_target=target, window=Window(), objective=Weighed(0.3), shared=Weighed(0.3),
            together=SimpleNamespace(mean=lambda values: float(sum(values) / len(values))),
        )  # fmt: skip
        made.set_beta = lambda beta: Targeting.set_beta(made, beta)
        made.window.completion_kl = [torch.tensor(9.0), torch.tensor(23.0)]
        Targeting.adjust_beta(made)
        return made

    fixed = trainer(None)
    assert fixed.objective.beta == 0.3 and fixed.window.figures == {} and fixed.window.completion_kl == []
    made = trainer(KLTarget(16.0, 0.3))
    assert made.kl_target.recent == [4.0] and made.window.completion_kl == []
    assert made.objective.beta == made.shared.beta == made.kl_target.beta
    (noted,) = made.window.figures["beta"]
    assert noted.dtype == torch.float64 and noted.item() == 0.3  # what the step had


# ---- rows ----
def test_the_order_of_prompts_is_the_same_for_ever():
    """A run that is resumed with a later version must go on in it."""
    assert list(PromptOrder(5, 12, 0)) == ORDER
    for total in (0, 1, 5, 6):
        assert list(PromptOrder(5, total, 0)) == ORDER[:total]
    assert list(PromptOrder(3, 4, None)) == [0, 1, 2, 0] and list(PromptOrder(3, 0, None)) == []
    rows = FirstRows("abc", 2)
    assert len(rows) == 2 and list(rows[i] for i in range(2)) == ["a", "b"]


ORDER = [int(i) for n in [np.random.default_rng([0, 1])] for _ in range(3) for i in n.permutation(5)][:12]


# ---- figures ----
def step(kl, mask, reward, loss=1.5):
    mask = torch.tensor(mask)
    return GradientStep(torch.zeros_like(mask), mask, torch.tensor(reward), torch.tensor(kl), torch.tensor(loss))


def prompts(n):
    return PromptBatch(torch.zeros(n, 1, dtype=torch.long), torch.ones(n, 1, dtype=torch.long))


def test_figures_of_a_microbatch():
    window = Window()
    window.note_step(step([[1.0, 3.0], [4.0, 9.0]], [[1, 1], [1, 0]], [2.0, 6.0]), prompts(2))
    assert {name: [float(v) for v in values] for name, values in window.figures.items()} == {
        "reward": [4.0], "reward_std": [2.0], "kl": [3.0], "loss": [1.5], "completions/mean_length": [1.5],
    }  # fmt: skip
    assert [float(v) for v in window.completion_kl] == [4.0] and window.completion_kl[0].dtype == torch.float64
    assert window.rows == []
    scores = Scores(
        {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([math.nan, 3.0]), "c": torch.tensor([math.nan] * 2)},
        {"a": 0.5}, {}, {"seen": [1.0, 2.0, 6.0]},
    )  # fmt: skip
    window = Window()
    window.note_step(step([[0.0], [0.0]], [[1], [1]], [2.0, 6.0]), prompts(2), scores)
    found = {name: [float(v) for v in values] for name, values in window.figures.items()}
    assert {name: values for name, values in found.items() if name not in
            ("reward", "reward_std", "kl", "loss", "completions/mean_length")} == {
        "rewards/a/mean": [3.0], "rewards/a/std": [2.0], "rewards/b/mean": [3.0], "rewards/b/std": [0.0],
        "rewards/a/seconds": [0.5], "seen": [3.0],
    }  # fmt: skip


def test_completions_are_kept_with_their_rewards_and_columns():
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(str, ids)))
    window, made = Window(tokenizer), step([[0.0, 0.0], [0.0, 0.0]], [[1, 1], [1, 0]], [2.0, 6.0])
    scores = Scores({"a": torch.tensor([1.0, 5.0])}, {}, {"x": ["u", "v"], "short": ["w"]})
    window.note_step(made, prompts(2), scores)
    assert window.rows == [
        {"prompt": "0", "completion": "00", "reward": 2.0, "rewards/a": 1.0, "x": "u"},
        {"prompt": "0", "completion": "0", "reward": 6.0, "rewards/a": 5.0, "x": "v"},
    ]
    table = window.table(lambda rows: rows + rows[:1])
    assert len(table) == 3 and window.rows == [] and window.table(list).empty
    window.note_step(made, prompts(2))
    assert set(window.rows[0]) == {"prompt", "completion", "reward"}


def test_a_window_goes_on_with_the_types_that_it_had():
    window = Window()
    window.note({"a": torch.tensor(0.1), "b": None, "c": 2, "d": torch.tensor(0.1, dtype=torch.float64)})
    window.note({"a": 3.0})
    window.rows.append({"prompt": "p"})
    state = window.state()
    assert state["figures"]["d"] == [["float64", 0.1]] and state["rows"] == [{"prompt": "p"}] and "b" not in state
    again = Window()
    again.restore(state)
    kinds = {name: [v.dtype for v in values] for name, values in again.figures.items()}
    assert kinds == {"a": [torch.float32] * 2, "c": [torch.int64], "d": [torch.float64]} and again.rows == window.rows
    means = again.drain(lambda values: float(sum(values)))
    assert means == {"a": pytest.approx(3.1), "c": 2.0, "d": 0.1} and again.figures == {}


def liked(values, counts):
    values = None if values is None else torch.tensor(values)
    store = SimpleNamespace(token_counts=lambda vocab: torch.tensor(counts)[:vocab])
    return SimpleNamespace(liked_tokens=lambda: values, store=store)


def test_tokens_at_both_ends_of_a_fit():
    backbone = SimpleNamespace(vocab_size=6, tokenizer=None)
    learner = liked([5.0, 1.0, 3.0, 4.0, 2.0, 9.0], [1, 1, 1, 1, 4, 0])
    mean = (5 + 1 + 3 + 4 + 4 * 2) / 8
    table = token_table(backbone, learner, 2)
    assert list(table.columns) == ["rank", "token", "id", "value", "count"]
    assert table["rank"].tolist() == [1, 2, -2, -1] and table["id"].tolist() == [0, 3, 4, 1]
    assert table["value"].tolist() == [value - mean for value in (5.0, 4.0, 2.0, 1.0)]
    assert table["count"].tolist() == [1, 1, 4, 1] and table["token"].tolist() == ["0", "3", "4", "1"]
    few = token_table(backbone, learner, 3)  # five tokens: none is listed twice
    assert few["rank"].tolist() == [1, 2, 3, -2, -1] and few["id"].tolist() == [0, 3, 2, 4, 1]
    assert token_table(backbone, learner, 5)["rank"].tolist() == [1, 2, 3, 4, 5]
    assert SHOWN == 20 and token_table(backbone, learner).equals(token_table(backbone, learner, 20))
    many = liked([float(i) for i in range(50)], [1] * 50)
    assert len(token_table(SimpleNamespace(vocab_size=50, tokenizer=None), many)) == 40
    empty = token_table(backbone, liked(None, [0] * 6))
    assert empty.empty and list(empty.columns) == list(table.columns)


# ---- callbacks ----
@pytest.mark.parametrize(
    ("at", "on_end", "before", "after"),
    [
        (3, False, (False, False), (False, False)), (3, True, (False, False), (False, False)),
        (5, True, (False, False), (True, True)), (5, False, (False, False), (False, True)),
        (6, True, (False, False), (True, True)), (3, False, (True, False), (True, True)),
        (3, False, (False, True), (False, True)), (5, False, (True, True), (True, True)),
    ],
)  # fmt: skip
def test_after_the_last_step_there_is_a_row_and_an_evaluation_if_it_is_wanted(at, on_end, before, after):
    calls = []
    trainer = SimpleNamespace(step_ended=lambda: calls.append("ended"), adjust_beta=lambda: calls.append("beta"))
    control = SimpleNamespace(should_evaluate=before[0], should_log=before[1])
    state = SimpleNamespace(global_step=at, max_steps=5)
    StepEnd(trainer).on_step_end(SimpleNamespace(eval_on_end=on_end), state, control)
    assert (control.should_evaluate, control.should_log) == after and calls == ["ended", "beta"]


def stopper(heard=lambda flag: flag):
    return StopOnSignal(SimpleNamespace(together=SimpleNamespace(any=heard)))


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_a_signal_stops_after_the_step_with_a_checkpoint(strategy):
    stop, args = stopper(), SimpleNamespace(save_strategy=strategy)
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    stop.on_step_end(args, None, control)
    assert not control.should_training_stop and stop.received is None
    stop._on(signal.SIGINT, None)
    assert stop.received == signal.SIGINT
    stop.on_step_end(args, None, control)
    assert control.should_training_stop is True and control.should_save is (strategy == "steps")
    stop._on(signal.SIGTERM, None)
    assert stop.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        stop._on(signal.SIGINT, None)
    told = stopper(lambda flag: True)  # another process was
    told.on_step_end(args, None, control)
    assert told.received == signal.SIGTERM


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = stopper()
    stop.on_train_begin(None, None, None)
    try:
        assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == [stop._on] * 2
    finally:
        stop.restore()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    other = stopper()
    thread = threading.Thread(target=other.on_train_begin, args=(None, None, None))
    thread.start()
    thread.join()
    assert other._before == {}


def test_lines_are_written_by_the_first_process_where_there_is_something_to_say():
    lines = []
    callback = Lines(lines.append, lambda state, row: row.get("text", ""))
    for first, row in ((True, {"text": "a"}), (True, {}), (True, None), (False, {"text": "b"})):
        callback.on_log(None, SimpleNamespace(is_world_process_zero=first), None, row)
    assert lines == ["a"]
