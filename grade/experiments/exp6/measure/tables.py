"""The tables of Experiment 6, and the settings that they depend on.

Finished training runs; parity of the engines; bytes that each of the document's optimisations keeps for backward,
counted on real tensors of the step that trains, without base and adapter; probability mass of a support; and times,
which are wall-clock seconds on the device at hand and only meant as ratios within one run.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from grade.config import Config
from grade.errors import InputError
from grade.experiments.measured import Count, Several, Size
from grade.experiments.setting import TRAINED_RUN, Setting, kl_at_start, load_models, make_setting
from grade.experiments.traced import kept_bytes
from grade.gradients.estimators import relax
from grade.gradients.objective import Engine, sequence_mean
from grade.gradients.replay import replay, replay_inputs
from grade.gradients.rollout import Rollout
from grade.gradients.unrolled import (
    CHECKPOINTED,
    UNROLLED,
    StepwiseOptions,
    checkpointed,
    gathered_embedding,
    stepwise,
    unrolled,
)
from grade.memory.settings import Device
from grade.memory.tracker import MemoryTracker
from grade.models.backbone import DTYPES, Backbone
from grade.models.head import weighted_embedding
from grade.models.noise import gumbel_noise
from grade.models.parameters import restoring, set_values
from grade.results import progress, read_metrics
from grade.rewards.model import RewardModel
from grade.training.config import TrainConfig
from grade.training.run import run_training, write_run
from grade.training.toy import toy_task

TAUS = (0.5, 1.0, 2.0)
HOPS = 2  # feedback hops of the headline error and of the timings, those of the training runs
PARITY_BATCH, PARITY_TAU = 2, 2.0  # B, and the Gumbel temperature of the training runs
LAST_POSITION = "unrolled, last position"  # with logits at the last position of each prefix only
_SUPPORTS = (1, 4, 16, 64, 256, 1024, 4096)  # K whose mass is measured, as far as they are below V
_REFERENCE_REPEATS = 3  # a pass is short: one timing alone could turn the verdict
_TOY_TRAINING = dict(
    max_steps=6, per_device_train_batch_size=8, max_prompt_length=6, truncation="right", raw_prompts=True,
    max_completion_length=8, min_completion_length=2, learning_rate=1e-2, lr_scheduler_type="constant", beta=0.01,
    eval_strategy="steps", eval_steps=2, eval_prompts=32, final_eval_prompts=64, kl_eval_prompts=32, seed=0,
    use_cpu=True,
)  # fmt: skip
_OPTIMISATIONS: dict[str, StepwiseOptions] = {
    "none (original)": UNROLLED,
    "1 top-k, scattered": UNROLLED,  # run with K < V: the document's code scatters into [B, V]
    "1 top-k, compact": StepwiseOptions(compact=True),
    "2 online KL": StepwiseOptions(online_kl=True),
    "3 reference cache": StepwiseOptions(reference_cache=True),
    "4 sparse reward, gathered": StepwiseOptions(compact=True, reward_embedding="gathered"),
    "4 sparse reward, bagged": StepwiseOptions(compact=True, reward_embedding="bagged"),
    "5 checkpoint each step": StepwiseOptions(checkpoint=True),
    "8 drop lists": StepwiseOptions(drop_lists=True),
    "1-5 and 8": CHECKPOINTED,
}
"""The document's optimisations by their number; 6 and 7 (T and B) are sizes, not code."""


