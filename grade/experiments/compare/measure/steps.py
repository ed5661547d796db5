"""Steps of TRL's trainers on a device, with random weights, which neither time nor memory depends on.

`timed_rows`: seconds and peak of GRPO and of distillation on the policy's own completions, ours and TRL's. Each trains
in a process of its own, with the settings of `grade.experiments.compare.measure.peers`, layers recomputed, completions
of full length, and a reward that costs nothing or a teacher of the policy's size. The first step pays for set-up and
does not count.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from grade.config import Config
from grade.experiments.compare.measure.peers import settings
from grade.experiments.training_runs import FIXED, UNEVALUATED
from grade.experiments.trl_runs import Clock, alone, same_settings, train_trl
from grade.memory.models import model_config
from grade.memory.settings import Device, require_device
from grade.models.backbone import Backbone
from grade.results import peak_memory
from grade.training.config import TrainConfig
from grade.training.trainer import GradeTrainer

SIZES = {"max_prompt_length": 128, "max_completion_length": 128, "per_device_train_batch_size": 32, "max_steps": 4}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 8, "beta": 0.1},
    "teacher": {},
}
"""By method, its settings."""
TRAINERS = ("grade", "grade, shared prompts", "trl")


class StepPeersConfig(Config):
    """Where steps are measured, and of what."""

    device: Device = Field("cpu", description="where to measure")
    models: list[str] = Field(["smollm2-135m"], min_length=1, description="shapes, Hugging Face ids or folders")

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_device(self.device)
        for model in self.models:
            model_config(model, "models")
        return self


def timed_rows(method: str, model: str, device: Device) -> Iterator[dict[str, Any]]:
    """For each trainer the seconds of its steps and the peak in bytes."""
    values = FIXED | UNEVALUATED | SIZES | METHODS[method] | {
        "method": method, "bf16": True, "gradient_checkpointing": True, "use_cpu": device == "cpu", "eval_steps": 100,
    }  # fmt: skip
    values["min_completion_length"] = values["max_completion_length"]
    with tempfile.TemporaryDirectory() as place:
        folder, teacher = Path(place, "policy"), Path(place, "teacher")
        for each in (folder, teacher) if method == "teacher" else (folder,):
            with torch.device(device):
                AutoModelForCausalLM.from_config(model_config(model), dtype=torch.bfloat16).save_pretrained(each)
            _word_tokenizer().save_pretrained(each)
        if method == "teacher":
            values["teacher"] = str(teacher)
        for trainer in TRAINERS:
            seconds, peak = alone(_train, trainer, str(folder), values)
            yield {"name": f"{model}, {method}, {trainer}", "seconds": seconds, "measured_peak_bytes": peak}


def _word_tokenizer() -> PreTrainedTokenizerFast:
    """A word a token."""
    words = Tokenizer(WordLevel({"a": 0, "end": 1, "pad": 2}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad", padding_side="left")


def _train(trainer: str, folder: str, values: dict[str, Any]) -> tuple[list[float], int]:
    config = TrainConfig.parse(values | ({"sampler": "shared"} if "shared" in trainer else {}))
    clock, prompts = Clock(config, lambda *_: None), [" ".join("a" * config.max_prompt_length)] * 64
    if trainer == "trl":
        make, arguments = _peer(config)
        train_trl(folder, torch.bfloat16, make, arguments, {"prompt": prompts}, clock)
    else:
        reward = None if config.teacher else _length
        backbone = Backbone.load(folder, "bfloat16", lora=config.lora)
        config.output_dir = str(Path(folder, "run"))
        GradeTrainer(backbone, reward, config, [{"prompt": text} for text in prompts], callbacks=[clock]).train()
    return clock.seconds, peak_memory(config.device)


def _peer(config: TrainConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """TRL's trainer and configuration, for `train_trl`."""
    import trl

    if config.teacher:
        given = same_settings(config) | {"beta": config.teacher_beta}
        arguments = partial(trl.DistillationConfig, teacher_model_init_kwargs={"dtype": "bfloat16"}, **given)
        return partial(trl.DistillationTrainer, teacher_model=config.teacher), arguments
    return partial(trl.GRPOTrainer, reward_funcs=_length), partial(trl.GRPOConfig, **settings(config))


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]
