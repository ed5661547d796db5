"""Teachers: models whose next-token distributions a policy learns, position by position.

| given | teacher | its weights |
|---|---|---|
| a folder or hub id | another model with the policy's vocabulary | those that differ from the base's |
| a folder with an adapter | the policy's base with that adapter | the adapter's |
| ``base`` | the policy's base | none |
| ``http://host:port`` | what a server says of the likeliest tokens (`grade.models.served`) | elsewhere |

``context`` is text that only the teacher reads, in front of the prompt, with a row's columns in braces: a hint, an
instruction, an example. With ``base`` this is context distillation (Snell et al. 2022, arXiv:2209.15189).

The teacher reads the policy's own token ids, so both must turn text into the same ones: vocabulary and prompts are
compared token by token before training. Rows of the head beyond the shorter vocabulary are padding (Qwen's 151,936 rows
for 151,665 tokens) and are left out of the divergence. Of a server's vocabulary only the tokens of some prompts are
compared, and those if it has ``/tokenize``.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from grade.errors import InputError, file_error
from grade.files import hashed
from grade.models.adapter import ADAPTER_FILES, saved_values
from grade.models.backbone import DTYPES, Backbone, load_pretrained
from grade.models.base import FrozenBase
from grade.models.compatibility import probe
from grade.models.head import Head, coarse_jensen_shannon, jensen_shannon, wide
from grade.models.parameters import fingerprint, share_equal
from grade.models.prompts import PromptBatch, encode_examples
from grade.models.scoring import predicting_hidden
from grade.models.served import ServedModel, Support
from grade.models.server import is_address

BASE = "base"
"""The teacher that is the policy's own base."""
SIBLING = "sibling"
"""The column that `with_siblings` fills."""
COMPARED = 64
"""Rows whose prompts are compared token by token."""
Encode = Callable[[Any, Sequence[Mapping[str, Any]]], PromptBatch]
"""From a tokenizer and rows to prompts."""


@dataclass(frozen=True)
class Teacher:
    """A teacher of one policy.

    Attributes:
        policy: The policy, whose base it may share.
        name: How it was given.
        weight: Of the divergence in the objective, in reward per nat and token.
        beta: Which divergence, see `grade.models.head.jensen_shannon`.
        own: A model of its own; None: the policy's base.
        adapter: Values of an adapter on that base, in the order of the policy's; None: without one.
        context: Text in front of the prompt that only the teacher reads.
        encode: From rows to its prompts, where there is a context.
        served: A model behind a server, in place of ``own``.
        figures: Of each `divergence` from a served model: the mean mass of the tokens that the server does not tell of,
            the teacher's and the policy's.
    """

    policy: Backbone
    name: str
    weight: float = 1.0
    beta: float = 1.0
    own: FrozenBase | None = None
    adapter: Sequence[Tensor] | None = None
    context: str = ""
    encode: Encode | None = None
    served: ServedModel | None = None
    figures: list[dict[str, Tensor]] = field(default_factory=list, compare=False, repr=False)

    @property
    def head(self) -> Head:
        """The head, at the policy's temperature."""
        head = self.policy.head if self.own is None else self.own.head
        return replace(head, temperature=self.policy.head.temperature)

    @torch.no_grad()
    def hidden(self, prompts: PromptBatch, ids: Tensor, mask: Tensor | None = None) -> Tensor | Support:
        """Hidden states [B, T, D_q] that predict the tokens of completions [B, T]; a server's are what it says of them.

        A server is not sent what the mask leaves out.
        """
        prompts = self.prompts(prompts)
        self._check_length(prompts.ids.shape[1] + ids.shape[1] - 1)
        if self.served is not None:
            mask = torch.ones_like(ids) if mask is None else mask
            return self.served.support(prompts, ids, mask, wide(self.policy.dtype))
        with self.policy.phase("teacher"), self._in_role():
            return predicting_hidden(self.own or self.policy, prompts, ids)

    def prompts(self, prompts: PromptBatch) -> PromptBatch:
        """What the teacher reads for the policy's prompts."""
        if not self.context:
            return prompts
        rows = [with_context(row, self.context) for row in prompts.examples]
        return self.encode(self.policy.tokenizer, rows).to(prompts.ids.device)

    def divergence(self, hidden: Tensor, teacher_hidden: Tensor | Support, mask: Tensor) -> Tensor:
        """Divergence at each token [B, T] in nats, 0 where masked, from hidden states of policy and teacher.

        Differentiable in the policy's [B, T, D]. From a server's support it is `coarse_jensen_shannon`.
        """
        if isinstance(teacher_hidden, Support):
            support, logq = (each.flatten(0, 1) for each in teacher_hidden)
            each, rest = coarse_jensen_shannon(self.policy.head, hidden.flatten(0, 1), support, logq, self.beta)
            masses, valid = {"teacher": logq[:, -1].exp(), "policy": rest}, mask.flatten().bool()
            self.figures.append({f"teacher/rest_{name}": mass[valid].mean() for name, mass in masses.items()})
            return each.view(mask.shape) * mask
        rows = (hidden.flatten(0, 1), teacher_hidden.flatten(0, 1))
        each = jensen_shannon(self.policy.head, rows[0], self.head, rows[1], self.beta)
        return each.view(mask.shape) * mask

    def fingerprint(self) -> str:
        """Hash of everything that the divergence depends on besides policy and text."""
        if self.served is not None:  # whose weights nobody here sees
            return hashed(self.served.model, self.served.topk, self.context, self.beta)
        weights = fingerprint((self.own or self.policy).model)
        adapter = [hashlib.sha256(value.double().cpu().numpy().tobytes()).hexdigest() for value in self.adapter or ()]
        return hashed(weights, adapter, self.context, self.beta)

    def _check_length(self, length: int) -> None:
        """Reject texts that are longer than the teacher's context, in tokens."""
        most = (self.served or self.own or self.policy).max_positions
        if length > most:
            field, value = ("teacher_context", self.context) if self.context else ("teacher", self.name)
            raise InputError(field, value, f"at most {most} tokens, the teacher's context, not {length}")

    @contextlib.contextmanager
    def _in_role(self) -> Iterator[None]:
        if self.own is not None:
            yield
        elif self.adapter is None:
            with self.policy.reference():
                yield
        else:
            parameters = self.policy.trainable_parameters()
            before = [p.data for p in parameters]  # swapped, not overwritten: a graph may need the values
            try:
                for p, value in zip(parameters, self.adapter, strict=True):
                    p.data = value
                yield
            finally:
                for p, value in zip(parameters, before, strict=True):
                    p.data = value


