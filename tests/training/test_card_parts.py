"""The model card, one part at a time: what it says of a run of which little is known, and of all of one."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grade.training import card
from grade.training.config import TrainConfig
from grade.training.evaluate import Evaluation


def described(folder, before=None, after=None, **changes):
    config = TrainConfig(output_dir=str(folder), method="rloo", use_cpu=True)
    values = dict(args=config, name="run", base="", rewards=["a", "b"], train_data="t", eval_data="", steps=3,
                  before=before, after=after, lora="small")  # fmt: skip
    return card.Card(**values | changes)


def test_a_card_of_little(tmp_path):
    made = described(tmp_path)
    assert (made.adapter, made.samples, made.command, made.method, made.datasets, made.about) == (
        ".",
        3,
        "",
        "",
        [],
        {},
    )
    text = made.text()
    assert "a model that was made in memory" in text and "- reward: `a` + `b`\n" in text and "## Command" not in text
    assert "- steps: 3, of 8 completions\n" in text and "held-out" not in text and "## Samples" not in text
    assert "base_model" not in text.split("---")[1] and "datasets" not in text.split("---")[1]
    assert 'from_pretrained("run")' in text and "The base is not on the hub" in text and text.endswith("\n")
    assert "\n\n\n" not in text and "pipeline_tag: text-generation" in text
    hub = described(tmp_path, base="some/model", adapter="adapter", command="make it").text()
    assert "[some/model](https://huggingface.co/some/model)" in hub and "The base is not" not in hub
    assert 'from_pretrained("run/adapter")' in hub and "## Command\n\n```bash\nmake it\n```" in hub
    tagged = described(tmp_path, about={"tags": ["grade", "x"], "pipeline_tag": "y", "license": "mit"}).text()
    assert "tags:\n- grade\n- reward-gradients\n- x\n" in tagged and "pipeline_tag: y" in tagged


def evaluation(n, reward=0.0, **parts):
    return Evaluation([f"p{i}" for i in range(n)], [f"c{i}" for i in range(n)], np.arange(n) + reward,
                      np.full(n, np.nan), np.zeros(0), 0.0, {k: np.array(v) for k, v in parts.items()})  # fmt: skip


@pytest.mark.parametrize(("before", "after", "samples", "shown"), [(5, 5, 3, 3), (5, 5, 9, 3), (2, 5, 3, 2),
                                                                  (5, 1, 3, 1), (5, 5, 0, 0)])  # fmt: skip
def test_a_card_shows_three_samples_at_most(before, after, samples, shown, tmp_path):
    made = described(tmp_path, evaluation(before), evaluation(after, 0.25), samples=samples)
    text = made._samples()
    assert text.count("Prompt:") == shown and ("## Samples" in text) == bool(shown)
    if shown:
        assert "Prompt:\n\n```text\np0\n```\n\nBefore (reward 0):\n\n```text\nc0\n```\n\nAfter (reward 0.25):" in text


def test_figures_of_one_side_have_no_change(tmp_path):
    text = described(tmp_path, evaluation(2))._figures()
    assert text.endswith("| reward | 0.5 ± 0.5 (n=2) |  |  |") and "gold" not in text
    assert described(tmp_path)._figures() == ""
    two = evaluation(2, a=[1.0, 3.0], b=[0.0, 0.0])
    lines = described(tmp_path, two, two)._figures().splitlines()
    assert [line.split(" | ")[0] for line in lines[6:]] == ["| reward", "| reward `a`", "| reward `b`"]


def test_a_trainers_card_says_what_it_is_told(tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr(card, "_write", lambda path, text: written.update({path: text}))
    lora = SimpleNamespace(r=2, lora_alpha=5, target_modules={"b", "a"})
    made = SimpleNamespace(
        is_world_process_zero=lambda: True, args=TrainConfig(output_dir=str(tmp_path / "mine"), method="rloo",
                                                             use_cpu=True),
        state=SimpleNamespace(global_step=4), train_dataset=range(9), eval_dataset={"x": range(2), "y": range(3)},
        backbone=SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(_name_or_path="some/base")),
                                 peft=SimpleNamespace(peft_config={"d": lora}, active_adapter="d")),
        rewards=SimpleNamespace(names=["r"]), evaluations={0: evaluation(2), 4: evaluation(2, 1.0)},
    )  # fmt: skip
    create = card.Describing.create_model_card
    create(made)
    ((path, text),) = written.items()
    assert path == tmp_path / "mine" / "README.md" and "# mine\n" in text and "base_model: some/base" in text
    assert "- adapter: LoRA of rank 2, alpha 5, on a, b\n" in text and "- prompts: 9 rows\n" in text
    assert "- held-out prompts: x: 2 rows; y: 3 rows\n" in text and "| 1 ± 0 (n=2) |" in text
    create(made, tasks=["t", "u"], dataset="Toys", dataset_args=["a", "b"], finetuned_from="other/base", model_name="N",
           dataset_tags=["d/e"], tags="z")  # fmt: skip
    text = written[path]
    assert "# N\n" in text and "base_model: other/base" in text and "pipeline_tag: t\n" in text and "- z\n" in text
    assert "- prompts: Toys (a, b), 9 rows\n" in text and "datasets:\n- d/e\n" in text
    create(made, dataset_tags="d/e")
    assert "- prompts: d/e, 9 rows\n" in written[path]
    made.state.global_step, made.eval_dataset, made.train_dataset = 0, None, None
    create(made)
    assert "- held-out" not in written[path] and "- prompts" not in written[path]
    assert written[path].count("(n=2)") == 1  # before the first step there is nothing after it
    made.is_world_process_zero = lambda: False
    written.clear()
    create(made)
    assert written == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [("a", "a"), ("true", '"true"'), ("1", '"1"'), ("", '""'), ("a: b", '"a: b"'), ("[", '"["'), (1.5, "1.5"),
     (None, "null"), (True, "true"), (["a"], '["a"]')],
)  # fmt: skip
def test_a_value_as_the_command_line_reads_it(value, text):
    assert card._yaml(value) == text


def test_an_evaluation_of_before_an_interruption_is_read(tmp_path):
    made = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path)), evaluations={4: "kept"})
    assert card._evaluated(made, 4) == "kept" and card._evaluated(made, 0) is None
    (tmp_path / "completions").mkdir()
    evaluation(2, 3.0).table().to_parquet(tmp_path / "completions" / "eval_00000.parquet")
    assert card._evaluated(made, 0).reward.tolist() == [3.0, 4.0]


def test_small_words():
    assert (
        card._listed(None) == card._listed("") == [] and card._listed("ab") == ["ab"] and card._listed({"a"}) == ["a"]
    )
    assert card._rows(None) == "" and card._rows([1, 2]) == "2 rows"
    assert card.is_hub_id("a/b") and not card.is_hub_id(str(Path.cwd()))
    assert json.loads(card._yaml({"a": 1})) == {"a": 1}
