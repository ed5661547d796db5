"""One script for TRL's GRPOTrainer runs here with the two class names changed."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("trl_script.py")


def run(base, output, *names):
    command = [sys.executable, str(SCRIPT), *names, str(base), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(seen, output):
    assert seen == {"steps": 3, "missing": [], "eval": True}
    assert (output / "adapter_model.safetensors").is_file() and "films" in (output / "README.md").read_text()
    assert [p.name for p in output.glob("checkpoint-*")] == ["checkpoint-3"]


def test_the_script_runs_with_two_names_changed(base, tmp_path):
    check(run(base, tmp_path, "grade", "GradeTrainer", "GradeConfig"), tmp_path)
