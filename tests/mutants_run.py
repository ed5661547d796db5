"""Which tests of a wing notice a fault: coverage of every test, and a warm process that forks one child per fault.

Everything happens in a copy of the tree. The parent imports what the tests import except the project itself. A child
sees one file replaced, collects the test files that run the line, runs those tests, files and tests that take the least
time first, and ends at the first failure.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutants_made import Mutant

TIMES, SECONDS = 3, 30
"""A child may take this many times what its tests took, and these seconds more; then the fault counts as noticed."""
MOST_MEMORY, MOST_ON_DISK = 12 * 2**30, 2**30
"""Limits of a child in bytes: a fault may ask for any amount."""
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:nbval")
ENVIRONMENT = dict(
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", GRADE_PROGRESS="0", TOKENIZERS_PARALLELISM="false",
    PYTHONDONTWRITEBYTECODE="1",
)  # fmt: skip
LARGE = ("torch", "transformers", "peft", "datasets", "scipy.stats", "sklearn", "pandas")
"""What takes seconds to import."""
TEST = "MUTANTS_TEST"
"""Environment variable that names the test to the processes it starts; their coverage is the test's."""


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a fault: killed, timeout or survived; the test, how many were chosen and left, seconds."""

    result: str
    test: str
    chosen: int
    left: int
    seconds: float


class Runner:
    """Copies a tree and runs the tests of its wings on faults.

    Args:
        root: Folder of the project, with `grade/` and `tests/<wing>/`.
        work: Folder for the copy, coverage and what tests write; kept, so that coverage is measured once.
    """

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work, self.tree = root, work, work / "tree"
        self._copy()

    def _copy(self) -> None:
        listed = ["git", "-C", self.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, capture_output=True, check=True, text=True).stdout.split("\0")
        shutil.rmtree(self.tree, ignore_errors=True)
        for file in filter(None, files):
            if (self.root / file).is_file():
                (self.tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.root / file, self.tree / file)
        # Bytecode by the source's hash: a fault may leave size and time of a file as they are.
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", self.tree / "grade"],
            check=True,
        )
        self._files = self._stamps()

    def _stamps(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, folders, names in os.walk(self.tree):
            folders[:] = [name for name in folders if name not in ("__pycache__", ".hypothesis")]
            for name in names:
                stat = os.stat(os.path.join(folder, name))
                found[os.path.join(folder, name)] = (stat.st_size, stat.st_mtime_ns)
        return found

    def warm_up(self, wings: Iterable[str], modules: Iterable[str] = LARGE) -> None:
        """Measure the coverage of the wings' tests where it is not known, and import what they imported.

        Args:
            wings: Which tests.
            modules: To be imported before coverage is measured.
        """
        os.environ.update(ENVIRONMENT)
        self._import(modules)
        for wing in wings:
            for known in self.covered(wing):
                self._import(json.loads(known.with_suffix(".json").read_text())["modules"])
        gc.collect()
        gc.freeze()  # pytest collects garbage at its end: most of a child's time, were it to look at all of this

    @staticmethod
    def _import(names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)

    def covered(self, wing: str) -> list[Path]:
        """Coverage files of a wing, one for each test file; measured where tests or sources are new."""
        shared = [*(self.tree / "grade").rglob("*.py"), self.tree / "tests" / "conftest.py"]
        shared += [path for path in (self.tree / "tests" / wing).glob("*.py") if not path.name.startswith("test_")]
        shared = filter(Path.is_file, shared)
        base = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(shared)))
        found = []
        for path in sorted((self.tree / "tests" / wing).glob("test_*.py")):
            this = base.copy()
            this.update(path.read_bytes())
            data = self.work / "coverage" / f"{wing}_{path.stem}_{this.hexdigest()[:16]}.data"
            if not data.with_suffix(".json").is_file():
                print(f"coverage of {path.relative_to(self.tree)}", flush=True)
                data.parent.mkdir(parents=True, exist_ok=True)
                self._fork(lambda path=path, data=data: self._cover(path, data), data.with_suffix(".log"), 3600)
            found.append(data)
        return found

    def _cover(self, path: Path, data: Path) -> int:
        """In a child: run a test file with a context for each test, in the processes that it starts too."""
        import coverage

        del os.environ["PYTHONDONTWRITEBYTECODE"]  # that of the tests, which pytest rewrites, is written here
        sys.dont_write_bytecode = False
        settings = data.with_suffix(".rc")
        settings.write_text(
            f"[run]\nparallel = true\nsigterm = true\nsource = {self.tree / 'grade'}\ndata_file = {data}\n"
            f"context = ${{{TEST}-}}\n"
        )
        hook = self.work / "hook"
        hook.mkdir(exist_ok=True)
        (hook / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        os.environ["PYTHONPATH"] = f"{hook}{os.pathsep}{os.environ['PYTHONPATH']}"
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        measured = coverage.Coverage(data_file=str(data), source=[str(self.tree / "grade")], config_file=False)
        measured.start()
        timed = _Timed(measured.switch_context)
        code = pytest.main([*(o for o in OPTIONS if o != "-x"), f"--basetemp={self.work / 'tmp'}", str(path)], [timed])
        measured.stop()
        measured.save()
        if others := [str(path) for path in data.parent.glob(f"{data.name}.*")]:
            measured.combine(others)
            measured.save()
        site = [name for name, module in list(sys.modules.items()) if _installed(module)]
        known = dict(tests=timed.passed, failed=timed.failed, modules=site)
        data.with_suffix(".json").write_text(json.dumps(known))
        return int(code)

    def judge(self, mutant: Mutant, most: float) -> Outcome:
        """Run the tests of its wing that run a fault's line.

        Args:
            mutant: The fault.
            most: Tests are chosen, the quickest first, up to this many seconds together.
        """
        tests, left = self._chosen(mutant, most)
        if not tests:
            return Outcome("survived", "no test of the wing runs it", 0, 0, 0.0)
        path, note, start = self.tree / mutant.file, self.work / "killer", time.monotonic()
        original = path.read_bytes()
        note.unlink(missing_ok=True)
        path.write_text(mutant.source, encoding="utf-8")
        try:
            limit = TIMES * sum(tests.values()) + SECONDS
            code = self._fork(lambda: self._test(tests, note), self.work / "child.log", limit)
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(self._files[str(path)][1],) * 2)
        if self._stamps() != self._files:  # a fault wrote or deleted what is not its own
            self._copy()
        result = "timeout" if code is None else "survived" if code == 0 else "killed"
        test = note.read_text() if note.is_file() else "" if code in (0, None) else f"ended with {code}"
        return Outcome(result, test, len(tests), left, time.monotonic() - start)

    def _chosen(self, mutant: Mutant, most: float) -> tuple[dict[str, float], int]:
        """Tests that run the line with their seconds, files by their sum, tests of a file by their own; and how many
        more there are. What runs at import may show in any test of a file: those that run code around it come first.
        """
        files, rest = [], []
        for data in self.covered(mutant.wing):
            seconds = json.loads(data.with_suffix(".json").read_text())["tests"]
            names, imported = self._contexts(mutant, data)
            near = names & set(seconds) or (set(seconds) if imported else set())
            files.append(sorted((seconds[name], name) for name in near))
            rest.extend((seconds[name], name) for name in seconds if imported and name not in near)
        files = [*sorted(files, key=lambda file: sum(second for second, _ in file)), sorted(rest)]
        chosen, total = {}, 0.0
        for second, name in (test for file in files for test in file):
            if not chosen or total + second <= most:
                chosen[name] = second
                total += second
        return chosen, sum(map(len, files)) - len(chosen)

    def _contexts(self, mutant: Mutant, data: Path) -> tuple[set[str], bool]:
        """Tests of a file that run the line, or else code around it; and whether it runs at import."""
        from coverage import CoverageData

        known = CoverageData(str(data))
        known.read()
        measured = [file for file in known.measured_files() if file.endswith(f"/{mutant.file}")]
        lines = known.contexts_by_lineno(measured[0]) if measured else {}
        tree = ast.parse((self.tree / mutant.file).read_text(encoding="utf-8"))
        spans, in_function = _around(tree, mutant.line)
        for first, last in spans:
            names = {name for line in range(first, last + 1) for name in lines.get(line, ()) if name}
            if names:
                return names, bool(lines) and not in_function
        return set(), bool(lines) and not in_function

    def _test(self, tests: dict[str, float], note: Path) -> int:
        """In a child: run tests in this order up to the first failure, and note which it was."""
        files = list(dict.fromkeys(name.split("::")[0] for name in tests))
        order = {name: rank for rank, name in enumerate(tests)}
        return int(pytest.main([*OPTIONS, f"--basetemp={self.work / 'tmp'}", *files], [_Chosen(order, note)]))

    def _fork(self, function: Callable[[], int], log: Path, limit: float) -> int | None:
        """Call a function in a child of its own session, in the copy; its status, or None: it took too long."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                with log.open("wb") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY,) * 2)
                resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_ON_DISK,) * 2)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.chdir(self.tree)
                sys.path[:0] = [str(self.tree)]
                sys.dont_write_bytecode = True
                os.environ["PYTHONPATH"] = str(self.tree)
                code = function()
            finally:
                sys.stdout.flush()
                os._exit(code)
        end, status = time.monotonic() + limit, None
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.02)
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the child has started and left
        if status is None:
            os.waitpid(child, 0)
            return None
        return os.waitstatus_to_exitcode(status)


