"""Settings are honoured or refused by name; an epoch is a pass over the prompts."""

import pytest
from transformers import TrainerCallback

from grade import GradeConfig, GradeTrainer
from grade.errors import InputError
from grade.training.config import TrainConfig
from grade.training.toy import toy_task

NO_EFFECT = {
    "neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1, "torch_compile": True, "data_seed": 3,
    "train_sampling_strategy": "group_by_length", "auto_find_batch_size": True, "dataloader_drop_last": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True}, "use_liger_kernel": True, "label_names": ["a"],
    "bf16_full_eval": True, "prediction_loss_only": True,
}  # fmt: skip
TRL = {
    "loss_type": "dr_grpo", "steps_per_generation": 2, "generation_batch_size": 8, "epsilon_high": 0.28,
    "mask_truncated_completions": True, "num_generations_eval": 2, "vllm_mode": "colocate", "delta": 1.5,
    "num_completions_to_print": 3, "top_entropy_quantile": 0.2, "sync_ref_model": True, "logging_dir": "logs",
    "vllm_server_base_url": "http://localhost", "importance_sampling_level": "sequence",
}  # fmt: skip


@pytest.mark.parametrize("make", [lambda v: GradeConfig(**v), TrainConfig.parse])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(k, v, "has no effect here") for k, v in NO_EFFECT.items()] + [(k, v, "TRL's, not ours") for k, v in TRL.items()],
)
def test_a_setting_without_effect_is_refused_by_name(make, name, value, message):
    with pytest.raises(InputError, match=f"^{name}: .*{message}") as raised:
        make({name: value, "output_dir": "x"})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("theirs", "ours"), [(True, "group"), (False, "none"), ("group", "group"), ("none", "none")])
def test_scale_rewards_may_be_spelled_as_in_older_scripts(theirs, ours):
    values = {"scale_rewards": theirs, "method": "grpo", "output_dir": "x"}
    assert GradeConfig(**values).scale_rewards == TrainConfig.parse(values).scale_rewards == ours


class Epochs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.seen.append(("begin", state.global_step))

    def on_epoch_end(self, args, state, control, **kwargs):
        self.seen.append(("end", state.global_step))


def test_an_epoch_is_a_pass_over_the_prompts(tmp_path):
    task, seen = toy_task(), Epochs()
    args = GradeConfig(
        str(tmp_path), method="ste", gumbel_topk=16, max_completion_length=4, max_prompt_length=6, truncation="right",
        per_device_train_batch_size=4, num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch",
        logging_strategy="epoch", use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"prompt": text} for text in task.train_prompts[:8]]
    trainer = GradeTrainer(task.backbone, task.reward_model, args, rows, rows[:4], callbacks=[seen])
    trainer.train()
    assert seen.seen == [(kind, step) for step in (0, 2, 4) for kind, step in (("begin", step), ("end", step + 2))]
    history = trainer.state.log_history
    assert [(r["step"], r["epoch"]) for r in history if "eval_reward" in r] == [(2, 1), (4, 2), (6, 3)]
    assert [r["step"] for r in history if "loss" in r] == [2, 4, 6]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
