"""The probe: sample, predict how the coming optimizer step will change the entropy, and check the prediction.

`EntropyProbe.run` leaves policy and optimizer as they were, bit by bit: the update is a vector, and the policy after it
is evaluated with replaced parameters.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from grade.config import SEEDS, Config
from grade.entropy.change import linearity_error, prefix_change, reweighted_change
from grade.entropy.samples import (
    Directional,
    Samples,
    SampleScores,
    directional,
    draw,
    entropy_coefficients,
    prompt_gradients,
    scores_at,
    two_batch,
)
from grade.entropy.update import UpdateVector, adamw_update, preconditioner
from grade.entropy.vector import moved, split_vector
from grade.errors import InputError
from grade.gradients.methods import Rate
from grade.memory.tracker import MemoryTracker
from grade.models.backbone import Backbone
from grade.models.parameters import trained_parameters
from grade.models.prompts import PromptBatch, decode
from grade.stats import Estimate

Reward = Callable[[PromptBatch, Tensor, Tensor], Tensor]
"""Rewards [n] of completions ids [n, T], mask [n, T] to prompts [n, P]."""
Gradient = Callable[[PromptBatch, torch.Generator], None]
"""Adds the gradient of a loss on the update's prompts to the parameters' ``.grad``, and changes nothing else."""


class _BatchConfig(Config):
    """Samples."""

    B: int = Field(8, ge=2, description="prompts of the evaluation batch, and as many of the update batch")
    G: int = Field(8, ge=2, description="completions of a prompt")


class _GenerationConfig(Config):
    """Sampling."""

    max_new_tokens: int = Field(24, ge=1, description="completion length T in tokens")


class _EstimateConfig(Config):
    """What is estimated."""

    multiples: list[Rate] = Field([], description="check steps of these multiples of the learning rate as well")


class _MemoryConfig(Config):
    """Microbatches."""

    teacher_force_microbatch_size: int = Field(2, ge=1, description="completions whose graph exists at once")
    importance_microbatch_size: int = Field(16, ge=1, description="completions scored at once without gradient")
    profile_memory: bool = Field(False, description="report the peak of live bytes of each phase")


class ProbeConfig(Config):
    """Settings of a probe."""

    batch_config: _BatchConfig = Field(_BatchConfig(), description="samples")
    generation: _GenerationConfig = Field(_GenerationConfig(), description="sampling")
    probe_config: _EstimateConfig = Field(_EstimateConfig(), description="what is estimated")
    memory_config: _MemoryConfig = Field(_MemoryConfig(), description="microbatches")
    max_grad_norm: float = Field(1.0, ge=0, description="the update's gradient is clipped to this norm; 0 = never")
    seed: int = Field(0, ge=0, lt=SEEDS, description="seed of the samples")


ESS_SHARE = 0.5
"""Of the samples; below this effective size they are drawn again after the step."""

_SUMMARY = (
    "entropy {entropy:.4g} nats per completion ({entropy_per_token:.4g} per token)\n"
    "predicted change {delta_h1:+.4g} +- {delta_h1_stderr:.2g} (gradients), "
    "{delta_h1_forward:+.4g} +- {delta_h1_forward_stderr:.2g} (forward mode)\n"
    "true change      {delta_h:+.4g} +- {delta_h_stderr:.2g} "
    "({source}; effective sample size {ess:.0f} of {samples:.0f}), "
    "{delta_h_prefix:+.4g} +- {delta_h_prefix_stderr:.2g} (weights of prefixes)\n"
    "of the predicted change: momentum {delta_h1_momentum:+.3g}, gradient {delta_h1_gradient:+.3g}, "
    "weight decay {delta_h1_decay:+.3g}"
)
_SWEEP_HEAD = f"{'step (x learning rate)':<25}{'predicted':<13}{'true':<22}{'by prefixes':<22}effective share"
_SWEEP = (
    "{multiple:<22g}   {delta_h1_forward:+.3e}   {delta_h:+.3e} +- {delta_h_stderr:.0e}   "
    "{delta_h_prefix:+.3e} +- {delta_h_prefix_stderr:.0e}   {ess_share:.2f}"
)


@dataclass(frozen=True)
class ProbeReport:
    """Results of a probe; entropies in nats per completion, standard errors over prompts."""

    figures: dict[str, float]  # numbers by name
    warnings: list[str]  # reasons to distrust a number
    notes: list[str]  # choices made automatically
    modules: dict[str, float]  # each module's part of the predicted change; they sum to ``delta_h1``
    sequences: Tensor  # each evaluation sample's part [B, G]; their mean is ``delta_h1_forward``
    sweep: list[dict[str, float]]  # one row per step size: its multiple of the learning rate, predicted and true change
    texts: list[tuple[str, str]]  # prompt and completion of each evaluation sample, B G of them; none without tokenizer
    step: Tensor | None = field(default=None, repr=False)  # the update vector ``delta theta`` [P]; no file has it

    def layers(self) -> dict[int, float]:
        """Each layer's part of the predicted change, by the layer's index; -1: modules outside the layers."""
        parts: dict[int, float] = defaultdict(float)
        for name, value in self.modules.items():
            match = re.search(r"\.(\d+)\.", name)
            layer = int(match[1]) if match else -1
            parts[layer] += value
        return dict(sorted(parts.items()))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for ``report.json``: the same in every run, so without seconds."""
        figures = {name: value for name, value in self.figures.items() if not name.startswith("seconds/")}
        values = vars(self) | {"figures": figures, "sequences": self.sequences.tolist()}
        return {name: value for name, value in values.items() if name != "step"}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ProbeReport:
        """The report of which ``content``, a ``report.json`` for one, has the plain values."""
        values = {each.name: content[each.name] for each in fields(cls) if each.name in content}
        return cls(**values | {"sequences": torch.tensor(content["sequences"], dtype=torch.float64)})

    def as_text(self) -> str:
        """The summary that ``python -m grade probe`` prints."""
        source = "sampled anew" if self.figures["resampled"] else "importance sampling"
        lines = [_SUMMARY.format_map(self.figures | {"source": source})]
        if self.sweep:
            lines += [_SWEEP_HEAD, *(_SWEEP.format_map(row) for row in self.sweep)]
        largest = sorted(self.modules.items(), key=lambda item: -abs(item[1]))[:5]
        lines += ["largest parts", *(f"  {value:+.3g}  {name}" for name, value in largest)]
        lines += [f"note: {text}" for text in self.notes]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


