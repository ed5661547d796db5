"""The update that experiments compare with this project's: GRPO or Intuitor as documents describe it.

Completions are given (a separate engine sampled them), and logits may be dense. The step scores completions without
gradient under the policy and the reference, then backpropagates a clipped policy-gradient loss. Left out: the sampling
engine's own weights and caches, and a critic. Steps of this project's own policy gradients, with all of these, are in
`grade.memory.step`.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from grade.gradients.losses import clipped_surrogate, kl_estimate
from grade.memory.live import LiveTracker
from grade.memory.step import Microbatch, TracedConfig, generator_on, phase
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden, score
from grade.models.self_certainty import certainty_of_logits


class PolicyStepConfig(TracedConfig):
    """A GRPO or Intuitor step."""

    logits: Literal["chunked", "completion", "all"] = Field(
        "chunked", description="chunked: a few rows at a time; completion: all [B, T, V] at once; all: the prompt's too"
    )
    self_certainty: bool = Field(False, description="score self-certainty, Intuitor's reward")
    reference: bool = Field(True, description="score the reference, for KL")
    kl_coef: float = Field(0.005, ge=0, description="weight beta of KL (k3 estimator)")

    def microbatch(self, backbone: Backbone, others: list[nn.Module]) -> Microbatch:  # noqa: D102
        prompts, generator, scale = self.prompts(backbone), generator_on(backbone), 1 / self.gradient_accumulation_steps
        shape = (self.batch_size, self.max_new_tokens)
        ids = torch.randint(backbone.vocab_size, shape, generator=generator, device=backbone.device)
        mask, advantages = torch.ones_like(ids), torch.ones(shape[0], 1, device=backbone.device)
        dense = self.logits != "chunked"

        def logps(certain: bool = False) -> tuple[Tensor, Tensor | None]:
            if dense:
                return self._dense(backbone, prompts, ids, certain)
            scores = score(backbone, prompts, ids, mask, ("logps", "self_certainty") if certain else ("logps",))
            return scores.logps, scores.self_certainty

        def run(tracker: LiveTracker | None) -> None:
            with self.casting(backbone):
                with phase(tracker, "scoring"), torch.no_grad():
                    old, _ = logps(self.self_certainty)
                ref = old
                if self.reference:
                    with phase(tracker, "reference"), torch.no_grad(), backbone.reference():
                        ref, _ = logps()
                with backbone.checkpointed_layers(self.gradient_checkpointing):
                    new, _ = logps()
                surrogate = clipped_surrogate(new, old, advantages, 0.2)
                k3 = kl_estimate(new, ref, "k3")
                loss = ((self.kl_coef * k3 - surrogate) * mask).sum() / mask.sum()
            (loss * scale).backward()

        return run

    def _dense(
        self, backbone: Backbone, prompts: PromptBatch, ids: Tensor, certain: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The usual way: logits of all positions at once, in float32."""
        if self.logits == "completion":
            logits = backbone.head(predicting_hidden(backbone, prompts, ids))  # [B, T, V]
        else:
            inputs = torch.cat([prompts.ids, ids], 1)
            every = torch.cat([prompts.mask, torch.ones_like(ids)], 1)
            logits = backbone.head(backbone.hidden(backbone.embed(inputs), every))  # [B, P + T, V]
            logits = logits[:, prompts.ids.shape[1] - 1 : -1]
        certainty = certainty_of_logits(logits) if certain else None
        return logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2), certainty
