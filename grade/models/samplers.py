"""Who samples the completions of a step: `own` and `shared` in this process, or a server at an address.

Prompts in; token ids, a mask and the tokens' log-probabilities under the sampler out. Tokens, never text: tokenising
the text of a completion need not give back the tokens that were sampled. No top-p, no top-k: those would be samples of
another distribution.

An engine with other kernels, another type or rounding samples a policy q that is not quite the policy p that is
trained. The log-probabilities that it reports tell how far apart they are (`Samples.mismatch`).

A server speaks the OpenAI completions protocol with token ids, as vLLM's does (``return_token_ids``, ``logprobs``), and
loads an adapter from a folder that it can read, under a new name (``/v1/load_lora_adapter``). Start vLLM so that it
allows this:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve <base> --enable-lora --max-lora-rank <r> \
        --logprobs-mode processed_logprobs --generation-config vllm

By default vLLM reports log-probabilities before temperature and minimum length, which are another distribution's.
Every sampling parameter is sent, since a server may have other defaults. ``ignore_eos`` with the policy's own
``stop_token_ids`` makes the ends ours. A server gives all prompts of one request the same seed, and the n completions
of a prompt seeds that it counts up; so a request has one prompt.

Left out: streaming, and whole weights instead of an adapter.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, FailFast, StrictInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.background import wait_for
from grade.models.head import wide
from grade.models.prompts import PromptBatch
from grade.models.sampling import check_length, generate
from grade.models.server import Logprob, Server

COMPLETIONS = 128
"""Most completions of a prompt in one request to a server, which batches them."""
NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True,
    "skip_special_tokens": False, "add_special_tokens": False, "stream": False,
}  # fmt: skip
"""Parameters of every request: the policy itself, unchanged, and tokens instead of text."""
UNLOAD = 3.0
"""Most seconds for unloading, on which nothing depends, while a run ends by Ctrl-C or an error too."""
LOCAL = ("own", "shared")
"""Samplers of this process: `generate`, and the same with ``inverse`` and ``shared``."""

Row = tuple[list[int], list[float]]
"""A completion's tokens and their log-probabilities."""


class _Mismatch(NamedTuple):
    """How far the sampler's policy q is from the trained one, p, on the sampled tokens.

    The mean of ``p / q``, whose expectation is 1, because the tokens are q's, and the largest ``|log p - log q|`` in
    nats.
    """

    mean_ratio: float
    largest_difference: float

    def check(self, name: str, dtype: torch.dtype, bound: float | None = None) -> None:
        """Refuse a sampler that is more than ``bound`` nats away from the policy at some token, or not a number.

        By default the bound is what rounding explains in the policy's type.
        """
        bound = bound or (1.0 if dtype.itemsize < 4 else 0.05)
        if not self.largest_difference <= bound:
            largest = f"{self.largest_difference:.3g} nats at one token, mean ratio {self.mean_ratio:.3g}"
            allowed = (
                f"at most sampler_max_difference = {bound:g} nats between the log-probabilities of {name} and the "
                "policy's own: the same weights, adapter, temperature and minimum length (vLLM: --logprobs-mode "
                "processed_logprobs)"
            )
            raise InputError("sampler: largest difference", largest, allowed)


class Samples(NamedTuple):
    """Completions of B prompts: ids, mask and the log-probability of each token under the sampler in nats, each [B, T].

    The mask is 1 up to and including the first end-of-sequence token; where it is 0, log-probabilities are 0.
    """

    ids: Tensor
    mask: Tensor
    logps: Tensor

    def mismatch(self, logps: Tensor) -> _Mismatch:
        """Against the policy's own log-probabilities [B, T], averaged over valid tokens in float64."""
        difference = (logps.double() - self.logps.double())[self.mask.bool()]
        return _Mismatch(float(difference.exp().mean()), float(difference.abs().max()))


