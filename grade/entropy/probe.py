"""The probe: sample, predict how the coming optimizer step will move the entropy, and check it.

`EntropyProbe.run` leaves policy and optimizer as they were, bit by bit: the update is a vector, and the policy after it
is visited by adding the vector and restoring the parameters.

Left out: resampling where the effective sample size is low (the report says that it is low).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from grade.backbone import Backbone
from grade.config import Config
from grade.entropy.exact import moved
from grade.entropy.forward import directional
from grade.entropy.gradients import entropy_coefficients, prompt_gradients, sequence_logps, trained_parameters
from grade.entropy.samples import Samples, draw
from grade.entropy.snis import reweighted_change
from grade.entropy.update import UpdateVector, adamw_update
from grade.entropy.ustat import two_batch, u_statistic
from grade.errors import InputError
from grade.memory.tracker import MemoryTracker
from grade.prompts import PromptBatch

Reward = Callable[[PromptBatch, Tensor, Tensor], Tensor]
"""Rewards [n] of completions ids [n, T], mask [n, T] to prompts [n, P]."""


class BatchConfig(Config):
    """Samples."""

    B: int = Field(8, ge=2, description="prompts of the evaluation batch, and as many of the update batch")
    G: int = Field(8, ge=2, description="completions of a prompt")


class GenerationConfig(Config):
    """Sampling."""

    max_new_tokens: int = Field(24, ge=1, description="completion length T in tokens")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probabilities are taken at the same")


class MemoryConfig(Config):
    """Microbatches."""

    teacher_force_microbatch_size: int = Field(2, ge=1, description="completions whose graph exists at once")
    importance_microbatch_size: int = Field(16, ge=1, description="completions scored at once without gradient")
    profile_memory: bool = Field(False, description="report the peak of live bytes of each phase")


class ImportanceConfig(Config):
    """Importance sampling."""

    clip: float = Field(0.0, ge=0, description="cut weights above this many times their mean; 0 = never")
    ess_threshold: float = Field(0.5, ge=0, le=1, description="warn below this share of the samples")


class ProbeConfig(Config):
    """Everything that a probe can be told."""

    batch_config: BatchConfig = Field(BatchConfig(), description="samples")
    generation: GenerationConfig = Field(GenerationConfig(), description="sampling")
    memory_config: MemoryConfig = Field(MemoryConfig(), description="microbatches")
    importance_sampling: ImportanceConfig = Field(ImportanceConfig(), description="importance sampling")
    max_grad_norm: float = Field(1.0, ge=0, description="the update's gradient is clipped to this norm; 0 = never")
    seed: int = Field(0, ge=0, description="seed of the samples")


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found; entropies in nats per completion, standard errors over prompts.

    Attributes:
        figures: Plain numbers by name.
        warnings: What makes them less than they seem.
        modules: Each module's part of the predicted change; they sum to ``delta_h1``.
        sequences: Each evaluation sample's part [B, G]; their mean is ``delta_h1_forward``.
    """

    figures: dict[str, float]
    warnings: list[str]
    modules: dict[str, float]
    sequences: Tensor

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for ``report.json``."""
        return {
            "figures": self.figures, "warnings": self.warnings, "modules": self.modules,
            "sequences": self.sequences.tolist(),
        }  # fmt: skip

    def as_text(self) -> str:
        """The summary that ``python -m grade probe`` prints."""
        f = self.figures
        lines = [
            f"entropy {f['entropy']:.4g} nats a completion ({f['entropy_per_token']:.4g} a token)",
            f"predicted change {f['delta_h1']:+.4g} +- {f['delta_h1_stderr']:.2g} (gradients), "
            f"{f['delta_h1_forward']:+.4g} +- {f['delta_h1_forward_stderr']:.2g} (forward mode)",
            f"true change      {f['delta_h']:+.4g} +- {f['delta_h_stderr']:.2g} (importance sampling, effective sample "
            f"size {f['ess']:.0f} of {f['samples']:.0f})",
            f"of the predicted change: momentum {f['delta_h1_momentum']:+.3g}, gradient {f['delta_h1_gradient']:+.3g}, "
            f"weight decay {f['delta_h1_decay']:+.3g}",
        ]
        largest = sorted(self.modules.items(), key=lambda item: -abs(item[1]))[:5]
        lines += ["largest parts", *(f"  {value:+.3g}  {name}" for name, value in largest)]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


class EntropyProbe:
    """Predicts and verifies the entropy change of an optimizer's coming step.

    The step is AdamW's on the group-relative policy gradient of the update batch, ``A = R - mean_g R``, each completion
    weighted by ``A / (G T)``: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).

    Args:
        policy: With an adapter.
        optimizer: AdamW of the adapter's parameters.
        config: Settings.
        allow_fresh: Accept an optimizer that has not stepped yet.
    """

    def __init__(
        self, policy: Backbone, optimizer: torch.optim.AdamW, config: ProbeConfig | None = None,
        allow_fresh: bool = False,
    ) -> None:  # fmt: skip
        self.policy, self.optimizer, self.config = policy, optimizer, config or ProbeConfig()
        self.allow_fresh = allow_fresh
        self._peaks: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def run(self, prompts: PromptBatch, reward: Reward) -> ProbeReport:
        """Run the probe.

        Args:
            prompts: At least 2 B prompts: the first B are for evaluation, the next B for the update.
            reward: Scores completions of the update batch.

        Returns:
            The report.

        Raises:
            InputError: If there are too few prompts, or a reward is not finite.
        """
        b = self.config.batch_config.B
        if len(prompts) < 2 * b:
            raise InputError("prompts", len(prompts), f"at least {2 * b}: B to evaluate on and B to update on")
        generator = torch.Generator(self.policy.device).manual_seed(self.config.seed)
        with self._phase("sampling"):
            evaluation, update = (self._draw(prompts, rows, generator) for rows in (slice(b), slice(b, 2 * b)))
        with self._phase("update"):
            y, vector, rewards = self._update(update, reward)
        with self._phase("gradients"):
            micro = self.config.memory_config.teacher_force_microbatch_size
            old = sequence_logps(self.policy, evaluation, self.config.memory_config.importance_microbatch_size)
            (x,) = prompt_gradients(self.policy, evaluation, [entropy_coefficients(old)], micro)
        figures = self._predicted(x, y, vector)
        with self._phase("forward mode"):
            size = self.config.memory_config.importance_microbatch_size
            terms = directional(self.policy, evaluation, vector.total, size)
        sequences = terms.per_sequence()
        units = sequences.mean(1)
        figures |= {
            "delta_h1_forward": float(units.mean()),
            "delta_h1_forward_stderr": float(units.std() / len(units) ** 0.5),
        }
        with self._phase("importance sampling"):
            figures |= self._true_change(evaluation, old, terms.entropies, vector.total)
        figures |= {"reward_mean": float(rewards.mean()), "samples": old.numel(), "prompts": b}
        figures |= {f"seconds/{name}": value for name, value in self._seconds.items()}
        figures |= {f"peak_bytes/{name}": value for name, value in self._peaks.items()}
        return ProbeReport(figures, self._warnings(figures, rewards), self._by_module(x, vector.total), sequences)

    def _draw(self, prompts: PromptBatch, rows: slice, generator: torch.Generator) -> Samples:
        c = self.config
        some = PromptBatch(prompts.ids[rows], prompts.mask[rows])
        return draw(self.policy, some, c.batch_config.G, c.generation.max_new_tokens, generator,
                    c.generation.temperature, c.memory_config.importance_microbatch_size)  # fmt: skip

    def _update(self, update: Samples, reward: Reward) -> tuple[Tensor, UpdateVector, Tensor]:
        """Each prompt's ascent gradient Y_n [B, P], the optimizer's step, and rewards [B, G]."""
        size = self.config.memory_config.importance_microbatch_size
        with torch.no_grad():
            parts = [reward(*rest).cpu().double() for _, *rest in update.microbatches(size, self.policy.device)]
        rewards = torch.cat(parts).view(update.ids.shape[:2])
        if not torch.isfinite(rewards).all():
            raise InputError("reward", "NaN or infinity", "finite rewards")
        advantages = (rewards - rewards.mean(1, keepdim=True)) / update.ids[0].numel()
        micro = self.config.memory_config.teacher_force_microbatch_size
        (y,) = prompt_gradients(self.policy, update, [advantages], micro)
        parameters = trained_parameters(self.policy)
        mean = (-y.mean(0)).split([p.numel() for p in parameters])  # the loss descends
        gradients = [part.view_as(p).to(p) for part, p in zip(mean, parameters, strict=True)]
        norm = self.config.max_grad_norm or None
        return y, adamw_update(self.optimizer, parameters, gradients, norm, self.allow_fresh), rewards

    def _predicted(self, x: Tensor, y: Tensor, vector: UpdateVector) -> dict[str, float]:
        """``delta H1 = grad H . delta theta = -mean_n X_n . delta theta``; by parts; and plain ascent's, two ways."""
        along = -(x.double() @ vector.total.double().cpu())
        parts = {n: -float(x.double().mean(0) @ getattr(vector, n).double().cpu())
                 for n in ("momentum", "gradient", "decay")}  # fmt: skip
        ascent = two_batch(x, y)
        pairs = u_statistic(x, y) if len(x) == len(y) else None
        return {
            "delta_h1": float(along.mean()),
            "delta_h1_stderr": float(along.std() / len(along) ** 0.5),
            **{f"delta_h1_{name}": value for name, value in parts.items()},
            "ascent_slope": -ascent.value,
            "ascent_slope_stderr": ascent.stderr,
            **(
                {}
                if pairs is None
                else {"ascent_slope_pairs": -pairs.value, "ascent_slope_pairs_stderr": pairs.plug_in}
            ),
            "clipped": vector.clipped,
            "update_norm": float(vector.total.norm()),
        }

    def _true_change(self, evaluation: Samples, old: Tensor, before: Tensor, step: Tensor) -> dict[str, float]:
        size, clip = self.config.memory_config.importance_microbatch_size, self.config.importance_sampling.clip or None
        with moved(self.policy, step, 1.0):
            new = sequence_logps(self.policy, evaluation, size)
            after = directional(self.policy, evaluation, torch.zeros_like(step), size).entropies
        lengths = evaluation.mask.sum(-1)
        found = reweighted_change(old, new, before.sum(-1), after.sum(-1), clip=clip)
        tokens = reweighted_change(old, new, before.sum(-1), after.sum(-1), lengths, clip)
        return {
            "entropy": found.before,
            "entropy_after": found.after,
            "delta_h": found.change,
            "delta_h_stderr": found.stderr,
            "entropy_per_token": tokens.before,
            "delta_h_per_token": tokens.change,
            "delta_h_per_token_stderr": tokens.stderr,
            "ess": found.ess,
            "clipped_weights": found.clipped,
            **({} if found.pareto_k is None else {"pareto_k": found.pareto_k}),
        }

    def _by_module(self, x: Tensor, step: Tensor) -> dict[str, float]:
        """Parts of ``delta_h1`` by adapted module."""
        named = [(name, p) for name, p in self.policy.model.named_parameters() if p.requires_grad]
        terms = (-x.double().mean(0) * step.double().cpu()).split([p.numel() for _, p in named])
        parts: dict[str, float] = {}
        for (name, _), term in zip(named, terms, strict=True):
            module = name.split(".lora_")[0]
            parts[module] = parts.get(module, 0.0) + float(term.sum())
        return parts

    def _warnings(self, figures: dict[str, float], rewards: Tensor) -> list[str]:
        found = []
        share = self.config.importance_sampling.ess_threshold
        if figures["ess"] < share * figures["samples"]:
            found.append(f"effective sample size {figures['ess']:.0f} is below {share:g} of {figures['samples']:.0f}: "
                         "the step is too large for these samples")  # fmt: skip
        if figures.get("pareto_k", 0.0) > 0.7:
            found.append(f"Pareto k {figures['pareto_k']:.2f} is above 0.7: the true change cannot be trusted")
        if not (rewards != rewards[:, :1]).any():
            found.append("all completions of each prompt have the same reward: the update is momentum and decay alone")
        return found

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start, profile = time.perf_counter(), self.config.memory_config.profile_memory
        with MemoryTracker() if profile else contextlib.nullcontext() as tracker:
            yield
        self._seconds[name] = time.perf_counter() - start
        if profile:
            self._peaks[name] = tracker.peak
