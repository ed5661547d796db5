"""A server that goes in the middle of a step, comes back, or comes back with another base: an error, never a mix."""

import pytest
import torch
from datasets import Dataset
from vllm_server import save_base

from grade import GradeConfig, GradeTrainer
from grade.errors import InputError
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone

PROMPTS = Dataset.from_list([{"prompt": f"w5 w9 w{number}"} for number in range(2, 8)])
STEPS = 3


def trainer(base, output, engine):
    args = GradeConfig(
        str(output), method="rloo", num_generations=4, sampler=engine.address, sampler_folder=str(output / "adapters"),
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=STEPS, max_completion_length=12,
        min_completion_length=1, learning_rate=3e-2, beta=0.1, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="steps", save_steps=1, lr_scheduler_type="constant",
    )  # fmt: skip
    lengths = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731 - by keyword
    return GradeTrainer(Backbone.load(base, lora=LoraSettings(r=4, alpha=8)), lengths, args, PROMPTS)


def adapter(made):
    return torch.cat([p.detach().flatten() for p in made.backbone.trainable_parameters()])


def differences(made):
    return [row["sampler/largest_difference"] for row in made.state.log_history if "loss" in row]


def interrupted(made, step, change):
    """Train, with ``change`` between the adapter of ``step`` and its samples; the message, and the adapter then."""
    sampler, publish, published = made.sampler, made.sampler.publish, []

    def once_published(backbone):
        published.append(publish(backbone))
        if len(published) == step:
            before.append(adapter(made))
            change()
        return published[-1]

    before, sampler.publish, sampler.waits = [], once_published, (0.1, 0.1)
    with pytest.raises(InputError) as error:
        made.train()
    assert torch.equal(adapter(made), *before) and "\n" not in str(error.value)
    return str(error.value)


def test_a_step_has_one_server_with_one_base(base, engine, tmp_path):
    """Killed, killed and restarted, and restarted with another base; then the run goes on as if nothing had been."""
    whole = trainer(base, tmp_path / "whole", engine)
    start = adapter(whole)
    whole.train()
    assert len(differences(whole)) == STEPS and max(differences(whole)) < 1e-3 and engine.names() == ["base"]
    assert (adapter(whole) - start).abs().max() > 1e-2  # a server with an adapter of before would be seen

    other = save_base(tmp_path / "other", seed=1)
    folder = tmp_path / "run"
    assert "ConnectError" in interrupted(trainer(base, folder, engine), 2, engine.kill)
    engine.start(base)
    lost = interrupted(trainer(base, tmp_path / "lost", engine), 1, lambda: (engine.kill(), engine.start(other)))
    assert "does not exist" in lost  # its name is that of no other adapter
    foreign = interrupted(trainer(base, tmp_path / "foreign", engine), 1, lambda: None)
    assert "largest difference" in foreign and "the same weights" in foreign and engine.names() == ["base"]
    engine.kill()
    engine.start(base)
    resumed = trainer(base, folder, engine)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    torch.testing.assert_close(adapter(resumed), adapter(whole))
    assert engine.names() == ["base"]