class Sampler:
    """Draws completions of the policy in this process; `publish` and `use` are for other ones (`ServerSampler`)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def sample(
        self, backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, generator: torch.Generator,
        min_new_tokens: int = 0,
    ) -> Samples:  # fmt: skip
        """One completion of each of B prompts, [B, T'] with T' <= ``max_new_tokens``.

        The policy is ``softmax(logits / temperature)`` with its head's temperature, without end-of-sequence before
        ``min_new_tokens``. The generator is the source of the noise, or of its seed. `InputError` says that lengths do
        not fit the model, or that the sampler fails or returns what the policy could not have written.
        """
        if not 0 <= min_new_tokens <= max_new_tokens:
            raise InputError("min_new_tokens", min_new_tokens, f"0 to max_new_tokens = {max_new_tokens}")
        check_length(backbone, prompts.ids.shape[1] + max_new_tokens)
        return self._sample(backbone, prompts, max_new_tokens, generator, min_new_tokens)

    def _sample(
        self, backbone: Backbone, prompts: PromptBatch, most: int, generator: torch.Generator, least: int
    ) -> Samples:
        logps: list[Tensor] = []
        shared = self.name == "shared"
        ids, mask = generate(
            backbone, prompts, most, generator, min_new_tokens=least, logps=logps, inverse=shared, shared=shared
        )
        return Samples(ids, mask, torch.stack(logps, 1) * mask)

    def publish(self, backbone: Backbone) -> Any:
        """Hand the present adapter to the sampler, once before the samples of a step, in one process of several.

        What it returns, in plain types, is for `use` in every process.
        """

    def use(self, published: Any) -> None:
        """Sample from the adapter that `publish` handed over, in this or another process."""

    def close(self) -> None:
        """Give back what the sampler holds for this run."""


class _Logprobs(BaseModel):
    token_logprobs: Annotated[list[Logprob], FailFast()]


class _Choice(BaseModel):
    index: int
    logprobs: _Logprobs
    token_ids: Annotated[list[StrictInt], FailFast()]
    prompt_token_ids: list[int] | None = None


class _Answer(BaseModel):
    model: str | None = None
    choices: Annotated[list[_Choice], FailFast()]  # thousands of wrong ones take minutes to list


class ServerSampler(Server, Sampler):
    """A server's completions. Its name is its address; it is asked up to three times.

    For each step the adapter is saved to a folder of its own, in ``folder`` or else a temporary one, that the server
    can read under the same path; it is loaded under a new name, and the one before it is unloaded.
    """

    def __init__(self, address: str, timeout: float = 600.0, folder: str | Path | None = None) -> None:
        Server.__init__(self, "sampler", address, timeout, "own, shared, or ")
        self.folder = None if folder is None else Path(folder).absolute()
        self.model: str | None = None
        self._loaded: tuple[str, Path] | None = None

    def publish(self, backbone: Backbone) -> str:  # noqa: D102
        # A name of its own each time: a server may keep what it has loaded under a name, or an earlier run its own.
        name = f"grade-{secrets.token_hex(8)}"
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix="grade-adapter-", dir=self.folder))
        place.chmod(0o755)  # the server may be another user's
        saved = backbone.save_adapter(place)
        needs = "vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, and sampler_folder that it can read"
        try:
            self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(saved)}, needs)
        except InputError as error:
            if "already been loaded" not in str(error):  # by an attempt whose answer was lost: the name is ours alone
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
            with suppress(InputError, TimeoutError):
                wait_for(asyncio.wait_for(self.ask("/v1/unload_lora_adapter", {"lora_name": name}), UNLOAD))

    def _sample(
        self, backbone: Backbone, prompts: PromptBatch, most: int, generator: torch.Generator, least: int
    ) -> Samples:
        settings = NEUTRAL | {
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
                requests.append(settings | {"prompt": prompt, "n": n, "seed": seed_of(generator)})
        rows = [row for rows in self.each(partial(self._complete, backbone), requests) for row in rows]
        ids = [torch.tensor(tokens) for tokens, _ in rows]
        columns = [ids, [torch.ones_like(tokens) for tokens in ids]]
        columns.append([torch.tensor(values, dtype=wide(backbone.dtype)) for _, values in rows])
        return Samples(*(pad_sequence(column, batch_first=True).to(backbone.device) for column in columns))

    async def _complete(self, backbone: Backbone, request: dict[str, Any]) -> list[Row]:
        """The ``n`` completions of a request, if the policy could have written them."""
        n = request["n"]
        needs = f"{n} choices, each with token ids (vLLM >= 0.10.2) and log-probabilities"
        answer = self.parsed(_Answer, await self.ask("/v1/completions", request), needs)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        numbered = [choice.index for choice in choices] == list(range(n))
        asked = request.get("model", answer.model)
        self.require(
            (answer.model in (None, asked), f"model {answer.model}", f"model {asked}, which was asked for"),
            (numbered, f"{len(choices)} choices", f"{n} choices with indices 0 to {n - 1}"),
        )
        tokenizer, eos, rows = backbone.tokenizer, backbone.eos_token_ids, []
        known = backbone.vocab_size if tokenizer is None else min(backbone.vocab_size, len(tokenizer))
        most, least, ends = request["max_tokens"], request["min_tokens"], ", ".join(map(str, sorted(eos))) or "none"
        for choice in choices:
            ids, logps, prompt = choice.token_ids, choice.logprobs.token_logprobs, choice.prompt_token_ids
            foreign = [token for token in ids if not 0 <= token < known]
            end = next((n for n, token in enumerate(ids) if token in eos), None)
            whole = len(ids) == most if end is None else end + 1 == len(ids) <= most and end >= least
            length = f"{len(ids)} tokens" + ("" if end is None else f", with an end-of-sequence after {end}")
            self.require(
                (prompt in (None, request["prompt"]), f"prompt_token_ids {prompt}", f"the prompt {request['prompt']}"),
                (len(ids) == len(logps), f"{len(logps)} log-probabilities of {len(ids)} tokens", "one of each token"),
                (not foreign, (foreign or [None])[0], f"token ids of the policy's tokenizer, 0 to {known - 1}"),
                (whole, length, f"{most} tokens, or fewer up to the policy's end ({ends}), not before {least}"),
            )
            rows.append((ids, logps))
        return rows


def seed_of(generator: torch.Generator) -> int:
    """A seed in [0, 2^62) for another engine; 2^62 leaves room for seeds that it counts up from this one."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def make_sampler(name: str, timeout: float = 600.0, folder: str | Path | None = None) -> Sampler:
    """The sampler of a name: own, shared, or a server's address with its time limit and the folder for adapters."""
    return Sampler(name) if name in LOCAL else ServerSampler(name, timeout, folder)


def known_sampler(name: str) -> str:
    """The name, if there is such a sampler."""
    make_sampler(name)
    return name
