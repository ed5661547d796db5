"""Arithmetic with a verifier: prompts that state sums, and a reward for the right answer.

Problems and verifier are reasoning-gym's (Stojanovski et al. 2025, arXiv:2505.24760): the optional extra
``arithmetic``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.prompts import PromptBatch, decode, encode_prompts
from grade.rewards.verifiers import import_reasoning_gym

EXAMPLES = "2 + 3 = 5\n7 - 4 = 3\n6 + 1 = 7\n"
"""Shown before each problem: a base model completes what it sees."""


@dataclass(frozen=True)
class Problems:
    """Problems with a verifier.

    Attributes:
        entries: reasoning-gym's, each with a question, an answer and the expression.
        dataset: Scores answers.
    """

    entries: list[dict[str, Any]]
    dataset: Any = field(repr=False)

    @classmethod
    def make(cls, number: int, seed: int = 0) -> Problems:
        """Sums and differences of two numbers of one digit."""
        dataset = import_reasoning_gym("task").create_dataset(
            "chain_sum", size=number, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )
        return cls(list(dataset), dataset)

    def prompts(self, tokenizer: Any, max_tokens: int) -> PromptBatch:
        """Prompts: worked examples, then the problem. All must fit, as a cut one would have another answer."""
        texts = [f"{EXAMPLES}{entry['metadata']['expression']} =" for entry in self.entries]
        longest = max(len(tokenizer(text).input_ids) for text in texts)
        if longest > max_tokens:
            raise InputError("max_prompt_tokens", max_tokens, f"at least {longest}, the longest problem's")
        return encode_prompts(tokenizer, texts, max_tokens)

    def reward(self, tokenizer: Any, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """1 where the first number of a completion is the verifier's answer, else 0; float32 [n].

        Prompts [n, P] are of this task: each problem is looked up by its text.
        """
        by_expression = {entry["metadata"]["expression"]: entry for entry in self.entries}
        rewards = []
        for p, p_mask, i, m in zip(prompts.ids, prompts.mask, ids, mask, strict=True):
            expression = decode(tokenizer, p, p_mask).rsplit("\n", 1)[-1].removesuffix(" =")
            number = re.search(r"-?\d+", decode(tokenizer, i, m))
            answer = number[0] if number else None
            rewards.append(float(self.dataset.score_answer(answer, by_expression[expression]) == 1))
        return torch.tensor(rewards, device=ids.device)