class Settings(Config):
    """Models and sizes of Experiment 6."""

    backbone_dir: str = ""  # folder of the base model; empty: a tiny random one
    reward_dir: str = ""  # folder of the reward model of the parity and speed measurements
    reviews_dir: str = ""  # folder of the review splits
    device: Device = "cpu"  # where to measure: cpu or cuda
    runs_dir: str = ""  # folder of finished training runs; empty: a few tiny steps are trained here
    support_size: Size = 16  # K of parity, bytes and speed
    parity_prompt_tokens: Size = 5  # P
    parity_new_tokens: Several = 6  # T
    parity_hops: list[Count] = [0, 1, 2, 3]  # feedback hops whose error is measured; 2 among them
    parity_steps: Size = 3  # optimizer steps, optimised against legacy
    bytes_prompt_tokens: Size = 5  # P of the counted step of one prompt
    bytes_new_tokens: Size = 4  # T
    speed_dtype: Literal[tuple(DTYPES)] = "float32"  # type of the base in the timings and for the support's mass
    speed_batch: Size = 2  # B of the timings
    speed_prompt_tokens: Size = 5  # P
    speed_new_tokens: Several = 8  # T of the headline ratio
    replay_tokens: list[Size] = [4, 8, 12]  # T of replay's time curve, besides speed_new_tokens
    stepwise_tokens: list[Size] = [4]  # T of the other engines' curves, besides speed_new_tokens
    repeats: Size = 2  # replay is timed this often, the median counts
    mass_texts: Size = 4  # held-out reviews on which the support's mass is measured
    mass_tokens: Several = 32  # tokens of each

    @cached_property
    def _toy_runs(self) -> tempfile.TemporaryDirectory:
        folder = tempfile.TemporaryDirectory()  # removed with this object
        for run in ("ste", "gumbel", "ste_trunk"):
            # The same base as the notebook's own, so that it can load a run's adapter.
            task = toy_task(kind="trunk" if run.endswith("_trunk") else "bag")
            config = TrainConfig(method=run.removesuffix("_trunk"), **_TOY_TRAINING)
            write_run(Path(folder.name, f"{run}-0"), config, task, run_training(config, task))
        return folder

    @property
    def runs(self) -> Path:
        """Folder of the training runs; tiny ones are trained where none is given."""
        return Path(self.runs_dir or self._toy_runs.name)

    @cached_property
    def _models(self) -> tuple[Backbone, RewardModel, list[str]]:
        return load_models(self.backbone_dir, self.reward_dir, self.reviews_dir, device=self.device)

    @cached_property
    def _untrained_values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._models[0].trainable_parameters()]

    def _with_adapter(self, trained: bool) -> tuple[Backbone, RewardModel, list[str]]:
        """Backbone in float32, reward model and held-out texts, with the adapter before or after training."""
        backbone, values = self._models[0], self._untrained_values  # kept before overwritten
        if trained:
            file = self.runs / TRAINED_RUN / "adapter" / "adapter_model.safetensors"
            unknown = set_peft_model_state_dict(backbone.peft, load_file(file)).unexpected_keys
            if unknown:
                raise InputError("adapter", str(file), f"an adapter without {unknown[0]}")
        else:
            set_values(backbone.trainable_parameters(), values)
        return self._models

    @cached_property
    def _other_type(self) -> tuple[Backbone, RewardModel, list[str]]:
        return load_models(self.backbone_dir, self.reward_dir, self.reviews_dir, self.speed_dtype, self.device)

    def timed_models(self) -> tuple[Backbone, RewardModel, list[str]]:
        """The trained policy, or the base with a fresh adapter where the timings have another type."""
        return self._with_adapter(True) if self.speed_dtype == "float32" else self._other_type

    def parity_setting(self, trained: bool) -> Setting:
        """What parity is measured on."""
        sizes = (PARITY_BATCH, self.parity_prompt_tokens, self.parity_new_tokens, self.support_size)
        return make_setting(*self._with_adapter(trained), *sizes, tau=PARITY_TAU)

    def counted_setting(self) -> Setting:
        """What bytes are counted on."""
        models = self._with_adapter(True)
        # transformers leaves a hook behind on the first use, after which prompts' embeddings are kept as well. With it
        # in place from the start, the counts do not depend on the order of the tables.
        with models[0].checkpointed_layers(True):
            pass
        return make_setting(*models, 1, self.bytes_prompt_tokens, self.bytes_new_tokens, self.support_size)


