"""The pipeline and its stages end together: real processes, real DVC."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
LONG = 120.0  # seconds: far more than a loaded machine needs, only ever reached by a failure
GRACE = 2.0  # seconds, in place of half a minute

# A stage with a child in its group, and one that has left it, as a notebook's kernel has.
STAGE = """\
import pathlib, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit it
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
if "kernel" in sys.argv:
    subprocess.Popen(sleep, start_new_session=True)
pathlib.Path(sys.argv[1] + ".started").touch()
try:
    time.sleep(600)
finally:
    pathlib.Path(sys.argv[1] + ".tidy").touch()
"""
STAGES = """\
vars:
  - params/cpu/suite.yaml
stages:
  one:
    cmd: python stage.py one %s
    outs: [one]
  two:
    cmd: python stage.py two %s
    outs: [two]
"""
PIPELINE = f"""\
import sys
from functools import partial
from pathlib import Path
from grade.errors import InputError
from grade.pipeline import profiles
profiles.Schedule = partial(profiles.Schedule, grace={GRACE})
try:
    sys.exit(profiles.run(Path.cwd(), jobs=2))
except InputError as error:
    sys.exit(f"grade repro: {{error}}")
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "stage.py").write_text(STAGE)
    (tmp_path / "dvc.yaml").write_text(STAGES % ("", ""))
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    (tmp_path / "params/cpu").mkdir(parents=True)
    (tmp_path / "params/cpu/suite.yaml").write_text("profile: cpu\noutputs: outputs\n")
    return tmp_path


@pytest.fixture
def start():
    """Starts pipelines, and in the end kills whatever a failed test has left."""
    trees = []

    def start(project, ignored=None):
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        # What is ignored is inherited: by the pipeline from here, and here from a shell's background job.
        before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
        if ignored:
            signal.signal(ignored, signal.SIG_IGN)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", PIPELINE], cwd=project, env=environment, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        trees.append([psutil.Process(process.pid)])
        return process

    def tree(process, project, names=("one", "two")):
        """All processes below a pipeline, when its stages are at work."""
        end = time.monotonic() + LONG
        while not all((project / f"{name}.started").exists() for name in names):
            assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        trees.append(psutil.Process(process.pid).children(recursive=True))
        return trees[-1]

    start.tree = tree
    yield start
    for process in (process for tree in trees for process in tree):
        if running(process):
            process.kill()


def running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def without_shells(processes):
    """All but the shells that DVC starts commands in: some replace themselves by the command, some wait for it."""
    return [process for process in processes if process.name() not in ("sh", "dash", "bash", "zsh")]


def holders(project):
    path = project / ".dvc/tmp/rwlock"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_stages_as_well(project, start, number):
    pipeline = start(project)
    tree = start.tree(pipeline, project)
    assert len(without_shells(tree)) == 6  # each stage: DVC, the command, its child
    pipeline.send_signal(number)
    out, _ = pipeline.communicate(timeout=LONG)
    assert [process for process in tree if running(process)] == []
    assert pipeline.returncode == 128 + number
    assert f"cpu: stopped by {number.name} after" in out and "failed after" not in out
    assert (project / "one.tidy").exists() and (project / "two.tidy").exists()  # asked to end, not killed
    assert not holders(project).get("write")  # DVC had time to release its locks


def test_what_does_not_end_in_time_is_killed_wherever_it_is(project, start):
    (project / "dvc.yaml").write_text(STAGES % ("deaf", "kernel"))
    pipeline = start(project)
    tree = start.tree(pipeline, project)
    assert len(without_shells(tree)) == 7
    begun = time.monotonic()
    pipeline.terminate()
    pipeline.communicate(timeout=LONG)
    assert [process for process in tree if running(process)] == []
    assert time.monotonic() - begun >= GRACE
    assert not (project / "one.tidy").exists() and (project / "two.tidy").exists()

    # Killed, DVC has left its locks behind: the next pipeline says so and works.
    (project / "dvc.yaml").write_text(STAGES.replace("python stage.py", "echo x >") % ("", ""))
    assert holders(project)["write"]
    out, _ = start(project).communicate(timeout=LONG)
    assert "removed DVC's locks of process" in out and "cpu: done in" in out


def test_a_background_job_of_a_script_can_ask_its_stages_to_end(project, start):
    # Such a job ignores SIGINT, and processes inherit that.
    pipeline = start(project, ignored=signal.SIGINT)
    tree = start.tree(pipeline, project)
    pipeline.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert pipeline.poll() is None
    pipeline.terminate()
    pipeline.communicate(timeout=LONG)
    assert [process for process in tree if running(process)] == []
    assert (project / "one.tidy").exists() and (project / "two.tidy").exists()


def test_no_stage_outlives_a_pipeline_whose_reader_has_gone(project, start):
    told = "while not pathlib.Path('go').exists(): time.sleep(0.05)\n    print('x', flush=True)\n    time.sleep(600)"
    (project / "stage.py").write_text(STAGE.replace("time.sleep(600)\nfin", f"{told}\nfin"))
    pipeline = start(project)
    tree = start.tree(pipeline, project)
    pipeline.stdout.close()
    (project / "go").touch()
    pipeline.wait(timeout=LONG)
    assert [process for process in tree if running(process)] == []


def test_a_second_pipeline_and_the_orphans_of_a_killed_one_are_one_line(project, start):
    pipeline = start(project)
    tree = start.tree(pipeline, project)
    out, _ = start(project).communicate(timeout=LONG)
    assert out.splitlines() == [
        "grade repro: profile: got 'cpu'; allowed: one pipeline of a profile in a folder: wait for process "
        f"{pipeline.pid}, or end it with `kill {pipeline.pid}`"
    ]
    pipeline.kill()
    pipeline.wait()
    out, _ = start(project).communicate(timeout=LONG)
    (line,) = out.splitlines()
    assert line.startswith("grade repro: DVC's locks: got 'rwlock of dvc --wait-for-lock repro")
    # The line's own advice ends them.
    advice = line.split("`")[1].split()
    assert advice[:3] == ["kill", "-INT", "--"] and -int(advice[3]) in {process.pid for process in tree}
    for group in {os.getpgid(process.pid) for process in tree}:
        subprocess.run(["kill", "-INT", "--", f"-{group}"], check=True)
    psutil.wait_procs(tree, timeout=LONG, callback=None)
    assert [process for process in tree if running(process)] == []
