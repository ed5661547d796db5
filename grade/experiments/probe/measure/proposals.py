"""Document 003's memory proposals: what each would change in the entropy probe's gradient path.

The path is the gradient of the leave-one-out entropy loss over B prompts with G completions each, in one of three ways:
all completions of a prompt in one pass (`whole`), in chunks whose graphs wait for one backward pass (`chunked`, the
document's first proposal), or streamed in two passes (`streamed`, `grade.entropy.samples`).
"""

import copy
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from grade.entropy.samples import Samples, entropy_coefficients, prompt_gradients, sequence_logps
from grade.experiments.traced import saved_bytes
from grade.memory.settings import Microbatch, TracedConfig
from grade.models.backbone import Backbone
from grade.models.parameters import flatten, trained_parameters
from grade.models.prompts import PromptBatch

Way = Literal["whole", "chunked", "streamed"]


class ProbeStepConfig(TracedConfig):
    """The probe's gradient path as a step: ``batch_size`` prompts, ``num_generations`` completions each."""

    way: Way = Field("streamed", description="whole, chunked or streamed")
    num_generations: int = Field(4, ge=2, description="completions of a prompt, G")
    microbatch_size: int = Field(2, ge=1, description="completions in a forward pass (chunked, streamed)")

    def microbatch(self, backbone: Backbone) -> Microbatch:  # noqa: D102
        prompts = self.prompts(backbone).to("cpu")
        shape = (self.batch_size, self.num_generations, self.max_new_tokens)
        ids = torch.randint(backbone.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        samples = Samples(prompts, ids, torch.ones_like(ids))

        def run() -> None:
            with backbone.checkpointed_layers(self.gradient_checkpointing):
                if self.way == "streamed":
                    with backbone.phase("scoring"):
                        logps = sequence_logps(backbone, samples, self.microbatch_size)
                    prompt_gradients(backbone, samples, entropy_coefficients(logps), self.microbatch_size)
                else:
                    held_gradient(backbone, samples, self.microbatch_size if self.way == "chunked" else None)

        return run


def held_gradient(backbone: Backbone, samples: Samples, chunk: int | None = None) -> Tensor:
    """The gradient as the document computes it: every chunk's graph waits for one backward pass."""
    parameters, parts = trained_parameters(backbone), []
    batch, group, length = samples.ids.shape
    for _, prompts, ids, mask in samples.microbatches(chunk or group, backbone.device):
        inputs, every = torch.cat([prompts.ids, ids], 1), prompts.mask_with(length)
        logits = backbone.head(backbone.hidden(backbone.embed(inputs), every))  # all positions, as in the document
        # Written out: what is alive between the chunks is traced.
        logps = logits[:, :-1].log_softmax(-1).gather(2, inputs[:, 1:].unsqueeze(2)).squeeze(2)
        parts.append((logps[:, -length:] * mask).sum(1))
    sums = torch.cat(parts)
    c = entropy_coefficients(sums.detach().view(batch, group)) / batch
    grads = torch.autograd.grad((c.flatten() * sums).sum(), parameters)
    return flatten(grads)


def _logps(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [B, T] of tokens from logits [B, T, V]."""
    return logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)


def saved_by_log_probabilities() -> dict[str, float]:
    """Bytes that token log-probabilities keep for backward, in units of the logits."""
    logits, ids = torch.zeros(16, 4096, requires_grad=True), torch.zeros(16, dtype=torch.long)
    ways = {
        "log_softmax": lambda: logits.log_softmax(-1).gather(1, ids[:, None]),
        "cross_entropy": lambda: F.cross_entropy(logits, ids, reduction="none"),
    }
    return {name: saved_bytes(way, exclude=[logits, ids]) / logits.nbytes for name, way in ways.items()}


def proposed_buffer_error() -> str:
    """Name of the exception that the second proposal's own snippet raises; empty if it runs."""
    parameter = torch.zeros(2, 3)
    try:
        torch.zeros(parameter.numel()).view_as(parameter, memory_format=torch.preserve_format)
    except TypeError as error:
        return type(error).__name__
    return ""


def restore_errors() -> dict[str, float]:
    """What remains of an AdamW step after each way of undoing it, on one parameter of ones.

    ``as_coded``: largest change of the parameter; the published restore needs gradients that ``zero_grad`` has dropped,
    so it does nothing. ``parameters_only``: largest difference between two "identical" probe steps if only the
    parameters are restored, as proposed. ``everything``: the same if the optimizer's state is restored too.
    """
    before, gradient = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))

    def fresh():
        parameter = nn.Parameter(torch.ones(50))
        return parameter, torch.optim.AdamW([parameter], lr=1e-2)

    def step(parameter, optimizer, gradient=gradient):
        parameter.grad = gradient.clone()
        optimizer.step()
        return parameter.detach().clone()

    errors = {"as_coded": float((step(*fresh()) - 1).abs().max())}
    for name in ("parameters_only", "everything"):
        parameter, optimizer = fresh()
        kept = step(parameter, optimizer, before)
        state = copy.deepcopy(optimizer.state_dict())
        first = step(parameter, optimizer)
        parameter.data.copy_(kept)
        if name == "everything":
            optimizer.load_state_dict(state)
        errors[name] = float((first - step(parameter, optimizer)).abs().max())
    return errors


@torch.no_grad()
def narrow_log_probability_error(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> dict[str, float]:
    """Largest errors in nats of log-probabilities from bfloat16 logits, as in both of the document's versions."""
    inputs, every = torch.cat([prompts.ids, ids], 1), prompts.mask_with(ids.shape[1])
    logits = backbone.head(backbone.hidden(backbone.embed(inputs), every))[:, prompts.ids.shape[1] - 1 : -1]
    error = _logps(logits.bfloat16(), ids).float() - _logps(logits, ids)
    return {"token_max": float(error.abs().max()), "sequence_max": float(error.sum(1).abs().max())}


@torch.no_grad()
def missing_mask_error(backbone: Backbone, prompts: PromptBatch, ids: Tensor, padding: int) -> float:
    """Largest error of a sequence log-probability, in nats, when left padding is not masked."""
    pad = torch.zeros(len(ids), padding, dtype=torch.long, device=ids.device)
    inputs = torch.cat([pad, prompts.ids, ids], 1)
    sums = []
    for visible in (0, 1):  # padding hidden, padding seen
        mask = torch.cat([pad + visible, prompts.mask, torch.ones_like(ids)], 1)
        hidden = backbone.hidden(backbone.embed(inputs), mask)[:, -ids.shape[1] - 1 : -1]
        sums.append(_logps(backbone.head(hidden), ids).sum(1))
    return float((sums[1] - sums[0]).abs().max())
