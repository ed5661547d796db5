"""Bad input is one line on stderr and exit code 2, for every command; nothing is written, nothing hangs.

The table is in bad_input_cases.py. By default a fixed sample runs, some cases of each command; ``make test-all`` runs
all of them.
"""

import importlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bad_input_cases import CASES, FIFO, YAML, sample
from bad_input_server import SECONDS

from grade.cli.main import COMMANDS, main
from grade.config import parse_yaml
from grade.data.prompts import load_prompts
from grade.data.reviews import load_reviews
from grade.errors import FILE_ERRORS, file_error, is_file_error, require_file
from grade.experiments.claims import Claim, to_markdown
from grade.pipeline.params import profiles

ALL = os.environ.get("GRADE_ALL_CASES") == "1"
EACH = 3
"""Cases of each command in the sample."""
MOST_BYTES = 2**30
"""Memory beyond that of the warm process: none of the good runs needs a tenth of it."""
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Sends a case to the warm process and returns its result."""
    root = tmp_path_factory.mktemp("bad_input")
    command = [sys.executable, str(HERE / "bad_input_server.py"), str(root / "project"), str(root / "copy")]
    with (
        open(root / "log", "w") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):

        def answer():
            line = process.stdout.readline()
            assert line, (root / "log").read_text()[-2000:]
            return json.loads(line)

        def run(name):
            process.stdin.write(json.dumps(name) + "\n")
            process.stdin.flush()
            return answer()

        assert answer() == "ready"
        yield run
        process.stdin.close()  # the end of its input ends it


def test_the_table_covers_every_command():
    counts = {command: sum(name.startswith(f"{command}:") for name in CASES) for command in COMMANDS}
    assert min(counts.values()) >= 10 and sum(counts.values()) >= 300, counts
    assert len(sample(EACH)) >= 60


@pytest.mark.parametrize("name", list(CASES) if ALL else sample(EACH))
def test_it_is_one_line_and_nothing_else(server, name):
    case, result = CASES[name], server(name)
    assert result["code"] == 2, result
    (line,) = result["lines"]
    command = next((f" {word}" for word in case.words if word in COMMANDS), "")
    assert line.startswith(f"grade{command}: ")
    assert case.says in line
    assert result["written"] == []
    assert result["seconds"] <= SECONDS and result["bytes"] <= MOST_BYTES


@pytest.mark.parametrize("name", FILE_ERRORS)
def test_an_exception_that_is_reported_in_a_line_exists_and_is_recognised(name):
    module, _, cls = name.rpartition(".")
    kind = getattr(importlib.import_module(module), cls)
    assert is_file_error(kind.__new__(kind))


def test_a_mistake_in_the_code_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(args):
        raise mistake

    monkeypatch.setattr("grade.cli.runs.run_show", broken)
    for mistake in (TypeError("x"), ValueError("x"), KeyError("x"), AttributeError("x"), RuntimeError("x")):
        with pytest.raises(type(mistake)):
            main(["show", str(tmp_path)])


def test_an_error_of_the_file_system_names_the_file(monkeypatch, capsys):
    def missing(args):
        open("no/such/file")

    monkeypatch.setattr("grade.cli.runs.run_show", missing)
    assert main(["show", "x"]) == 2
    assert capsys.readouterr().err == "grade show: no/such/file: No such file or directory\n"
    assert "\n" not in file_error(OSError("a\nb")) and len(file_error(EOFError("x" * 10_000))) < 600


@pytest.mark.parametrize("title", [title for title, text in YAML.items() if isinstance(text, str)])
def test_yaml_with_two_meanings_or_none_is_refused(title):
    accepted = ("a date", "an infinite number", "a list", "a text", "bytes", "a key that is a number",
                "a key that is null")  # fmt: skip
    if title in accepted or title.startswith("over"):  # refused where it is used
        parse_yaml(YAML[title])
        return
    with pytest.raises(yaml.YAMLError):
        parse_yaml(YAML[title])


def test_yaml_that_is_accepted_means_what_it_always_did():
    root = HERE.parent
    for path in root.glob("params/*/*.yaml"):
        assert parse_yaml(path.read_text()) == yaml.safe_load(path.read_text())
    assert profiles(root)
    text = "base: &b {a: 1, c: 2}\nother: {<<: *b, a: 3}\ntime: '1:30'\nlist: [*b, *b]\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None and parse_yaml("a: [1_000, 0x1f, yes, 2024-01-02]") == yaml.safe_load(
        "a: [1_000, 0x1f, yes, 2024-01-02]"
    )


def test_a_pipe_of_the_shell_may_be_read_and_a_named_one_may_not(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"seed: 3\n")
    os.close(writing)
    try:
        assert require_file(f"/dev/fd/{reading}").read_text() == "seed: 3\n"
    finally:
        os.close(reading)
    FIFO(tmp_path / "pipe")
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    with pytest.raises(OSError, match="not a file"):
        require_file(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        require_file(tmp_path)
    assert require_file(os.devnull).read_text() == ""


def test_a_line_separator_in_a_text_ends_no_line_of_json(tmp_path):
    text = "one\u2028two\u2029three\x85four"
    row = {"prompt": text, "text": text, "label": 1}
    path = tmp_path / "gold.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [row["prompt"] for row in load_prompts(path)] == [text]
    assert [review.text for review in load_reviews(tmp_path, "gold")] == [text]


def test_claims_show_their_text_and_are_no_html():
    row = Claim("000", "x <b>bold</b> & &lt;", "<script>", 1.0, "MB", "derived", "refuted", "8 -> 4, >99%, a < b")
    line = to_markdown([row]).splitlines()[2]
    assert "x &lt;b>bold&lt;/b> & &amp;lt;" in line and "&lt;script>" in line and "8 -> 4, >99%, a < b" in line
