"""Parts of a weighted sum and what is logged of them; names, scopes and warnings; functions and texts by hand."""

import itertools
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import ToyReward

from grade.errors import InputError
from grade.models.prompts import PromptBatch
from grade.rewards import functions, rewards, shallow, sources
from grade.rewards.differentiable import EmbeddedClassifier
from grade.rewards.fit import BagSettings, TrunkSettings
from grade.rewards.functions import FunctionReward, Log, run_functions
from grade.rewards.model import HeadSettings, RewardModel
from grade.rewards.rewards import HeadReward, Rewards, make_rewards
from grade.rewards.shallow import ShallowReward, first_layers, layer_count
from grade.rewards.sources import resolve_reward
from grade.rewards.text import Texts, beginning, decode_texts, text_of

TEXTS = Texts(["p"] * 3, ["yes", "no", "maybe"], [[5], [6], [7]], {})
IDS, ONES = torch.arange(6).view(3, 2), torch.ones(3, 2, dtype=torch.long)


def part(name="part", values=(1.0, 2.0, 3.0), **more):
    """A reward that is not a function of text."""
    return SimpleNamespace(
        name=name, score=lambda prompts, ids, mask: torch.tensor(values, dtype=torch.float64), **more
    )


class Words:
    """A tokenizer whose tokens are numbers."""

    @staticmethod
    def decode(ids, skip_special_tokens):
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i == 0))


def text(function, name=None):
    return FunctionReward(function, Words(), name)


def clock(monkeypatch, module, *times):
    times = iter(times)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))


def score(made):
    return made.score(PromptBatch(IDS, ONES), IDS, ONES)


# --- sums


