"""The model card of a run: ``README.md`` with the metadata that the Hugging Face hub reads.

It says what was trained on what, how, with which figures before and after, and how to load it. No path of the machine
that made it is in it: an absolute path is shortened to its last part.

Left out: dates and times, so that a run made again writes the same card.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import Trainer

from grade.gradients.methods import AUTO, RELAXED
from grade.results import environment, replacing
from grade.stats import Estimate
from grade.training.config import TrainConfig
from grade.training.evaluate import Evaluation

if TYPE_CHECKING:
    from grade.training.config import GradeConfig
    from grade.training.run import RunResult
    from grade.training.trainer import GradeTrainer

TAGS = ["grade", "reward-gradients"]
GRADE = ("GRADE", "https://arxiv.org/abs/2601.11574")
PAPERS = {
    "reinforce": ("REINFORCE, Williams 1992", "https://doi.org/10.1007/BF00992696"),
    "rloo": ("RLOO, Ahmadian et al. 2024", "https://arxiv.org/abs/2402.14740"),
    "remax": ("ReMax, Li et al. 2023", "https://arxiv.org/abs/2310.10505"),
    "grpo": ("GRPO, Shao et al. 2024", "https://arxiv.org/abs/2402.03300"),
    "ppo": ("PPO, Schulman et al. 2017", "https://arxiv.org/abs/1707.06347"),
    "distilled": ("all-action policy gradients, Ciosek and Whiteson 2018", "https://arxiv.org/abs/1706.05374"),
}
"""Papers of methods that take any reward. Every relaxed method is of `GRADE`."""

SAMPLES, SAMPLE_CHARACTERS = 3, 400
_NOT_SET = ("method", "reward", "output_dir", "run_name", "report_to", "project")
_NOT_SET_PREFIXES = ("hub_", "push_", "trackio_", "log_level")
"""Settings that are not in the command: those with an option of their own, secrets, and what changes no result."""


@dataclass
class Card:
    """What a model card is written from.

    Attributes:
        args: The run's settings.
        name: The run's name.
        base: Hugging Face id or folder of the base; empty where it was a model in memory.
        rewards: Names of the rewards.
        train_data: The prompts.
        eval_data: The held-out prompts; empty for none.
        steps: Optimizer steps taken.
        before: Evaluation of the untrained policy.
        after: Evaluation of the trained policy.
        lora: The adapter's rank and layers, in words.
        adapter: Where the adapter is, seen from the card.
        samples: Completions before and after to show.
        command: What made the run; empty if a script did.
        method: The method that trained; empty: that of the settings, which is not `auto` then.
        datasets: Hugging Face ids of the data.
        about: Further metadata.
    """

    args: GradeConfig
    name: str
    base: str
    rewards: list[str]
    train_data: str
    eval_data: str
    steps: int
    before: Evaluation | None
    after: Evaluation | None
    lora: str
    adapter: str = "."
    samples: int = SAMPLES
    command: str = ""
    method: str = ""
    datasets: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The card, metadata first."""
        about = dict(self.about)
        tags = list(dict.fromkeys([*TAGS, *_listed(about.pop("tags", None))]))
        if is_hub_id(self.base):
            about = {"base_model": self.base, "base_model_relation": "adapter"} | about
        data = ModelCardData(
            library_name="peft", pipeline_tag=about.pop("pipeline_tag", "text-generation"), tags=tags,
            datasets=self.datasets or None, **about,
        )  # fmt: skip
        sections = [
            f"---\n{data.to_yaml()}\n---", f"# {self.name}", self._opening(), self._figures(), self._training(),
            self._samples(), self._use(), self._made_by(), _versions(),
        ]  # fmt: skip
        return "\n\n".join(filter(None, sections)) + "\n"

    def _opening(self) -> str:
        method = self.method or self.args.method
        paper, link = GRADE if method in RELAXED else PAPERS[method]
        chosen = f", which `{AUTO}` chose for its reward" if self.args.method == AUTO else ""
        return f"A LoRA adapter for {self._base_link()}, trained with `{method}` ([{paper}]({link})){chosen}."

    def _base_link(self) -> str:
        if is_hub_id(self.base):
            return f"[{self.base}](https://huggingface.co/{self.base})"
        return f"the local model `{Path(self.base).resolve().name}`" if self.base else "a model that was made in memory"

    def _figures(self) -> str:
        rows = []
        for label, name in [("reward", "reward"), *((f"reward `{p}`", p) for p in self._parts()),
                            ("gold judge", "gold"), ("KL to the base, nats per token", "kl")]:  # fmt: skip
            values = [None if e is None else _values(e, name) for e in (self.before, self.after)]
            if any(v is not None for v in values):
                rows.append(f"| {label} | {' | '.join(map(_estimate, values))} | {_change(*values)} |")
        if not rows:
            return ""
        head = "| | before | after | change |\n|---|---|---|---|"
        note = "Means over held-out prompts, one completion each, ± standard error (n); the change is paired by prompt."
        return "\n".join(["## Figures", "", note, "", head, *rows])

    def _parts(self) -> list[str]:
        names = list(dict.fromkeys(name for e in (self.before, self.after) if e is not None for name in e.parts))
        return names if len(names) > 1 else []

    def _training(self) -> str:
        args = self.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        rows = {
            "base model": self._base_link(), "reward": " + ".join(f"`{name}`" for name in self.rewards),
            "prompts": self.train_data, "held-out prompts": self.eval_data, "adapter": self.lora,
            "steps": f"{self.steps}, of {per_step} completions",
            "completion length": f"at most {args.max_completion_length} tokens",
            "learning rate": f"{args.learning_rate:g}", "weight of KL (beta)": self._beta(),
            "temperature": f"{args.temperature:g}", "seed": str(args.seed),
        }  # fmt: skip
        return "\n".join(["## Training", "", *(f"- {name}: {value}" for name, value in rows.items() if value)])

    def _beta(self) -> str:
        beta, target = self.args.beta, self.args.target_kl
        if target is None:
            return f"{beta:g}"
        return f"{beta:g} at the start, then adjusted for a KL of {target:g} nats a completion"

    def _samples(self) -> str:
        if self.before is None or self.after is None:
            return ""
        blocks = []
        for i in range(min(self.samples, SAMPLES, len(self.after.prompts), len(self.before.prompts))):
            blocks += ["Prompt:", _fenced(self.after.prompts[i])]
            for name, evaluation in (("Before", self.before), ("After", self.after)):
                blocks += [f"{name} (reward {evaluation.reward[i]:.4g}):", _fenced(evaluation.completions[i])]
        return "\n\n".join(["## Samples", *blocks]) if blocks else ""

    def _use(self) -> str:
        place = self.name if self.adapter == "." else f"{self.name}/{self.adapter}"
        code = [
            "from peft import AutoPeftModelForCausalLM", "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{place}")  # this folder, wherever it is',
        ]  # fmt: skip
        lines = ["## Use", "", "```python", *code, "```"]
        if not is_hub_id(self.base):
            lines += ["", "The base is not on the hub: `adapter_config.json` names the place where it is loaded from."]
        lines += ["", f"`grade merge {shlex.quote(self.name)} OUT` writes a model that needs no adapter."]
        return "\n".join(lines)

    def _made_by(self) -> str:
        return f"## Command\n\n{_fenced(self.command, 'bash', None)}" if self.command else ""


