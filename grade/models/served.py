"""A teacher behind a server: what vLLM says of the tokens of a text, at ``http://host:port``.

A text goes there as token ids, prompt and completion in one, and comes back with `prompt_logprobs`: at each position
the log-probabilities of the ``topk`` likeliest tokens, and of the text's own. From these `coarse_jensen_shannon` takes
a divergence. They are of the model's own distribution, at temperature 1: that of another temperature has a sum over all
tokens in it.

Left out: scoring of given token ids (vLLM's ``prompt_logprob_token_ids``), which would tell the teacher's values of the
policy's likeliest tokens: it needs vLLM's second model runner, which its CPU wheel does not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grade.errors import InputError
from grade.models.head import NOTHING
from grade.models.prompts import PromptBatch
from grade.models.server import Logprob, Server

FLOOR = 1e-6
"""Least mass of the rest: what the rounding of a float32 server may leave of 0, of which there is a logarithm."""
EXCESS = 1e-3
"""By which the probabilities of a position may exceed 1 or miss it."""


class Support(NamedTuple):
    """What is known of a teacher along completions: K tokens at each place, and log-probabilities in nats.

    Token ids are [B, T, K], log-probabilities [B, T, K + 1], those of all other tokens last; they are normalised, and
    `NOTHING` where a place has fewer tokens.
    """

    ids: Tensor
    logq: Tensor


class _Value(BaseModel):
    logprob: Logprob


class _Choice(BaseModel):
    prompt_logprobs: list[dict[Annotated[int, Field(ge=0)], _Value] | None]
    prompt_token_ids: list[int] | None = None


class _Answer(BaseModel):
    model: str | None = None
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Model(BaseModel):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: Annotated[int, Field(ge=3)] | None = None


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _Tokens(BaseModel):
    tokens: list[int]


class ServedModel:
    """A model at ``http://host:port``, or ``http://host:port#name`` if it is not the server's base.

    Attributes:
        model: Its name, which the server gives; it is the same at another address.
        max_positions: Longest text in tokens whose last token is not read, as of a model here.
    """

    def __init__(self, given: str, topk: int, vocab: int, timeout: float = 600.0) -> None:
        address, _, name = given.partition("#")
        self.server, self.topk, self.vocab = Server("teacher", address, timeout), topk, vocab
        content = self.server.post("/v1/models", None)
        models = self.server.parsed(_Models, content, "a list of models, as vLLM's").data
        known = {each.id: each for each in models}
        self.model = name or next((each.id for each in models if each.parent is None), models[0].id)
        if self.model not in known:
            raise InputError("teacher", given, f"a model of the server: {', '.join(known)}")
        card = known[self.model]
        # vLLM's base may have several names, of which answers have the first.
        self._names = {None, *(each.id for each in models if (each.root or each.id) == (card.root or card.id))}
        length = card.max_model_len or getattr(known.get(card.parent), "max_model_len", None)
        self.max_positions = length - 2 if length else 2**31  # the last token is read too, and one is written
        self._kept: dict[tuple[tuple[int, ...], int], tuple[Tensor, Tensor]] = {}

    def support(self, prompts: PromptBatch, ids: Tensor, mask: Tensor, dtype: torch.dtype) -> Support:
        """What it says along completions [B, T] of B prompts. Equal texts, and those of the last call, are asked once.

        `InputError` if the server fails, or says what is not of this text or no distribution.
        """
        own = (tokens[valid].tolist() for tokens, valid in zip(ids, mask.bool(), strict=True))
        texts = [(tuple(prompt + more), len(prompt)) for prompt, more in zip(prompts.rows(), own, strict=True)]
        new = [text for text in dict.fromkeys(texts) if text not in self._kept]
        known = self._kept | dict(zip(new, self.server.each(self._scored, new), strict=True))
        self._kept = {text: known[text] for text in texts}  # a reward and its gradient ask for the same
        tokens, logq = (pad_sequence(column, batch_first=True) for column in zip(*map(known.get, texts), strict=True))
        return Support(tokens.to(ids.device), logq.to(ids.device, dtype))

    async def _scored(self, text: tuple[tuple[int, ...], int]) -> tuple[Tensor, Tensor]:
        """Token ids [T, K] and log-probabilities [T, K + 1] of the T tokens that follow a text's prompt."""
        tokens, start = list(text[0]), text[1]
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0,
                "prompt_logprobs": self.topk, "add_special_tokens": False, "return_token_ids": True}  # fmt: skip
        needs = "prompt_logprobs (vLLM: --max-logprobs >= teacher_topk)"
        content = await self.server.ask("/v1/completions", body, needs)
        needs = "one choice with the prompt_logprobs of its tokens, as vLLM's"
        answer = self.server.parsed(_Answer, content, needs)
        (choice,) = answer.choices
        given, read = choice.prompt_logprobs, choice.prompt_token_ids
        self.server.require(
            (answer.model in self._names, f"model {answer.model}", f"model {self.model}, which was asked for"),
            (read in (None, tokens), f"prompt_token_ids {read}", f"the text {tokens}"),
            (len(given) == len(tokens), f"{len(given)} prompt_logprobs", f"one of each token, {len(tokens)}"),
        )
        ids, values = [], []
        for token, place in zip(tokens[start:], given[start:], strict=True):
            of_each = {number: value.logprob for number, value in (place or {}).items()}
            mass = sum(map(math.exp, of_each.values()))
            likeliest = sorted(of_each.values())[-self.topk :]
            others = (self.vocab - len(of_each)) * math.exp(min(likeliest, default=0))  # none is likelier than these
            self.server.require(
                (token in of_each, f"prompt_logprobs without token {token}", "the text's own token among them"),
                (self.topk <= len(of_each) <= self.topk + 1, f"{len(of_each)} prompt_logprobs of a token",
                 f"{self.topk} (teacher_topk) and the text's own token"),
                (max(of_each, default=0) < self.vocab, f"token {max(of_each, default=0)}",
                 f"token ids of the policy, 0 to {self.vocab - 1}"),
                (1 - EXCESS - others <= mass <= 1 + EXCESS, f"probabilities with the sum {mass:.4g}",
                 "1, or less of some tokens if others, none of them likelier, can have the rest (vLLM: --logprobs-mode "
                 "processed_logprobs or raw_logprobs)"),
            )  # fmt: skip
            missing = self.topk + 1 - len(of_each)
            rest = NOTHING if len(of_each) == self.vocab else math.log(max(1 - mass, FLOOR))
            ids.append([*of_each, *[token] * missing])
            values.append([*of_each.values(), *[NOTHING] * missing, rest])
        logq = torch.tensor(values, dtype=torch.float64)
        return torch.tensor(ids), logq.log_softmax(-1).clamp(min=NOTHING)

    def read(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Its tokens of texts, special ones only where they are written out; None if the server does not tell."""

        async def tokens(text: str) -> list[int] | None:
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            content = await self.server.ask("/tokenize", body, absent=(404, 405, 501))
            return None if content is None else self.server.parsed(_Tokens, content, "tokens, as vLLM's").tokens

        rows: list[Any] = self.server.each(tokens, texts)
        return None if None in rows else rows
