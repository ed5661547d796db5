"""The report of a probe."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grade.entropy.samples import Samples


@dataclass(frozen=True)
class ProbeReport:
    """Results of a probe; entropies in nats per completion, standard errors over prompts.

    Attributes:
        figures: Numbers by name.
        warnings: Reasons to distrust a number.
        notes: Choices made automatically.
        modules: Each module's part of the predicted change; they sum to ``delta_h1``.
        sequences: Each evaluation sample's part [B, G]; their mean is ``delta_h1_forward``.
        sweep: One row per step size: its multiple of the learning rate, predicted and true change.
        samples: The evaluation batch.
        step: The update vector ``delta theta`` [P].
    """

    figures: dict[str, float]
    warnings: list[str]
    modules: dict[str, float]
    sequences: Tensor
    notes: list[str]
    sweep: list[dict[str, float]]
    samples: Samples = field(repr=False)
    step: Tensor = field(repr=False)

    def layers(self) -> dict[int, float]:
        """Each layer's part of the predicted change, by the layer's index; -1: modules outside the layers."""
        parts: dict[int, float] = {}
        for name, value in self.modules.items():
            match = re.search(r"\.(\d+)\.", name)
            layer = int(match[1]) if match else -1
            parts[layer] = parts.get(layer, 0.0) + value
        return dict(sorted(parts.items()))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for ``report.json``."""
        return {
            "figures": self.figures, "warnings": self.warnings, "notes": self.notes, "modules": self.modules,
            "sequences": self.sequences.tolist(), "sweep": self.sweep,
        }  # fmt: skip

    def as_text(self) -> str:
        """The summary that ``python -m grade probe`` prints."""
        f = self.figures
        lines = [
            f"entropy {f['entropy']:.4g} nats a completion ({f['entropy_per_token']:.4g} a token)",
            f"predicted change {f['delta_h1']:+.4g} +- {f['delta_h1_stderr']:.2g} (gradients), "
            f"{f['delta_h1_forward']:+.4g} +- {f['delta_h1_forward_stderr']:.2g} (forward mode)",
            f"true change      {f['delta_h']:+.4g} +- {f['delta_h_stderr']:.2g} "
            + ("(sampled anew; " if f["resampled"] else "(importance sampling; ")
            + f"effective sample size {f['ess']:.0f} of {f['samples']:.0f}), {f['delta_h_prefix']:+.4g} +- "
            f"{f['delta_h_prefix_stderr']:.2g} (weights of prefixes)",
            f"of the predicted change: momentum {f['delta_h1_momentum']:+.3g}, gradient {f['delta_h1_gradient']:+.3g}, "
            f"weight decay {f['delta_h1_decay']:+.3g}",
        ]
        if self.sweep:
            lines += [f"{'step (x learning rate)':<25}{'predicted':<13}{'true':<22}{'by prefixes':<22}effective share"]
            lines += [
                f"{row['multiple']:<22g}   {row['delta_h1_forward']:+.3e}   {row['delta_h']:+.3e} +- "
                f"{row['delta_h_stderr']:.0e}   {row['delta_h_prefix']:+.3e} +- {row['delta_h_prefix_stderr']:.0e}   "
                f"{row['ess_share']:.2f}"
                for row in self.sweep
            ]
        largest = sorted(self.modules.items(), key=lambda item: -abs(item[1]))[:5]
        lines += ["largest parts", *(f"  {value:+.3g}  {name}" for name, value in largest)]
        lines += [f"note: {text}" for text in self.notes]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])
