"""Files of prompts and their order."""

import json
import sys

import pytest

from tests.messages import assert_names
from vcpo_megatron.environments.base import EnvironmentSetupError
from vcpo_megatron.environments.datasets import ShuffledOrder, read_records


def write(path, text, mode="w"):
    with open(path, mode) as file:
        file.write(text)
    return path


def problem(path, wanted=("prompt",), fields=None):
    with pytest.raises(EnvironmentSetupError) as caught:
        read_records(path, wanted, fields or {})
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def test_jsonl_rows_carry_values_and_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"question": "x", "other": 1}\n\n{"question": "y\u2028z"}\r\n')
    rows = read_records(path, ("prompt",), {"prompt": "question"})
    assert [row.values for row in rows] == [{"prompt": "x"}, {"prompt": "y\u2028z"}]
    assert [row.where for row in rows] == [f"{path}: line 1", f"{path}: line 3"]


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "x"}\n{"prompt": "\xef\xbb\xbfy"}\n', "wb")
    assert [row.values for row in read_records(path, ("prompt",), {})] == [{"prompt": "x"}, {"prompt": "\ufeffy"}]


def test_parquet_rows_equal_jsonl_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"question": ["x", "y"], "answer": [1, 2]}), path)
    rows = read_records(path, ("prompt", "answer"), {"prompt": "question"})
    assert [row.values for row in rows] == [{"prompt": "x", "answer": 1}, {"prompt": "y", "answer": 2}]
    assert rows[1].where == f"{path}: row 2"


def test_parquet_problems_are_one_line(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", "not parquet")
    pytest.importorskip("pyarrow")
    assert f"{path}: not a readable parquet file" in problem(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in problem(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"prompt": "x"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": "x"}\n["x"]\n', "line 2: a JSON list, not an object"),
        ('{"prompt": "x"}\n{"text": "x"}\n', "line 2: field 'prompt' is missing or null (present: 'text')"),
        ('{"prompt": null}\n', "line 1: field 'prompt' is missing or null"),
        ("\n\n", "the file holds no record"),
        ('{"prompt": "x"}\n' + "[" * 100_000, "line 2: nested too deeply"),
        ('{"prompt": "x"}\n{"prompt": ' + "[" * 100_000, "line 2: nested too deeply"),
        ('{"prompt": "x"}\n{"prompt": ' + "1" * 5000 + "}", "line 2: not JSON that can be read ("),
    ],
)
def test_a_bad_jsonl_file_names_path_line_and_remedy(tmp_path, text, expected):
    path = write(tmp_path / "bad.jsonl", text)
    line = problem(path)
    assert line.startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"prompt": "x"}\n{"prompt": "a\\ud83d"}\n', 2),
        ('{"prompt": "x", "other": {"deep": ["y", "\\udc00"]}}\n', 1),  # read, though it is not wanted
        ('\n\n{"prompt": "x", "\\ud83d": 1}\n', 3),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_its_line(tmp_path, text, line):
    path = write(tmp_path / "a.jsonl", text)
    said = problem(path)
    assert said.startswith(f"{path}: line {line}: ") and "half of a surrogate pair" in said
    assert said.isprintable() and said.encode()


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "\\ud83d\\ude00"}\n')
    assert read_records(path, ("prompt",), {})[0].values == {"prompt": "\U0001f600"}


def test_text_that_is_none_in_parquet_is_refused_with_its_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    broken = pyarrow.array([b"x", b"y", b"\xed\xa0\xbd"]).view(pyarrow.string())  # a half, as some encoders write it
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": broken}), path)
    assert problem(path).startswith(f"{path}: row 3: ")


def test_bad_paths_and_encodings(tmp_path):
    assert "no such file" in problem(tmp_path / "none.jsonl")
    assert "no such file" in problem(tmp_path / "none.parquet")
    (tmp_path / "folder.jsonl").mkdir()
    assert "no such file" in problem(tmp_path / "folder.jsonl")
    assert "unknown format '.csv'" in problem(write(tmp_path / "a.csv", "x"))
    assert "UTF-8" in problem(write(tmp_path / "latin.jsonl", b'{"prompt": "\xe9"}', "wb"))


def test_a_field_the_environment_does_not_read_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}\n')
    assert "environment.fields names 'promt'" in problem(path, fields={"promt": "question"})


