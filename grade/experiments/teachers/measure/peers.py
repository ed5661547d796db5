"""Distillation on the policy's own completions beside TRL's `DistillationTrainer`: the same model, teacher and prompts.

Both descend the reverse KL to the teacher along completions that the policy samples in every step, with the same LoRA
from the same start, AdamW, learning rate and sizes. TRL's trainer always samples itself (its ``lmbda`` would be 1) and
always has its loss in tiles. Each trains in a fresh process of one thread and leaves
its adapters in a folder; others evaluate them, all by one function, so that peak memory is that of training. Each has
the sampler that is fastest on a CPU: ours `own`, as the policy's probabilities are compared with those of any other,
which takes a pass more; TRL's generation of transformers, the only one it has there.

| teacher | |
|---|---|
| ``rewarded`` | trained for the gold judge along texts, method `offline` |
| ``best_of_n`` | fine-tuned on the best of n completions of the base, by the gold judge |

Both are an adapter on the policy's base and, merged, a model of their own. TRL reads the merged one, and so does
``grade``; ``grade_adapter`` reads the adapter, for which it needs no second model.
"""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from grade.config import Config
from grade.experiments.measured import Seeds, Several, Size
from grade.experiments.training_runs import (
    BATCH_ROWS,
    FIXED,
    UNEVALUATED,
    best_of,
    fine_tune,
    judged_by,
    review_prompts,
)
from grade.experiments.trl_runs import Clock, alone, require_peer, same_settings, train_trl
from grade.files import remove
from grade.gradients.methods import Rate
from grade.gradients.objective import sequence_mean
from grade.models.adapter import ADAPTER_FILES, LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import encode_prompts
from grade.models.sampling import generate
from grade.models.scoring import hidden_logps, predicting_hidden, token_kl
from grade.models.teacher import make_teacher
from grade.results import peak_memory
from grade.rewards.gold import GoldJudge
from grade.stats import Estimate
from grade.training.config import TrainConfig
from grade.training.load import name_base
from grade.training.merge import merge
from grade.training.trainer import GradeTrainer

PEER, OURS, ADAPTER = "trl_distillation", "grade", "grade_adapter"
"""Trainers in the tables."""
CPU = torch.device("cpu")
TEACHER_BATCH, TEACHER_SEED, EVALUATION_SEED = 8, 0, 1
TEACHER_RATE, TEACHER_KL = 3e-3, 5.0
"""Learning rate of the teachers, falling to 0, and KL of the rewarded one from the base, in nats per completion."""


class TeacherPeersConfig(Config):
    """The contest: folders, teachers, sizes."""

    model: str = Field("models/tiny", description="folder of the base model")
    gold_file: str = Field("models/gold/judge.npz", description="the gold judge")
    reviews_dir: str = Field("data/reviews", description="folder of the review splits")
    teachers_dir: str = Field("models/teachers", description="folder of the teachers; those that it lacks are made")
    teachers: list[Literal["rewarded", "best_of_n"]] = Field(["rewarded"], min_length=1, description="teachers")
    seeds: Seeds = Field([0], min_length=1, description="of adapter, prompt order and noise; one run each")
    prompt_tokens: Size = Field(12, description="P")
    new_tokens: Size = Field(24, description="T, the length of every completion")
    batch: Size = Field(16, description="completions a step")
    steps: Size = Field(24, description="optimizer steps")
    eval_every: Size = Field(8, description="steps between evaluations")
    eval_prompts: Several = Field(64, description="held-out prompts of an evaluation")
    learning_rate: Rate = Field(1e-3, description="AdamW's, constant")
    gradient_checkpointing: bool = Field(False, description="both recompute layers in backward")
    teacher_steps: Size = Field(24, description="steps in which a teacher is trained, of 8 texts or completions")
    teacher_texts: Size = Field(4096, description="rewarded: texts, windows of reviews")
    best_of: Several = Field(16, description="best_of_n: n")
    best_prompts: Size = Field(96, description="best_of_n: prompts")
    trace_layers: int = Field(6, ge=0, description="layers of the models of `trl_traces`; 0: none are traced")


