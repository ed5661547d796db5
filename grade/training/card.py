"""The model card of a trained adapter: ``README.md``, with the metadata that the Hugging Face hub reads.

No path of the machine that made it is in it, and no date, so that a run made again writes the same card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from huggingface_hub import ModelCardData

from grade.stats import Estimate

if TYPE_CHECKING:
    from grade.training.config import GradeConfig
    from grade.training.evaluate import Evaluation

TAGS = ("grade", "reward-gradients")
TEMPLATE = """---
{metadata}
---

# {name}

A LoRA adapter for `{base}`, trained with `{method}`.

- reward: {rewards}
- prompts: {prompts}
- steps: {steps}, of {batch} completions with at most {length} tokens
- learning rate {learning_rate:g}, temperature {temperature:g}, seed {seed}
- KL to the base: {kl}
{chosen}
## Held-out prompts

Means, one completion each, ± standard error (n); the change is paired by prompt.

| | before | after | change |
|---|---|---|---|
{figures}

## Use

`peft.AutoPeftModelForCausalLM.from_pretrained` loads this folder, wherever it is; `grade merge` writes a model that
needs no adapter.
"""


def model_card(
    args: GradeConfig, before: Evaluation | None, after: Evaluation | None, *, name: str, base: str, method: str,
    rewards: Sequence[str], prompts: str, steps: int, chosen: Mapping[str, str],
) -> str:  # fmt: skip
    """The text of a card, metadata first.

    ``base`` is a Hugging Face id or a folder; ``method`` the one that trained; ``rewards`` their names or files;
    ``chosen`` what the run chose, with reasons.
    """
    local = not base or Path(base).exists()
    data = ModelCardData(
        base_model=None if local else base, library_name="peft", pipeline_tag="text-generation", tags=TAGS
    )
    target = "" if args.target_kl is None else f", at most {args.target_kl:g} nats per completion in the end"
    return TEMPLATE.format(
        metadata=data.to_yaml(), name=name, base=Path(base).resolve().name if local else base, method=method,
        rewards=" + ".join(f"`{_relative(reward)}`" for reward in rewards), prompts=_relative(prompts), steps=steps,
        batch=args.per_device_train_batch_size * args.microbatches, length=args.max_completion_length,
        learning_rate=args.learning_rate, temperature=args.temperature, seed=args.seed,
        kl=f"weight (beta) {args.beta:g}{target}", chosen="".join(f"- {what}: {why}\n" for what, why in chosen.items()),
        figures="\n".join(_rows(before, after)),
    )  # fmt: skip


def _relative(spec: str) -> str:
    return Path(spec).name if Path(spec).is_absolute() else spec


def _rows(before: Evaluation | None, after: Evaluation | None) -> list[str]:
    rows = []
    for label, name in (("reward", "reward"), ("gold judge", "gold"), ("KL, nats per token", "kl")):
        first, last = (np.zeros(0) if of is None else getattr(of, name) for of in (before, after))
        change = last - first if len(first) == len(last) else np.zeros(0)
        scored = [v[np.isfinite(v)] for v in (first, last, change)]
        values = [str(Estimate.of(v)) if len(v) else "" for v in scored]
        if any(values):
            rows.append(f"| {label} | {' | '.join(values)} |")
    return rows
