"""Reward functions: TRL's signature, async, None, and every way to be wrong."""

import asyncio
import functools

import numpy as np
import pytest
import torch

from grade.errors import InputError
from grade.models.prompts import PromptBatch
from grade.rewards.functions import FunctionReward, Log, Texts, decode_texts, run_functions

TEXTS = Texts(["a", "b"], ["yes", "no"], [[5, 0], [6]], {"answer": [1, 2]})


def call(function, texts=TEXTS, log=None):
    return run_functions([FunctionReward(function)], texts, log or Log(), torch.float32)[0][0]


def examples(*prompts, **columns):
    rows = [dict(prompt=p, completion="old", **{k: v[i] for k, v in columns.items()}) for i, p in enumerate(prompts)]
    return tuple(rows)


def test_a_function_is_called_by_keyword_with_trls_arguments():
    seen = {}

    def reward(**arguments):
        seen.update(arguments)
        arguments["log_extra"]("length", [3, 2])
        arguments["log_metric"]("share", torch.tensor(0.5))
        return [1, None]

    log = Log(trainer_state="state")
    values = call(reward, log=log)
    assert values[0] == 1 and values[1].isnan() and values.dtype == torch.float32
    assert log.columns == {"length": [3, 2]} and log.metrics == {"share": [0.5]}
    assert {k: v for k, v in seen.items() if not k.startswith("log_")} == {
        "prompts": ["a", "b"], "completions": ["yes", "no"], "completion_ids": [[5, 0], [6]], "answer": [1, 2],
        "trainer_state": "state",
    }  # fmt: skip


def test_completions_of_a_prompt_share_no_value_that_a_function_may_change():
    messages, answers = [{"role": "user", "content": "hi"}], ["a", "b"]
    given = Log().arguments(Texts([messages] * 2, ["x", "y"], [[5], [6]], {"answers": [answers] * 2}))
    given["answers"][0].pop()
    given["prompts"][0].append(messages[0])
    assert given["answers"][1] == answers == ["a", "b"] and given["prompts"][1] == messages == messages[:1]


def test_texts_are_the_rows_prompts_the_decoded_completions_and_the_other_columns(tokenizer, batch):
    prompts, ids, mask = batch
    made = decode_texts(tokenizer, prompts, ids, mask)
    assert made.prompts == ["The film was", "This movie", "The second half of it was not"] and made.columns == {}
    assert made.completions == [" a delight.", " was dull and clumsy, a mess", " fun"]
    assert [len(row) for row in made.completion_ids] == mask.sum(1).tolist()
    asked = examples("kept verbatim  ", "p", "q", answer=["1", None, "3"])
    made = decode_texts(tokenizer, PromptBatch(prompts.ids, prompts.mask, asked), ids, mask)
    assert made.prompts == ["kept verbatim  ", "p", "q"] and made.columns == {"answer": ["1", None, "3"]}


def test_completions_of_messages_are_messages_and_ids_keep_the_end(tokenizer):
    message = [{"role": "user", "content": "hi"}]
    ids, mask = torch.tensor([[70, 71, 0, 1]]), torch.tensor([[1, 1, 1, 0]])
    one = torch.ones(1, 1, dtype=torch.long)
    made = decode_texts(tokenizer, PromptBatch(one, one, examples(message)), ids, mask)
    assert made.prompts == [message] and made.completion_ids == [[70, 71, 0]]
    assert made.completions == [[{"role": "assistant", "content": tokenizer.decode([70, 71])}]]


def test_async_functions_wait_together_also_where_a_loop_runs():
    running = []

    async def slow(completions, **_):
        running.append(1)
        await asyncio.sleep(0.2)
        return [float(len(running))] * len(completions)

    class Callable:
        async def __call__(self, completions, **_):
            return await slow(completions)

    rewards = [FunctionReward(f) for f in (slow, functools.partial(slow), Callable(), lambda **_: [0, 0])]
    assert [r.is_async for r in rewards] == [True, True, True, False]
    assert [r.name for r in rewards] == ["slow", "slow", "Callable", "<lambda>"]

    def score():
        running.clear()
        results = run_functions(rewards, TEXTS, Log(), torch.float32)
        assert [v.tolist() for v, _ in results] == [[3, 3], [3, 3], [3, 3], [0, 0]]
        assert all(seconds >= 0.2 for _, seconds in results[:3])

    score()

    async def notebook():
        score()  # a loop is already running, as in Jupyter

    asyncio.run(notebook())


