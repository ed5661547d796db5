"""README, docs and CONTRIBUTING: commands run, snippets run, figures are the metrics', and what they name exists."""

import csv
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import save_toy_base

import grade
from grade.cli import main as command_line
from grade.cli.memory import step_of
from grade.cli.probe import SECTION
from grade.config_files import load_config, read_yaml
from grade.entropy.run import ProbeRunConfig
from grade.memory import compare
from grade.plugins import REWARDS
from grade.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
PROGRAMS = ("grade", "make", "dvc", "pytest", "nbstripout", "accelerate")


def blocks(page, language=None):
    """Fenced blocks of a page; without a language those that hold shell lines."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    return [text for name, text in found if (name in ("", "sh") if language is None else name == language)]


def shell_lines(page):
    return [line.strip() for block in blocks(page) for line in block.splitlines() if line.strip().startswith(PROGRAMS)]


def words_of(line):
    return shlex.split(line.split(" | ")[0], comments=True)


LINES = [(page, line) for page in PAGES for line in shell_lines(page)]


def run(*words, **options):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True, **options)


def test_the_readmes_trace_prints_what_it_says():
    (line,) = [line for line in shell_lines("README.md") if line.startswith("grade memory")]
    done = run("bash", "-c", line)
    shown, printed = (
        [re.sub(r"; \d+ s\)", ")", line.rstrip()) for line in text.strip().splitlines()]
        for text in (blocks("README.md", "text")[0], done.stdout)
    )
    assert printed == shown, done.stderr


OWN = ("short.yaml", "run.yaml")
"""A reader's own files, of which `docs/your-own-task.md` shows one."""
KINDS = {"train": TrainConfig, "evaluate": TrainConfig, "tilt": TrainConfig, "probe": ProbeRunConfig}


@pytest.mark.parametrize("page, line", LINES)
def test_a_command_has_the_options_that_the_page_gives_it(page, line, tmp_path):
    program, *words = words_of(line)
    if program == "make":
        recipe = re.search(rf"^{words[0]}:.* ## .*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.M)
        assert recipe, "no such target"
        if "$(MAKE)" not in recipe[1]:  # make runs such lines even when told to print them
            assert run("make", "--dry-run", *words).returncode == 0
    elif program == "accelerate":
        launched = words.index("-m")
        assert words[launched + 1] == "grade"
        _check_settings(words[launched + 2 :], tmp_path)
        read = [word for word in words[:launched] if word.endswith(".yaml")]
        assert all((ROOT / file).is_file() for file in read)
    elif program == "grade":
        assert _parses(words), line
        _check_settings(words, tmp_path)
    elif program == "dvc":
        _check_dvc(words)
    elif program in ("pytest", "nbstripout"):
        files = [word for word in words if "/" in word and "lengths" not in word]  # the recipe's new experiment
        assert [file for file in files if not (ROOT / file).exists()] == []


def _parses(words):
    """Whether a command takes its words: everything happens but the command itself."""
    if "--help" in words:
        return words[0] in command_line.COMMANDS
    options = vars(command_line.parse(words))
    _check_files(options)
    return callable(options["execute"])


def _check_files(options):
    """Config files, params and notebooks that a command reads must be there, and keys that it sets be known."""
    named = [*(options.get("config") or []), *(options.get("params") or []), options.get("notebook")]
    for file in filter(None, named):
        assert (ROOT / file).exists() or "lengths" in file or file in OWN, file


def _check_settings(words, folder):
    """Settings of a command, with those of its files, are known and fit together, and rewards are of a known kind."""
    if "--help" in words or "sharper" in words:  # the recipe's new estimator
        return
    args = command_line.parse(words)
    if words[0] == "memory":
        step_of(args.config, args.set)
    elif kind := KINDS.get(words[0]):
        (folder / "own.yaml").write_text(blocks("docs/your-own-task.md", "yaml")[0])
        files = [folder / "own.yaml" if file in OWN else ROOT / file for file in args.config]
        load_config(kind, files, args.set, section=SECTION if kind is ProbeRunConfig else "")
        for reward in getattr(args, "reward", None) or ():
            assert reward.partition(":")[0] in (*REWARDS, "rewards.py"), reward


READING = [(page, line) for page, line in LINES if re.search("--adapter |grade show ", line)]


@pytest.mark.parametrize("page, line", READING)
def test_what_a_command_reads_was_written_by_an_earlier_one_of_the_page(page, line):
    lines = shell_lines(page)
    earlier = lines[: lines.index(line)]
    written = [word for one in earlier for word in re.findall(r"--output-dir (\S+)", one)]
    written += [f"outputs/train/{run}" for one in earlier for run in re.findall(r"train@(\S+)", one)]
    (read,) = re.findall(r"(?:--adapter|grade show) (\S+)", line)
    assert any(f"{read}/".startswith(f"{folder}/") for folder in written), line


def _check_dvc(words):
    assert words[0] in ("repro", "exp", "metrics", "dag", "status", "plots")
    if words[0] == "repro":
        assert {word.partition("@")[0] for word in words[1:]} <= read_yaml(ROOT / "dvc.yaml")["stages"].keys()
    for word in words:
        file, _, change = word.partition(":")
        if change:
            assert change.split("=")[0] in read_yaml(ROOT / file), f"{file} has no key {change}"


# The README's runs in tests/cli/test_entrance.py, without a checkout.
@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs") and blocks(page, "python")])
def test_the_python_examples_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "standard_steps", lambda device, every=compare.standard_steps: every(device)[:1])
    save_toy_base("models/backbone")  # in place of SmolLM2
    for example in blocks(page, "python"):
        exec(compile(example, page, "exec"), {})
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (ROOT / page).parent.joinpath(link).exists(), link
            assert not link.endswith(".py"), f"{link}: the site has no code"


