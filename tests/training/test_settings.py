"""Settings are honoured or refused by name; an epoch is a pass over the prompts."""

import importlib.util
from argparse import Namespace
from dataclasses import dataclass
from decimal import Decimal

import pytest
from transformers import HfArgumentParser, TrainerCallback

from grade import GradeConfig, GradeTrainer
from grade.errors import InputError
from grade.training.config import TrainConfig
from grade.training.toy import toy_task
from grade.training.trl import NEUTRAL

NO_EFFECT = {
    "neftune_noise_alpha": 5.0, "torch_compile": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "fsdp_config": {"min_num_params": 3},
}  # fmt: skip
TRL = {"loss_type": "dr_grpo", "steps_per_generation": 2, "vllm_mode": "colocate", "sync_ref_model": False}


@pytest.mark.parametrize("make", [lambda v: GradeConfig(**v), TrainConfig.parse])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(k, v, "has no effect here") for k, v in NO_EFFECT.items()] + [(k, v, "TRL's, not ours") for k, v in TRL.items()],
)
def test_a_setting_without_effect_is_refused_by_name(make, name, value, message):
    with pytest.raises(InputError, match=f"^{name}: .*{message}"):
        make({name: value, "output_dir": "x"})


HARMLESS = {
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "ddp_find_unused_parameters": False, "label_names": [],
    "torch_empty_cache_steps": 2, "resume_from_checkpoint": "checkpoint-1", "eval_accumulation_steps": 1,
}  # fmt: skip


def test_what_could_not_be_missed_is_accepted():
    made = GradeConfig("x", **HARMLESS, learning_rate=Decimal("0.01"))
    assert (made.torch_empty_cache_steps, made.learning_rate, type(made.learning_rate)) == (2, 0.01, float)


def test_null_is_the_empty_text_where_a_setting_may_be_empty():
    names = ("gold", "texts", "eval_dataset", "teacher_context")
    read = TrainConfig.load([], ["output_dir=x", "use_cpu=true", *(f"{name}=" for name in names)])
    made = TrainConfig("x", use_cpu=True, **dict.fromkeys(names))
    assert [getattr(config, name) for config in (read, made) for name in names] == [""] * 8
    assert not read.eval_on_start


def test_a_parser_of_transformers_reads_all_settings(tmp_path):
    words = ["--output_dir", str(tmp_path), "--residual_weight", "0.5", "--method", "distilled", "--use_cpu",
             "--model_init_kwargs", '{"dtype": "bfloat16"}', "--chat_template_kwargs", '{"thinks": false}']  # fmt: skip
    (read,) = HfArgumentParser(GradeConfig).parse_args_into_dataclasses(words)
    mappings = dict(model_init_kwargs={"dtype": "bfloat16"}, chat_template_kwargs={"thinks": False})
    assert read == GradeConfig(tmp_path, residual_weight=0.5, method="distilled", use_cpu=True, **mappings)


THEIRS = {
    "optim": "nonsense", "lr_scheduler_type": "nope", "dataloader_prefetch_factor": 2, "num_train_epochs": -1,
    "save_total_limit": "x", "log_level": "x", "ddp_backend": "gloo",
    "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}, "report_to": 3, "save_strategy": "better",
    "dataloader_persistent_workers": True, "dataloader_multiprocessing_context": "spawn", "max_steps": 10**13,
    "top_p": 0.9, "fp16": True, "fsdp": "full_shard", "remove_unused_columns": True, "eval_strategy": "x",
    "trust_remote_code": True, "adam_epsilon": 0.0,
}  # fmt: skip


