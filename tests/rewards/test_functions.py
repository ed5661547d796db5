"""Reward functions: TRL's signature, async, None, and what is refused."""

import asyncio
import copy
import functools
import re

import numpy as np
import pytest
import torch

from grade.errors import InputError
from grade.models.prompts import PromptBatch, encode_examples
from grade.rewards.functions import FunctionReward, Log, Texts, decode_texts, run_functions

TEXTS = Texts(["a", "b"], ["yes", "no"], [[5, 0], [6]], ["<s>a", "<s>b"], {"answer": [1, 2]})


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
        "prompt_texts": ["<s>a", "<s>b"], "trainer_state": "state",
    }  # fmt: skip


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


def test_a_function_sees_what_the_template_opened_before_the_completion(tokenizer):
    opening = copy.deepcopy(tokenizer)
    opening.chat_template += "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    prompts = encode_examples(opening, examples([{"role": "user", "content": "The film was"}]))
    ids = torch.tensor([opening(" dull</think> fun")["input_ids"]])
    made = decode_texts(opening, prompts, ids, torch.ones_like(ids))

    def thought(prompt_texts, completions, **_):
        texts = [asked + said[0]["content"] for asked, said in zip(prompt_texts, completions, strict=True)]
        return [float(bool(re.search("<think>.+</think>", text))) for text in texts]

    assert call(thought, made).tolist() == [1.0]
    assert made.completions == [[{"role": "assistant", "content": " dull</think> fun"}]]
    assert made.prompt_texts == ["<user>The film was\n<assistant><think>"]


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


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_an_async_reward_can_end_the_program(end):
    async def ends(**_):
        raise end

    for _ in range(2):  # the loop goes on
        with pytest.raises(end):
            call(ends)


def test_a_client_made_in_one_call_still_works_in_the_next():
    """Connections of a client belong to a loop: it must be the same one at every step."""
    loops = []

    async def reward(completions, **_):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    call(reward), call(reward)
    assert loops[0] is loops[1] and not loops[0].is_closed()


@pytest.mark.parametrize("result", [[1, True], (1.0, np.float16(1)), np.ones(2), torch.ones(2)])
def test_numbers_of_any_kind_are_rewards(result):
    assert call(lambda **_: result).tolist() == [1, 1]


FEW = r"allowed: 2 finite numbers, one for each completion, or None"
BAD = [
    (lambda: [1.0], rf"got \[1.0\]; {FEW}"),
    (lambda: [1.0, float("nan")], rf"got \[1.0, nan\]; {FEW}"),
    (lambda: [1e300, 1.0], rf"got \[1e\+300, 1.0\]; {FEW}"),
    (lambda: [[1.0], [2.0]], FEW),
    (lambda: ["1.0", 1.0], "no exception .*str"),
    (lambda: "no", "no exception .*str"),
    (lambda: None, "got 'TypeError'; allowed: no exception .*NoneType"),
    (lambda: 1 / 0, r"got 'ZeroDivisionError'; allowed: no exception \(division by zero; .*test_functions.py, line"),
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
