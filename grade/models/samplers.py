"""Who samples the completions of a step: `own` and `shared` in this process, or a server at an address.

Prompts in; token ids, a mask and the tokens' log-probabilities under the sampler out. Tokens, never text: tokenising
the text of a completion need not give back the tokens that were sampled. No top-p, no top-k: those would be samples of
another distribution.

An engine with other kernels, another type or rounding samples a policy q that is not quite the policy p that is
trained. The log-probabilities that it reports tell how far apart they are (`Samples.mismatch`).
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.head import wide
from grade.models.prompts import PromptBatch
from grade.models.sampling import Decoder, check_length, check_logits, forbid_eos, generate, is_eos
from grade.models.server import CompletionsServer, Row

COMPLETIONS = 128
"""Most completions of a prompt in one request to a server."""
BLOCK = 256
"""Tokens in a block of `draw`: about the square root of a vocabulary."""


@dataclass(frozen=True)
class Mismatch:
    """How far the sampler's policy q is from the trained one, p, on the sampled tokens.

    Attributes:
        mean_ratio: Mean of ``p / q``; its expectation is 1, because the tokens are q's.
        largest_difference: Largest ``|log p - log q|`` in nats.
    """

    mean_ratio: float
    largest_difference: float

    def check(self, bound: float, name: str) -> None:
        """Refuse a sampler that is more than ``bound`` nats away from the policy at some token, or not a number."""
        if not self.largest_difference <= bound:
            largest = f"{self.largest_difference:.3g} nats at one token, mean ratio {self.mean_ratio:.3g}"
            allowed = (
                f"at most sampler_max_difference = {bound:g} nats between the log-probabilities of {name} and the "
                "policy's own: the same weights, adapter, temperature and minimum length (vLLM: --logprobs-mode "
                "processed_logprobs)"
            )
            raise InputError("sampler: largest difference", largest, allowed)


@dataclass(frozen=True)
class Samples:
    """Completions of B prompts.

    Attributes:
        ids: Token ids [B, T].
        mask: [B, T], 1 up to and including the first end-of-sequence token, then 0.
        logps: Log-probability of each token under the sampler [B, T] in nats, 0 where masked.
    """

    ids: Tensor
    mask: Tensor
    logps: Tensor

    def mismatch(self, logps: Tensor) -> Mismatch:
        """Against the policy's own log-probabilities [B, T], averaged over valid tokens in float64."""
        difference = (logps.double() - self.logps.double())[self.mask.bool()]
        return Mismatch(float(difference.exp().mean()), float(difference.abs().max()))


class Sampler:
    """Draws completions of the policy. Subclasses implement `_sample`; `publish` and `use` are for other processes."""

    name: str = ""

    def sample(
        self, backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, generator: torch.Generator,
        min_new_tokens: int = 0,
    ) -> Samples:  # fmt: skip
        """One completion of each of B prompts, [B, T'] with T' <= ``max_new_tokens``.

        The policy is ``softmax(logits / temperature)`` with its head's temperature, without end-of-sequence before
        ``min_new_tokens``. The generator is the source of the noise, or of its seed.

        Raises:
            InputError: If lengths do not fit the model, or the sampler fails or returns what the policy could not have
                written.
        """
        if max_new_tokens < 1:
            raise InputError("max_new_tokens", max_new_tokens, "at least 1")
        if not 0 <= min_new_tokens <= max_new_tokens:
            raise InputError("min_new_tokens", min_new_tokens, f"0 to max_new_tokens = {max_new_tokens}")
        check_length(backbone, prompts.ids.shape[1] + max_new_tokens)
        with torch.no_grad():
            return self._sample(backbone, prompts, max_new_tokens, generator, min_new_tokens)

    def _sample(
        self, backbone: Backbone, prompts: PromptBatch, most: int, generator: torch.Generator, least: int
    ) -> Samples:
        raise NotImplementedError

    def publish(self, backbone: Backbone) -> Any:
        """Hand the present adapter to the sampler, once before the samples of a step, in one process of several.

        What it returns, in plain types, is for `use` in every process.
        """

    def use(self, published: Any) -> None:
        """Sample from the adapter that `publish` handed over, in this or another process."""

    def close(self) -> None:
        """Give back what the sampler holds for this run."""


class OwnSampler(Sampler):
    """`grade.models.sampling.generate`, with the log-probabilities of its tokens."""

    name = "own"

    def _sample(
        self, backbone: Backbone, prompts: PromptBatch, most: int, generator: torch.Generator, least: int
    ) -> Samples:
        logps: list[Tensor] = []
        ids, mask = generate(backbone, prompts, most, generator, min_new_tokens=least, logps=logps)
        return Samples(ids, mask, torch.stack(logps, 1) * mask)