# ---- finished training runs ----
def _of_each(s: Settings, read: Callable[[Path], pd.DataFrame]) -> pd.DataFrame:
    """What is read in the folder of each run, one below the other; the first column has the folder's name."""
    folders, tables = sorted(file.parent for file in s.runs.glob("*/history.csv")), dict[str, pd.DataFrame]()
    if not folders:
        raise InputError("runs_dir", str(s.runs), "a folder with <run>-<seed>/history.csv")
    for folder in folders:
        tables[folder.name] = read(folder)
    return pd.concat(tables, names=["run"]).reset_index("run").reset_index(drop=True)


def _run(folder: Path) -> pd.DataFrame:
    """A finished run before and after training, with standard errors over prompts (of a gain's paired differences)."""
    m = read_metrics(folder / "metrics.json")
    row: dict[str, Any] = {"samples": m["samples"]}
    for judge in ("reward", "gold"):
        gain, stderr = m[f"gain/{judge}"], m[f"gain/{judge}_stderr"]
        row |= {f"{judge} {when}": m[f"{when}/val/{judge}_mean"] for when in ("before", "after")}
        row |= {f"{judge} stderr": stderr, f"{judge} z": gain / stderr}
    row |= {"KL": m["after/val/kl"], "KL stderr": m["after/val/kl_stderr"], "n": m["gain/reward_n"]}
    return pd.DataFrame([row])


def _curves(s: Settings) -> pd.DataFrame:
    """Histories of the runs without their times."""
    table = _of_each(s, lambda folder: pd.read_csv(folder / "history.csv"))
    return table.drop(columns=[column for column in table if "seconds" in column])


def _seconds(folder: Path) -> pd.DataFrame:
    """Seconds since the start of a run by step, evaluations not counted."""
    file = folder / "timings.csv"
    return pd.read_csv(file if file.is_file() else folder / "history.csv")[["step", "seconds"]]


def _texts(folder: Path) -> pd.DataFrame:
    """Three completions of a run before and after training, with the trained reward and the gold judge's score."""
    return pd.DataFrame(json.loads((folder / "samples.json").read_text(encoding="utf-8"))[:3])


# ---- parity of the engines ----
def _relative_error(value: Tensor, exact: Tensor) -> float:
    """``|value - exact| / |exact|``, Euclidean norms in float64."""
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def _hops(s: Settings) -> pd.DataFrame:
    """Relative gradient error of `replay` against `unrolled` by policy, tau, estimator and hops."""
    rows = []
    for policy, tau, hops, estimators in (
        ("untrained", PARITY_TAU, s.parity_hops, ("ste", "gumbel")),
        ("trained", PARITY_TAU, s.parity_hops, ("ste", "gumbel")),
        ("trained", 1.0, [2, 3], ("ste",)),
    ):
        setting = s.parity_setting(policy == "trained")
        for estimator in estimators:
            case = setting.relaxed(estimator=estimator, tau=tau)
            _, exact = case.run(unrolled)
            for n in progress(hops, f"hops, {estimator}"):
                step, grad = case.run(partial(replay, hops=n))
                residual = None if step.residual is None else float(step.residual)
                rows.append((policy, tau, estimator, n, _relative_error(grad, exact), residual))
    return pd.DataFrame(rows, columns=["policy", "tau", "estimator", "hops", "error", "residual"])


def _parity(s: Settings) -> pd.DataFrame:
    """Training from the same adapter on the same noise, replay and legacy: reward and KL, means over a step's batch."""
    setting = s.parity_setting(True)
    backbone, parameters = setting.backbone, setting.backbone.trainable_parameters()
    columns: dict[str, Sequence[float]] = {"step": range(s.parity_steps)}
    for name, engine in (("replay", partial(replay, hops=setting.relaxation.max_new_tokens)), ("legacy", unrolled)):
        rewards, kls = columns[f"{name}_reward"], columns[f"{name}_kl"] = [], []
        with restoring(parameters):
            optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
            for i in progress(range(s.parity_steps), f"training steps, {name}"):
                optimizer.zero_grad(set_to_none=True)
                step = engine(backbone, setting.prompts, setting.objective, setting.relaxation, setting.noise(i))
                optimizer.step()
                rewards.append(float(step.reward.mean()))
                kls.append(float(sequence_mean(step.kl, step.completion_mask).mean()))
    backbone.zero_grad(set_to_none=True)
    return pd.DataFrame(columns)