class _Timed:
    """Plugin: tells coverage which test runs, and takes its time."""

    def __init__(self, switch: Callable[[str], None]) -> None:
        self.switch, self.passed, self.failed = switch, {}, []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.switch(item.nodeid)
        os.environ[TEST] = item.nodeid
        start = time.monotonic()
        self.ok = True
        result = yield
        (self.passed.__setitem__(item.nodeid, time.monotonic() - start) if self.ok else self.failed.append(item.nodeid))
        self.switch("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ok &= not report.failed and not report.skipped


class _Chosen:
    """Plugin: keeps the chosen tests in their order, and writes down the first that fails."""

    def __init__(self, order: dict[str, int], note: Path) -> None:
        self.order, self.note = order, note

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])

    def _failed(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed and not self.note.exists():
            self.note.write_text(report.nodeid)

    pytest_runtest_logreport = pytest_collectreport = _failed


def _installed(module: object) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.startswith((sys.prefix, sys.base_prefix)) and "pytest" not in file


def _around(tree: ast.Module, line: int) -> tuple[list[tuple[int, int]], bool]:
    """Lines to look for tests in, and whether they are within a function.

    Within a function those of the statement, elsewhere those of the functions and classes around it, or else all.
    """
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    nested = [node for node in statements if _first(node) <= line <= node.end_lineno]
    inner = max(nested, key=_first, default=None)
    if any(isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line for node in nested):
        body = getattr(inner, "body", None)
        return [(inner.lineno, max(line, body[0].lineno - 1) if body else inner.end_lineno)], True
    blocks = [node for node in nested if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    spans = [(node.body[0].lineno, node.end_lineno) for node in sorted(blocks, key=_first, reverse=True)]
    return [*spans, (1, max((node.end_lineno for node in statements), default=1))], False


def _first(node: ast.stmt) -> int:
    """A statement's first line, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