def test_parts_are_timed_and_kept_without_weight(monkeypatch):
    made = Rewards([part("a"), text(lambda **_: [4, 5, 6], "b"), part("c", (0.5, 0.25, 0))], [2, -1.0, 4])
    clock(monkeypatch, functions, 1.0, 4.0, 10.0, 15.0, 20.0, 27.0)  # one module: the function first, then the others
    assert made.last is None
    assert score(made).tolist() == [2 - 4 + 2, 4 - 5 + 1, 6 - 6]
    assert made.last.seconds == {"a": 5.0, "b": 3.0, "c": 7.0}
    assert {name: value.tolist() for name, value in made.last.values.items()} == {
        "a": [1, 2, 3], "b": [4, 5, 6], "c": [0.5, 0.25, 0],
    }  # fmt: skip
    assert {value.dtype for value in made.last.values.values()} == {torch.float32}
    assert made.last.columns == made.last.metrics == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_differentiable_sum_keeps_its_graph_and_its_parts_do_not(dtype):
    values = [torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    made = Rewards([part("a"), part("b")], [0.5, -3.0], dtype=dtype)
    total = made.combine(values)
    assert total.tolist() == [-2.5, -5.0] and total.dtype == dtype
    total.sum().backward()
    assert [value.grad.tolist() for value in values] == [[0.5, 0.5], [-3.0, -3.0]]
    assert not any(value.requires_grad for value in made.last.values.values())
    assert made.last.seconds == made.last.columns == made.last.metrics == {}


def test_only_a_row_without_any_reward_is_warned_of():
    first = text(lambda **_: [None, 1, None], "first")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = Rewards([first, text(lambda **_: [2, None, 3], "second")])
        assert score(made).tolist() == [2, 1, 3]
    made = Rewards([first, text(lambda **_: [2, 3, None], "second")], [1.0, 10.0])
    with pytest.warns(UserWarning, match="returned None for the completion '4 5'; its reward is 0") as seen:
        assert score(made).tolist() == [20, 31, 0]
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score(made)  # once is enough


def test_the_warning_names_the_line_that_asked_for_the_score():
    made = Rewards([text(lambda **_: [None] * 3)])
    with pytest.warns(UserWarning) as seen:
        made.score(PromptBatch(IDS, ONES), IDS, ONES)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_row_that_is_not_finite_is_named(row, value):
    values = [1.0, 2.0, 3.0]
    values[row:] = [value] * (3 - row)
    with pytest.raises(InputError, match=f"reward 'b', row {row}: got {value}; allowed: a finite number"):
        score(Rewards([part("a"), part("b", values)]))


@pytest.mark.parametrize(
    ("weights", "fine"),
    [
        ([1], True), ([0.0], True), ([-2.5], True), ((3,), True), ([1, 2], False), ([], False),
        ([float("inf")], False), ([float("nan")], False), (["1"], False), ([None], False), ([1j], False),
    ],
)  # fmt: skip
def test_weights_are_finite_numbers_one_for_each_part(weights, fine):
    if fine:
        assert Rewards([part()], weights).weights == list(weights)
    else:
        with pytest.raises(InputError, match="reward_weights"):
            Rewards([part()], weights)


def test_without_weights_all_are_1_and_without_parts_there_is_no_reward():
    assert Rewards([part(), part()]).weights == [1.0, 1.0]
    with pytest.raises(InputError, match="reward_funcs"):
        Rewards([])


@pytest.mark.parametrize("scope", ["prompt_and_completion", "completion"])
@pytest.mark.parametrize("own", ["prompt_and_completion", "completion", None])
def test_a_part_of_another_scope_is_a_mistake(scope, own):
    one = part() if own is None else part(scope=own)
    if own in (None, scope):
        assert Rewards([one], scope=scope).scope == scope
    else:
        with pytest.raises(ValueError, match=f"made for scope '{own}', the others have '{scope}'"):
            Rewards([one], scope=scope)


@pytest.mark.parametrize(
    ("names", "distinct"),
    [
        (["a"], ["a"]),
        (["a", "a"], ["a", "a_2"]),
        (["a", "b", "a", "a", "b"], ["a", "b", "a_2", "a_3", "b_2"]),
        (["b", "a"], ["b", "a"]),
    ],
)
def test_equal_names_are_numbered_from_2(names, distinct):
    assert Rewards([part(name) for name in names]).names == distinct


@pytest.mark.parametrize("scope", ["prompt_and_completion", "completion"])
def test_a_head_reads_the_embeddings_of_its_scope_and_leaves_no_graph(scope, policy):
    seen = []

    def function(embeds, mask):
        seen.append((embeds, mask))
        return embeds.sum((1, 2)) * torch.ones((), requires_grad=True)

    prompts = PromptBatch(IDS + 70, torch.tensor([[0, 1]] * 3))
    head = HeadReward(function, policy, scope, "head")
    assert not head.score(prompts, IDS, ONES).requires_grad
    ids = torch.cat([prompts.ids, IDS], 1) if scope == "prompt_and_completion" else IDS
    mask = torch.cat([prompts.mask, ONES], 1) if scope == "prompt_and_completion" else ONES
    assert torch.equal(seen[0][0], policy.embed(ids)) and torch.equal(seen[0][1], mask)
    assert head(policy.embed(ids), mask).requires_grad


# --- what users give


def test_tokenizers_of_classifiers(policy, make_classifier, tokenizer):
    def length(completions, **_):
        return [1.0] * len(completions)

    model = make_classifier("bert", dtype=torch.float32)
    for given, tokenizers in ((model, tokenizer), ([model], tokenizer), ([model, length], (tokenizer, None))):
        assert isinstance(make_rewards(given, policy, None, tokenizers).parts[0], EmbeddedClassifier)
    for given, tokenizers, number in (
        ([model, length], tokenizer, 1),
        ([model, length], [tokenizer], 1),
        (length, [], 0),
    ):
        with pytest.raises(InputError, match=f"reward_processing_classes: got {number}; allowed: .*one for each"):
            make_rewards(given, policy, None, tokenizers)


@pytest.mark.parametrize(
    ("source", "name"),
    [("judge", "judge"), ("some/where/judge", "judge"), ("org/judge/", "judge"), ("", "BertForSequenceClassification")],
)
def test_a_classifier_is_named_after_its_source(source, name, policy, make_classifier, tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(rewards, "load_tokenizer", lambda where: asked.append(where) or tokenizer)
    model = make_classifier("bert", dtype=torch.float32)
    model.config._name_or_path = source
    (made,) = make_rewards(model, policy, None, None if source else tokenizer).parts
    assert made.name == name and asked == ([source] if source else [])


def test_heads_are_named_by_name_or_kind_and_what_scores_is_taken_as_it_is(policy):
    bag, toy, own = RewardModel("bag", policy, HeadSettings()), ToyReward(16, torch.float32), part("own")
    named = ToyReward(16, torch.float32)
    named.name = "mine"
    made = make_rewards([bag, toy, named, own], policy)
    assert made.names == ["bag", "reward", "mine", "own"] and made.parts[3] is own
    assert [type(one) for one in made.parts[:3]] == [HeadReward] * 3


# --- texts


def test_columns_are_those_of_the_first_row():
    rows = ({"prompt": "a", "answer": 1, "completion": "x", "completion_ids": [1]}, {"prompt": "b", "more": 2})
    ids, mask = torch.tensor([[5, 0, 9], [6, 7, 8]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    made = decode_texts(Words(), PromptBatch(IDS[:2], ONES[:2], rows), ids, mask)
    assert made.columns == {"answer": [1, None]} and made.prompts == ["a", "b"] and len(made) == 2
    assert made.completions == ["5", "6 7 8"] and made.completion_ids == [[5, 0], [6, 7, 8]]
    without = decode_texts(Words(), PromptBatch(IDS[:2], torch.tensor([[0, 1], [1, 1]])), ids, mask)
    assert without.prompts == ["1", "2 3"] and without.columns == {}


@pytest.mark.parametrize(
    ("completion", "characters", "shown"),
    [
        ("x" * 5, 5, "'xxxxx'"), ("x" * 6, 5, "'xx...'"), ("", 5, "''"), ("a\nb", 9, r"'a\nb'"),
        ([{"content": "first"}, {"content": "last"}], 40, "'last'"),
    ],
)  # fmt: skip
def test_how_a_completion_begins(completion, characters, shown):
    assert beginning(completion, characters) == shown
    assert isinstance(completion, list) or text_of(completion) == completion


# --- functions


def test_sync_and_async_functions_are_timed(monkeypatch):
    clock(monkeypatch, functions, 1.0, 4.0, 10.0, 15.0)

    async def late(**_):
        return [1, 2, 3]

    made = [FunctionReward(late, object()), FunctionReward(lambda **_: [4, 5, 6], object())]
    (late_values, late_seconds), (values, seconds) = run_functions(made, TEXTS, Log())
    assert (seconds, late_seconds) == (3.0, 5.0)
    assert late_values.tolist() == [1, 2, 3] and values.tolist() == [4, 5, 6]
    assert [t.daemon for t in threading.enumerate() if t.name == "async rewards"] == [True]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 3.4028234663852886e38), (torch.float16, 65504.0)])
def test_the_largest_number_of_the_type_is_finite(dtype, most):
    def made(value):
        reward = FunctionReward(lambda **_: [value, -value, None], object(), dtype=dtype)
        return run_functions([reward], TEXTS, Log())[0][0]

    assert made(most)[:2].tolist() == [most, -most] and made(most).dtype == dtype and made(most)[2].isnan()
    with pytest.raises(InputError, match="row 0"):
        made(most * 1.001)


@pytest.mark.parametrize(("length", "shown"), [(300, 300), (301, 300), (10, 10)])
def test_of_an_exception_300_characters_are_shown(length, shown):
    def wrong(**_):
        raise KeyError("k" * 500) if length == 0 else RuntimeError("x" * length)

    with pytest.raises(InputError) as error:
        run_functions([FunctionReward(wrong, object())], TEXTS, Log())
    assert f"no exception ({'x' * shown}), but a list" in str(error.value)


def test_an_exception_without_words_and_an_exit_are_errors_too():
    for error, said in (
        (ValueError(), "'ValueError'; allowed: no exception .no message."),
        (SystemExit(3), "'SystemExit'"),
    ):

        def wrong(error=error, **_):
            raise error

        async def late(error=error, **_):
            raise error

        for function in (wrong, late):
            with pytest.raises(InputError, match=said):
                run_functions([FunctionReward(function, object())], TEXTS, Log())


def test_what_functions_log_is_appended():
    log = Log()
    log.extra("a", [1, 2]), log.extra("a", [3]), log.metric("m", 1.0), log.metric("m", 2.0)
    assert log.columns == {"a": [1, 2, 3]} and log.metrics == {"m": [1.0, 2.0]} and log.trainer_state is None


# --- names


def test_the_own_folder_comes_before_others(tmp_path, monkeypatch):
    for folder, value in (("elsewhere", 1.0), ("own", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sibling_of_rewards.py").write_text(f"VALUE = {value}\n")
    source = "import sibling_of_rewards\ndef good(completions, **_):\n    return [sibling_of_rewards.VALUE]\n"
    (tmp_path / "own" / "own_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    before = list(sys.path)
    try:
        assert resolve_reward(f"{tmp_path}/own/own_rewards.py:good", SimpleNamespace())(completions=["a"]) == [2.0]
        assert sys.path == before
        sys.modules.pop("sibling_of_rewards")
        monkeypatch.chdir(tmp_path / "own")
        assert resolve_reward("own_rewards:good", SimpleNamespace())(completions=["a"]) == [2.0]
        assert sys.path == before
    finally:
        for name in ("sibling_of_rewards", "own_rewards", "reward_own_rewards"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("spec", "loaded", "label", "name"),
    [
        ("hf:judge", "judge", None, "judge"),
        ("hf:org/judge@GOOD", "org/judge", "GOOD", "judge"),
        ("hf:a@b/judge", "a@b/judge", None, "judge"),
        ("hf:a/judge@home@GOOD", "a/judge@home", "GOOD", "judge@home"),
        ("org/judge", "org/judge", None, "judge"),
        ("org/judge@VERY GOOD", "org/judge", "VERY GOOD", "judge"),
    ],
)
def test_what_a_classifiers_name_means(spec, loaded, label, name, monkeypatch):
    monkeypatch.setattr(sources, "load_classifier", lambda *args: ("model", f"own of {args[0]}"))
    monkeypatch.setattr(sources, "classifier_reward", lambda *args: args)
    policy = SimpleNamespace(device="cpu")
    assert resolve_reward(spec, policy, "completion") == (
        "model", f"own of {loaded}", policy, label, "completion", name,
    )  # fmt: skip
    assert resolve_reward(spec, policy, "completion", "given")[1] == "given"


# --- the first layers


class FakeModel:
    """What training gives back."""

    def __init__(self, backbone):
        self.backbone, self.trains = backbone, None

    def requires_grad_(self, flag):
        self.trains = flag

    def __call__(self, embeds, mask):
        return layer_count(self.backbone)


@pytest.mark.parametrize(
    ("options", "tokens", "least"), [({}, 64, 16), (dict(tokens=9), 9, 9), (dict(tokens=17), 17, 16)]
)
def test_a_shallow_reward_is_trained_and_read_on_the_first_layers(options, tokens, least, policy, monkeypatch):
    asked = []

    def train(kind, config, backbone, data, held_out):
        asked.append((kind, config, layer_count(backbone), data, held_out))
        return FakeModel(backbone), "report"

    monkeypatch.setattr(shallow, "train_reward", train)
    reward = ShallowReward(policy, 1, ["a"] * 5, ["b"] * 3, seed=4, **options)
    kind, config, depth, data, held_out = asked[0]
    assert (kind, depth, len(data), len(held_out)) == ("trunk", 1, 5, 3)
    assert config.trunk == TrunkSettings(
        train_size=5, validation_size=3, max_tokens=tokens, min_tokens=least, eval_size=2
    )
    assert config.eval_tokens == [tokens] and config.seed == 4 and config.bag == BagSettings()
    assert reward.accuracy == "report" and reward.model.trains is False and reward.depth == 1
    assert reward(None, None) == 1 and layer_count(policy) == 2


def test_a_base_is_whole_again_after_an_error(policy):
    with pytest.raises(KeyError), first_layers(policy, 1):
        raise KeyError
    assert layer_count(policy) == 2


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_padding_beyond_the_limit_is_cut_and_no_token(kind, make_classifier, policy, tokenizer, batch):
    # 14 columns, of which the longest row fills 11: a classifier of 11 positions reads every row whole.
    prompts, ids, mask = batch
    ids, mask = torch.cat([prompts.ids, ids], 1), torch.cat([prompts.mask, mask], 1)
    longest = int(mask.sum(1).max())
    assert mask.shape[1] > longest
    limit = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    for positions in (longest, mask.shape[1]):
        model = make_classifier(kind, **{limit: positions})
        reward = EmbeddedClassifier(model, tokenizer, policy, scope="completion")
        rows = [row[m.bool()] for row, m in zip(ids, mask, strict=True)]
        with torch.no_grad():
            want = torch.cat([model(input_ids=row[None]).logits[:, 0] for row in rows])
        torch.testing.assert_close(reward(reward.reads.embed(ids), mask), want)


def test_numbers_of_a_list_go_to_their_functions_in_order():
    calls = itertools.count()
    made = [FunctionReward(lambda **_: [next(calls)] * 3, object(), str(i)) for i in range(3)]
    assert [values.tolist() for values, _ in run_functions(made, TEXTS, Log())] == [[0] * 3, [1] * 3, [2] * 3]
