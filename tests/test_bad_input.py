"""Bad input at the boundary is one line on stderr with what is wrong, and exit code 2; nothing is trained."""

import json
import re
import shlex

import pytest
from conftest import save_toy_files

from grade.cli.main import COMMANDS, main

REWARDS = """
def length(completions, **columns):
    return [len(text) / 10 for text in completions]

def few(completions, **columns):
    return [1.0]

def none(completions, **columns):
    return None

def nan(completions, **columns):
    return [float("nan")] * len(completions)

def infinite(completions, **columns):
    return [float("inf")] * len(completions)

def words(completions, **columns):
    return ["good"] * len(completions)

def raises(completions, **columns):
    raise ValueError("the judge is asleep")
"""
TRAIN = {
    "model": "base", "train_dataset": "prompts.jsonl", "eval_dataset": "", "reward": "rewards.py:length",
    "method": "rloo", "lora": {"r": 2, "alpha": 4}, "max_steps": 1, "per_device_train_batch_size": 4,
    "num_generations": 2, "max_completion_length": 4, "use_cpu": True, "seed": 0,
}  # fmt: skip
GOOD = {
    "train": "--config train.yaml --output-dir out",
    "evaluate": "--config train.yaml --adapter nowhere",
    "generate": "--backbone base --prompt film --max-new-tokens 2",
    "memory": "--model tiny --max-new-tokens 2 --prompt-tokens 2",
    "merge": "nowhere merged",
    "show": "nowhere",
    "probe": "--output report.json --backbone base --reward bag --reviews reviews",
}
SETTINGS = [
    ("--no_such_key 1", "no_such_key: got 'no_such_key'; allowed: a known key"),
    ("--learning_rte 1", "did you mean 'learning_rate'"), ("--set supprt=1", "did you mean 'support'"),
    ("--method rloop", "did you mean 'rloo'"), ("--method 3", "method: got 3"),
    ("--hops 2", "hops: got 'hops'; allowed: a setting of this method: only gumbel, ste"),
    ("--epsilon 0.1", "only grpo, ppo, auto have epsilon"), ("--lora.rank 3", "lora.rank: got 'rank'"),
    ("--lora 3", "lora: got 3"), ("--set seed", "--set: got 'seed'"),
    ("--set .=1", "--set: got '.=1'"), ("--set 'seed=['", "--set: got 'seed=['"), ("--seed 4294967296", "seed: got"),
    ("--seed one", "seed: got 'one'"), ("--max_steps two", "max_steps: got 'two'"), ("--max_steps 0", "max_steps"),
    ("--save_strategy best", "metric_for_best_model: got None"),
    ("--save_strategy no --metric_for_best_model reward", "save_strategy: got 'no'"),
    ("--learning_rate .nan", "learning_rate: got nan"), ("--beta -1", "beta: got -1"), ("--beta '{a: 1}'", "beta: got"),
    ("--temperature 1e-30", "temperature: got"), ("--set 'reward=[3]'", "reward.0: got 3"),
    ("--num_generations 3", "num_generations: got 3; allowed: a divisor of per_device_train_batch_size = 4"),
    ("--num_generations 1", "num_generations: got 1"), ("--min_completion_length 9", "at most max_completion_length"),
    ("--method ste --num_generations 1", "only"),
    ("--method ste --gumbel_topk 1", "gumbel_topk: got 1; allowed: 0 (the full vocabulary) or at least 2"),
    ("--num_generations 6 --gradient_accumulation_steps 2", "num_generations: got 6; allowed: a divisor of"),
    ("--num_generations 8 --gradient_accumulation_steps 3", "that divides the 12 completions of a process's step"),
    ("--method ste --sampler http://a:1", "sampler: got 'http://a:1'; allowed: none with ste"),
    ("--method tilt", "target_kl: got None; allowed: a KL in nats per completion, or beta above 0"),
    ("--sampler vllm", "sampler: got 'vllm'"), ("--sampler_folder x", "sampler: got 'nothing'"),
    ("--truncation middle", "truncation: got 'middle'"),
    ("--config nowhere.yaml", "nowhere.yaml"), ("--config list.yaml", "list.yaml: got [1, 2]; allowed: a mapping"),
    ("--config broken.yaml", "broken.yaml"), ("--config wrong.yaml", "wrong.yaml: beta: got 'much'"),
]  # fmt: skip
LOADING = [
    ("--model nowhere", "got 'nowhere'"),
    ("--train_dataset nowhere.jsonl", "nowhere.jsonl"),
    ("--lora.target_modules '[nothing]'", "nothing"),
    ("--max_completion_length 100000", "max_completion_length"),
    ("--reward nowhere", "got 'nowhere'"),
    ("--reward nowhere.py:f", "nowhere.py"),
    ("--reward rewards.py:missing", "missing"),
    ("--train_dataset columns.jsonl", "prompt"),
    ("--train_dataset empty.jsonl", "empty.jsonl"),
    ("--train_dataset blank.jsonl", "row 1"),
    ("--train_dataset numbers.jsonl", "prompt"),
    ("--train_dataset comma.csv", "comma.csv"),
    ("--train_dataset long.jsonl", "row 0"),
    ("--max_prompt_length 1", "max_prompt_length"),
    ("--method ste --gumbel_topk 8 --reward rewards.py:length", "reward 'length'"),
    ("--method ste --gumbel_topk 100000 --reward bag", "gumbel_topk: got 100000"),
    ("--sampler http://127.0.0.1:9", "a server that answers"),
    ("--teacher nowhere", "teacher: got 'nowhere'; allowed: a local folder or hub id"),
    ("--teacher base --teacher_context {nothing}", "teacher_context: got"),
    (f"--teacher base --teacher_context '{'a ' * 500}'", "the teacher's context"),
    ("--method ste --gumbel_topk 8 --reward bag --teacher base", "reward 'teacher'"),
    ("--method teacher", "teacher: got None; allowed: a model"),
    ("--reward rewards.py:few", "few"),
    ("--reward rewards.py:none", "none"),
    ("--reward rewards.py:nan", "nan"),
    ("--reward rewards.py:infinite", "infinite"),
    ("--reward rewards.py:words", "words"),
    ("--reward rewards.py:raises", "the judge is asleep"),
]  # fmt: skip
OTHERS = [
    ("", "", "command"), ("trian", "", "invalid choice"), ("generate", "--no-such-option", "--no-such-option"),
    ("memory", "--batch_sice 2", "did you mean 'batch_size'"), ("memory", "--model nowhere", "nowhere"),
    ("memory", "--fits '12 parsecs'", "12 parsecs"), ("memory", "--method gripo", "did you mean 'grpo'"),
    ("memory", "--method grpo --engine replay", "engine: got 'replay'; allowed: auto for grpo"),
    ("memory", "--method grpo --batch_size 6 --num_generations 4", "batch_size: got 6; allowed: a multiple of 4 comp"),
    ("memory", "--max-new-tokens 4096", "prompt_tokens + max_new_tokens: got 4098; allowed: at most 2048"),
    ("generate", "--backbone nowhere", "nowhere"), ("generate", "--adapter nowhere", "nowhere"),
    ("generate", "--prompt ''", "prompt"), ("merge", "", "nowhere"), ("show", "", "nowhere"),
    ("probe", "--reward nowhere", "nowhere"), ("probe", "--batch_config.D 3", "batch_config.D"),
    ("evaluate", "", "eval_dataset"),
]  # fmt: skip


