"""Scripts of the tests, run in a fresh process, which has no threads that a fork would lose."""

import os
import subprocess
import sys
from pathlib import Path


def script(path, *arguments, timeout=280):
    """Run a script with a folder, where it writes ``errors.log``, and further arguments.

    Returns:
        The finished process, and what the log says.
    """
    log = Path(arguments[0]) / "errors.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # forks of a process with more hang
    command = [sys.executable, str(path), *map(str, arguments)]
    environment["INTERRUPTED_LOG"] = str(log)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    return done, log.read_text() if log.exists() else ""