class EntropyProbe:
    """Predicts and verifies the entropy change of an optimizer's coming step.

    The step is AdamW's on a gradient of the update batch. By default that is the group-relative policy gradient
    ``A = R - mean_g R``, each completion weighted by ``A / (G T)``: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    Any other loss is passed as a function.

    Args:
        policy: With an adapter.
        optimizer: AdamW of the adapter's parameters.
        config: Settings.
    """

    def __init__(self, policy: Backbone, optimizer: torch.optim.AdamW, config: ProbeConfig | None = None) -> None:
        self.policy, self.optimizer, self.config = policy, optimizer, config or ProbeConfig()
        self._peaks: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def run(self, prompts: PromptBatch, reward: Reward | None = None, gradient: Gradient | None = None) -> ProbeReport:
        """Run the probe.

        Args:
            prompts: At least 2 B prompts: the first B are for evaluation, the next B for the update.
            reward: Scores completions of the update batch, for a policy gradient.
            gradient: Instead of a reward, a function that computes the gradient of the update's own loss.

        Returns:
            The report.

        Raises:
            ValueError: If both or neither of reward and gradient are given.
            InputError: If there are too few prompts or a reward is not finite.
        """
        b = self.config.batch_config.B
        if len(prompts) < 2 * b:
            raise InputError("prompts", len(prompts), f"at least {2 * b}: B to evaluate on and B to update on")
        if (reward is None) == (gradient is None):
            raise ValueError("the update follows a reward or a gradient: give one of them")
        generator = torch.Generator(self.policy.device).manual_seed(self.config.seed)
        with self._phase("sampling"):
            evaluation = self._draw(prompts[slice(b)], generator)
        with self._phase("update"):
            y, gradients, rewards = self._update(prompts[slice(b, 2 * b)], reward, gradient, generator)
            parameters, norm = trained_parameters(self.policy), self.config.max_grad_norm or None
            vector = adamw_update(self.optimizer, parameters, gradients, norm)
        with self._phase("gradients"):
            old = self._scores(evaluation)
            x = self._gradients(evaluation, entropy_coefficients(old.logps.sum(-1)))
        figures = self._predicted(x, vector) | ({} if y is None else self._ascent(x, y))
        with self._phase("forward mode"):
            size = self.config.memory_config.importance_microbatch_size
            terms = directional(self.policy, evaluation, vector.total, size)
        with self._phase("importance sampling"):
            figures |= _mean("delta_h1_forward", terms.per_sequence().mean(1))
            figures |= _mean("delta_h1_forward_per_token", terms.per_token(evaluation.mask).mean(1))
            multiples = sorted(self.config.probe_config.multiples)
            new = {multiple: self._scores(evaluation, vector.total, multiple) for multiple in {1.0, *multiples}}
            figures |= self._true_change(evaluation, old, new[1.0], terms, vector.total)
            sweep = [self._at_multiple(multiple, evaluation, old, new[multiple], terms) for multiple in multiples]
        figures |= {"samples": old.logps[..., 0].numel(), "prompts": b}
        figures |= {} if rewards is None else {"reward_mean": float(rewards.mean())}
        figures |= {f"seconds/{name}": value for name, value in self._seconds.items()}
        figures |= {f"peak_bytes/{name}": value for name, value in self._peaks.items()}
        notes = []
        if self.policy.model.config._attn_implementation == "sdpa":
            notes = ["forward mode ran torch's unfused attention: fused attention has no forward derivative"]
        return ProbeReport(
            figures, self._warnings(figures, rewards), notes, self._by_module(x, vector.total), terms.per_sequence(),
            sweep, self._texts(evaluation), vector.total,
        )  # fmt: skip

    def _texts(self, samples: Samples) -> list[tuple[str, str]]:
        if (tokenizer := self.policy.tokenizer) is None:
            return []
        return [(decode(tokenizer, prompts.ids[0], prompts.mask[0]), decode(tokenizer, ids[0], mask[0]))
                for _, prompts, ids, mask in samples.microbatches(1, "cpu")]  # fmt: skip

    def _draw(self, prompts: PromptBatch, generator: torch.Generator) -> Samples:
        c = self.config
        return draw(self.policy, prompts, c.batch_config.G, c.generation.max_new_tokens, generator)

    def _scores(self, samples: Samples, step: Tensor | None = None, multiple: float = 1.0) -> SampleScores:
        """Scores after so many times the step, or without one as the policy is."""
        size = self.config.memory_config.importance_microbatch_size
        return scores_at(self.policy, samples, step, multiple, size)

    def _gradients(self, samples: Samples, coefficients: Tensor) -> Tensor:
        size = self.config.memory_config.teacher_force_microbatch_size
        return prompt_gradients(self.policy, samples, coefficients, size)

    def _update(
        self, prompts: PromptBatch, reward: Reward | None, gradient: Gradient | None, generator: torch.Generator
    ) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
        """Each prompt's ascent gradient Y_n [B, P], the loss's gradient, and rewards [B, G]."""
        parameters = trained_parameters(self.policy)
        if gradient is not None:
            before = [p.grad for p in parameters]
            try:
                for p in parameters:
                    p.grad = None
                with torch.random.fork_rng(range(torch.cuda.device_count())):
                    gradient(prompts.to(self.policy.device), generator)
                return None, [p.grad for p in parameters], None
            finally:
                for p, grad in zip(parameters, before, strict=True):
                    p.grad = grad
        update = self._draw(prompts, generator)
        size = self.config.memory_config.importance_microbatch_size
        with torch.no_grad():
            parts = [reward(*rest).cpu().double() for _, *rest in update.microbatches(size, self.policy.device)]
        rewards = torch.cat(parts).view(update.ids.shape[:2])
        group, length = update.ids.shape[1:]
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (group * length)
        y = self._gradients(update, advantages)
        return y, split_vector(self.policy, -y.mean(0)), rewards  # the loss descends

    def _predicted(self, x: Tensor, vector: UpdateVector) -> dict[str, float]:
        """``delta H1 = grad H . delta theta = -mean_n X_n . delta theta``, and by parts of the step."""
        along = -(x.double() @ vector.total.double().cpu())
        parts = {n: -float(x.double().mean(0) @ getattr(vector, n).double().cpu())
                 for n in ("momentum", "gradient", "decay")}  # fmt: skip
        return {
            **_mean("delta_h1", along),
            **{f"delta_h1_{name}": value for name, value in parts.items()},
            "clipped": vector.clipped,
            "update_norm": float(vector.total.norm()),
        }

    def _ascent(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """Document 003's number: ``-eta E[X] . P E[Y]``, P the optimizer's preconditioner before the step."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        scale = preconditioner(self.optimizer, trained_parameters(self.policy))
        if scale is None:
            return {}
        value, stderr = two_batch(x, y.double() * scale.double().cpu())
        return {"delta_h1_ascent": -lr * value, "delta_h1_ascent_stderr": lr * stderr}

    def _true_change(
        self, evaluation: Samples, old: SampleScores, new: SampleScores, terms: Directional, step: Tensor
    ) -> dict[str, float]:
        change, tokens = (reweighted_change(old, new, mask) for mask in (None, evaluation.mask))
        figures = {
            "entropy": change.before,
            "entropy_after": change.after,
            "delta_h": change.change,
            "delta_h_stderr": change.stderr,
            "entropy_per_token": tokens.before,
            "delta_h_per_token": tokens.change,
            "delta_h_per_token_stderr": tokens.stderr,
            "ess": change.ess,
            "resampled": 0.0,
            **({} if (k := change.pareto_k()) is None else {"pareto_k": k}),
            **self._by_prefix(old, new, terms),
        }
        if change.ess < ESS_SHARE * old.logps[..., 0].numel():
            with moved(self.policy, step, 1.0):
                figures |= self._sampled_anew(evaluation, old)
        return figures

    def _sampled_anew(self, evaluation: Samples, old: SampleScores) -> dict[str, float]:
        """The change from new completions of the current policy, with the noise of those drawn before the step."""
        generator = torch.Generator(self.policy.device).manual_seed(self.config.seed)
        fresh = self._draw(evaluation.prompts, generator)
        new = self._scores(fresh)
        after, before = (s.entropies.sum(-1).mean(1) for s in (new, old))
        tokens = float(new.entropies.sum() / fresh.mask.sum() - old.entropies.sum() / evaluation.mask.sum())
        return {
            "entropy_after": float(after.mean()),
            **_mean("delta_h", after - before),
            "delta_h_per_token": tokens,
            "resampled": 1.0,
        }

    def _at_multiple(
        self, multiple: float, evaluation: Samples, old: SampleScores, new: SampleScores, terms: Directional
    ) -> dict[str, float]:
        """Predicted and true change for this multiple of the learning rate, which AdamW's step is proportional to."""
        change = reweighted_change(old, new)
        return {
            "multiple": multiple,
            **_mean("delta_h1_forward", multiple * terms.per_sequence().mean(1)),
            "delta_h": change.change,
            "delta_h_stderr": change.stderr,
            "ess_share": change.ess / old.logps[..., 0].numel(),
            **self._by_prefix(old, new, terms, multiple),
        }

    def _by_prefix(
        self, old: SampleScores, new: SampleScores, terms: Directional, multiple: float = 1.0
    ) -> dict[str, float]:
        """The change by weights of prefixes and, from three prompts on, its deviation from the linear prediction."""
        change = prefix_change(old, new)
        figures = _mean("delta_h_prefix", change.mean(1))
        if len(change) >= 3:
            value, stderr = linearity_error(multiple * terms.per_sequence(), change)
            figures |= {"linearity_error": value, "linearity_error_stderr": stderr}
        return figures

    def _by_module(self, x: Tensor, step: Tensor) -> dict[str, float]:
        """Parts of ``delta_h1`` by adapted module, and the token bias's if it is trained."""
        named = [(name.removeprefix("model."), p) for name, p in self.policy.named_parameters() if p.requires_grad]
        terms = (-x.double().mean(0) * step.double().cpu()).split([p.numel() for _, p in named])
        parts: dict[str, float] = defaultdict(float)
        for (name, _), term in zip(named, terms, strict=True):
            module, _, _ = name.partition(".lora_")
            parts[module] += float(term.sum())
        return dict(parts)

    def _warnings(self, figures: dict[str, float], rewards: Tensor | None) -> list[str]:
        texts = []
        if figures["resampled"]:
            texts.append(
                f"effective sample size {figures['ess']:.0f} is below {ESS_SHARE:g} of {figures['samples']:.0f}: "
                "the step is too large for these samples; the true change is sampled anew"
            )
        elif figures.get("pareto_k", 0.0) > 0.7:
            texts.append(f"Pareto k {figures['pareto_k']:.2f} is above 0.7: the true change cannot be trusted")
        if rewards is not None and not (rewards != rewards[:, :1]).any():
            texts.append("all completions of each prompt have the same reward: the update is momentum and decay alone")
        return texts

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start, profile = time.perf_counter(), self.config.memory_config.profile_memory
        with MemoryTracker() if profile else contextlib.nullcontext() as tracker:
            yield
        self._seconds[name] = time.perf_counter() - start
        if profile:
            self._peaks[name] = tracker.peak


def _mean(name: str, prompts: Tensor) -> dict[str, float]:
    """``name`` and ``name_stderr``: mean and standard error over prompts [B]."""
    estimate = Estimate.of(prompts)
    return {name: estimate.mean, f"{name}_stderr": estimate.stderr}
