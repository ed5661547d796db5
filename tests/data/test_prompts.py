"""Datasets of prompts: every kind of source gives the same rows, and every bad one is one line."""

import json

import datasets
import pytest
from datasets import Dataset, DatasetDict

from grade.data.prompts import load_prompts
from grade.errors import InputError

ROWS = [
    {"prompt": "7 plus 4,\ncats?", "answer": 11, "source": None},
    {"prompt": "NA", "answer": None, "source": "b"},
    {"prompt": " 12", "answer": -3, "source": "café"},
]
JSONL = (
    '{"prompt": "7 plus 4,\\ncats?", "answer": 11}\n\n{"prompt": "NA", "source": "b"}\n'
    '{"prompt": " 12", "answer": -3, "source": "caf\\u00e9"}\n'
)
CSV = 'prompt,answer,source\n"7 plus 4,\ncats?",11,\nNA,,b\n 12,-3,café\n'


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def sources(folder):
    """The rows in every form."""
    frame = Dataset.from_list(ROWS)
    frame.to_parquet(folder / "rows.parquet")
    frame.save_to_disk(folder / "saved")
    return {
        "jsonl": write(folder / "rows.jsonl", JSONL),
        "BOM": write(folder / "bom.jsonl", b"\xef\xbb\xbf" + JSONL.replace("\n{", "\r\n{").encode()),
        "list": write(folder / "rows.json", "[\n" + ",\n".join(filter(None, JSONL.split("\n"))) + "]"),
        "json": write(folder / "lines.json", JSONL),
        "csv": write(folder / "rows.csv", CSV),
        "csv with BOM": write(folder / "bom.CSV", b"\xef\xbb\xbf" + CSV.encode()),
        "parquet": folder / "rows.parquet",
        "saved": folder / "saved",
    }


def test_every_source_gives_the_same_rows(tmp_path):
    for name, source in sources(tmp_path).items():
        assert repr(list(load_prompts(source))) == repr(ROWS), name  # 11, not 11.0
        assert list(load_prompts(str(source))) == ROWS, name


def test_columns_keep_what_a_row_holds(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]
    rows = [
        {"prompt": messages[:1], "schema": {"type": "object", "required": []}, "any": 1, "deep": [[1], [None, 2]]},
        {"prompt": messages, "schema": {"enum": ["x", None]}, "any": "one", "deep": None, "late": True},
        {"prompt": messages[:1], "schema": None, "any": None, "deep": [], "late": None},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert list(load_prompts(path)) == [{**rows[0], "late": None}, *rows[1:]]


def test_prompts_in_a_table_are_text_whatever_they_look_like(tmp_path):
    path = write(tmp_path / "rows.csv", "prompt,n\n007,1.5\n\n1e3,\n  \n12,2\n")
    expected = [{"prompt": "007", "n": 1.5}, {"prompt": "1e3", "n": None}, {"prompt": "12", "n": 2.0}]
    assert list(load_prompts(path)) == expected


def test_fields_of_a_table_that_a_type_would_change_are_text(tmp_path):
    columns = {"007": "007", "1.50": "1.50", "0.1234567890123456": 0.1234567890123456, "2.0": 2.0, "TRUE": True,
               "nan": "nan", "9007199254740993": "9007199254740993"}  # fmt: skip
    for written, value in columns.items():
        path = write(tmp_path / "rows.csv", f"prompt,x\na,{written}\nb,\nc,{value if value is True else 1.5}\n")
        other = 1.5 if isinstance(value, float) else True if value is True else "1.5"
        assert [row["x"] for row in load_prompts(path)] == [value, None, other]


def test_of_several_splits_it_is_train(tmp_path):
    first, second = Dataset.from_list(ROWS[:1]), Dataset.from_list(ROWS[1:])
    for name, splits in {"two": {"test": second, "train": first}, "one": {"test": first}}.items():
        DatasetDict(splits).save_to_disk(tmp_path / name)
        assert list(load_prompts(tmp_path / name)) == ROWS[:1]
    DatasetDict(test=second, dev=first).save_to_disk(tmp_path / "neither")
    with pytest.raises(InputError, match="split: got 'train'; allowed: one of test, dev, which"):
        load_prompts(tmp_path / "neither")


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("user/na-me_1.0", ("user/na-me_1.0", None, None)),
        ("user/name:train[:10%]", ("user/name", None, "train[:10%]")),
        ("user/name:main:test", ("user/name", "main", "test")),
    ],
)
def test_an_id_of_the_hub(monkeypatch, source, asked):
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return Dataset.from_list(ROWS) if split else DatasetDict(train=Dataset.from_list(ROWS))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(load_prompts(source)) == ROWS and calls == [asked]


GOOD = '{"prompt": "a"}\n'
BAD = {
    "missing.jsonl": (None, FileNotFoundError, "missing.jsonl"),
    "rows.txt": ("a\n", InputError, "prompts: got .*rows.txt'; allowed: a file .*jsonl"),
    "empty.jsonl": ("", InputError, "at least one row"),
    "broken.jsonl": (GOOD + '{"prompt": "b"\n', InputError, "broken.jsonl, line 2: got .*JSON"),
    "list.jsonl": (GOOD + '["b"]\n', InputError, r"list.jsonl, line 2: got \['b'\]; allowed: an object"),
    "mixed.jsonl": ('{"prompt": "a", "x": 1}\n\n{"prompt": "b", "x": "2"}\n', InputError,
                    "line 3, x: got '2'; allowed: .*one type"),
    "columns.jsonl": ('{"question": "a"}\n', InputError, r"columns of .*: got \['question'\]; .*\"prompt\""),
    "commas.csv": ("prompt\nHello, you\nDear, me\n", ValueError, "2 fields in line 2, 1 in .*in quotes"),
    "short.csv": ('prompt,x\n"a\nb",1\n\nThe fil', ValueError, "short.csv: 1 fields in line 5, 2 in the header"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "kind", "message"), [(name, *rest) for name, rest in BAD.items()], ids=BAD)
def test_bad_files_are_named(tmp_path, name, content, kind, message):
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(kind, match=message):
        load_prompts(tmp_path / name)
