"""What is found by name is not imported by the core: without all of it the other methods train."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import grade

PLUGINS = (
    "training/teacher.py", "training/teacher_settings.py", "training/auto.py", "training/served.py",
    "training/served_settings.py", "models/sharded.py", "models/quantised.py", "rewards/classifier.py", "data/texts.py",
    "training/tilt.py", "training/fit_bias.py", "gradients/tilt.py", "gradients/straight_through.py",
    "gradients/unrolled.py", "entropy", "memory", "cli",
)  # fmt: skip
TRAIN = """
from grade import GradeConfig, GradeTrainer
from grade.training.toy import toy_task

for method in ("ste", "grpo"):
    task = toy_task()
    own = dict(gumbel_topk=16) if method == "ste" else dict(num_generations=4)
    config = GradeConfig(f"runs/{method}", method=method, max_steps=2, max_completion_length=4, save_strategy="no",
                         use_cpu=True, raw_prompts=True, **own)
    trainer = GradeTrainer(task.backbone, task.reward_model, config, [{"prompt": text} for text in task.train_prompts])
    trainer.train()
    assert trainer.state.global_step == 2
"""


def test_the_core_trains_without_any_plug_in(tmp_path):
    package = tmp_path / "grade"
    shutil.copytree(Path(grade.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "experiments"))
    for name in PLUGINS:
        path = package / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