def write_card(folder: str | Path, config: TrainConfig, result: RunResult) -> None:
    """Write the card of a run of the command line, and the same into the adapter's folder, over PEFT's empty one.

    Args:
        folder: Is given a ``README.md``; holds ``adapter/``.
        config: The run.
        result: Its results.
    """
    place = Path(folder)
    name = Path(config.output_dir).resolve().name
    rewards = [config.reward] if isinstance(config.reward, str) else config.reward
    data = [hub for source in (config.train_dataset, config.eval_dataset) if (hub := _hub_dataset(source))]
    lora = f"LoRA of rank {config.lora.r}, alpha {config.lora.alpha}, on {', '.join(config.lora.target_modules)}"
    card = Card(
        config, name, config.base_name or config.model, [without_places(spec) for spec in rewards],
        f"`{without_places(config.train_dataset)}`",
        f"`{without_places(config.eval_dataset)}`" if config.eval_dataset else "",
        result.step, result.before, result.after, lora, "adapter", min(config.samples, SAMPLES), command_of(config),
        result.method, list(dict.fromkeys(data)),
    )  # fmt: skip
    _write(place / "README.md", card.text())
    if (place / "adapter").is_dir():
        card.name, card.adapter = f"{name}/adapter", "."
        _write(place / "adapter" / "README.md", card.text())


