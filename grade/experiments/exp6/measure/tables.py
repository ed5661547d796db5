"""The tables of Experiment 6, and the settings that they depend on."""

from __future__ import annotations

import statistics
import tempfile
from functools import cached_property, partial
from pathlib import Path

import pandas as pd
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.experiments.exp6.measure import memory, runs, study
from grade.experiments.setting import Setting, kl_at_start, load_models, make_setting
from grade.gradients.unrolled import StepwiseOptions, stepwise
from grade.models.backbone import Backbone
from grade.models.parameters import set_values
from grade.rewards.model import RewardModel

SUPPORTS = (1, 4, 16, 64, 256, 1024, 4096)  # K whose mass is measured, as far as they are below V
TAUS = (0.5, 1.0, 2.0)
REWARD_SIZES = dict(tokens=64, k=256, hidden=2560, vocab=32_000)  # the document's, with the width of Qwen3-4B
LAST_POSITION = "unrolled, last position"  # with logits at the last position of each prefix only
REFERENCE_REPEATS = 3  # a pass is short: one timing alone could turn the verdict


class Settings(Config):
    """Models and sizes of Experiment 6."""

    backbone_dir: str = Field("", description="folder of the base model; empty: a tiny random one")
    reward_dir: str = Field("", description="folder of the reward model of the parity and speed measurements")
    reviews_dir: str = Field("", description="folder of the review splits")
    device: str = Field("cpu", description="where to measure: cpu or cuda")
    runs_dir: str = Field("", description="folder of finished training runs; empty: a few tiny steps are trained here")
    trained_run: str = Field("ste-0", description="the run whose adapter is the trained policy")
    support_size: int = Field(16, ge=1, description="K of parity, bytes and speed")
    parity_batch: int = Field(2, ge=2, description="B of the parity measurements")
    parity_prompt_tokens: int = Field(5, ge=1, description="P")
    parity_new_tokens: int = Field(6, ge=2, description="T")
    parity_tau: float = Field(2.0, gt=0, description="Gumbel temperature, that of the training runs")
    parity_hops: list[int] = Field([0, 1, 2, 3], description="feedback hops whose error is measured; 2 among them")
    parity_steps: int = Field(3, ge=1, description="optimizer steps, optimised against legacy")
    parity_learning_rate: float = Field(1.0e-3, gt=0, description="of those steps")
    bytes_prompt_tokens: int = Field(5, ge=1, description="P of the counted step of one prompt")
    bytes_new_tokens: int = Field(4, ge=1, description="T")
    speed_dtype: str = Field("float32", description="type of the base in the timings and for the support's mass")
    speed_batch: int = Field(2, ge=1, description="B of the timings")
    speed_prompt_tokens: int = Field(5, ge=1, description="P")
    speed_new_tokens: int = Field(8, ge=2, description="T of the headline ratio")
    speed_hops: int = Field(2, ge=0, description="feedback hops of the timings")
    replay_tokens: list[int] = Field([4, 8, 12], description="T of replay's time curve, besides speed_new_tokens")
    stepwise_tokens: list[int] = Field([4], description="T of the other engines' curves, besides speed_new_tokens")
    repeats: int = Field(2, ge=1, description="replay is timed this often, the median counts")
    mass_texts: int = Field(4, ge=1, description="held-out reviews on which the support's mass is measured")
    mass_tokens: int = Field(32, ge=2, description="tokens of each")

    @cached_property
    def _toy_runs(self) -> tempfile.TemporaryDirectory:
        folder = tempfile.TemporaryDirectory()  # removed with this object
        runs.toy_runs(folder.name)
        return folder

    @property
    def trained_runs(self) -> Path:
        """Folder of the training runs; tiny ones are trained where none is given."""
        return Path(self.runs_dir or self._toy_runs.name)

    @cached_property
    def models(self) -> tuple[Backbone, RewardModel, list[str]]:
        """Backbone in float32, reward model, held-out texts."""
        return load_models(self.backbone_dir, self.reward_dir, self.reviews_dir, device=self.device)

    @cached_property
    def _untrained_values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.models[0].trainable_parameters()]

    def with_adapter(self, trained: bool) -> tuple[Backbone, RewardModel, list[str]]:
        """The models, with the adapter before or after training."""
        parameters, values = self.models[0].trainable_parameters(), self._untrained_values  # kept before overwritten
        if trained:
            runs.overwrite_adapter(self.models[0], self.trained_runs / self.trained_run / "adapter")
        else:
            set_values(parameters, values)
        return self.models

    def timed_models(self) -> tuple[Backbone, RewardModel, list[str]]:
        """The trained policy, or the base with a fresh adapter where the timings have another type."""
        return self.with_adapter(True) if self.speed_dtype == "float32" else self._other_type

    @cached_property
    def _other_type(self) -> tuple[Backbone, RewardModel, list[str]]:
        return load_models(self.backbone_dir, self.reward_dir, self.reviews_dir, self.speed_dtype, self.device)

    def parity_setting(self, trained: bool) -> Setting:
        """What parity is measured on."""
        sizes = (self.parity_batch, self.parity_prompt_tokens, self.parity_new_tokens, self.support_size)
        return make_setting(*self.with_adapter(trained), *sizes, tau=self.parity_tau)

    def counted_setting(self) -> Setting:
        """What bytes are counted on."""
        models = self.with_adapter(True)
        # transformers leaves a hook behind on the first use, after which prompts' embeddings are kept as well. With it
        # in place from the start, the counts do not depend on the order of the tables.
        with models[0].checkpointed_layers(True):
            pass
        return make_setting(*models, 1, self.bytes_prompt_tokens, self.bytes_new_tokens, self.support_size)


