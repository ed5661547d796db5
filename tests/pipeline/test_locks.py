"""Locks of dead processes are removed; those of living ones end the pipeline in one line."""

import json
import os
import subprocess
import sys
import time

import pytest
from dvc.lock import make_lock
from dvc.repo import Repo

from grade.errors import InputError
from grade.pipeline.locks import free_dvc_locks, only_pipeline


@pytest.fixture
def place(tmp_path):
    Repo.init(str(tmp_path), no_scm=True).close()
    return tmp_path


@pytest.fixture
def another():
    """A living process."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def write_locks(place, *pids, age=0.0):
    """DVC's file of locks as these processes would have left it, some seconds ago."""
    readers, path = [{"pid": pid, "cmd": "dvc repro"} for pid in pids], place / ".dvc/tmp/rwlock"
    path.write_text(json.dumps({"write": {"/out": readers[0]}, "read": {"/in": readers}}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_locks_of_a_process_that_has_ended_go(place):
    ended = subprocess.Popen(["true"])
    ended.wait()
    path = write_locks(place, ended.pid)
    assert free_dvc_locks(place) == [f"removed DVC's locks of process {ended.pid}, which is dead (dvc repro)"]
    assert json.loads(path.read_text()) == {}
    assert free_dvc_locks(place) == []


def test_a_process_that_only_waits_to_be_collected_is_dead(place):
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    write_locks(place, zombie.pid)
    assert len(free_dvc_locks(place)) == 1
    zombie.wait()


def test_another_process_with_the_same_number_did_not_write_the_file(place, another):
    path = write_locks(place, another.pid, age=3600)  # before it started, as after a reboot
    assert len(free_dvc_locks(place)) == 1
    assert json.loads(path.read_text()) == {}


def test_locks_of_a_living_process_stay_and_the_line_names_it(place, another):
    ended = subprocess.Popen(["true"])
    ended.wait()
    path = write_locks(place, ended.pid, another.pid)
    before = path.read_bytes()
    with pytest.raises(InputError, match=f"wait for process {another.pid}, or end it with `kill -INT {another.pid}`"):
        free_dvc_locks(place)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["", '{"write": ', "[]", '{"write": {"/out": 5}}', '{"read": {"/in": [{}]}}', "\xff"]
)
def test_a_damaged_file_is_one_line_and_stays(place, content):
    path = place / ".dvc/tmp/rwlock"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match="it is damaged: remove the file if no DVC command runs") as error:
        free_dvc_locks(place)
    assert "\n" not in str(error.value) and path.exists()


@pytest.mark.parametrize("name", ["lock", "rwlock.lock"])
def test_a_lock_that_is_held_is_one_line(place, name):
    tmp = place / ".dvc/tmp"
    with make_lock(str(tmp / name)), pytest.raises(InputError, match=f"wait for process {os.getpid()}; if there is"):
        free_dvc_locks(place)
    assert free_dvc_locks(place) == []


def test_a_profile_runs_once_at_a_time_and_two_profiles_can(tmp_path):
    with only_pipeline(tmp_path, "cpu"):
        with only_pipeline(tmp_path, "full"):
            pass
        with pytest.raises(InputError, match=f"`kill {os.getpid()}`"), only_pipeline(tmp_path, "cpu"):
            pass
        with pytest.raises(InputError), only_pipeline(tmp_path, "cpu"):  # the refused one took nothing away
            pass
    with only_pipeline(tmp_path, "cpu"):
        pass
