"""A script as written for TRL's GRPOTrainer. Only the two class names are filled in: ``TRAINER`` and ``CONFIG``."""

import json
import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

PACKAGE, TRAINER, CONFIG, MODEL, OUTPUT = sys.argv[1:]
names = __import__(PACKAGE, fromlist=[TRAINER, CONFIG])
GRPOTrainer, GRPOConfig = getattr(names, TRAINER), getattr(names, CONFIG)

dataset = Dataset.from_list([{"prompt": f"The film {i} was", "limit": i % 3} for i in range(16)])


def short(completions, limit, **kwargs):
    return [-abs(len(text) - 8.0 * most) for text, most in zip(completions, limit, strict=True)]


async def has_an_e(prompts, completions, completion_ids, trainer_state, log_metric=None, **kwargs):
    if log_metric is not None:
        log_metric("longest", max(len(ids) for ids in completion_ids))
    return [None if trainer_state.global_step > 1 else float("e" in text) for text in completions]


class Rewards(TrainerCallback):
    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.rows.append(logs)


seen = Rewards()
training_args = GRPOConfig(
    output_dir=OUTPUT,
    learning_rate=1e-3,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    num_generations=4,
    max_completion_length=8,
    temperature=1.0,
    beta=0.04,
    num_iterations=1,
    epsilon=0.2,
    scale_rewards="group",
    reward_weights=[1.0, 0.5],
    max_steps=3,
    logging_steps=1,
    save_steps=2,
    save_total_limit=1,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    max_grad_norm=0.5,
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=True,
    seed=0,
    report_to="none",
    disable_tqdm=True,
)
# as TRL's own scripts do
training_args.model_init_kwargs = dict(
    revision="main",
    trust_remote_code=training_args.trust_remote_code,
    attn_implementation=None,
    dtype="float32",
)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[short, has_an_e],
    args=training_args,
    train_dataset=dataset,
    eval_dataset=dataset.select(range(4)),
    quantization_config=None,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[seen],
)
trainer.train()
trainer.save_model(OUTPUT)
trainer.create_model_card(dataset_name="films")
metrics = trainer.evaluate()
keys = {"reward", "reward_std", "loss", "grad_norm", "learning_rate", "completions/mean_length", "rewards/short/mean"}
missing = sorted(keys - set(seen.rows[0]))
print(json.dumps({"steps": len(seen.rows), "missing": missing, "eval": "eval_reward" in metrics}))
