"""The probe: sample, predict how the coming optimizer step will change the entropy, and check the prediction.

`EntropyProbe.run` restores policy and optimizer bit by bit: the update is a vector, and the policy after it is
evaluated with replaced parameters, or by a real step that is undone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from grade.entropy.forward import Directional, directional
from grade.entropy.functional import SampleScores, scores_at
from grade.entropy.gradients import entropy_coefficients, prompt_gradients
from grade.entropy.report import ProbeReport
from grade.entropy.samples import Samples, draw
from grade.entropy.settings import ProbeConfig
from grade.entropy.snis import Reweighted, linearity_error, prefix_change, reweighted_change
from grade.entropy.step import Snapshot, stepped
from grade.entropy.update import UpdateVector, adamw_update, preconditioner
from grade.entropy.ustat import blocks, two_batch, u_statistic
from grade.errors import InputError
from grade.memory.tracker import MemoryTracker
from grade.models.backbone import Backbone
from grade.models.parameters import moved, split_vector, trained_parameters
from grade.models.prompts import PromptBatch
from grade.stats import Estimate

Reward = Callable[[PromptBatch, Tensor, Tensor], Tensor]
"""Rewards [n] of completions ids [n, T], mask [n, T] to prompts [n, P]."""
Gradient = Callable[[PromptBatch, torch.Generator], None]
"""Adds the gradient of a loss on the update's prompts to the parameters' ``.grad``: a training step of this library."""


class EntropyProbe:
    """Predicts and verifies the entropy change of an optimizer's coming step.

    The step is AdamW's on a gradient of the update batch. By default that is the group-relative policy gradient
    ``A = R - mean_g R``, each completion weighted by ``A / (G T)``: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    RLOO's weights are ``A / (G - 1)`` (Ahmadian et al. 2024, arXiv:2402.14740). Any other loss is passed as a function.

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

    def run(self, prompts: PromptBatch, reward: Reward | None = None, gradient: Gradient | None = None) -> ProbeReport:
        """Run the probe.

        Args:
            prompts: At least 2 B prompts: the first B are for evaluation, the next B for the update (one batch: B).
            reward: Scores completions of the update batch, for a policy gradient.
            gradient: Instead of a reward, a function that computes the gradient of the update's own loss.

        Returns:
            The report.

        Raises:
            ValueError: If both or neither of reward and gradient are given, or ``gradient`` leaves no gradient.
            InputError: If there are too few prompts or a reward is not finite.
        """
        b, one = self.config.batch_config.B, self.config.probe_config.one_batch
        if len(prompts) < b * (2 - one):
            allowed = f"at least {b}: B" if one else f"at least {2 * b}: B to evaluate on and B to update on"
            raise InputError("prompts", len(prompts), allowed)
        if (reward is None) == (gradient is None):
            raise ValueError("the update follows a reward or a gradient: give one of them")
        generator = torch.Generator(self.policy.device).manual_seed(self.config.seed)
        size = self.config.memory_config.importance_microbatch_size
        with self._phase("sampling"):
            evaluation = self._draw(prompts, slice(b), generator)
        with self._phase("update"):
            y, gradients, rewards = self._update(prompts, evaluation, reward, gradient, generator)
            norm = self.config.max_grad_norm or None
            parameters = trained_parameters(self.policy)
            vector = adamw_update(self.optimizer, parameters, gradients, norm, self.allow_fresh)
        with self._phase("gradients"):
            old = scores_at(self.policy, evaluation, microbatch=size)
            micro = self.config.memory_config.teacher_force_microbatch_size
            (x,) = prompt_gradients(self.policy, evaluation, [entropy_coefficients(old.logps.sum(-1))], micro)
        figures = self._predicted(x, vector) | ({} if y is None else self._ascent(x, y))
        with self._phase("forward mode"):
            terms = directional(self.policy, evaluation, vector.total, size)
        with self._phase("importance sampling"):
            figures |= self._forward(terms, evaluation)
            figures |= self._true_change(evaluation, old, terms, vector.total, gradients)
            sweep = [self._at_multiple(m, evaluation, old, terms, vector.total)
                     for m in sorted(self.config.probe_config.multiples)]  # fmt: skip
        figures |= {"samples": old.logps[..., 0].numel(), "prompts": b}
        figures |= {} if rewards is None else {"reward_mean": float(rewards.mean())}
        figures |= {f"seconds/{name}": value for name, value in self._seconds.items()}
        figures |= {f"peak_bytes/{name}": value for name, value in self._peaks.items()}
        modules = self._by_module(x, vector.total)
        warnings, sequences = self._warnings(figures, rewards), terms.per_sequence()
        return ProbeReport(figures, warnings, modules, sequences, self._notes(), sweep, evaluation, vector.total)

    def _draw(self, prompts: PromptBatch, rows: slice, generator: torch.Generator) -> Samples:
        c = self.config
        return draw(self.policy, prompts[rows], c.batch_config.G, c.generation.max_new_tokens, generator,
                    c.generation.temperature, c.batch_config.rollout_batch_size)  # fmt: skip

    def _update(
        self, prompts: PromptBatch, evaluation: Samples, reward: Reward | None, gradient: Gradient | None,
        generator: torch.Generator,
    ) -> tuple[Tensor | None, list[Tensor], Tensor | None]:  # fmt: skip
        """Each prompt's ascent gradient Y_n [B, P], the loss's gradient, and rewards [B, G]."""
        b, one = self.config.batch_config.B, self.config.probe_config.one_batch
        rows = slice(b) if one else slice(b, 2 * b)
        parameters = trained_parameters(self.policy)
        if gradient is not None:
            snapshot = Snapshot.of(self.policy, self.optimizer)
            try:
                for p in parameters:
                    p.grad = None
                gradient(prompts[rows].to(self.policy.device), generator)
                if any(p.grad is None for p in parameters):
                    raise ValueError("gradient left a trained parameter without .grad: it must run backward")
                return None, [p.grad for p in parameters], None
            finally:
                snapshot.restore()
        update = evaluation if one else self._draw(prompts, rows, generator)
        size = self.config.memory_config.importance_microbatch_size
        with torch.no_grad():
            parts = [reward(*rest).cpu().double() for _, *rest in update.microbatches(size, self.policy.device)]
        rewards = torch.cat(parts).view(update.ids.shape[:2])
        if not torch.isfinite(rewards).all():
            raise InputError("reward", "NaN or infinity", "finite rewards")
        group, length = update.ids.shape[1:]
        scale = {"dr_grpo": group * length, "rloo": group - 1}[self.config.probe_config.update]
        advantages = (rewards - rewards.mean(1, keepdim=True)) / scale
        micro = self.config.memory_config.teacher_force_microbatch_size
        (y,) = prompt_gradients(self.policy, update, [advantages], micro)
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
        """Document 003's number: ``-eta E[X] . P E[Y]``, P the optimizer's preconditioner before the step.

        From independent batches the product of means; from one batch the U-statistic over pairs of prompts.
        """
        c = self.config
        lr = float(self.optimizer.param_groups[0]["lr"])
        scale = preconditioner(self.optimizer, trained_parameters(self.policy))
        if scale is None:
            return {}
        scaled = y.double() * scale.double().cpu()
        if not c.probe_config.one_batch:
            product = two_batch(x, scaled)
            return {"delta_h1_ascent": -lr * product.value, "delta_h1_ascent_stderr": lr * product.stderr}
        if c.probe_config.mode == "blocks":
            x, scaled = (blocks(z, c.probe_config.block_size) for z in (x, scaled))
        pairs = u_statistic(x, scaled)
        figures = {"delta_h1_pairs": -lr * pairs.value, "delta_h1_pairs_plain": -lr * pairs.plain}
        if c.stats_config.compute_plugin_se:
            figures["delta_h1_pairs_plugin_stderr"] = lr * pairs.plug_in
        if c.stats_config.compute_jackknife_se and pairs.jackknife is not None:
            figures["delta_h1_pairs_jackknife_stderr"] = lr * pairs.jackknife
        return figures

    def _forward(self, terms: Directional, evaluation: Samples) -> dict[str, float]:
        figures = {}
        for name, values in (("", terms.per_sequence()), ("_per_token", terms.per_token(evaluation.mask))):
            figures |= _mean(f"delta_h1_forward{name}", values.mean(1))
        return figures

    def _true_change(
        self, evaluation: Samples, old: SampleScores, terms: Directional, step: Tensor, gradients: list[Tensor]
    ) -> dict[str, float]:
        c = self.config
        size, clip = c.memory_config.importance_microbatch_size, c.importance_sampling.clip or None
        real = c.importance_sampling.step == "optimizer"

        def after():
            if real:
                return stepped(self.policy, self.optimizer, gradients, c.max_grad_norm or None)
            return contextlib.nullcontext()

        with after():
            new = scores_at(self.policy, evaluation, None if real else step, microbatch=size)
        lengths = evaluation.mask.sum(-1)
        change = _reweighted(old, new, None, clip)
        tokens = _reweighted(old, new, lengths, clip)
        figures = {
            "entropy": change.before,
            "entropy_after": change.after,
            "delta_h": change.change,
            "delta_h_stderr": change.stderr,
            "entropy_per_token": tokens.before,
            "delta_h_per_token": tokens.change,
            "delta_h_per_token_stderr": tokens.stderr,
            "ess": change.ess,
            "clipped_weights": change.clipped,
            "resampled": 0.0,
            **({} if change.pareto_k is None else {"pareto_k": change.pareto_k}),
        }
        figures |= self._by_prefix(old, new, terms)
        if self._low(change.ess, old) and c.importance_sampling.resample_on_low_ess:
            with after() if real else moved(self.policy, step, 1.0):
                figures |= self._sampled_anew(evaluation, old)
        return figures

    def _sampled_anew(self, evaluation: Samples, old: SampleScores) -> dict[str, float]:
        """The change from new completions of the current policy, with the noise of those drawn before the step."""
        generator = torch.Generator(self.policy.device).manual_seed(self.config.seed)
        fresh = self._draw(evaluation.prompts, slice(None), generator)
        new = scores_at(self.policy, fresh, microbatch=self.config.memory_config.importance_microbatch_size)
        after, before = (s.entropies.sum(-1).mean(1) for s in (new, old))
        tokens = float(new.entropies.sum() / fresh.mask.sum() - old.entropies.sum() / evaluation.mask.sum())
        return {
            "entropy_after": float(after.mean()),
            **_mean("delta_h", after - before),
            "delta_h_per_token": tokens,
            "resampled": 1.0,
        }

    def _at_multiple(
        self, multiple: float, evaluation: Samples, old: SampleScores, terms: Directional, step: Tensor
    ) -> dict[str, float]:
        """Predicted and true change for this multiple of the learning rate, which AdamW's step is proportional to."""
        size, clip = self.config.memory_config.importance_microbatch_size, self.config.importance_sampling.clip or None
        new = scores_at(self.policy, evaluation, step, multiple, size)
        change = _reweighted(old, new, None, clip)
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
        change = prefix_change(old.logps, new.logps, old.entropies, new.entropies)
        figures = _mean("delta_h_prefix", change.mean(1))
        if len(change) >= 3:
            value, stderr = linearity_error(multiple * terms.per_sequence(), change)
            figures |= {"linearity_error": value, "linearity_error_stderr": stderr}
        return figures

    def _by_module(self, x: Tensor, step: Tensor) -> dict[str, float]:
        """Parts of ``delta_h1`` by adapted module."""
        named = [(name, p) for name, p in self.policy.model.named_parameters() if p.requires_grad]
        terms = (-x.double().mean(0) * step.double().cpu()).split([p.numel() for _, p in named])
        parts: dict[str, float] = {}
        for (name, _), term in zip(named, terms, strict=True):
            module = name.split(".lora_")[0]
            parts[module] = parts.get(module, 0.0) + float(term.sum())
        return parts

    def _low(self, ess: float, old: SampleScores) -> bool:
        return ess < self.config.importance_sampling.ess_threshold * old.logps[..., 0].numel()

    def _warnings(self, figures: dict[str, float], rewards: Tensor | None) -> list[str]:
        texts, share = [], self.config.importance_sampling.ess_threshold
        if figures["ess"] < share * figures["samples"]:
            source = "sampled anew" if figures["resampled"] else "not to be trusted"
            texts.append(f"effective sample size {figures['ess']:.0f} is below {share:g} of {figures['samples']:.0f}: "
                         f"the step is too large for these samples, and the true change is {source}")  # fmt: skip
        if figures.get("pareto_k", 0.0) > 0.7 and not figures["resampled"]:
            texts.append(f"Pareto k {figures['pareto_k']:.2f} is above 0.7: the true change cannot be trusted")
        if rewards is not None and not (rewards != rewards[:, :1]).any():
            texts.append("all completions of each prompt have the same reward: the update is momentum and decay alone")
        if self.config.probe_config.one_batch:
            texts.append("one batch for update and evaluation: only delta_h1_pairs is free of the bias of common noise")
        return texts

    def _notes(self) -> list[str]:
        if self.policy.model.config._attn_implementation == "sdpa":
            return ["forward mode ran torch's unfused attention: fused attention has no forward derivative"]
        return []

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


def _reweighted(old: SampleScores, new: SampleScores, lengths: Tensor | None, clip: float | None) -> Reweighted:
    sums = (x.sum(-1) for x in (old.logps, new.logps, old.entropies, new.entropies))
    return reweighted_change(*sums, lengths, clip)
