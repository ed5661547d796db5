"""Bytes that Experiment 6 counts: what each of the document's optimisations keeps for backward, alone and together.

Counted on real tensors by `grade.memory`, on the step that trains. The base and the adapter are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from grade.experiments.measured import progress
from grade.experiments.setting import Setting
from grade.experiments.traced import kept_bytes
from grade.gradients.estimators import relax
from grade.gradients.replay import replay_inputs
from grade.gradients.rollout import Rollout
from grade.gradients.unrolled import CHECKPOINTED, UNROLLED, StepwiseOptions, gathered_embedding, stepwise
from grade.memory.tracker import MemoryTracker
from grade.models.head import weighted_embedding
from grade.models.noise import gumbel_noise

OPTIMISATIONS: dict[str, StepwiseOptions] = {
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


def kept_by_option(setting: Setting) -> pd.DataFrame:
    """Bytes alive after the forward pass of one step, each of the document's optimisations alone and all together.

    Table with columns option, engine (unrolled, checkpointed, replay), bytes. Adapter and base are not counted.
    """
    full = setting.relaxation.model_copy(update={"gumbel_topk": 0})
    topk = setting.relaxation
    rows = []
    for name, options in progress(OPTIMISATIONS.items(), "bytes kept"):
        filtered = options.compact or "top-k" in name
        case = replace(setting, relaxation=topk if filtered else full)
        engine = "checkpointed" if options.checkpoint else "unrolled"
        rows.append(dict(option=name, engine=engine, bytes=_kept_by_stepwise(case, options)))
    for name, checkpointing in (("replay", False), ("replay, layers checkpointed", True)):
        rows.append(dict(option=name, engine="replay", bytes=_kept_by_replay(setting, checkpointing)))
    return pd.DataFrame(rows)


def _kept_by_stepwise(setting: Setting, options: StepwiseOptions) -> int:
    generator = torch.Generator(setting.backbone.device).manual_seed(setting.seed)
    args = (setting.backbone, setting.prompts, setting.objective, setting.relaxation, generator)
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


def policy_bytes(setting: Setting) -> dict[str, float]:
    """Bytes that the policy's own passes keep in the three engines; relaxation, KL and reward are in their lean forms.

    Figures ``policy_<engine>_bytes`` and ``policy_completion_tokens`` = B T.
    """
    tokens = len(setting.prompts) * setting.relaxation.max_new_tokens
    return {
        "policy_completion_tokens": tokens,
        "policy_unrolled_bytes": _kept_by_stepwise(setting, replace(CHECKPOINTED, checkpoint=False)),
        "policy_checkpointed_bytes": _kept_by_stepwise(setting, CHECKPOINTED),
        "policy_replay_bytes": _kept_by_replay(setting, False),
        "policy_replay_checkpointed_bytes": _kept_by_replay(setting, True),
    }


def relaxation_bytes(vocab: int, k: int, tau: float = 1.0, hidden: int = 64) -> dict[str, float]:
    """Bytes that one relaxed token keeps for backward, from logits to embedding: dense, as published, compact.

    Figures ``relax_<form>_bytes_per_token`` and ``relax_vocab_size``.
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, hidden, generator=generator)
    logits = torch.randn(1, vocab, generator=generator)
    support = logits.topk(k).indices
    noise, noise_k = gumbel_noise((1, vocab), generator), gumbel_noise((1, k), generator)

    def dense(source: Tensor) -> Tensor:
        soft = relax(source + noise, tau, "gumbel")
        return soft @ table

    def scattered(source: Tensor) -> Tensor:  # the published gumbel_softmax_topk and its sparse reward
        y = relax(source.gather(1, support) + noise_k, tau, "gumbel")
        soft = torch.zeros_like(source).scatter(1, support, y)
        return (soft.gather(1, support).unsqueeze(-1) * table[support]).sum(1)

    def compact(source: Tensor) -> Tensor:
        y = relax(source + noise_k, tau, "gumbel")
        return weighted_embedding(table, support, y)

    figures: dict[str, float] = {"relax_vocab_size": vocab}
    for name, form, source in (
        ("dense", dense, logits),
        ("topk_scattered", scattered, logits),
        ("topk_compact", compact, logits.gather(1, support)),
    ):
        # A product by one, so that the source is an intermediate as in training, not a leaf that counts for free.
        leaf = source.clone().requires_grad_()
        figures[f"relax_{name}_bytes_per_token"] = kept_bytes(lambda form=form, leaf=leaf: form(leaf * 1.0))[1]
    return figures


def reward_embedding_bytes(tokens: int, k: int, hidden: int, vocab: int) -> dict[str, float]:
    """Bytes that making the reward's soft embeddings keeps for backward, from the weights [T, K] on.

    Figures ``reward_dense_bytes``, ``reward_gather_bytes``, ``reward_bag_bytes``.
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.empty(vocab, hidden).normal_(generator=generator)
    support = torch.randint(vocab, (tokens, k), generator=generator)
    weights = torch.rand(tokens, k, generator=generator).requires_grad_()

    def dense() -> Tensor:
        soft = torch.zeros(tokens, vocab).scatter(1, support, weights * 1.0)
        return soft @ table

    forms = {
        "dense": dense,
        "gather": lambda: gathered_embedding(table, support, weights * 1.0),
        "bag": lambda: weighted_embedding(table, support, weights * 1.0),
    }
    return {f"reward_{name}_bytes": kept_bytes(form)[1] for name, form in forms.items()}


def reference_forms(setting: Setting) -> dict[str, Callable[[], None]]:
    """The reference over one completion without gradients, in two forms.

    ``uncached``, which runs the whole prefix again for each token, and ``cached``, on a KV cache.
    """
    backbone, prompts = setting.backbone, setting.prompts
    inputs, mask = replay_inputs(prompts, backbone.embed(prompts.ids), setting.rollout().embeds)
    first = prompts.ids.shape[1]

    def uncached() -> None:
        with torch.no_grad(), backbone.reference():
            for end in range(first, inputs.shape[1] + 1):
                backbone.head(backbone.hidden(inputs[:, :end], mask[:, :end])[:, -1])

    def cached() -> None:
        with torch.no_grad(), backbone.reference():
            cache = backbone.new_cache()
            backbone.head(backbone.decode(inputs[:, :first], mask[:, :first], cache)[:, -1])
            for end in range(first + 1, inputs.shape[1] + 1):
                backbone.head(backbone.decode(inputs[:, end - 1 : end], mask[:, :end], cache)[:, -1])

    return {"uncached": uncached, "cached": cached}


def peaks(setting: Setting) -> dict[str, float]:
    """Peak live bytes of what runs, beyond what was there before.

    Figures ``peak_<with or without>_freeing_bytes`` of one whole step, dense lists dropped at once or not, and
    ``reference_<form>_peak_bytes`` for the forms of `reference_forms`.
    """
    runs: dict[str, Callable[[], object]] = {}
    for name, drop in (("with", True), ("without", False)):
        engine = partial(stepwise, options=replace(CHECKPOINTED, drop_lists=drop))
        runs[f"peak_{name}_freeing_bytes"] = partial(setting.run, engine)
    runs |= {f"reference_{name}_peak_bytes": form for name, form in reference_forms(setting).items()}
    figures = {}
    for name, run in runs.items():
        with MemoryTracker(round_to=1) as tracker:
            run()
        figures[name] = tracker.peak
    return figures
