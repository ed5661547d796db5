"""A teacher: a model whose next-token distributions a policy learns, position by position.

| given | teacher | its weights |
|---|---|---|
| a folder or hub id, or a model | another model with the policy's vocabulary | those that differ from the base's |
| a folder with an adapter | the policy's base with that adapter | the adapter's |
| ``base`` | the policy's base | none |

``teacher_context`` is text that only the teacher reads, in front of the prompt, with a row's columns in braces: a hint,
an instruction, an example. With ``base`` this is context distillation (Snell et al. 2022, arXiv:2209.15189).

**Alone** (method `teacher`) a step descends ``g = mean_b mean_t grad D_t`` with the divergence ``D_t`` of the policy
from the teacher (`jensen_shannon`) at the positions of the policy's own completions (on-policy distillation, GKD;
Agarwal et al. 2024, arXiv:2306.13649). For the reverse KL this is the all-action gradient with the values
``s_t(v) = log q(v | y_<t) - log pi(v | y_<t)``, up to their mean. What a token changes for the divergence of later ones
is left out, as in TRL.

**Beside rewards** R has ``-w mean_t D_t`` as one of its parts, and its gradient is exact: the score function's term
through R, and D's own at each position.

The teacher reads the policy's token ids, so the vocabularies must agree; rows of the head beyond the shorter one are
padding (Qwen's 151,936 rows for 151,665 tokens) and are left out of the divergence.

A model that ends with other tokens (``<|im_end|>`` where the policy has ``<|endoftext|>``) teaches where to end, not by
which token: all ends of both are one event of the divergence, with the sum of their probabilities, so the policy learns
to end with the tokens that are its own. A completion of the run ends at any of them.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from grade.errors import InputError
from grade.gradients.learner import Learner
from grade.gradients.methods import TEACHER
from grade.gradients.objective import GradientStep, Objective, sequence_mean
from grade.models.adapter import has_lora, saved_values
from grade.models.backbone import Backbone, load_pretrained
from grade.models.base import FrozenBase
from grade.models.batch import Completions
from grade.models.compatibility import probe
from grade.models.head import Head, entropy_function, row_values, wide
from grade.models.parameters import share_equal, trained_parameters
from grade.models.prompts import PromptBatch, encode_examples
from grade.models.scoring import predicting_hidden, token_kl
from grade.rewards.base import Reward
from grade.rewards.rewards import Rewards
from grade.training.teacher_settings import TeacherSettings

if TYPE_CHECKING:
    from grade.training.loop import GradeTrainer

BASE = "base"
"""The teacher that is the policy's own base."""


class TeacherGradient(Learner):
    """The method `teacher`. It keeps nothing between steps."""

    def accumulate(self, completions: Completions, objective: Objective, scale: float = 1.0) -> GradientStep:
        """Add the gradient along completions; the reward is minus the divergence."""
        (prompts, ids, mask), near = completions.text, objective.beta > 0
        reference = self.reference(prompts, ids) if near else None
        hidden = self.hidden(prompts, ids)
        (teacher,) = objective.terms
        terms, entropy = teacher.divergence(hidden, teacher.hidden(prompts, ids), mask)
        divergence = sequence_mean(teacher.weight * terms, mask)
        loss, kl = divergence.mean(), torch.full(mask.shape, torch.nan, device=mask.device)
        if near:
            kl = token_kl(self.backbone, hidden, reference, mask)
            loss = loss + objective.beta * sequence_mean(kl, mask).mean()
        (loss * scale).backward(inputs=self.backbone.trainable_parameters())
        return GradientStep(ids, mask, -divergence.detach(), kl.detach(), loss.detach(), entropy=entropy)


