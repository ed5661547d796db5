"""`grade show` and `grade merge` on a run on disk; its adapter loads from anywhere."""

import json
import os
import re
import shutil
import unicodedata
from html import unescape
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grade import GradeConfig, GradeTrainer
from grade.cli.main import main
from grade.training.toy import toy_task

REWARDS = """
def length(completions, **columns):
    return [len(text) / 10 for text in completions]

def vowels(completions, **columns):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A project whose base is named by a relative path, with a run of 4 steps in it."""
    root = tmp_path_factory.mktemp("place")
    task = toy_task()
    task.backbone.peft.unload().save_pretrained(root / "base")
    task.backbone.tokenizer.save_pretrained(root / "base")
    for name, prompts in (("train", task.train_prompts[:8]), ("held_out", task.validation_prompts[:6])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    (root / "rewards.py").write_text(REWARDS)
    values = {
        "model": "base", "train_dataset": "train.jsonl", "eval_dataset": "held_out.jsonl", "lora": {"r": 2, "alpha": 4},
        "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "learning_rate": 0.1,
        "max_completion_length": 6, "log_completions": True, "use_cpu": True, "seed": 5,
    }  # fmt: skip
    (root / "train.yaml").write_text(json.dumps(values))
    here = os.getcwd()
    os.chdir(root)
    try:
        rewards = ["--reward", "rewards.py:length", "--reward", "rewards.py:vowels"]
        options = ["--config", "train.yaml", "--method", "rloo", "--output-dir", "run"]
        assert main(["train", *options, *rewards]) == 0
    finally:
        os.chdir(here)
    return root


@pytest.fixture
def copied(place, tmp_path):
    """A run whose files a test may change."""
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()
    return tmp_path / "run"


@pytest.fixture
def unfinished(copied):
    """What a run leaves that was killed after its second step."""
    for name in ("metrics.json", "history.csv", "timings.csv", "timings.json", "samples.json"):
        (copied / name).unlink()
    for name in ("adapter", "checkpoints", "checkpoint-4"):
        shutil.rmtree(copied / name)
    for path in (copied / "completions").iterdir():
        if int(path.stem[-5:]) > 2:
            path.unlink()
    return copied


def show(capsys, *arguments):
    code = main(["show", *map(str, arguments)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def error(capsys, *arguments):
    assert main([str(word) for word in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    return printed.err


def test_a_run_is_shown_with_its_settings_history_and_completions(place, capsys):
    out = show(capsys, place / "run", "--rows", "2")
    first, *lines = out.splitlines()
    assert first == "rloo, base base, reward rewards.py:length + rewards.py:vowels, 4 steps, seed 5"
    history = pd.read_csv(place / "run" / "history.csv").set_index("step")
    assert lines[1].split() == ["step", "reward", "KL", "held-out", "reward"]
    assert [line.split()[0] for line in lines[2:7]] == ["0", "1", "2", "3", "4"]
    mean, stderr = history.loc[4, "val/reward_mean"], history.loc[4, "val/reward_stderr"]
    assert lines[6].endswith(f"{mean:.4g} ± {stderr:.2g}") and f"{history.loc[4, 'train/reward']:.4g}" in lines[6]
    assert "completions, step 4: 2 of 4 completions" in lines and "eval, step 4: 2 of 6 completions" in lines
    table = pd.read_parquet(place / "run" / "completions" / "eval_00004.parquet")
    words = lines[lines.index("eval, step 4: 2 of 6 completions") + 2].split()
    assert words[-3:] == [f"{table[name][0]:.4g}" for name in ("reward", "rewards/length", "rewards/vowels")]


@pytest.mark.parametrize("width", [90, 133])
def test_no_line_is_wider_than_the_terminal(copied, width, capsys, monkeypatch):
    path = copied / "completions" / "eval_00009.parquet"
    texts = ["word " * 100, "漢字" * 100, "short", "two\nlines \x1b[31m"]
    pd.DataFrame({"prompt": texts, "completion": texts[::-1], "reward": [1.0, 0.5, -12345.678, float("nan")],
                  **{f"rewards/part_{i}": [0.25] * 4 for i in range(8)}}).to_parquet(path)  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    table = show(capsys, copied).split("4 of 4 completions\n")[1]
    widths = [sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line) for line in table.splitlines()]
    assert max(widths) <= width
    assert "漢字" in table and "漢字" * 12 not in table  # each is four places wide
    assert table.count("…") >= 4  # two long texts in each of two columns
    monkeypatch.setenv("COLUMNS", "0")
    assert show(capsys, copied).split("4 of 4 completions\n")[1].strip()
    assert "two\\nlines" in table and "\x1b" not in table and "-1.235e+04" in table and "part_7" in table


def test_step_rows_and_columns_choose(place, capsys):
    out = show(capsys, place / "run", "--step", "1", "--rows", "1", "--columns", "vowels,rewards/length, completion")
    tables = out.split("\n\n")[2:]
    assert len(tables) == 1
    title, head, row = tables[0].splitlines()
    assert title == "completions, step 1: 1 of 4 completions" and head.split() == ["vowels", "length", "completion"]


def test_a_long_history_keeps_its_evaluations_and_its_end(copied, capsys):
    steps = range(2001)
    pd.DataFrame({"step": steps, "train/reward": 0.5, "train/kl": 0.1,
                  "val/reward_mean": [0.25 if step % 500 == 3 else None for step in steps]}
                 ).to_csv(copied / "history.csv", index=False)  # fmt: skip
    rows = show(capsys, copied).split("\n\n")[1].splitlines()[1:]
    assert [int(row.split()[0]) for row in rows] == [3, 503, 1003, 1503, 2000]


def test_a_run_that_was_killed_is_shown_up_to_its_checkpoint(place, unfinished, capsys):
    (unfinished / "checkpoint-9").mkdir()  # as if it was killed while it wrote one
    whole, part = show(capsys, place / "run", "--step", "2"), show(capsys, unfinished)
    assert part.splitlines()[0].endswith("step 2 of 4, not finished, seed 5")
    rows = [[line.split() for line in out.split("\n\n")[1].splitlines()] for out in (part, whole)]
    assert rows[0] == rows[1][:4] and [row[0] for row in rows[0]] == ["step", "0", "1", "2"]
    assert part.split("\n\n")[2:] == whole.split("\n\n")[2:]


def test_a_run_that_has_no_checkpoint_yet_is_shown(unfinished, capsys):
    shutil.rmtree(unfinished / "checkpoint-2")
    shutil.rmtree(unfinished / "completions")
    out = show(capsys, unfinished)
    assert "step 0 of 4, not finished" in out and "no completions yet" in out


def test_a_page_holds_curves_completions_by_step_settings_and_command(place, copied, tmp_path, capsys):
    assert show(capsys, place / "run", "--html", tmp_path / "run.html") == f"wrote {tmp_path / 'run.html'}\n"
    page = (tmp_path / "run.html").read_text()
    assert "<h1>run</h1>" in page and "rloo, base base, reward rewards.py:length + rewards.py:vowels, 4 steps" in page
    curves = ElementTree.fromstring(re.sub("(xlink|xml):", "", re.search("<svg.*</svg>", page, re.S)[0]))
    titles = [text.text for text in curves.iter("text")]
    assert "held-out reward ± standard error" in titles and "KL to the base, nats per token" in titles
    assert "R² of the distilled reward" not in titles  # rloo has none
    for step in (0, 4):
        table = pd.read_parquet(place / "run" / "completions" / f"eval_{step:05}.parquet")
        scores = [f"{name} {table[column][0]:.4g}" for name, column in
                  (("reward", "reward"), ("length", "rewards/length"), ("vowels", "rewards/vowels"))]  # fmt: skip
        assert f"<th>step {step}</th>" in page and ", ".join(scores) in page
        assert table["prompt"][0] in unescape(page)
    assert "<td>learning_rate</td><td>0.1</td>" in page and "grade train --method rloo" in page
    assert f"<li>torch {torch.__version__}</li>" in page
    (copied / "README.md").unlink()  # the user's to write
    show(capsys, copied, "--html", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page
    assert not re.search("https?://|<script|<link|src=", page)


def test_a_page_shows_what_the_reward_likes_and_escapes_all_that_the_run_wrote(copied, tmp_path, capsys):
    bad = '<script>alert(1)</script> & "two"\nlines \x1b[31m'
    for step, reward in ((5, 1.5), (9, float("nan"))):
        rows = [{"prompt": bad, "completion": f"{step}{bad}", "reward": reward}]
        pd.DataFrame(rows).to_parquet(copied / "completions" / f"eval_{step:05}.parquet")
    tokens = {"token": ["<b>", "&"], "value": [0.5, -0.25]}
    pd.DataFrame(tokens).to_parquet(copied / "completions" / "tokens_00009.parquet")
    note = json.loads((copied / "run.json").read_text()) | {"command": "<b>bold</b>"}
    (copied / "run.json").write_text(json.dumps(note))
    show(capsys, copied, "--rows", 9, "--html", tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    safe = "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#34;two&#34;\nlines \\x1b[31m"
    assert f"<td>{safe}</td>" in page and f"<td>9{safe}<" in page and "reward 1.5" in page
    assert "<script" not in page and "<b>" not in page
    likes, dislikes = re.findall(r"<p>The reward (?:dis)?likes: <code>(.*?)</code>", page)
    assert likes == "&#39;&lt;b&gt;&#39; +0.5" and dislikes == "&#39;&amp;&#39; -0.25"


def test_a_page_of_a_run_that_was_killed_or_has_only_begun(unfinished, tmp_path, capsys):
    show(capsys, unfinished, "--html", tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "step 2 of 4, not finished" in page and "<svg" in page and "<th>step 0</th>" in page
    assert "<th>step 4</th>" not in page
    shutil.rmtree(unfinished / "checkpoint-2")
    shutil.rmtree(unfinished / "completions")
    show(capsys, unfinished, "--html", tmp_path / "run.html")
    assert "Nothing is logged yet." in (tmp_path / "run.html").read_text()


def test_a_page_of_a_run_from_python_has_the_fit_of_the_distilled_reward(tmp_path, capsys):
    task = toy_task()
    prompts = [{"prompt": text} for text in task.train_prompts[:4]]
    config = GradeConfig(str(tmp_path / "run"), max_steps=4, learning_rate=1e-2, eval_strategy="steps", eval_steps=2,
                         max_completion_length=4, report_to="none", use_cpu=True)  # fmt: skip
    reward = lambda completions, **_: [float("e" in text) for text in completions]  # noqa: E731
    GradeTrainer(task.backbone, reward, config, prompts, eval_dataset=prompts).train()
    capsys.readouterr()
    shown = show(capsys, tmp_path / "run")
    assert "eval, step 4" in shown and re.search(r"^the reward likes: .+ [+-]\d.*\ndislikes: ", shown, re.M)
    show(capsys, tmp_path / "run", "--html", tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "R² of the distilled reward" in page and "The reward likes" in page
    assert "<p>distilled, reward &lt;lambda&gt;, 4 steps, seed 42</p>" in page
    assert "<td>learning_rate</td><td>0.01</td>" in page and "<td>max_completion_length</td><td>4</td>" in page
    assert all(f"<th>step {step}</th>" in page for step in (2, 4))


@pytest.mark.parametrize("name", ["run.json", "metrics.json", "history.csv", "completions/eval_00004.parquet",
                                  "checkpoint-4/trainer_state.json"])  # fmt: skip
def test_a_damaged_file_is_one_line(place, copied, capsys, name):
    for content in (b"\xff", b"[]") if name.endswith("json") else (b"\xff",):
        (copied / name).write_bytes(content)
        assert "grade show: RUN: got" in error(capsys, "show", copied)
    shutil.copy(place / "run" / "manifest.json", copied)
    flipped = bytearray((place / "run" / name).read_bytes())
    flipped[-9] ^= 1  # in the last number, in a table's footer
    (copied / name).write_bytes(flipped)
    assert f"says; {name.removeprefix('checkpoint-4/')} is damaged" in error(capsys, "show", copied)
    (copied / name).unlink()
    assert f"{name.removeprefix('checkpoint-4/')} is damaged" in error(capsys, "show", copied)


@pytest.mark.parametrize(
    "name, content",
    [("history.csv", "step,train/reward\n"),
     ("checkpoint-4/trainer_state.json", '{"global_step": 4, "log_history": 0}')],
)  # fmt: skip
def test_what_has_no_content_or_another_type_is_one_line(copied, capsys, name, content):
    (copied / name).write_text(content)
    if "checkpoint" in name:
        (copied / "checkpoint-4" / "manifest.json").unlink()
        (copied / "metrics.json").unlink()
    assert "RUN: got" in error(capsys, "show", copied)


@pytest.mark.parametrize("column, values", [("prompt", [1.0]), ("rewards/a", ["x"]), ("reward", ["x"])])
def test_a_table_of_other_types_is_one_line(copied, capsys, column, values):
    row = {"prompt": ["a"], "completion": ["b"], "reward": [0.5], column: values}
    pd.DataFrame(row).to_parquet(copied / "completions" / "eval_00009.parquet")
    for more in ((), ("--html", copied / "run.html")):
        assert "eval_00009.parquet" in error(capsys, "show", copied, *more)


def test_what_another_run_wrote_is_one_line(place, copied, capsys, monkeypatch):
    other = copied.parent / "other"
    monkeypatch.chdir(place)
    assert main(["train", "--config", "train.yaml", "--method", "rloo", "--reward", "rewards.py:length", "--set",
                 "max_steps=2", "--output-dir", str(other)]) == 0  # fmt: skip
    capsys.readouterr()
    shutil.copy(other / "completions" / "eval_00002.parquet", copied / "completions" / "eval_00009.parquet")
    assert "eval_00009.parquet'; allowed: a table of this run and step" in error(capsys, "show", copied)
    (copied / "completions" / "eval_00009.parquet").unlink()
    shutil.copy(copied / "completions" / "eval_00000.parquet", copied / "completions" / "eval_00004.parquet")
    assert "eval_00004.parquet'; allowed: a table of this run and step" in error(capsys, "show", copied)
    shutil.copytree(other / "checkpoint-2", copied / "checkpoint-8")
    assert "checkpoint-8'; allowed: a checkpoint of this run" in error(capsys, "show", copied)


def test_a_manifest_that_omits_a_file_is_damaged(place, tmp_path, capsys):
    shutil.copytree(place / "run", tmp_path / "run")
    for folder in (tmp_path / "run", tmp_path / "run" / "adapter"):
        content = json.loads((folder / "manifest.json").read_text())
        content.pop("history.csv" if folder.name == "run" else "adapter_model.safetensors")
        (folder / "manifest.json").write_text(json.dumps(content))
    assert "manifest.json is damaged" in error(capsys, "show", tmp_path / "run")
    assert "manifest.json is damaged" in error(capsys, "merge", tmp_path / "run", tmp_path / "out")


def test_of_several_processes_each_says_which_one_it_is(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["show", "nowhere"]) == 2 and capsys.readouterr().err.startswith("grade show (process 1): RUN")
    monkeypatch.setenv("RANK", "0")
    assert main(["show", "nowhere"]) == 2 and capsys.readouterr().err.startswith("grade show: RUN")


@torch.no_grad()
def test_the_adapter_loads_from_any_folder_and_merges_to_the_same_logits(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the run named its base "base", from its own folder
    ids = AutoTokenizer.from_pretrained(place / "base")("The film was a delight.", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    bare = base(ids).logits
    want = PeftModel.from_pretrained(base, place / "run" / "adapter")(ids).logits
    assert (want - bare).norm() > 1e-3 * want.norm()
    assert torch.equal(AutoPeftModelForCausalLM.from_pretrained(place / "run" / "adapter")(ids).logits, want)
    assert main(["merge", str(place / "run"), "out"]) == 0
    assert capsys.readouterr().out == "wrote out (float32)\n"
    got = AutoModelForCausalLM.from_pretrained("out")(ids).logits
    assert (got - want).norm() <= 1e-5 * want.norm()  # the requirement; float32 sums in another order
    assert main(["merge", str(place / "run" / "checkpoint-4"), "last"]) == 0
    assert torch.equal(AutoModelForCausalLM.from_pretrained("last")(ids).logits, got)