def _accumulation(s: Settings) -> dict[str, float]:
    """Relative difference between the gradients of B microbatches of one prompt and of one batch of B."""
    setting = s.parity_setting(trained=True)
    whole = setting.rollout()
    _, exact = setting.run(partial(replay, hops=1, rollout=whole))
    total = torch.zeros_like(exact)
    for i in range(len(setting.prompts)):
        row = slice(i, i + 1)
        prompts = setting.prompts[row]
        parts = {k: v[row] for k, v in vars(whole).items() if k != "prompts"}
        one = replace(setting, prompts=prompts)
        total += one.run(partial(replay, hops=1, rollout=Rollout(prompts, **parts)))[1] / len(setting.prompts)
    return {"rel_error": _relative_error(total, exact)}


# ---- bytes ----
def _kept(s: Settings) -> pd.DataFrame:
    """Bytes alive after the forward pass of one step, each of the document's optimisations alone and all together."""
    setting, rows = s.counted_setting(), []
    full = setting.relaxed(gumbel_topk=0)
    for name, options in progress(_OPTIMISATIONS.items(), "bytes kept"):
        case = setting if options.compact or "top-k" in name else full
        engine = "checkpointed" if options.checkpoint else "unrolled"
        rows.append((name, engine, _kept_by_stepwise(case, options)))
    for name, checkpointing in (("replay", False), ("replay, layers checkpointed", True)):
        rows.append((name, "replay", _kept_by_replay(setting, checkpointing)))
    return pd.DataFrame(rows, columns=["option", "engine", "bytes"])


def _kept_by_stepwise(setting: Setting, options: StepwiseOptions) -> int:
    args = (setting.backbone, setting.prompts, setting.objective, setting.relaxation, setting.noise())
    return kept_bytes(lambda: stepwise(*args, options=options, backward=False))[1]


def _kept_by_replay(setting: Setting, gradient_checkpointing: bool) -> int:
    """Bytes kept by the rollout and the teacher-forced pass of `replay`, from which all hops are taken."""
    backbone = setting.backbone

    def forward() -> tuple[Rollout, Tensor]:
        rollout = setting.rollout()
        e = rollout.embeds.detach().requires_grad_()
        inputs, mask = replay_inputs(setting.prompts, backbone.embed(setting.prompts.ids), e)
        with backbone.checkpointed_layers(gradient_checkpointing):
            return rollout, backbone.hidden(inputs, mask)

    return kept_bytes(forward)[1]


def _bytes(s: Settings) -> dict[str, float]:
    """Bytes kept by relaxation, reward embeddings and policy; peaks of a step and of the reference, beyond the start's.

    The policy's passes have relaxation, KL and reward in their lean forms. A step drops dense lists at once or not.
    """
    setting = s.counted_setting()
    figures = _relaxation_bytes(setting.backbone.vocab_size) | _reward_embedding_bytes() | {
        "policy_completion_tokens": len(setting.prompts) * setting.relaxation.max_new_tokens,
        "policy_unrolled_bytes": _kept_by_stepwise(setting, replace(CHECKPOINTED, checkpoint=False)),
        "policy_checkpointed_bytes": _kept_by_stepwise(setting, CHECKPOINTED),
        "policy_replay_bytes": _kept_by_replay(setting, False),
        "policy_replay_checkpointed_bytes": _kept_by_replay(setting, True),
    }  # fmt: skip
    runs: dict[str, Callable[[], object]] = {
        f"peak_{name}_freeing_bytes":
            partial(setting.run, partial(stepwise, options=replace(CHECKPOINTED, drop_lists=drop)))
        for name, drop in (("with", True), ("without", False))
    }  # fmt: skip
    runs |= {f"reference_{name}_peak_bytes": form for name, form in _reference_forms(setting).items()}
    for name, run in runs.items():
        with MemoryTracker(round_to=1) as tracker:
            run()
        figures[name] = tracker.peak
    return figures