@dataclass(frozen=True)
class Teacher:
    """A teacher of one policy, and the term ``w D_t`` of an objective.

    Attributes:
        policy: The policy, whose base it may share.
        weight: w, in reward per nat and token.
        beta: Which divergence, see `jensen_shannon`.
        model: A model of its own; None: the policy's base.
        adapter: Values of an adapter on that base, in the order of the policy's; None: without one.
        token_bias: Its token bias [V], where it has the policy's base; None: without one.
        context: Text in front of the prompt that only the teacher reads.
        encode: From rows to its prompts, where there is a context.
        ends: End-of-sequence tokens of both, where some of the teacher's are not the policy's; otherwise none.
    """

    policy: Backbone
    weight: float = 1.0
    beta: float = 1.0
    model: FrozenBase | None = None
    adapter: Sequence[Tensor] | None = None
    token_bias: Tensor | None = None
    context: str = ""
    encode: Callable[[Sequence[Mapping[str, Any]]], PromptBatch] | None = None
    ends: tuple[int, ...] = ()

    def __call__(self, hidden: Tensor, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """``w D`` [B, T] of completions [B, T], differentiable in the policy's hidden states [B, T, D]."""
        return self.weight * self.divergence(hidden, self.hidden(prompts, ids), mask)[0]

    @property
    def head(self) -> Head:
        """The head, at the policy's temperature."""
        temperature = self.policy.ref_head.temperature
        if self.model is not None:
            return replace(self.model.head, temperature=temperature)
        return replace(self.policy.ref_head, token_bias=self.token_bias)

    @torch.no_grad()
    def hidden(self, prompts: PromptBatch, ids: Tensor) -> Tensor:
        """Hidden states [B, T, D_q] that predict the tokens of completions [B, T]."""
        prompts = self.prompts(prompts)
        length, most = prompts.ids.shape[1] + ids.shape[1] - 1, (self.model or self.policy).max_positions
        if length > most:
            raise InputError("teacher", f"a text of {length} tokens", f"at most {most}, the teacher's context")
        with self._in_role():
            return predicting_hidden(self.model or self.policy, prompts, ids)

    def prompts(self, prompts: PromptBatch) -> PromptBatch:
        """What the teacher reads for the policy's prompts."""
        if not self.context:
            return prompts
        return self.encode([with_context(row, self.context) for row in prompts.examples]).to(prompts.ids.device)

    def divergence(self, hidden: Tensor, teacher_hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence and the policy's entropy at each token [B, T] in nats, 0 where masked, from both's hidden states.

        The divergence is differentiable in the policy's [B, T, D].
        """
        rows, taught = hidden.flatten(0, 1), teacher_hidden.flatten(0, 1)
        values = jensen_shannon(self.policy.head, rows, self.head, taught, self.beta, self.ends)
        return tuple(each.view(mask.shape) * mask for each in values)

    @contextlib.contextmanager
    def _in_role(self) -> Iterator[None]:
        if self.model is not None:
            yield
        elif self.adapter is None:
            with self.policy.bare():
                yield
        else:
            parameters = trained_parameters(self.policy.model)
            before = [p.data for p in parameters]  # swapped, not overwritten: a graph may need the values
            try:
                for p, value in zip(parameters, self.adapter, strict=True):
                    p.data = value
                yield
            finally:
                for p, value in zip(parameters, before, strict=True):
                    p.data = value


class TeacherReward(Reward):
    """A teacher as a reward: ``-mean_t D_t`` in nats per token, of the policy's divergence along a completion."""

    name = "teacher"
    no_gradient = "a divergence of distributions, of which relaxed tokens have none"

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    @torch.no_grad()
    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Of completions [B, T] of the policy as it is now; see `Reward.score`."""
        states = self.teacher.hidden(prompts, ids)
        values, _ = self.teacher.divergence(predicting_hidden(policy, prompts, ids), states, mask)
        return -values.sum(1) / mask.sum(1)


def jensen_shannon(
    head: Head, hidden: Tensor, teacher: Head, teacher_hidden: Tensor, beta: float, ends: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Generalised Jensen-Shannon divergence of a policy p from a teacher q, and p's entropy, without gradient.

    ``D = beta KL(q || m) + (1 - beta) KL(p || m)`` in nats with ``m = beta q + (1 - beta) p``, row by row; beta = 0 is
    the forward ``KL(q || p)`` and beta = 1 the reverse ``KL(p || q)``, as in TRL (Agarwal et al. 2024,
    arXiv:2306.13649). Differentiable in ``hidden`` [N, D]; ``teacher_hidden`` [N, D_q] are constants. With
    ``g = (1 - beta) log(p / m)``, ``dD/dl_v = p_v (g_v - E_p g)``; at beta = 0 it is ``p_v - q_v``, and at beta = 1
    ``p_v (log p_v - log q_v - D)``.

    Heads of unequal width are compared on the tokens that both have, each distribution renormalised there: the others
    are padding. As in `kl_divergence`, the sum is of terms >= 0. The tokens ``ends`` are one event E of both: with
    ``l_E = logsumexp_{v in E} l_v``, ``dD/dl_v = p_v / p_E dD/dl_E``. The entropy is of all tokens. See
    `grade.models.head.row_values`.
    """
    shared, columns = min(len(head.weight), len(teacher.weight)), list(ends)

    def of_logits(logits: Tensor, needed: bool, others: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        missing, logits = logits.shape[1] - shared, logits[:, :shared]
        taught = teacher(others[0])[:, :shared].to(logits.dtype)
        if columns:
            shares, _ = (_merge(each, columns) for each in (logits, taught))
        # The probabilities lie over the logits: four tensors of size V, and no fifth.
        value, grad = _divergence(logits.log_softmax(-1), taught.log_softmax(-1), beta, logits, taught)
        if columns:
            grad[:, columns] = grad[:, columns[:1]] * shares
        return value, F.pad(grad, (0, missing)) if needed else None

    of_logits.reads = () if teacher.weight is head.weight else (teacher.weight,)
    entropy, divergence = row_values(head, hidden, [entropy_function, of_logits], teacher_hidden.detach())
    return divergence, entropy.detach()


def _merge(logits: Tensor, columns: list[int]) -> Tensor:
    """Put the log of the columns' sum of exponentials [n] into the first, in place, and the others' probability at 0.

    Returns each one's share of the sum [n, E].
    """
    each = logits[:, columns]
    logits[:, columns] = torch.finfo(logits.dtype).min / 4  # finite, as 0 times infinity is NaN
    logits[:, columns[0]] = each.logsumexp(-1)
    return each.softmax(-1)


def _divergence(logp: Tensor, logq: Tensor, beta: float, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """`jensen_shannon` [n] of log-probabilities [n, V], and its gradient in the logits that those of p are made of.

    All arguments are overwritten, the last two by the probabilities.
    """
    p, q = torch.exp(logp, out=p), torch.exp(logq, out=q)
    if beta == 0:
        value = logq.sub_(logp).mul_(q).sub_(q).add_(p).sum(-1)
        grad = p.sub_(q)
    elif beta == 1:
        g = logp.sub_(logq)
        value = torch.mul(p, g, out=logq).sub_(p).add_(q).sum(-1)
        grad = p.mul_(g.sub_(value.unsqueeze(-1)))
    else:
        logm = torch.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
        logm = torch.where(logp == logq, logp, logm)  # the same, without rounding that an optimizer would follow
        m, g = logm.exp(), logp.sub_(logm)
        value = (beta * (q * logq.sub_(logm) - q + m) + (1 - beta) * (p * g - p + m)).sum(-1)
        grad = p.mul_(g.sub_((p * g).sum(-1, keepdim=True))).mul_(1 - beta)
    return value, grad


def with_context(row: Mapping[str, Any], context: str) -> dict[str, Any]:
    """A row whose prompt has the context in front: of text as it is, of messages as the system's.

    Without one where a column that the context names is None.

    >>> with_context({"prompt": "2+2=", "answer": 4}, "It is {answer}. ")["prompt"]
    'It is 4. 2+2='
    >>> with_context({"prompt": "2+2=", "answer": None}, "It is {answer}. ")["prompt"]
    '2+2='
    """
    named = {re.split(r"[.\[]", name)[0] for _, name, *_ in Formatter().parse(context) if name}
    if missing := named - row.keys():
        columns = ", ".join(f"{{{name}}}" for name in row)
        raise InputError("teacher_context", context, f"columns of the row in braces: {columns}, not {min(missing)}")
    if any(row[name] is None for name in named):
        return dict(row)
    text, prompt = context.format_map(row), row["prompt"]
    if isinstance(prompt, str):
        return {**row, "prompt": text + prompt}
    first, *others = prompt
    if first["role"] == "system":
        told = first["content"]
        told = f"{text}\n\n{told}" if isinstance(told, str) else [{"type": "text", "text": text}, *told]
        return {**row, "prompt": [{**first, "content": told}, *others]}
    return {**row, "prompt": [{"role": "system", "content": text}, *prompt]}


def make_teacher(
    given: str | Path | PreTrainedModel, policy: Backbone, *, weight: float = 1.0, beta: float = 1.0,
    context: str = "", encode: Callable[..., PromptBatch] | None = None,
) -> Teacher:  # fmt: skip
    """The teacher of a policy, from a name or a model; see the module's table.

    Another model is loaded in the policy's type. A teacher with another vocabulary is an `InputError`.
    """
    encode = encode or partial(encode_examples, policy.tokenizer, warn_raw=False)
    teacher = Teacher(policy, weight, beta, context=context, encode=encode)
    if isinstance(given, str | Path):
        if str(given) == BASE:
            return teacher
        values = policy.saved_bias(given)
        if has_lora(given) or values is not None:
            adapter = saved_values(policy.peft, given) if has_lora(given) else None
            return replace(teacher, adapter=adapter, token_bias=values)
        model, tokenizer = load_pretrained(given, policy.dtype, field="teacher")
    elif given is policy.model or not isinstance(given, PreTrainedModel):
        allowed = f"a name, a PreTrainedModel of its own, or {BASE!r}: the policy's base, which has its adapter by now"
        raise InputError("teacher", type(given).__name__, allowed)
    else:
        model, tokenizer = given, None
        if given.name_or_path:
            with contextlib.suppress(OSError, ValueError):  # it may have none there
                tokenizer = AutoTokenizer.from_pretrained(given.name_or_path)
    base = FrozenBase(model.to(policy.device), tokenizer)
    probe(base)
    _check_vocabulary(base, policy)
    if not policy.lockstep:
        share_equal(model, policy.model)
    own = None if tokenizer is None else tokenizer.eos_token_id
    others = {*base.eos_token_ids, own} - {*policy.eos_token_ids, None}
    return replace(teacher, model=base, ends=(*policy.eos_token_ids, *sorted(others)) if others else ())


def _check_vocabulary(base: FrozenBase, policy: Backbone) -> None:
    """Refuse a model whose token ids mean other tokens than the policy's."""
    if policy.tokenizer is None:
        return
    tokens = policy.tokenizer.get_vocab()
    read = tokens if base.tokenizer is None else base.tokenizer.get_vocab()
    rows = min(base.vocab_size, policy.vocab_size)
    different = sorted((i, token) for token, i in tokens.items() ^ read.items() | {
        item for item in tokens.items() if item[1] >= rows
    })  # fmt: skip
    if different:
        i, token = different[0]
        allowed = f"a model with the policy's vocabulary: token {i}, {token!r}, is not in both"
        raise InputError("teacher", base.model.name_or_path, allowed)


def add_teacher(
    trainer: GradeTrainer, given: str | PreTrainedModel, rewards: Rewards | None
) -> tuple[Rewards, Teacher]:  # fmt: skip
    """The sum of a trainer's rewards, if any, and of a teacher's; and the teacher as a term of the objective."""
    config = trainer.config
    settings = config if isinstance(config, TeacherSettings) else TeacherSettings()
    if config.method == TEACHER and rewards is not None:
        raise InputError("method", TEACHER, "a policy gradient or auto beside rewards, of which it reads none")
    reading = trainer.config.reading | {"max_prompt_length": None}
    encode = partial(encode_examples, trainer.backbone.tokenizer, **reading)
    teacher = make_teacher(
        given, trainer.backbone, weight=settings.teacher_weight, beta=settings.teacher_beta,
        context=settings.teacher_context, encode=encode,
    )  # fmt: skip
    rows = trainer.train_dataset
    for number in range(len(rows) if settings.teacher_context and rows is not None else 0):
        with_context(rows[number], settings.teacher_context)  # now, not after all steps
    kind = {0: "forward KL", 1: "reverse KL"}.get(teacher.beta, f"Jensen-Shannon divergence, beta {teacher.beta:g}")
    name = given if isinstance(given, str | Path) else given.name_or_path or type(given).__name__
    if teacher.ends:
        trainer.backbone.eos_token_ids = teacher.ends
        kind += (
            f"; completions end with any of the tokens {', '.join(map(str, teacher.ends))}, its ends and the policy's"
        )
    trainer.choose("teacher", f"{name}: {kind}")
    parts, weights = ([], []) if rewards is None else (rewards.parts, rewards.weights)
    summed = Rewards(
        [*parts, TeacherReward(teacher)], [*weights, teacher.weight], config.reward_scope, wide(trainer.backbone.dtype)
    )
    return summed, teacher
