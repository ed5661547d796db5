"""The probe's gradient path as a step to trace (`grade.memory.trace`): streamed, or with graphs that wait.

The path is the gradient of the leave-one-out entropy loss over B prompts with G completions each. `whole`: all
completions of a prompt in one pass. `chunked`: a few at a time, but their graphs wait for one backward pass.
`streamed`: in two passes, so that one microbatch's graph exists at once (`grade.entropy.samples`).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from grade.entropy.samples import Samples, entropy_coefficients, prompt_gradients, sequence_logps
from grade.memory.settings import Microbatch, TracedConfig
from grade.models.backbone import Backbone
from grade.models.parameters import flatten, trained_parameters


class ProbeStepConfig(TracedConfig):
    """The gradient path: ``batch_size`` prompts, ``num_generations`` completions each."""

    way: Literal["whole", "chunked", "streamed"] = Field("streamed", description="whole, chunked or streamed")
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
    """The mean over prompts [P] of what `prompt_gradients` streams, with every chunk's graph held until one backward.

    A pass has ``chunk`` completions; None: all of a prompt.
    """
    parameters, parts = trained_parameters(backbone), []
    batch, group, length = samples.ids.shape
    for _, prompts, ids, mask in samples.microbatches(chunk or group, backbone.device):
        inputs, every = torch.cat([prompts.ids, ids], 1), prompts.mask_with(length)
        logits = backbone.head(backbone.hidden(backbone.embed(inputs), every))  # all positions, as in document 003
        # Written out: what is alive between the chunks is traced.
        logps = logits[:, :-1].log_softmax(-1).gather(2, inputs[:, 1:].unsqueeze(2)).squeeze(2)
        parts.append((logps[:, -length:] * mask).sum(1))
    sums = torch.cat(parts)
    c = entropy_coefficients(sums.detach().view(batch, group)) / batch
    grads = torch.autograd.grad((c.flatten() * sums).sum(), parameters)
    return flatten(grads)