@cache
def metrics(folder):
    """Every figure of a folder of results by its name, times included."""
    flat = {}
    for file in ("metrics.json", "timings.json", "timings/metrics.json"):
        if (ROOT / "outputs" / folder / file).exists():
            flat |= _flat(json.loads((ROOT / "outputs" / folder / file).read_text()))
    return flat


def _flat(nested, prefix=""):
    flat = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return flat


# Pages, text around a figure ({} stands for it), folder of results, key, format; a "±" takes the standard error too.
FIGURES = [
    ("README.md", "has a reward of {}; refitted", "full/limit", "reward_at_5/tiny_gold/bias_texts", ".2f"),
    ("README.md", "own 1,280 completions {}; `rloo`", "full/limit", "reward_at_5/tiny_gold/tilt", ".2f"),
    ("README.md", "after as many, {} (", "full/limit", "reward_at_5/tiny_gold/rloo", ".2f"),
    ("README.md", "after ten times as many {} (one)", "full/limit", "reward_at_5/tiny_gold/rloo_x10", ".2f"),
    ("README.md", "prefers `rloo`, {} sd to", "full/limit", "outside/tiny_gold/rloo", ".2f"),
    ("README.md", "sd to {} | tiny |", "full/limit", "outside/tiny_gold/bias_texts", ".2f"),
    ("docs/methods.md", "on `gold` {} sd", "full/limit", "outside/tiny_gold/rloo", ".2f±"),
    ("docs/methods.md", "and the bias {}. By", "full/limit", "outside/tiny_gold/bias_texts", ".2f±"),
    ("docs/methods.md", "`ppo` has {} of", "full/limit", "reward_at_5/tiny_bag/ppo", ".3f±"),
    ("README.md", "sd to 0.20 | tiny | +{} |", "full/limit", "bias_texts/tiny_gold/reward_at_5_over_rloo", ".3f±"),
    ("README.md", "(SmolLM2, three: +{})", "full/limit", "bias_texts/smollm2_gold/reward_at_5_over_rloo", ".3f±"),
    ("README.md", "1,280, `bag` | tiny | +{} |", "full/limit", "bias_gradient/tiny_bag/reward_at_5_over_ste", ".3f±"),
    ("README.md", "(bias from texts: {};", "full/limit", "efficiency/tiny_gold/bias_texts", ".2f"),
    ("README.md", "best of 16: {})", "full/limit", "efficiency/tiny_gold/best_of_16", ".2f"),
    ("README.md", "best of 16: 0.84) | tiny | {} |", "full/limit", "efficiency/tiny_gold/rloo", ".3f±"),
    ("README.md", "KL of {} nats. ", "your_own_task", "auto/kl", ".1f"),
    ("README.md", "`auto` goes from {} to", "your_own_task", "auto/function/before", ".2f"),
    ("README.md", "to {} on held-out", "your_own_task", "auto/function/after", ".2f"),
    ("README.md", "at tau 1: {} [", "full/estimators", "after/worth/bag", ".3g"),
    ("README.md", "through 30 layers {} [", "full/estimators", "after/worth/trunk", ".2f"),
    ("docs/methods.md", "worth {} RLOO samples of `bag`", "full/estimators", "after/worth/bag", ".3g"),
    ("docs/methods.md", "and {} of `trunk`", "full/estimators", "after/worth/trunk", ".2f"),
    ("README.md", "unrolled graph | SmolLM2 | {} |", "exp6", "parity/replay_rel_error_ste", ".3g"),
    ("README.md", "to {} GiB in bfloat16", "exp4", "exp4/bf16_peak_gib", ".3g"),
    ("README.md", "replayed to {} GiB", "exp4", "exp4/document_replay_peak_gib", ".3g"),
    ("README.md", "Qwen3-4B | {} GiB", "exp4", "exp4/replay_peak_gib", ".3g"),
    ("docs/methods.md", "measures {} nats per token", "exp6", "parity/kl_at_init_misaligned", ".1f"),
    ("docs/memory.md", "traces to {} GiB. It", "exp4", "exp4/bf16_peak_gib", ".3g"),
    ("docs/memory.md", "leaves {} GiB", "exp4", "exp4/bf16_checkpointed_peak_gib", ".3g"),
    ("docs/memory.md", "`replay` needs {} GiB", "exp4", "exp4/document_replay_peak_gib", ".3g"),
    ("docs/memory.md", "the step takes {} GiB", "exp4", "exp4/replay_peak_gib", ".3g"),
    ("docs/memory.md", "of which {} GiB", "exp4", "exp4/replay_step_gib", ".3g"),
    ("docs/memory.md", "needs {} instead of", "exp4", "exp4/replay_tflop", ".3g"),
    ("docs/memory.md", "instead of {} TFLOP", "exp4", "exp4/bf16_checkpointed_tflop", ".3g"),
    ("docs/memory.md", "error is about {}.", "tracer", "cpu/max_rel_error", ".4f"),
    ("README.md", "full rate: {})", "probe", "study/step0/x1/linearity_error", ".3f±"),
    ("README.md", "| SmolLM2 | {} | [probe]", "probe", "study/step0/x0.1/linearity_error", ".4f±"),
    ("docs/entropy.md", "is 1{} early", "probe", "study/step0/x0.1/linearity_error", ".4f±"),
    ("docs/your-own-task.md", "of `grpo` takes {} of", "full/beside_trl", "grpo/seconds_ratio", ".2f"),
    ("docs/your-own-task.md", "with KL in both {},", "full/beside_trl", "grpo_kl/seconds_ratio", ".2f"),
    ("docs/your-own-task.md", "one of `teacher` {};", "full/beside_trl", "teacher/seconds_ratio", ".2f"),
    ("docs/methods.md", "about {} times `ste`'s squared error", "estimators", "mse/gumbel_rao_over_ste", ".2f"),
]