def _relaxation_bytes(vocab: int) -> dict[str, float]:
    """Bytes that one relaxed token keeps for backward, from logits to embedding: dense, as published, compact."""
    generator, k = torch.Generator().manual_seed(0), min(256, vocab)
    table = torch.randn(vocab, 64, generator=generator)
    logits = torch.randn(1, vocab, generator=generator)
    support = logits.topk(k).indices
    noise, noise_k = gumbel_noise((1, vocab), generator), gumbel_noise((1, k), generator)

    def scattered(source: Tensor) -> Tensor:  # the published gumbel_softmax_topk and its sparse reward
        y = relax(source.gather(1, support) + noise_k, 1.0, "gumbel")
        soft = torch.zeros_like(source).scatter(1, support, y)
        return gathered_embedding(table, support, soft.gather(1, support))

    def compact(source: Tensor) -> Tensor:
        return weighted_embedding(table, support, relax(source + noise_k, 1.0, "gumbel"))

    forms: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        "dense": (logits, lambda source: relax(source + noise, 1.0, "gumbel") @ table),
        "topk_scattered": (logits, scattered),
        "topk_compact": (logits.gather(1, support), compact),
    }
    figures: dict[str, float] = {"relax_vocab_size": vocab}
    for name, (source, form) in forms.items():
        # A product by one, so that the source is an intermediate as in training, not a leaf that counts for free.
        leaf = source.clone().requires_grad_()
        figures[f"relax_{name}_bytes_per_token"] = kept_bytes(lambda form=form, leaf=leaf: form(leaf * 1.0))[1]
    return figures


def _reward_embedding_bytes() -> dict[str, float]:
    """Bytes that making the reward's soft embeddings keeps for backward, from the weights [T, K] on."""
    tokens, k, vocab, hidden = 64, 256, 32_000, 2560  # the document's sizes, with the width of Qwen3-4B
    generator = torch.Generator().manual_seed(0)
    table = torch.empty(vocab, hidden).normal_(generator=generator)
    support = torch.randint(vocab, (tokens, k), generator=generator)
    weights = torch.rand(tokens, k, generator=generator).requires_grad_()

    forms = {
        "dense": lambda: torch.zeros(tokens, vocab).scatter(1, support, weights * 1.0) @ table,
        "gather": lambda: gathered_embedding(table, support, weights * 1.0),
        "bag": lambda: weighted_embedding(table, support, weights * 1.0),
    }
    return {f"reward_{name}_bytes": kept_bytes(form)[1] for name, form in forms.items()}


def _reference_forms(setting: Setting) -> dict[str, Callable[[], None]]:
    """The reference over one completion without gradients: the whole prefix again for each token, or on a KV cache."""
    backbone, prompts = setting.backbone, setting.prompts
    inputs, mask = replay_inputs(prompts, backbone.embed(prompts.ids), setting.rollout().embeds)
    first = prompts.ids.shape[1]

    def uncached() -> None:
        with torch.no_grad(), backbone.reference():
            for end in range(first, inputs.shape[1] + 1):
                backbone.head(backbone.hidden(inputs[:, :end], mask[:, :end])[:, -1])

    def cached() -> None:
        with torch.no_grad(), backbone.reference():
            cache, start = backbone.new_cache(), 0
            for end in range(first, inputs.shape[1] + 1):
                backbone.head(backbone.decode(inputs[:, start:end], mask[:, :end], cache)[:, -1])
                start = end

    return {"uncached": uncached, "cached": cached}


