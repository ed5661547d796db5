"""What a run draws: every step and microbatch its own completions, and the prompts in a shuffled order."""

from datasets import Dataset

from grade import GradeConfig, GradeTrainer

SMALL = dict(
    method="rloo", num_generations=2, per_device_train_batch_size=2, max_completion_length=4, report_to="none",
    use_cpu=True, save_strategy="no",
)  # fmt: skip


def seen_by_the_reward(base, output, rows, **changes):
    """Prompts and completions of every call of the reward, one call for each microbatch."""
    calls = []

    def reward(prompts, completion_ids, number, **_):
        calls.append((number[::2], tuple(tuple(ids) for ids in completion_ids)))
        return [0.0] * len(prompts)

    dataset = Dataset.from_list([{"prompt": "The film was", "number": i} for i in range(rows)])
    args = GradeConfig(output_dir=str(output), **SMALL | changes)
    GradeTrainer(str(base), reward, args, train_dataset=dataset).train()
    return calls


def test_every_step_and_every_microbatch_draws_its_own_completions(base, tmp_path):
    # One prompt and a reward of 0 without KL: the policy stays what it is, and only the noise can differ.
    changes = dict(gradient_accumulation_steps=2, beta=0.0)
    calls = [ids for _, ids in seen_by_the_reward(base, tmp_path / "0", 1, seed=0, max_steps=2, **changes)]
    assert len(calls) == len(set(calls)) == 4
    again = [ids for _, ids in seen_by_the_reward(base, tmp_path / "1", 1, seed=0, max_steps=1, **changes)]
    other = [ids for _, ids in seen_by_the_reward(base, tmp_path / "2", 1, seed=1, max_steps=1, **changes)]
    assert again == calls[:2] and not set(other) & set(calls)


def test_prompts_are_shuffled_anew_in_every_pass(base, tmp_path):
    changes = dict(per_device_train_batch_size=8, max_completion_length=1, max_steps=4)
    calls = seen_by_the_reward(base, tmp_path, 8, **changes)
    order = [number for numbers, _ in calls for number in numbers]
    first, second = tuple(order[:8]), tuple(order[8:])
    assert sorted(first) == sorted(second) == [*range(8)]
    assert len({first, second, tuple(range(8))}) == 3