def without_num_generations(words):
    """`ste` and `teacher` in the table have no group of two."""
    grouped = not {"ste", "teacher"} & {*re.findall(r"--method (\w+)", words)}
    return {name: value for name, value in TRAIN.items() if name != "num_generations" or grouped}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    save_toy_files(root)
    rows = [{"prompt": f"The film was {word}"} for word in ("good", "bad", "long", "short")]
    files = {
        "rewards.py": REWARDS, "list.yaml": "[1, 2]", "broken.yaml": "seed: [", "wrong.yaml": "beta: much",
        "prompts.jsonl": rows, "columns.jsonl": [{"text": "a"}], "empty.jsonl": [], "numbers.jsonl": [{"prompt": 3}],
        "blank.jsonl": [rows[0], {"prompt": "  "}], "long.jsonl": [{"prompt": "film " * 500}],
        "comma.csv": "prompt,n\nHello, you,1\nGood,2\n",
    }  # fmt: skip
    for name, content in files.items():
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [("train", *row) for row in (*SETTINGS, *LOADING)] + OTHERS,
)
def test_bad_input_is_one_line_that_names_it(project, monkeypatch, capsys, command, words, says):
    monkeypatch.chdir(project)
    (project / "train.yaml").write_text(json.dumps(without_num_generations(words)))  # JSON is YAML
    argv = [word for word in (command, *shlex.split(GOOD.get(command, "")), *shlex.split(words)) if word]
    try:
        code = main(argv)
    except SystemExit as stop:  # argparse's own
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and says in err and err.count("\n") == 1, err
    assert not (project / "out" / "adapter").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0 and "usage: grade" in capsys.readouterr().out
