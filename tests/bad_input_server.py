"""Runs commands for tests/test_bad_input.py, each in a process forked from this one, which has imported everything.

The project that the commands work on is made by the first child, so that this process never starts a thread. A job is
a line of JSON on stdin, its result a line of JSON on stdout. Every job gets a fresh copy of the project.
"""

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import stat
import sys
import time
from pathlib import Path

SECONDS = 10  # the bar
ROOM = 4 * 2**30  # bytes of address space beyond what the warm process has: a bomb ends here, not the machine
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "GRADE_PROGRESS": "0", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80",
               # A thread of the warm process would be missing in its children. Arrow's allocator starts one.
               "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
               "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # fmt: skip


def main():
    """Serve until stdin ends. Arguments: the project's folder (made here), and a folder for the copies."""
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = True  # of a reward's file: that is Python's doing, and no result
    sys.path.insert(0, str(Path(__file__).parent))
    project, place = Path(sys.argv[1]), Path(sys.argv[2])
    import bad_input_project
    from bad_input_cases import CASES

    from grade.cli.main import COMMANDS, import_command

    for name in COMMANDS:
        import_command(name)
    for name in bad_input_project.WARM:
        importlib.import_module(name)
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)  # stdout is for results
        os._exit(exit_code(lambda: bad_input_project.make(project)))
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the project could not be made")
    assert len(os.listdir("/proc/self/task")) == 1, "a thread of this process would be missing in its children"
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name = json.loads(line)
        print(json.dumps(result_of(CASES[name], project, place)), flush=True)
    os._exit(0)  # taking down everything that was imported takes seconds


def result_of(case, project, place):
    """Run a case in a copy of the project.

    Returns:
        Exit code (negative: the signal that ended it), lines of stderr, what was written, seconds, and peak memory in
        bytes beyond this process's own.
    """
    shutil.rmtree(place, ignore_errors=True)
    folder = place / "project"
    shutil.copytree(project, folder, symlinks=True)
    for name, content in case.files.items():
        put(folder / name, content)
    before = snapshot(folder)
    own, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(run(case, folder, place))
    status, usage = wait(pid)
    seconds = time.monotonic() - start
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    after = snapshot(folder)
    return {
        "code": code,
        "lines": (place / "stderr").read_text(errors="replace").splitlines(),
        "stdout": (place / "stdout").read_text(errors="replace"),
        "written": sorted(set(before.items()) ^ set(after.items())),
        "seconds": seconds,
        "bytes": max(0, usage.ru_maxrss - own) * 1024,
    }


def wait(pid):
    """Status and resources of a child, which is killed with its own children when the time is over."""
    end = time.monotonic() + SECONDS + 2
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.005)


def run(case, folder, place):
    """In the child: the command, its streams in files."""
    os.setpgid(0, 0)
    os.chdir(folder)
    for fd, name in ((0, os.devnull), (1, place / "stdout"), (2, place / "stderr")):
        os.dup2(os.open(name, os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), fd)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    os.environ.update(case.environment)

    from grade.cli.main import main as command

    return exit_code(lambda: command([*case.words]))


def exit_code(call):
    """What the interpreter would exit with."""
    try:
        code = call()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code or 0


def put(path, content):
    """Make what a case replaces: text, bytes, None (nothing there), or a function of the path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if content is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def snapshot(folder):
    """Every path below a folder with its type, size and time of change."""
    found = {}
    for where, folders, files in os.walk(folder):
        if where == os.path.join(folder, ".dvc", "tmp"):  # DVC's own, and the pipeline's lock
            continue
        for name in (*folders, *files):
            path = os.path.join(where, name)
            about = os.lstat(path)
            size = 0 if stat.S_ISDIR(about.st_mode) else about.st_size
            changed = 0 if stat.S_ISDIR(about.st_mode) else about.st_mtime_ns
            found[os.path.relpath(path, folder)] = f"{stat.S_IFMT(about.st_mode):o} {size} {changed}"
    return found


if __name__ == "__main__":
    main()
