"""The tutorial's tiny model writes text that a person can read."""

import re

import torch

from grade import decode, encode_prompts, generate, toy_task


def test_the_tiny_writer_writes_words_of_the_reviews():
    task = toy_task(pretrain_steps=150)
    policy = task.backbone
    prompts = encode_prompts(policy.tokenizer, task.validation_prompts[:32], max_prompt_tokens=4)
    ids, mask = generate(policy, prompts, 12, torch.Generator().manual_seed(0))
    known = set(re.findall(r"\w+", " ".join(task.train_prompts)))
    words = [w for i, m in zip(ids, mask, strict=True) for w in re.findall(r"\w+", decode(policy.tokenizer, i, m))]
    assert len(words) > 200 and sum(word in known for word in words) > 0.9 * len(words)