class _SharedPrompts(Sampler):
    """Less to compute than `generate`: a prompt is read once for its group, a token costs one random number.

    `generate` reads each prompt as often as it has completions, and draws Gumbel noise for the whole vocabulary,
    because the relaxed methods need it. A sampler of plain completions needs neither. The completions have the same
    distribution; they are other ones for the same seed, so this is a choice of its own. A prompt's completions must
    follow each other in the batch, as in a group; each has its own copy of the cache, so no memory is saved.
    """

    name = "shared"

    def _sample(
        self, backbone: Backbone, prompts: PromptBatch, most: int, generator: torch.Generator, least: int
    ) -> Samples:
        eos, alive, going = backbone.eos_token_ids, prompts.mask.new_ones(len(prompts), dtype=torch.bool), True
        ids, masks, logps = [], [], []
        with backbone.merged():
            state = _shared_decoder(backbone, prompts)
            for step in range(most):
                if going:
                    token, logp = draw(forbid_eos(state.logits(), None, step, least, eos), generator)
                    check_logits(logp, alive)
                    for values, value in zip((ids, masks, logps), (token, alive, logp), strict=True):
                        values.append(value)
                    alive = alive & ~is_eos(token, eos)
                    going = bool(alive.any())
                # As in `generate`: all processes of a sharded base take part in each pass.
                if step + 1 == most or not backbone.anywhere(going):
                    break
                state.advance(backbone.embed(token))
        mask = torch.stack(masks, 1).long()
        return Samples(torch.stack(ids, 1), mask, torch.stack(logps, 1) * mask)


def _shared_decoder(backbone: Backbone, prompts: PromptBatch) -> Decoder:
    """A decoder with a row for each prompt that reads equal prompts in a row once."""
    keys = torch.cat([prompts.ids * prompts.mask, prompts.mask], 1)
    _, place = torch.unique_consecutive(keys, return_inverse=True, dim=0)
    first = torch.cat([place.new_ones(1), place.diff()]).nonzero().squeeze(1)
    state = Decoder(backbone, prompts[first])
    if len(first) < len(prompts):
        state.cache.batch_select_indices(place)
        state.mask, state.last = prompts.mask, state.last[place]
    return state