# Rows of the table of the limit by their first cell.
LIMIT_ROWS = {
    "bias from 8,192 scored texts": "bias_texts", "bias from one gradient of 8 completions": "bias_gradient8",
    "`tilt`, own completions": "tilt", "`auto`": "auto", "`rloo`": "rloo", "`ste`": "ste",
    "values by state, 8,192 texts, three seeds": "bias_states",
    "`rloo`, ten times the completions, one seed": "rloo_x10",
    "a bias in the adapter's place, by `rloo`, three seeds": "rloo_bias",
}  # fmt: skip


@pytest.mark.parametrize("label, method", LIMIT_ROWS.items())
def test_a_row_of_the_limit_is_the_metrics(label, method):
    found, cells = metrics("full/limit"), [label]
    for task in ("gold", "bag", "trunk", "rule"):
        key = f"reward_at_5/tiny_{task}/{method}"
        cells.append(f"{found[key]:.3f} ± {found[f'{key}_stderr']:.3f}" if key in found else "")
    row = "|" + "|".join(f" {cell} ".replace("  ", " ") for cell in cells) + "|"
    assert row in (ROOT / "docs/methods.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page, text, folder, key, form", FIGURES)
def test_a_figure_is_the_metrics(page, text, folder, key, form):
    found, spec = metrics(folder), form.rstrip("±")
    value = f"{found[key]:{spec}}"
    if form.endswith("±"):
        value += f" ± {found[f'{key}_stderr']:{spec}}"
    value = value.removeprefix("0") if "is 1{}" in text else value  # 1 + the error
    words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert text.format(value) in words, value


def test_the_peak_beside_trl_is_the_metrics():
    peaks = metrics("full/beside_trl")
    ratio = peaks["grpo/peak_mib/grade"] / peaks["grpo/peak_mib/TRL"]
    assert f"its peak is {ratio:.2f} of TRL's" in (ROOT / "docs/your-own-task.md").read_text(encoding="utf-8")


H100 = {
    "Qwen3-4B: three engines, four policy gradients": "qwen3",
    "SmolLM2: float32, autocast, all weights, eager attention": "smol",
}


@pytest.mark.parametrize("label, model", H100.items())
def test_a_row_of_steps_on_a_gpu_is_what_was_measured(label, model):
    steps = json.loads((ROOT / "notebooks/tracer_h100.json").read_text())["steps"]
    steps = [step for step in steps if step["name"].startswith(model)]
    ratios = [step["traced_peak_bytes"] / step["measured_peak_bytes"] for step in steps]
    row = f"| {label} | {len(ratios)} | {min(ratios):.3f} to {max(ratios):.3f} |"
    assert row in (ROOT / "docs/memory.md").read_text(encoding="utf-8"), row


def test_every_public_name_is_documented():
    places = re.findall(r"^::: (\S+)\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(name for _, name in places) == grade.__all__
    for module, name in places:
        assert getattr(importlib.import_module(module), name) is getattr(grade, name)


def test_most_claims_are_refuted():
    with (ROOT / "outputs/claims.csv").open(newline="") as file:
        verdicts = [row["verdict"] for row in csv.DictReader(file)]
    assert verdicts.count("refuted") > len(verdicts) / 2