# ---- probability mass of a support ----
@torch.no_grad()
def _mass(s: Settings) -> pd.DataFrame:
    """Probability mass of the K likeliest tokens of ``softmax(logits / tau)`` along real text; stderr is over texts."""
    backbone, _, texts = s.timed_models()
    ks = [k for k in _SUPPORTS if k < backbone.vocab_size]
    per_text: dict[tuple[float, int], list[Tensor]] = {(tau, k): [] for tau in TAUS for k in ks}
    for text in progress(texts[: s.mass_texts], "mass of the support"):
        ids = torch.tensor([backbone.tokenizer(text)["input_ids"][: s.mass_tokens]], device=backbone.device)
        logits = backbone.head(backbone.hidden(backbone.embed(ids), torch.ones_like(ids))[0])  # [L, V]
        top = logits.topk(max(ks), -1).values
        for tau in TAUS:
            log_total = (logits / tau).logsumexp(-1, keepdim=True)
            mass = (top / tau - log_total).exp().cumsum(-1)
            for k in ks:
                per_text[tau, k].append(mass[:, k - 1].cpu())
    rows = []
    for (tau, k), values in per_text.items():
        pooled, means = torch.cat(values), torch.stack([v.mean() for v in values])
        stderr = float(means.std() / len(means) ** 0.5) if len(means) > 1 else None
        rows.append(dict(tau=tau, K=k, mass=float(pooled.mean()), stderr=stderr,
                         p05=float(pooled.quantile(0.05)), n=len(pooled), texts=len(values)))  # fmt: skip
    return pd.DataFrame(rows)


# ---- times ----
def _median_seconds(fn: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall-clock seconds of a call, with the device's queue drained before and after."""
    wait, times = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None), []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        fn()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _time_against_tokens(s: Settings) -> pd.DataFrame:
    """Seconds of one gradient, rollout included, by engine and completion length."""
    setting = make_setting(*s.timed_models(), s.speed_batch, s.speed_prompt_tokens, s.speed_new_tokens, s.support_size)
    replayed, headline, rows = partial(replay, hops=HOPS), s.speed_new_tokens, []
    last_only = partial(stepwise, options=StepwiseOptions(head_positions="last"))
    contest: dict[str, tuple[Engine, Sequence[int], int]] = {
        "replay": (replayed, sorted({*s.replay_tokens, headline}), s.repeats),
        "unrolled": (unrolled, [*s.stepwise_tokens, headline], 1),
        "checkpointed": (checkpointed, [*s.stepwise_tokens, headline], 1),
        LAST_POSITION: (last_only, [headline], 1),
    }
    setting.relaxed(max_new_tokens=2).run(replayed)  # the first call of a process pays for set-up
    for name, (engine, lengths, repeats) in contest.items():
        for length in progress(lengths, f"timing {name}"):
            case = partial(setting.relaxed(max_new_tokens=length).run, engine)
            rows.append((name, length, _median_seconds(case, setting.backbone.device, repeats)))
    return pd.DataFrame(rows, columns=["engine", "T", "seconds"])


def _reference_seconds(s: Settings) -> dict[str, float]:
    """Seconds of the reference pass over one completion."""
    counted, medians = s.counted_setting(), {}
    for name, form in _reference_forms(counted).items():
        form()  # the first call pays for set-up
        medians[name] = _median_seconds(form, counted.backbone.device, _REFERENCE_REPEATS)
    return medians


TABLES = {
    "runs": lambda s: _of_each(s, _run),
    "curves": _curves,
    "texts": lambda s: _of_each(s, _texts),
    "kl_at_start": lambda s: kl_at_start(s.parity_setting(trained=False)),
    "hops": _hops,
    "parity": _parity,
    "accumulation": _accumulation,
    "kept": _kept,
    "bytes": _bytes,
    "mass": _mass,
}
TIMED = {
    "time_against_tokens": _time_against_tokens,
    "reference_seconds": _reference_seconds,
    "run_seconds": lambda s: _of_each(s, _seconds),
}