def draw(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A token of each row's softmax by inverse transform [B], and its log-probability [B], from logits [B, V].

    With weights ``w_v = exp(l_v)``, cumulative sums ``c`` of whole blocks of tokens and u uniform in [0, 1), the block
    is the first with ``c > u C``, C the sum of all; what is left of u within the block then chooses the token in the
    same way. Blocks, because a cumulative sum over the vocabulary takes three times as long as the weights do.
    Log-probabilities are not finite where the logits are not.

    >>> logits = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(1000, 3)
    >>> tokens, logps = draw(logits, torch.Generator().manual_seed(0))
    >>> sorted(set(tokens.tolist())), round(float(logps[0].exp()), 6)
    ([0, 2], 0.5)
    """
    batch, vocab = logits.shape
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()
    if vocab % BLOCK:
        weights = F.pad(weights, (0, -vocab % BLOCK))
    blocks = weights.view(batch, -1, BLOCK)
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    u = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=logits.device) * total
    block = torch.searchsorted(ends, u, right=True).clamp(max=ends.shape[1] - 1)
    size = sums.gather(1, block)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(-1)
    rest = (u - ends.gather(1, block) + size) / size * inside[:, -1:]
    token = (block * BLOCK + torch.searchsorted(inside, rest, right=True)).clamp(max=vocab - 1)
    logp = logits.gather(-1, token) - largest - total.log().to(logits.dtype)
    return token.squeeze(-1), logp.squeeze(-1)


class _ServerSampler(Sampler):
    """A server's completions (`grade.models.server`).

    For each step the adapter is saved to a folder of its own, in ``folder`` or else a temporary one, that the server
    can read under the same path; it is loaded under a new name, and the one before it is unloaded.
    """

    def __init__(self, address: str, timeout: float = 600.0, folder: str | Path | None = None) -> None:
        self.server = CompletionsServer(address, timeout)
        self.name = self.server.address
        self.folder = None if folder is None else Path(folder).absolute()
        self.model: str | None = None
        self._loaded: tuple[str, Path] | None = None

    def publish(self, backbone: Backbone) -> str:  # noqa: D102
        # A name of its own each time: a server may keep what it has loaded under a name, or an earlier run its own.
        name = f"grade-{secrets.token_hex(8)}"
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix="grade-adapter-", dir=self.folder))
            place.chmod(0o755)  # the server may be another user's
            backbone.save_adapter(place)
        except OSError as error:
            raise InputError("sampler_folder", str(self.folder), f"a folder to write to ({error.strerror})") from None
        try:
            self.server.load(name, str(place))
        except InputError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self.close()
        self._loaded = (name, place)
        self.use(name)
        return name

    def use(self, published: str) -> None:  # noqa: D102
        self.model = published

    def close(self) -> None:
        """Unload the adapter and remove its folder; a server that has gone is no error."""
        if self._loaded is not None:
            name, place = self._loaded
            self._loaded = None
            shutil.rmtree(place, ignore_errors=True)
            with suppress(InputError):
                self.server.unload(name)

    def _sample(
        self, backbone: Backbone, prompts: PromptBatch, most: int, generator: torch.Generator, least: int
    ) -> Samples:
        settings = {
            "max_tokens": most, "min_tokens": least, "temperature": backbone.head.temperature,
            "stop_token_ids": list(backbone.eos_token_ids),
        }  # fmt: skip
        if self.model is not None:
            settings["model"] = self.model
        requests = []
        for prompt, equal in groupby(prompts.rows()):
            count = len(list(equal))
            for start in range(0, count, COMPLETIONS):
                n = min(COMPLETIONS, count - start)
                requests.append({"prompt": prompt, "n": n, "seed": seed_of(generator)} | settings)
        return _samples_of(self.name, self.server.complete(requests), backbone, most, least)


def seed_of(generator: torch.Generator) -> int:
    """A seed in [0, 2^62) for another engine; 2^62 leaves room for seeds that it counts up from this one."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def _samples_of(name: str, rows: Sequence[Row], backbone: Backbone, most: int, least: int) -> Samples:
    """Completions of another engine as tensors on the policy's device, cut after the first end-of-sequence token.

    Raises:
        InputError: For a completion that the policy could not have written in ``least`` to ``most`` tokens.
    """
    tokenizer, eos = backbone.tokenizer, set(backbone.eos_token_ids)
    known = backbone.vocab_size if tokenizer is None else min(backbone.vocab_size, len(tokenizer))
    kept = [_checked(name, row, known, eos, most, least) for row in rows]
    shape = (len(kept), max(len(ids) for ids, _ in kept))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    logps = torch.zeros(shape, dtype=wide(backbone.dtype))
    for n, (tokens, values) in enumerate(kept):
        ids[n, : len(tokens)], mask[n, : len(tokens)] = torch.tensor(tokens), 1
        logps[n, : len(tokens)] = torch.tensor(values, dtype=logps.dtype)
    return Samples(ids.to(backbone.device), mask.to(backbone.device), logps.to(backbone.device))


def _checked(name: str, row: Row, known: int, eos: set[int], longest: int, shortest: int) -> Row:
    ids, logps = row
    field = f"sampler {name}"
    if len(ids) != len(logps):
        raise InputError(field, f"{len(logps)} log-probabilities of {len(ids)} tokens", "one of each token")
    if not 1 <= len(ids) <= longest:
        raise InputError(field, f"{len(ids)} tokens", f"completions of 1 to {longest} tokens")
    for token in ids:
        if not 0 <= token < known:
            raise InputError(field, token, f"token ids of the policy's tokenizer, 0 to {known - 1}")
    end = next((n for n, token in enumerate(ids) if token in eos), None)
    if end is not None and end < shortest:
        raise InputError(field, f"an end-of-sequence after {end} tokens", f"none before {shortest} tokens")
    if end is None and len(ids) < longest:
        ends = ", ".join(map(str, sorted(eos))) or "none"
        allowed = f"{longest} tokens, or an end-of-sequence of the policy ({ends})"
        raise InputError(field, f"a completion that stops after {len(ids)} tokens", allowed)
    stop = len(ids) if end is None else end + 1
    return ids[:stop], logps[:stop]


_LOCAL = {"own": OwnSampler, "shared": _SharedPrompts}
LOCAL = tuple(_LOCAL)
"""Samplers of this process."""


def make_sampler(name: str, timeout: float = 600.0, folder: str | Path | None = None) -> Sampler:
    """The sampler of a name: own, shared, or a server's address with its time limit and the folder for adapters."""
    return _LOCAL[name]() if name in _LOCAL else _ServerSampler(name, timeout, folder)


def known_sampler(name: str) -> str:
    """The name, if there is such a sampler."""
    make_sampler(name)
    return name