class Describing(Trainer):
    """The part of `grade.training.trainer.GradeTrainer` that writes its model card."""

    def create_model_card(
        self, language: str | None = None, license: str | None = None, tags: str | list[str] | None = None,
        model_name: str | None = None, finetuned_from: str | None = None, tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None, dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:  # fmt: skip
        """Write ``README.md`` into the output folder, with figures of the evaluations before and after.

        Args:
            language: Of the model.
            license: Of the model.
            tags: Further tags.
            model_name: Its title; None: the output folder's name.
            finetuned_from: The base; None: what the model says.
            tasks: The hub's pipeline tag; None: text-generation.
            dataset_tags: Hugging Face ids of the data.
            dataset: The data's name in words.
            dataset_args: Added to it, in brackets.
        """
        if not self.is_world_process_zero():
            return
        output, step = Path(self.args.output_dir), self.state.global_step
        base = finetuned_from or getattr(self.backbone.model.config, "_name_or_path", "")
        about = {"language": language, "license": license, "tags": tags, "pipeline_tag": (_listed(tasks) or [None])[0]}
        words, brackets = ", ".join(_listed(dataset) or _listed(dataset_tags)), ", ".join(_listed(dataset_args))
        words = words and f"{words} ({brackets})" if brackets else words
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        lora = self.backbone.peft.peft_config[self.backbone.peft.active_adapter]
        card = Card(
            self.args, model_name or output.resolve().name, base, list(self.rewards.names),
            ", ".join(filter(None, (words, _rows(self.train_dataset)))),
            "; ".join(f"{name}: {_rows(rows)}" if name else _rows(rows) for name, rows in sets.items()),
            step, _evaluated(self, 0), _evaluated(self, step) if step else None,
            f"LoRA of rank {lora.r}, alpha {lora.lora_alpha}, on {', '.join(sorted(_listed(lora.target_modules)))}",
            datasets=_listed(dataset_tags), about={name: value for name, value in about.items() if value},
        )  # fmt: skip
        _write(output / "README.md", card.text())


def command_of(config: TrainConfig) -> str:
    """A command that makes the same run: all settings that differ from their defaults, absolute paths shortened.

    Args:
        config: The run.
    """
    rewards = [config.reward] if isinstance(config.reward, str) else config.reward
    words = [["grade", "train", "--method", config.method, "--output-dir", Path(config.output_dir).resolve().name]]
    words += [["--reward", without_places(spec)] for spec in rewards]
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
            words.append(["--set", f"{item.name}={_yaml(without_places(value))}"])
    return " \\\n  ".join(shlex.join(part) for part in words)


def without_places(value: Any) -> Any:
    """A setting, also a nested one, with absolute paths and those upwards shortened to their last part.

    >>> without_places("/mine/rewards.py:short"), without_places("hf:/models/judge@GOOD"), without_places("a/b.csv")
    ('rewards.py:short', 'hf:judge@GOOD', 'a/b.csv')
    """
    if isinstance(value, dict):
        return {name: without_places(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_places(inner) for inner in value]
    if not isinstance(value, str):
        return value
    prefix = "hf:" if value.startswith("hf:") else ""
    path = Path(value.removeprefix(prefix))
    return prefix + path.name if path.is_absolute() or {"..", "~"} & set(path.parts) else value


def is_hub_id(name: str) -> bool:
    """Whether a base's name is an id of the Hugging Face hub, not a folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).is_dir()


def _hub_dataset(source: str) -> str:
    name = source.partition(":")[0]
    return name if "/" in name and not Path(name).exists() and is_hub_id(name) else ""


def _yaml(value: Any) -> str:
    """A value as ``--set`` reads it: text plainly where YAML reads the same text."""
    if isinstance(value, str):
        try:
            if yaml.safe_load(value) == value:
                return value
        except yaml.YAMLError:
            pass
    return json.dumps(value)


def _evaluated(trainer: GradeTrainer, step: int) -> Evaluation | None:
    table = Path(trainer.args.output_dir) / "completions" / f"eval_{step:05d}.parquet"
    if step not in trainer.evaluations and table.is_file():  # of the part before an interruption
        return Evaluation.of_table(pd.read_parquet(table))
    return trainer.evaluations.get(step)


def _values(evaluation: Evaluation, name: str) -> Any:
    values = evaluation.parts.get(name) if name in evaluation.parts else getattr(evaluation, name)
    return values if len(values) and all(map(math.isfinite, values)) else None


def _estimate(values: Any) -> str:
    return "" if values is None else str(Estimate.of(values))


def _change(before: Any, after: Any) -> str:
    return "" if before is None or after is None or len(before) != len(after) else str(Estimate.of(after - before))


def _fenced(text: str, language: str = "text", most: int | None = SAMPLE_CHARACTERS) -> str:
    if most is not None and len(text) > most:
        text = text[:most] + " ..."
    text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _versions() -> str:
    versions = {name: value for name, value in environment().items() if name in ("torch", "transformers", "peft")}
    return "\n".join(["## Versions", "", *(f"- {name} {value}" for name, value in versions.items() if value)])


def _rows(dataset: Any) -> str:
    return "" if dataset is None else f"{len(dataset)} rows"


def _listed(value: Any) -> list[str]:
    return [] if not value else [value] if isinstance(value, str) else list(value)


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)