def with_context(row: Mapping[str, Any], context: str) -> dict[str, Any]:
    """A row whose prompt has the context in front: of text as it is, of messages as the system's.

    Without one where a column that the context names is None, such as a sibling that there is not.

    >>> with_context({"prompt": "2+2=", "answer": 4}, "It is {answer}. ")["prompt"]
    'It is 4. 2+2='
    >>> with_context({"prompt": "2+2="}, "It may be {sibling}. ")["prompt"]
    '2+2='
    """
    known = {SIBLING: None, **row}
    try:
        named = {re.split(r"[.\[]", name)[0] for _, name, *_ in Formatter().parse(context) if name}
        if any(known[name] is None for name in named):
            return dict(row)
        text = context.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        columns = ", ".join(f"{{{name}}}" for name in row)
        allowed = f"text with columns of the row in braces: {columns} ({file_error(error)})"
        raise InputError("teacher_context", context, allowed) from error
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return {**row, "prompt": text + prompt}
    first, *others = prompt
    if first["role"] == "system":
        told = first["content"]
        told = f"{text}\n\n{told}" if isinstance(told, str) else [{"type": "text", "text": text}, *told]
        return {**row, "prompt": [{**first, "content": told}, *others]}
    return {**row, "prompt": [{"role": "system", "content": text}, *prompt]}


def names_sibling(context: str) -> bool:
    """Whether a context has the column that is not the dataset's."""
    return f"{{{SIBLING}}}" in context


def with_siblings(prompts: PromptBatch, texts: Sequence[str], rewards: Tensor, group: int) -> PromptBatch:
    """Prompts of completions whose rows have the text of the best other completion of the prompt as ``sibling``.

    Groups of G follow each other. None where the best is as bad as the worst of all G, or has no text.
    """
    examples = []
    for start in range(0, len(texts), group):
        scores = rewards[start : start + group].nan_to_num(-torch.inf).tolist()
        for number in range(group):
            score, best = max((score, -other) for other, score in enumerate(scores) if other != number)
            told = (texts[start - best] or None) if score > min(scores) else None
            examples.append({**prompts.examples[start + number], SIBLING: told})
    return replace(prompts, examples=tuple(examples))


