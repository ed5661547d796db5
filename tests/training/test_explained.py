"""What texts explain of a reward before training: measured on the reference, printed, written, drawn."""

import json

import pytest
from conftest import save_toy_base

from grade.cli.main import main
from grade.training.toy import toy_reviews

REWARD = """
WEIGHTS = {LETTERS}

def value(text):
    return float(sum(text.count(letter) * weight for letter, weight in WEIGHTS.items()))

def reward(prompts, completions, **_):
    return [value(completion) + 3 * value(prompt) for prompt, completion in zip(prompts, completions)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    save_toy_base(folder / "base")
    rows = [json.dumps({"text": review.text}) for review in toy_reviews(200, seed=1)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def explained(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def explained(*options, letters="{'e': 1.0, 'a': -1.0}"):
        (tmp_path / "rewards.py").write_text(REWARD.replace("{LETTERS}", letters))
        arguments = ["--reward", f"{tmp_path}/rewards.py:reward", "--texts", f"{folder}/texts.jsonl"]
        arguments += ["--model", f"{folder}/base", "--json=~/explained.json", "--most_texts", "400"]
        code = main(["explained", *arguments, "--reference", "64", *options])
        return code, json.loads((tmp_path / "explained.json").read_text()) if code == 0 else None

    return explained


def test_a_reward_that_is_a_sum_over_tokens_is_explained_also_on_the_reference(explained, tmp_path, capsys):
    code, result = explained("--figure", f"{tmp_path}/explained.png")
    shown = capsys.readouterr().out
    assert code == 0 and (tmp_path / "explained.png").stat().st_size > 1000
    last = {row["family"]: row for row in result["curve"] if row["texts"] == result["texts"]}
    assert last["counts"]["policy"] > 0.5 and set(last) == {"counts", "bag", "ngrams"}
    liked = [row["token"] for row in result["tokens"] if 1 <= row["rank"] <= 5]
    disliked = [row["token"] for row in result["tokens"] if -5 <= row["rank"] <= -1]
    assert sum(t.count("e") - t.count("a") for t in liked) > 0 > sum(t.count("e") - t.count("a") for t in disliked)
    gains = [row["gain"] for row in result["promise"]]
    assert [row["kl"] for row in result["promise"]] == [2, 5, 10] and 0 < gains[0] <= gains[1] <= gains[2]
    assert repr(liked[0]) in shown and "R2 (reference)" in shown


def test_what_cannot_be_explained_is_one_line(explained, capsys):
    for options, message in [
        (("--reference", "30"), "reference: got 30; allowed: a multiple of group = 4"),
        (("--families", '["trunk"]'), "families.0: got 'trunk'; allowed: 'counts'"),
        (("--most_texts", "18"), "at least 16 different prompts for the reference, and 8 texts"),
        (("--texts", "missing.csv"), "texts: got 'missing.csv'; allowed: a file that exists"),
    ]:
        assert explained(*options)[0] == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert explained(letters="{}")[0] == 2 and "texts whose rewards differ" in capsys.readouterr().err
