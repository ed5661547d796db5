"""A token bias from one gradient, averaged over few completions or many."""

import torch

from grade.training.config import GradeConfig
from grade.training.fit_bias import fit_bias
from grade.training.toy import toy_task


def test_a_few_completions_give_the_direction_of_many_where_the_reward_is_linear_in_embeddings():
    found = {}
    for source in ("gradient:8", "gradient"):
        task, args = toy_task(), GradeConfig(max_completion_length=8)
        found[source] = fit_bias(task.backbone, task.reward_model, task.train_prompts, 0.5, source, args)
    assert [fit.texts for fit in found.values()] == [8, 128]
    few, many = (fit.values for fit in found.values())
    # R = sigmoid(z), z linear: every gradient has one direction, and only its length differs
    assert torch.cosine_similarity(few - few.mean(), many - many.mean(), 0) > 0.999
    assert float(few.norm() / many.norm()) < 1.2