def make_teacher(
    given: str | Path | PreTrainedModel | Teacher, policy: Backbone, *, weight: float = 1.0, beta: float = 1.0,
    context: str = "", dtype: str | None = None, rows: Sequence[Mapping[str, Any]] = (), encode: Encode | None = None,
    topk: int = 20, timeout: float = 600.0,
) -> Teacher:  # fmt: skip
    """The teacher of a policy, from a name or a model; see the module's table.

    ``dtype`` is that of another model, by default the policy's. Prompts of the first ``rows`` are compared. A server is
    asked for ``topk`` tokens, and waited for ``timeout`` seconds. A teacher that cannot be read, has another
    vocabulary, or renders a prompt in other tokens is an `InputError`.
    """
    if isinstance(given, Teacher):
        return given
    encode = encode or (lambda tokenizer, some: encode_examples(tokenizer, some, warn_raw=False))
    name = given if isinstance(given, str | Path) else getattr(given, "name_or_path", "") or type(given).__name__
    teacher, tokenizer = Teacher(policy, str(name), weight, beta, context=context, encode=encode), None
    if isinstance(given, PreTrainedModel) and given is not policy.model:
        if given.name_or_path:
            with contextlib.suppress(Exception):  # it may have none there
                tokenizer = AutoTokenizer.from_pretrained(given.name_or_path)
        teacher = replace(teacher, own=FrozenBase(given.to(policy.device), tokenizer))
        probe(teacher.own)
    elif not isinstance(given, str | Path):
        allowed = f"a name, a PreTrainedModel of its own, or {BASE!r}: the policy's base, which has its adapter by now"
        raise InputError("teacher", type(given).__name__, allowed)
    elif is_address(given):
        for name, value, only in (("temperature", policy.head.temperature, 1.0), ("teacher_dtype", dtype, None)):
            if value != only:
                raise InputError(name, value, f"{only} with a teacher behind a server: its distribution is its own")
        if topk > policy.vocab_size:
            raise InputError("teacher_topk", topk, f"at most the policy's {policy.vocab_size} tokens")
        teacher = replace(teacher, served=ServedModel(given, topk, policy.vocab_size, timeout))
    elif given != BASE and (Path(given) / ADAPTER_FILES[0]).is_file():
        teacher = replace(teacher, adapter=saved_values(policy.peft, given))
    elif given != BASE:
        if dtype is not None and dtype not in DTYPES:
            raise InputError("teacher_dtype", dtype, ", ".join(DTYPES))
        model, tokenizer = load_pretrained(given, policy.dtype if dtype is None else DTYPES[dtype], field="teacher")
        teacher = replace(teacher, own=FrozenBase(model.to(policy.device), tokenizer))
        probe(teacher.own)
        if policy.shards is None:
            share_equal(model, policy.model)
    some = [rows[i] for i in range(min(COMPARED, len(rows)))]
    if tokenizer is not None:
        _check_tokens(teacher, policy.tokenizer, some)
    elif teacher.served is not None and some:
        read = [policy.tokenizer.decode(ids) for ids in encode(policy.tokenizer, some).rows()]  # special tokens, too
        if (theirs := teacher.served.read(read)) is not None:
            ours = policy.tokenizer(read, add_special_tokens=False)["input_ids"]
            _compare(teacher, ours, theirs)
    if context and some:
        for i in range(len(rows)):  # without tokens, each of them
            with_context(rows[i], context)
        read = encode(policy.tokenizer, [with_context(row, context) for row in some])
        teacher._check_length(read.ids.shape[1] + 1)
    return teacher


def _check_tokens(teacher: Teacher, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Reject a teacher that reads other tokens than the policy."""
    theirs, shared = teacher.own.tokenizer, min(len(teacher.head.weight), teacher.policy.vocab_size)
    here, there = (set(each.get_vocab().items()) for each in (tokenizer, theirs))
    known = {(token, i) for token, i in here & there if i < shared}
    different = sorted((i, token) for token, i in (here | there) - known)
    if different:
        i, token = different[0]
        found = f"token {i}, {token!r}, is not in both"
        raise InputError("teacher", teacher.name, f"a model with the policy's vocabulary: {found}")
    if rows:
        _compare(teacher, *(teacher.encode(each, rows).rows() for each in (tokenizer, theirs)))


def _compare(teacher: Teacher, ours: list[list[int]], theirs: list[list[int]]) -> None:
    """Reject a teacher that reads prompts as other tokens; of which the policy's tokenizer may know nothing."""
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own != other:
            place = next((i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), len(own))
            text, there = teacher.policy.tokenizer.decode(own[place : place + 8]), other[place : place + 8]
            allowed = (f"a model that renders prompts as the policy does: row {number} goes on with {text!r} after "
                       f"token {place} for the policy, with tokens {there} for the teacher")  # fmt: skip
            raise InputError("teacher", teacher.name, allowed)