def _hops(s: Settings) -> pd.DataFrame:
    """Gradient error of replay by policy, tau, estimator and hops; see `study.hop_errors`."""
    tables = [
        study.hop_errors(s.parity_setting(trained), s.parity_hops).assign(policy=policy, tau=s.parity_tau)
        for policy, trained in (("untrained", False), ("trained", True))
    ]
    cold = s.parity_setting(trained=True).relaxed(tau=1.0)
    tables.append(study.hop_errors(cold, [2, 3], ["ste"]).assign(policy="trained", tau=1.0))
    columns = ["policy", "tau", "estimator", "hops", "error", "residual"]
    return pd.DataFrame([row for table in tables for row in table.to_dict("records")])[columns]


def _bytes(s: Settings) -> dict[str, float]:
    """Bytes of the relaxation, the reward's embeddings, the policy, a step and the reference pass."""
    counted = s.counted_setting()
    vocab = counted.backbone.vocab_size
    return {
        **memory.relaxation_bytes(vocab, min(256, vocab)),
        **memory.reward_embedding_bytes(**REWARD_SIZES),
        **memory.policy_bytes(counted),
        **memory.peaks(counted),
    }


def _mass(s: Settings) -> pd.DataFrame:
    """Probability mass of the K likeliest tokens; see `study.support_mass`."""
    backbone, _, texts = s.timed_models()
    ks = [k for k in SUPPORTS if k < backbone.vocab_size]
    return study.support_mass(backbone, texts[: s.mass_texts], TAUS, ks, s.mass_tokens)


def _time_against_tokens(s: Settings) -> pd.DataFrame:
    """Seconds of one gradient by engine and T; see `study.time_against_tokens`."""
    setting = make_setting(*s.timed_models(), s.speed_batch, s.speed_prompt_tokens, s.speed_new_tokens, s.support_size)
    stepwise_tokens = [*s.stepwise_tokens, s.speed_new_tokens]
    tokens = {"replay": sorted({*s.replay_tokens, s.speed_new_tokens}), "unrolled": stepwise_tokens,
              "checkpointed": stepwise_tokens}  # fmt: skip
    times = study.time_against_tokens(setting, tokens, s.speed_hops, s.repeats)
    last_only = partial(stepwise, options=StepwiseOptions(head_positions="last"))
    last = dict(engine=LAST_POSITION, T=s.speed_new_tokens, seconds=study.gradient_seconds(setting, last_only))
    return pd.concat([times, pd.DataFrame([last])], ignore_index=True)


def _reference_seconds(s: Settings) -> dict[str, float]:
    """Seconds of the reference pass over one completion, ``uncached`` and ``cached``; the median of three."""
    counted, medians = s.counted_setting(), {}
    for name, form in memory.reference_forms(counted).items():
        form()  # the first call pays for set-up
        times = [study.seconds(form, counted.backbone.device) for _ in range(REFERENCE_REPEATS)]
        medians[name] = statistics.median(times)
    return medians


TABLES = {
    "runs": lambda s: runs.run_table(s.trained_runs),
    "curves": lambda s: runs.curve_table(s.trained_runs),
    "texts": lambda s: runs.text_table(s.trained_runs),
    "kl_at_start": lambda s: kl_at_start(s.parity_setting(trained=False)),
    "hops": _hops,
    "parity": lambda s: study.training_parity(s.parity_setting(True), s.parity_steps, s.parity_learning_rate),
    "accumulation": lambda s: {"rel_error": study.accumulation_error(s.parity_setting(trained=True))},
    "kept": lambda s: memory.kept_by_option(s.counted_setting()),
    "bytes": _bytes,
    "mass": _mass,
}
TIMED = {
    "time_against_tokens": _time_against_tokens,
    "reference_seconds": _reference_seconds,
    "run_seconds": lambda s: runs.seconds_table(s.trained_runs),
}
