"""A vLLM server samples the completions of a step.

Tokens go in and tokens come out, never text, which need not give back the tokens that were sampled. Each comes with its
log-probability under the server's policy q, which has other kernels, and perhaps another type, than the policy p that
is trained. The two are compared at every step: a wrong base, a lost adapter or another temperature would otherwise
train without a sign of it. Samples of q are then taken for samples of p.

The server needs its own log-probabilities after temperature and minimum length, and adapters that come and go:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --max-lora-rank 16 --max-loras 2 \
        --logprobs-mode processed_logprobs --generation-config vllm

Every sampling parameter is sent, as a server may have other defaults. The prompts of one request would have one seed;
so a request has one prompt.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grade.errors import InputError
from grade.models.batch import Completions
from grade.models.noise import draw_rows
from grade.models.scoring import completion_logps

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch
    from grade.training.config import GradeConfig

logger = logging.getLogger(__name__)

TIMEOUT = 600.0
"""Seconds for an answer."""
REQUESTS = 64
"""Most requests at the same time."""
KEY = "VLLM_API_KEY"
"""Environment variable with the key that the server was started with, if it asks for one."""
NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True,
    "skip_special_tokens": False, "add_special_tokens": False, "stream": False,
}  # fmt: skip
"""Parameters of every request: the policy itself, unchanged, and tokens instead of text."""
ROUNDING = 0.05
"""Mean difference in nats per token that rounding to 16 bits leaves; a coarser server may have more."""


class StepSampler:
    """The completions of each step, sampled by the policy as it is then."""

    def __init__(self, config: GradeConfig) -> None:
        self.config, self.address = config, config.sampler.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY)
        self.client = httpx.Client(
            base_url=self.address, timeout=TIMEOUT, trust_env=False,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip
        self.name: str | None = None  # of the present adapter
        self._step: int | None = None  # whose adapter it is
        self._folder: Path | None = None
        self._warned = False

    def sample(
        self, backbone: Backbone, prompts: PromptBatch, generator: torch.Generator, step: int
    ) -> tuple[Completions, dict[str, Tensor]]:
        """A completion of each of B prompts, and how far the server's policy is from the trained one.

        Once a step all processes call this together, and one of them hands over the adapter.

        Raises:
            InputError: If the server fails, or samples another policy; it is given no token bias.
        """
        if backbone.token_bias is not None:
            raise InputError("sampler", self.address, "none for a policy with a token bias, which no adapter holds")
        start = time.perf_counter()
        if step != self._step:
            name = self._hand_over(backbone) if self.config.process_index == 0 else None
            self.name, self._step = gather_object([name])[0], step
        ids, mask, logps = self._completions(backbone, prompts, generator)
        seconds, least = time.perf_counter() - start, self.config.min_completion_length
        with torch.no_grad():
            found = compare(completion_logps(backbone, prompts, ids, mask, min_new_tokens=least), logps, mask)
        self._check(found)
        figures = {f"sampler/{name}": torch.tensor(value, dtype=torch.float64) for name, value in found.items()}
        figures["sampler/seconds"] = torch.tensor(seconds, dtype=torch.float64)
        return Completions(prompts, ids, mask), figures

    def close(self) -> None:
        """Take the adapter back; a server that has gone is no error."""
        self._take_back(self._folder)
        self._folder = None

    def _hand_over(self, backbone: Backbone) -> str:
        """Load the present adapter under a new name, and unload the one before it."""
        parent, before = Path(self.config.sampler_folder or tempfile.gettempdir()).absolute(), self._folder
        # A name of its own each time: a server may keep what it has loaded under a name.
        self._folder = folder = parent / f"grade-{secrets.token_hex(8)}"
        folder.mkdir(parents=True)  # which the server, perhaps another user's, can read
        backbone.save_adapter(folder)
        self._post("/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})
        self._take_back(before)
        return folder.name

    def _take_back(self, folder: Path | None) -> None:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(InputError):
                self._post("/v1/unload_lora_adapter", {"lora_name": folder.name})

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            answer = self.client.post(path, json=body)
        except httpx.HTTPError as error:
            raise InputError("sampler", self.address, f"a server that answers ({error})") from error
        if answer.is_error:
            allowed = f"vLLM, started as docs/samplers.md says; it said: {answer.text[:400]}"
            raise InputError("sampler", f"{self.address}{path}: status {answer.status_code}", allowed)
        return answer

    def _completions(
        self, backbone: Backbone, prompts: PromptBatch, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, mask and the server's log-probabilities [B, T]."""
        settings = NEUTRAL | {
            "model": self.name, "max_tokens": self.config.max_completion_length,
            "min_tokens": self.config.min_completion_length, "temperature": self.config.temperature,
            "stop_token_ids": list(backbone.eos_token_ids),
        }  # fmt: skip
        # Below 2^62, as the server counts up from it for the n completions of a request; its first row's.
        number = partial(torch.randint, 2**62, generator=generator, device=generator.device)
        seeds, requests = draw_rows((len(prompts),), generator, number).tolist(), []
        for prompt, equal in groupby(zip(prompts.rows(), seeds, strict=True), key=lambda row: row[0]):
            (_, seed), *others = equal
            requests.append(settings | {"prompt": prompt, "n": 1 + len(others), "seed": seed})
        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = list(pool.map(lambda body: self._post("/v1/completions", body).json(), requests))
        choices = [each for answer in answers for each in sorted(answer["choices"], key=lambda each: each["index"])]
        ids = [torch.tensor(each["token_ids"]) for each in choices]
        logps = [torch.tensor(each["logprobs"]["token_logprobs"], dtype=torch.float64) for each in choices]
        columns = ids, [torch.ones_like(tokens) for tokens in ids], logps
        return tuple(pad_sequence(column, batch_first=True).to(backbone.device) for column in columns)

    def _check(self, found: dict[str, float]) -> None:
        """Refuse a server that samples another policy, as far as rounding cannot explain it."""
        difference, most = found["mean_difference"], self.config.sampler_max_difference
        if not difference <= most:  # NaN, too
            allowed = (
                f"at most sampler_max_difference = {most:g} nats per token between the server's log-probabilities and "
                "the policy's: the same base and adapter, --logprobs-mode processed_logprobs"
            )
            raise InputError("sampler: mean difference", difference, allowed)
        if difference > ROUNDING and not self._warned:
            logger.warning(
                f"sampler: log-probabilities differ from the policy's by {difference:.2g} nats per token on average. "
                "Weights in 8 bits or fewer may explain it; otherwise the server samples another policy"
            )
            self._warned = True


def compare(policy_logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> dict[str, float]:
    """How far two policies p and q are apart on tokens that q sampled, from log-probabilities and mask [B, T].

    ``mean_ratio``, the mean of ``p / q``, has the expectation 1. ``mean_difference`` and ``largest_difference`` are of
    ``|log p - log q|`` in nats.
    """
    difference = (policy_logps.double() - sampler_logps.double())[mask.bool()]
    return {
        "mean_ratio": float(difference.exp().mean()), "mean_difference": float(difference.abs().mean()),
        "largest_difference": float(difference.abs().max()),
    }  # fmt: skip
