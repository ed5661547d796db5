"""A user's own task: the notebook is short and says its points, the page's files and commands work as they stand."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from grade import toy_task
from grade.cli import main as command_line
from grade.data.prompts import load_prompts

ROOT = Path(__file__).parents[1]
NOTEBOOK = nbformat.read(ROOT / "notebooks/your_own_task.ipynb", as_version=4)
CODE = [cell.source for cell in NOTEBOOK.cells if cell.cell_type == "code"]
PAGE = (ROOT / "docs/your-own-task.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


COMMANDS = [line.split() for block in blocks("sh") for line in block.splitlines()]


def reward_of(source):
    """The reward function that a text defines."""
    lines = re.search(r"^def short_words\(.*?\n(?: .*\n)+", source, re.M)[0]
    names = {"re": re}
    exec(lines, names)
    return names["short_words"], lines


# --- the notebook ---


def test_its_prompts_are_sixty_sentences_of_which_no_held_out_one_is_trained_on():
    rows = load_prompts(ROOT / "notebooks/your_own_task.jsonl")
    train, test = ({row["prompt"] for row in rows if row["split"] == split} for split in ("train", "test"))
    assert (len(train), len(test), len(rows)) == (36, 24, 60) and not train & test


@pytest.mark.parametrize("source", [*(s for s in CODE if "def short_words" in s), blocks("python")[0]])
def test_the_reward_is_the_share_of_short_words_and_has_at_most_five_lines(source):
    function, lines = reward_of(source)
    assert len(lines.splitlines()) <= 5
    texts = ["The sun is up and it is hot.", "A big elephant, my friend, sat on this chair", "hot", ""]
    # all 8; a, big, my, sat, on, this of 9; 1 of at least 8; nothing
    assert function(completions=texts, prompts=texts) == [1.0, 6 / 9, 1 / 8, 0.0]


# --- the page ---


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the files that the page speaks of, and a tiny model in the place of the real one."""
    backbone = toy_task().backbone
    backbone.peft.unload().save_pretrained(tmp_path / "models/backbone")
    backbone.tokenizer.save_pretrained(tmp_path / "models/backbone")
    exact = next(block for block in blocks("python") if block.startswith("def exact"))
    (tmp_path / "rewards.py").write_text(f"import re\n\n\n{reward_of(blocks('python')[0])[1]}\n\n{exact}")
    for name in ("prompts", "held_out"):
        rows = [{"prompt": f"The film {number} was", "answer": str(number)} for number in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "short.yaml").write_text(blocks("yaml")[0] + "report_to: none\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADE_PROGRESS", "0")
    return tmp_path


def run(line, *more):
    words = [word for word in " ".join(line).replace('"The sky is blue because"', "The_sky").split()]
    assert words[0] == "grade"
    return command_line.main([*words[1:], *more])


def test_its_commands_run_one_after_the_other(project, capsys):
    trained = [line for line in COMMANDS if line[:2] == ["grade", "train"]]
    assert len(trained) == 4
    for line in trained:
        assert run(line, "--set", "max_steps=2") == 0, capsys.readouterr().err
    assert "this run has finished" in capsys.readouterr().out  # the last one is --resume of the first
    names = {path.name for path in (project / "runs/short").iterdir()}
    table = PAGE.split("## What comes out")[1].split("```")[0]
    for name in re.findall(r"`([\w.]+)/?`", table):
        if name != "log_completions":
            assert name in names, name
    assert "checkpoints" in names
    for command in ("show", "merge", "generate"):
        changed = ["--backbone", "models/backbone"] if command == "generate" else []
        for line in (line for line in COMMANDS if line[:2] == ["grade", command]):
            assert run(line, *changed) == 0, capsys.readouterr().err
    assert (project / "runs/short-merged/config.json").is_file()