ODD = [
    ("save_total_limit", 0), ("eval_delay", -1), ("report_to", None), ("accelerator_config", {"even_batches": False}),
    ("accelerator_config", {"no_such": 1}), ("accelerator_config", "nowhere.json"), ("num_iterations", 2),
    ("model_init_kwargs", "bfloat16"), ("model_init_kwargs", "[1]"), ("chat_template_kwargs", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [*THEIRS.items(), *ODD])
def test_a_wrong_value_of_transformers_setting_is_one_line(name, value):
    with pytest.raises(InputError, match=f"^{name}.*: got .*; allowed: "):
        GradeConfig("x", use_cpu=True, **{name: value})


def test_a_part_of_a_setting_that_was_given_is_not_said_to_be_from_a_file():
    values = {"output_dir": "x", "use_cpu": True, "accelerator_config": {"even_batches": False}}
    with pytest.raises(InputError, match="^accelerator_config.even_batches: got False"):
        TrainConfig.parse(values, "run.yaml", ["accelerator_config"])


@dataclass
class GRPOConfig:
    """Some of TRL's, with its defaults."""

    output_dir: str = "x"
    learning_rate: float = 1e-6
    beta: float = 0.0
    max_completion_length: int = 512
    scale_rewards: str = "group"
    num_iterations: int = 1
    steps_per_generation: int | None = None
    gradient_accumulation_steps: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    generation_kwargs: dict | None = None
    vllm_mode: str = "colocate"
    warmup_ratio: float = 0.0
    top_k: int | None = None


class RLOOConfig(GRPOConfig):
    pass


@pytest.mark.parametrize("given", [None, 3, GRPOConfig, GradeConfig("x")])
def test_what_is_no_config_is_one_line(given):
    with pytest.raises(InputError, match="config: got"):
        GradeConfig.from_trl(given)


def test_a_config_of_trls_becomes_ours(caplog):
    theirs = GRPOConfig(
        beta=0.04, max_completion_length=32, gradient_accumulation_steps=2, steps_per_generation=2, epsilon_high=0.28,
        generation_kwargs={"min_new_tokens": 3},
    )  # fmt: skip
    ours = GradeConfig.from_trl(theirs, seed=5)
    wanted = dict(
        method="grpo", beta=1.28, learning_rate=1e-6, scale_rewards="group", gradient_accumulation_steps=2, seed=5,
        min_completion_length=3, top_k=0,
    )  # fmt: skip
    assert {name: getattr(ours, name) for name in wanted} == wanted
    said = [record.getMessage().split(": ")[1] for record in caplog.records if "from_trl" in record.getMessage()]
    assert sorted(said) == ["beta", "epsilon_high", "generation_kwargs", "loss_type"]
    assert GradeConfig.from_trl(theirs, max_completion_length=50).beta == 2
    assert GradeConfig.from_trl(RLOOConfig(scale_rewards="none")).method == "rloo"
    assert GradeConfig.from_trl(Namespace(max_prompt_length=9, substitutions=5, method="distilled")).substitutions == 5
    assert GradeConfig.from_trl({"max_prompt_length": 9}, method="distilled").truncation == "left"


def test_what_asks_for_nothing_passes(caplog):
    GradeConfig.from_trl(NEUTRAL)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["defaults"]


def test_a_distillation_of_trls_becomes_ours(caplog):
    kwargs = {"dtype": "bfloat16"}
    theirs = {"teacher_model_name_or_path": "big", "beta": 0.5, "lmbda": 0.25, "max_new_tokens": 9, "loss_type": "nll",
              "temperature": 0.9, "teacher_model_init_kwargs": kwargs, "seq_kd": False}  # fmt: skip
    ours = GradeConfig.from_trl(theirs)
    wanted = dict(method="teacher", teacher="big", teacher_beta=0.5, beta=0, lmbda=0.25, max_completion_length=9,
                  temperature=0.9, teacher_dtype="bfloat16", learning_rate=2e-4)  # fmt: skip
    assert {name: getattr(ours, name) for name in wanted} == wanted and kwargs == {"dtype": "bfloat16"}
    said = [record.getMessage().split(": ")[1] for record in caplog.records if "from_trl" in record.getMessage()]
    assert said == ["defaults", "teacher_model_name_or_path", "beta", "max_new_tokens", "loss"]
    if importlib.util.find_spec("trl"):
        from trl import DistillationConfig

        same = GradeConfig.from_trl(DistillationConfig("out", teacher_model_name_or_path="big", bf16=False))
        assert (same.method, same.teacher, same.teacher_beta, same.lmbda) == ("teacher", "big", 1.0, 1.0)
        assert (same.learning_rate, same.logging_steps, same.max_completion_length) == (1e-6, 10, 512)
        assert same.gradient_checkpointing and same.beta == 0


@dataclass
class GKDConfig:
    output_dir: str = "x"
    teacher_model_name_or_path: str = "big"
    remove_unused_columns: bool = True  # its trainer sets it to False


def test_a_default_that_trls_trainer_changes_itself_is_dropped():
    assert GradeConfig.from_trl(GKDConfig()).teacher == "big"
    with pytest.raises(InputError, match="remove_unused_columns: got True"):
        GradeConfig.from_trl({"remove_unused_columns": True})


@pytest.mark.parametrize(
    "name, value",
    [("steps_per_generation", 4), ("mask_truncated_completions", True), ("loss_type", "cispo"), ("seq_kd", True),
     ("generation_kwargs", {"top_p": 0.9}), ("scale_rewards", "batch"), ("warmup_ratio", 0.1), ("learning_rat", 0),
     ("beta", "0.1"), ("max_completion_length", None), ("generation_kwargs", ["min_new_tokens"]),
     ("top_entropy_quantile", 0.2), ("ref_model_sync_steps", 64)],
)  # fmt: skip
def test_what_would_train_something_else_is_refused(name, value):
    known = name in GRPOConfig.__dataclass_fields__
    for given in ({name: value}, *([GRPOConfig(**{name: value})] if known else [])):
        with pytest.raises(InputError, match=f"^{name}: got"):
            GradeConfig.from_trl(given)


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

    def on_evaluate(self, args, state, control, **kwargs):
        self.seen.append(("evaluation", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(("checkpoint", state.global_step))


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
    assert trainer.state.num_train_epochs == 3
    order = [("begin", 0), ("end", 2), ("evaluation", 2), ("checkpoint", 2)]  # as transformers'
    assert seen.seen == [(kind, step + after) for after in (0, 2, 4) for kind, step in order]
    history = trainer.state.log_history
    assert [(r["step"], r["epoch"]) for r in history if "eval_reward" in r] == [(2, 1), (4, 2), (6, 3)]
    assert [r["step"] for r in history if "loss" in r] == [2, 4, 6]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