def run_config(config: TeacherPeersConfig, seed: int, **values: Any) -> TrainConfig:
    """Our run; TRL's settings are made of it."""
    given = FIXED | UNEVALUATED | {
        "method": "teacher", "seed": seed, "max_prompt_length": config.prompt_tokens,
        "max_completion_length": config.new_tokens, "min_completion_length": config.new_tokens,
        "per_device_train_batch_size": config.batch, "max_steps": config.steps, "eval_steps": config.eval_every,
        "learning_rate": config.learning_rate, "gradient_checkpointing": config.gradient_checkpointing,
    }  # fmt: skip
    return TrainConfig.parse(given | values)


def measure_teacher_peers(config: TeacherPeersConfig) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Evaluations of all trainers, teachers and seeds, and their costs.

    Costs: ``seconds_per_step`` by the clock and ``cpu_seconds_per_step`` of the processor, means over all steps;
    ``peak_bytes`` of the process, and ``start_bytes`` before it has a model.
    """
    require_peer(PEER)
    curves, costs, steps = [], [], sorted({*range(0, config.steps, config.eval_every), config.steps})
    for name in config.teachers:
        teacher = Path(config.teachers_dir, name)
        if not (teacher / "merged").is_dir():
            remove(teacher)
            alone(TEACHERS[name], config, teacher)
        with tempfile.TemporaryDirectory() as place:
            runs = []
            for seed in config.seeds:
                # The last has the other's weights: its curve is that one's up to rounding.
                for trainer in (OURS, PEER, *((ADAPTER,) if seed == config.seeds[0] else ())):
                    names = {"trainer": trainer, "teacher": name, "seed": seed}
                    seconds, cpu_seconds, peak, start = alone(_train, config, names, teacher, Path(place))
                    costs.append(names | {"seconds_per_step": sum(seconds) / len(seconds),
                                          "cpu_seconds_per_step": sum(cpu_seconds) / len(cpu_seconds),
                                          "peak_bytes": peak, "start_bytes": start})  # fmt: skip
                    if trainer != ADAPTER:
                        runs += [(names, step, sum(seconds[:step])) for step in steps]
            curves += alone(_evaluate, config, teacher, Path(place), runs)
    return pd.DataFrame(curves), pd.DataFrame(costs)


def _file(place: Path, names: Mapping[str, Any], step: int) -> Path:
    return place / f"{names['trainer'] if step else OURS}_{names['seed']}_{step}.safetensors"


def _train(
    config: TeacherPeersConfig, names: Mapping[str, Any], teacher: Path, place: Path
) -> tuple[list[float], list[float], int, int]:
    """Train one, leave its adapters in a folder: seconds of each step, by clock and processor, peak, start."""
    trainer, seed = names["trainer"], names["seed"]
    run = run_config(config, seed, teacher=str(teacher / ("adapter" if trainer == ADAPTER else "merged")))
    prompts = review_prompts(config.reviews_dir)[0]

    def observe(values: Mapping[str, Tensor], step: int, seconds: float) -> None:
        save_file({name: value.contiguous() for name, value in values.items()}, _file(place, names, step))

    if trainer == PEER:
        from trl import DistillationConfig, DistillationTrainer

        clock = Clock(run, observe, start=load_file(_file(place, names, 0)))
        start = peak_memory(CPU)
        make = partial(DistillationTrainer, teacher_model=run.teacher)
        arguments = partial(DistillationConfig, **same_settings(run), beta=run.teacher_beta)
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        cut = encode_prompts(tokenizer, prompts, config.prompt_tokens).rows()
        columns = {"prompt": tokenizer.batch_decode(cut, skip_special_tokens=True)}
        train_trl(config.model, torch.float32, make, arguments, columns, clock)
    else:
        clock, start = Clock(run, observe), peak_memory(CPU)
        backbone = Backbone.load(config.model, lora=run.lora, seed=seed)
        observe(get_peft_model_state_dict(backbone.peft), 0, 0.0)
        with tempfile.TemporaryDirectory() as folder:
            run.output_dir = folder
            rows = [{"prompt": prompt} for prompt in prompts]
            GradeTrainer(backbone, None, run, rows, callbacks=[clock]).train()
    return clock.seconds, clock.cpu_seconds, peak_memory(CPU), start


@torch.no_grad()
def _evaluate(
    config: TeacherPeersConfig, folder: Path, place: Path, runs: Sequence[tuple[Mapping[str, Any], int, float]]
) -> list[dict[str, Any]]:
    """Rows of trained policies, each named and with its step and seconds, and one of the teacher itself.

    The exact reverse KL to the teacher and the KL to the base, along a completion of the policy for each held-out
    prompt, in nats per token.
    """
    policy = Backbone.load(config.model, lora=LoraSettings())
    teacher = make_teacher(folder / "merged", policy)
    texts = review_prompts(config.reviews_dir)[1][: config.eval_prompts]
    prompts = encode_prompts(policy.tokenizer, texts, config.prompt_tokens)
    itself = {"trainer": "teacher", "teacher": runs[0][0]["teacher"], "seed": 0}
    values = [(names, step, seconds, load_file(_file(place, names, step))) for names, step, seconds in runs]

    def scores() -> dict[str, list[float]]:
        generator, length = torch.Generator().manual_seed(EVALUATION_SEED), config.new_tokens
        scores: dict[str, list[float]] = {"divergence": [], "kl": []}
        for few in torch.arange(len(texts)).split(BATCH_ROWS):
            ids, mask = generate(policy, prompts[few], length, generator, min_new_tokens=length)
            hidden = predicting_hidden(policy, prompts[few], ids)
            divergence = teacher.divergence(hidden, teacher.hidden(prompts[few], ids), mask)
            with policy.reference():
                kl = token_kl(policy, hidden, predicting_hidden(policy, prompts[few], ids), mask)
            scores["divergence"] += sequence_mean(divergence, mask).tolist()
            scores["kl"] += sequence_mean(kl, mask).tolist()
        return scores

    rows = []
    for names, step, seconds, adapter in [(itself, 0, 0.0, load_file(folder / "adapter" / ADAPTER_FILES[1])), *values]:
        set_peft_model_state_dict(policy.peft, adapter)
        row = names | {"step": step, "samples": step * config.batch, "seconds": seconds}
        for name, each in scores().items():
            estimate = Estimate.of(each)
            row |= {name: estimate.mean, f"{name}_stderr": estimate.stderr}
        rows.append(row | {"n": len(texts)})
    return rows


def _rewarded(config: TeacherPeersConfig, folder: Path) -> None:
    policy = Backbone.load(config.model, lora=LoraSettings())
    values = {
        "method": "offline", "texts": str(Path(config.reviews_dir, "policy.jsonl")),
        "most_texts": config.teacher_texts, "target_kl": TEACHER_KL, "learning_rate": TEACHER_RATE,
        "lr_scheduler_type": "linear", "max_steps": config.teacher_steps, "per_device_train_batch_size": TEACHER_BATCH,
    }  # fmt: skip
    run = run_config(config, TEACHER_SEED, **values)
    reward = judged_by(GoldJudge.load(config.gold_file))
    prompts = [{"prompt": prompt} for prompt in review_prompts(config.reviews_dir)[0]]
    with tempfile.TemporaryDirectory() as place:
        run.output_dir = place
        GradeTrainer(policy, reward, run, prompts, texts=run.texts).train()
    _save_teacher(policy, folder)


def _best_of_n(config: TeacherPeersConfig, folder: Path) -> None:
    """Log-likelihood of the best of n completions of the base, in shuffled passes."""
    policy, judge = Backbone.load(config.model, lora=LoraSettings()), judged_by(GoldJudge.load(config.gold_file))
    texts = review_prompts(config.reviews_dir)[0][: config.best_prompts]
    prompts, generator = encode_prompts(policy.tokenizer, texts, config.prompt_tokens), torch.Generator()
    generator.manual_seed(TEACHER_SEED)

    def score(rows: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        written = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return torch.tensor(judge([texts[row] for row in rows], written))

    _, ids = best_of(policy, prompts, config.best_of, config.new_tokens, generator, score)

    def loss(rows: Tensor) -> Tensor:
        hidden = predicting_hidden(policy, prompts[rows], ids[rows])
        return -hidden_logps(policy, hidden, ids[rows], torch.ones_like(ids[rows])).mean()

    rows, steps = torch.arange(len(texts)), config.teacher_steps
    for _ in fine_tune(policy, rows, loss, TEACHER_RATE, steps, TEACHER_BATCH, generator):
        pass
    _save_teacher(policy, folder)


def _save_teacher(policy: Backbone, folder: Path) -> None:
    name_base(policy)
    policy.save_adapter(folder / "adapter")
    merge(folder / "adapter", folder / "merged")


TEACHERS = {"rewarded": _rewarded, "best_of_n": _best_of_n}
"""Make one in a folder, from the settings: its adapter, and itself merged."""