def test_a_client_made_in_one_call_still_works_in_the_next():
    """Connections of a client belong to a loop: it must be the same one at every step."""
    loops = []

    async def reward(completions, **_):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    call(reward), call(reward)
    assert loops[0] is loops[1] and not loops[0].is_closed()


def test_a_function_may_change_its_lists():
    def greedy(completions, answer, **_):
        completions.clear(), answer.clear()
        return [0, 0]

    run_functions([FunctionReward(greedy), FunctionReward(greedy)], TEXTS, Log(), torch.float32)
    assert TEXTS.completions == ["yes", "no"] and TEXTS.columns == {"answer": [1, 2]}


BAD = [
    (lambda: [1.0], "length of the list: got 1; allowed: 2"),
    (lambda: [1.0, float("nan")], r"row 1 \('no'\): got nan"),
    (lambda: [1e300, 1.0], r"row 0 .*got 1e\+300"),
    (lambda: [1e38, 1.0], r"row 0 .*got 1e\+38; .* at most 1e\+18 in size"),
    (lambda: [10**400, 1.0], "row 0 .*got 1000"),
    (lambda: [np.float16("inf"), 1.0], "row 0 .*got inf"),
    (lambda: ["1.0", 1.0], "row 0 .*got '1.0'"),
    (lambda: "no", "got 'no'; allowed: a list"),
    (lambda: torch.ones(2, requires_grad=True), "got tensor.*; allowed: .*tolist"),
    (lambda: 1 / 0, r"got 'ZeroDivisionError'; allowed: no exception \(division by zero\).*row 0 of 2 begins 'yes'"),
]


@pytest.mark.parametrize(("result", "match"), BAD)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_function_does_wrong_is_one_line_with_its_name(result, match, kind):
    def wrong(**_):
        return result()

    async def late(**_):
        await asyncio.sleep(0)
        return result()

    function = wrong if kind == "sync" else late
    with pytest.raises(InputError, match=match) as error:
        call(function)
    assert f"reward {function.__name__!r}" in str(error.value)


def test_an_exception_keeps_its_traceback_and_a_missing_keyword_says_so():
    def reward(prompts, completions):
        return [0.0, 0.0]

    with pytest.raises(InputError, match="unexpected keyword argument") as error:
        call(reward)
    assert isinstance(error.value.__cause__, TypeError) and error.value.__cause__.__traceback__ is not None


def test_one_failing_async_function_leaves_none_running():
    done = []

    async def slow(completions, **_):
        await asyncio.sleep(0.1)
        done.append(1)
        return [0.0] * len(completions)

    async def failing(**_):
        raise RuntimeError("judge is down\nsecond line")

    with pytest.raises(InputError, match="reward 'failing': got 'RuntimeError'.*judge is down second line"):
        run_functions([FunctionReward(f) for f in (failing, slow)], TEXTS, Log(), torch.float32)
    assert done == [1]


def test_a_column_is_logged_once_for_a_batch_by_whatever_function():
    def reward(log_extra, **_):
        log_extra("length", [3, 2])
        return [0.0, np.float16(1)]

    log = Log()
    assert call(reward, log=log).tolist() == [0, 1] and call(reward, log=Log()).tolist() == [0, 1]
    with pytest.raises(InputError, match="log_extra: got 'length'; allowed: another name"):
        call(reward, log=log)


def test_an_input_error_of_a_function_stays_as_it_is():
    def reward(**_):
        raise InputError("column", "answer", "there")

    with pytest.raises(InputError, match="^column: got 'answer'"):
        call(reward)
