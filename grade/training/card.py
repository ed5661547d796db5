"""The model card of a run: ``README.md`` with the metadata that the Hugging Face hub reads.

It says what was trained on what, how, with which figures before and after, and how to load it. Its text is in
``card.md.jinja``. No path of the machine that made it is in it: an absolute path is shortened to its last part.

Left out: dates and times, so that a run made again writes the same card.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from grade.gradients.methods import RELAXED
from grade.results import environment
from grade.stats import Estimate
from grade.training.config import TrainConfig
from grade.training.evaluate import Evaluation

if TYPE_CHECKING:
    from peft import LoraConfig

    from grade.training.config import GradeConfig

TEMPLATE = Path(__file__).with_name("card.md.jinja")
TAGS = ["grade", "reward-gradients"]
GRADE = ("GRADE", "https://arxiv.org/abs/2601.11574")
PAPERS = {
    "reinforce": ("REINFORCE, Williams 1992", "https://doi.org/10.1007/BF00992696"),
    "rloo": ("RLOO, Ahmadian et al. 2024", "https://arxiv.org/abs/2402.14740"),
    "remax": ("ReMax, Li et al. 2023", "https://arxiv.org/abs/2310.10505"),
    "grpo": ("GRPO, Shao et al. 2024", "https://arxiv.org/abs/2402.03300"),
    "ppo": ("PPO, Schulman et al. 2017", "https://arxiv.org/abs/1707.06347"),
    "offline": ("mean actor-critic, Allen et al. 2017", "https://arxiv.org/abs/1709.00503"),
    "teacher": ("GKD, Agarwal et al. 2024", "https://arxiv.org/abs/2306.13649"),
    "distilled": ("all-action policy gradients, Ciosek and Whiteson 2018", "https://arxiv.org/abs/1706.05374"),
}
"""Papers of methods that take any reward. Every relaxed method is of `GRADE`."""

SAMPLES, SAMPLE_CHARACTERS = 3, 400
_NOT_SET = ("method", "reward", "output_dir", "run_name", "report_to", "project")
_NOT_SET_PREFIXES = ("hub_", "push_", "trackio_", "log_level")
"""Settings that are not in the command: those with an option of their own, secrets, and what changes no result."""


def model_card(
    args: GradeConfig,
    lora: LoraConfig,
    before: Evaluation | None,
    after: Evaluation | None,
    *,
    name: str,
    base: str,
    method: str,
    samples: int = SAMPLES,
    tags: Sequence[str] = (),
    datasets: Sequence[str] = (),
    about: dict[str, Any] | None = None,
    **facts: Any,
) -> str:
    """The text of a card, metadata first.

    ``base`` is a Hugging Face id or folder, empty for a model that was made in memory; ``method`` the one that trained;
    ``datasets`` Hugging Face ids; ``about`` further metadata; ``facts`` what the template names besides.
    """
    about, on_hub = dict(about or {}), _is_hub_id(base)
    if on_hub:
        about = {"base_model": base, "base_model_relation": "adapter"} | about
        base = f"[{base}](https://huggingface.co/{base})"
    else:
        base = f"the local model `{Path(base).resolve().name}`" if base else "a model that was made in memory"
    layers = lora.target_modules  # names, or a regular expression
    layers = [layers] if isinstance(layers, str) else sorted({name.rpartition(".")[2] for name in layers})
    data = ModelCardData(
        library_name="peft", pipeline_tag=about.pop("pipeline_tag", "text-generation"),
        tags=list(dict.fromkeys([*TAGS, *tags])), datasets=list(datasets) or None, **about,
    )  # fmt: skip
    paper, link = GRADE if method in RELAXED else PAPERS[method]
    card = ModelCard.from_template(
        data, template_path=str(TEMPLATE), args=args, name=name, base=base, on_hub=on_hub, method=method, paper=paper,
        link=link, figures=_figures(before, after), before=before, after=after, quoted=shlex.quote(name),
        shown=range(min(samples, SAMPLES, len(before.prompts), len(after.prompts)) if before and after else 0),
        fenced=_fenced, versions=environment(), lora=lora, layers=layers, **facts,
    )  # fmt: skip
    return f"{card}\n"


def run_card(
    config: TrainConfig, name: str, adapter: str, lora: LoraConfig, before: Evaluation | None,
    after: Evaluation | None, method: str, steps: int, chosen: Mapping[str, str],
) -> str:  # fmt: skip
    """The card of a run from files.

    ``method`` is what ``auto`` chose; ``chosen`` everything that was chosen, with reasons; ``adapter`` the adapter's
    folder, seen from the card.
    """
    rewards = [config.reward] if isinstance(config.reward, str) else config.reward
    sources = (source.partition(":")[0] for source in (config.train_dataset, config.eval_dataset))
    datasets = dict.fromkeys(s for s in sources if "/" in s and not Path(s).exists() and _is_hub_id(s))
    return model_card(
        config, lora, before, after, name=name, place=f"{name}/{adapter}".removesuffix("/."),
        base=config.base_name or config.model, method=method or config.method, samples=config.samples,
        rewards=[_without_places(spec) for spec in [*rewards, *(["teacher"] if config.teacher else [])]], steps=steps,
        chosen=chosen, train_data=f"`{_without_places(config.train_dataset)}`",
        eval_data=config.eval_dataset and f"`{_without_places(config.eval_dataset)}`", command=command_of(config),
        datasets=list(datasets),
    )  # fmt: skip


def _figures(before: Evaluation | None, after: Evaluation | None) -> list[tuple[str, str, str, str]]:
    """Rows of the table: what is measured, before, after, change."""
    first, second = _values(before), _values(after)
    rows = []
    for label in dict.fromkeys([*first, *second]):
        a, b = first.get(label), second.get(label)
        change = Estimate.of(b - a) if a is not None and b is not None and len(a) == len(b) else ""
        rows.append((label, *("" if v is None else str(Estimate.of(v)) for v in (a, b)), str(change)))
    return rows


def _values(evaluation: Evaluation | None) -> dict[str, Any]:
    """Values by label, without those that are missing for a prompt."""
    if evaluation is None:
        return {}
    parts = evaluation.parts if len(evaluation.parts) > 1 else {}
    values = {"reward": evaluation.reward} | {f"reward `{name}`": part for name, part in parts.items()}
    values |= {"gold judge": evaluation.gold, "KL to the base, nats per token": evaluation.kl}
    return {label: each for label, each in values.items() if len(each) and np.isfinite(each).all()}


def command_of(config: TrainConfig) -> str:
    """A command that makes the same run: all settings that differ from their defaults, absolute paths shortened."""
    rewards = [config.reward] if isinstance(config.reward, str) else config.reward
    words = [["grade", "train", "--method", config.method, "--output-dir", Path(config.output_dir).resolve().name]]
    words += [["--reward", _without_places(spec)] for spec in rewards]
    # With what the Trainer makes of them, on the same devices.
    default = TrainConfig(output_dir=config.output_dir, method=config.method, use_cpu=config.use_cpu)
    for item in fields(TrainConfig):
        value = getattr(config, item.name)
        if not item.init or item.name in _NOT_SET or item.name.startswith(_NOT_SET_PREFIXES):
            continue
        if value == (TrainConfig.default_of("use_cpu") if item.name == "use_cpu" else getattr(default, item.name)):
            continue
        value = value.model_dump() if hasattr(value, "model_dump") else getattr(value, "value", value)
        if isinstance(value, bool | int | float | str | list | dict | None):
            words.append(["--set", f"{item.name}={_yaml(_without_places(value))}"])
    return " \\\n  ".join(shlex.join(part) for part in words)


def _without_places(value: Any) -> Any:
    """A setting, also a nested one, with absolute paths and those upwards shortened to their last part.

    >>> _without_places("/mine/rewards.py:short"), _without_places("hf:/models/judge@GOOD"), _without_places("a/b.csv")
    ('rewards.py:short', 'hf:judge@GOOD', 'a/b.csv')
    """
    if isinstance(value, dict):
        return {name: _without_places(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner) for inner in value]
    if not isinstance(value, str):
        return value
    prefix = "hf:" if value.startswith("hf:") else ""
    path = Path(value.removeprefix(prefix))
    return prefix + path.name if path.is_absolute() or {"..", "~"} & set(path.parts) else value


def _is_hub_id(name: str) -> bool:
    """Whether a base's name is an id of the Hugging Face hub, not a folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).is_dir()


def _yaml(value: Any) -> str:
    """A value as ``--set`` reads it: text plainly where YAML reads the same text."""
    if isinstance(value, str):
        try:
            if yaml.safe_load(value) == value:
                return value
        except yaml.YAMLError:
            pass
    return json.dumps(value)


def _fenced(text: str, language: str = "text", most: int | None = SAMPLE_CHARACTERS) -> str:
    if most is not None and len(text) > most:
        text = text[:most] + " ..."
    text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