def test_every_epoch_is_a_permutation_of_its_own():
    order = ShuffledOrder(50, seed=3)
    epochs = [[order(epoch * 50 + position) for position in range(50)] for epoch in range(3)]
    for epoch, visited in enumerate(epochs):
        assert [number for number, _ in visited] == [epoch] * 50
        assert sorted(row for _, row in visited) == list(range(50))
    orders = [[row for _, row in visited] for visited in epochs]
    assert orders[0] != orders[1] != orders[2] != list(range(50))


def test_access_is_random_and_the_same_everywhere():
    forward = [ShuffledOrder(7, seed=1)(index) for index in range(70)]
    order = ShuffledOrder(7, seed=1)
    assert [order(index) for index in reversed(range(70))] == forward[::-1]
    # Literal values: a change of the order would break resuming and comparing older runs.
    assert [row for _, row in forward[:14]] == [5, 3, 0, 4, 2, 6, 1, 5, 2, 3, 4, 1, 0, 6]
    assert [ShuffledOrder(7, seed=2)(index) for index in range(70)] != forward


def test_bad_sizes_and_indices_are_refused():
    with pytest.raises(ValueError, match="not 0"):
        ShuffledOrder(0, seed=0)
    with pytest.raises(ValueError, match="-1"):
        ShuffledOrder(3, seed=0)(-1)


NESTED = [
    {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "72"}, "a.b": "flat", "a": {"b": "in"}},
    {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "5"}, "a.b": "flat", "a": {"b": "in"}},
]


def write_records(path, records):
    if path.suffix == ".jsonl":
        return write(path, "".join(json.dumps(record) + "\n" for record in records))
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("reward_model.ground_truth", ["72", "5"]),
        ("reward_model", [{"style": "rule", "ground_truth": "72"}, {"style": "rule", "ground_truth": "5"}]),
        ("a.b", ["flat", "flat"]),  # a column of that very name
    ],
)
def test_a_name_with_dots_leads_into_nested_records(tmp_path, suffix, column, values):
    path = write_records(tmp_path / f"a.{suffix}", NESTED)
    rows = read_records(path, ("answer", "data_source"), {"answer": column})
    assert [row.values for row in rows] == [{"answer": value, "data_source": "gsm8k"} for value in values]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("column", ["reward_model.truth", "reward_model.style.x", "none.ground_truth"])
def test_a_nested_name_that_is_not_there_is_named_with_those_that_are(tmp_path, suffix, column):
    path = write_records(tmp_path / f"a.{suffix}", NESTED)
    line = problem(path, ("answer",), {"answer": column})
    assert line.startswith(str(path)) and f"field {column!r} is missing or null" in line
    assert "'reward_model.ground_truth', 'reward_model.style'" in line


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_nested_record_that_is_null_is_a_missing_field_of_its_row(tmp_path, suffix):
    path = write_records(tmp_path / f"a.{suffix}", [*NESTED, {**NESTED[0], "reward_model": None}])
    line = problem(path, ("answer",), {"answer": "reward_model.ground_truth"})
    assert "3: field 'reward_model.ground_truth' is missing or null" in line


@pytest.mark.parametrize(
    "wanted",
    [{"prompt": "prompt"}, {"prompt": "prompt", "answer": "reward_model.ground_truth"}, {"prompt": "messages"}],
)
def test_only_the_wanted_columns_of_parquet_are_read(tmp_path, wanted):
    """The others are damaged here: whoever reads their bytes notices."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    record = {
        "prompt": "1+1",
        "messages": [{"role": "user", "content": "1+1"}],
        "reward_model": {"ground_truth": "2", "trace": "UNWANTED" * 50},
        "solution": "UNWANTED" * 100,
    }
    table = pyarrow.Table.from_pylist([record, record])
    parquet.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    content = path.read_bytes()
    assert content.count(b"UNWANTED") > 250
    path.write_bytes(content.replace(b"UNWANTED", b"\xff" * 8))
    with pytest.raises(UnicodeDecodeError):
        parquet.read_table(path).to_pylist()

    rows = read_records(path, tuple(wanted), wanted)
    expected = {"prompt": "1+1", "messages": record["messages"], "reward_model.ground_truth": "2"}
    assert [row.values for row in rows] == [{name: expected[column] for name, column in wanted.items()}] * 2


def test_bytes_that_are_no_text_are_named_by_their_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["x", "DAMAGE", "y"]}), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"DAMAGE", b"\xff" * 6))
    assert_names(problem(path), f"{path}: row 2", "no UTF-8")
