"""Errors are asserted by their type and the values that they name; whole sentences stand in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.messages import assert_names, cases, topics

TESTS = Path(__file__).parent

#: A string of so many words is a sentence. A word has a letter or a digit: ``.*`` and ``-`` are none.
SENTENCE = 9

#: Files, or tests of one, that compare long strings which are no sentences, and what they are.
FORMATS = {
    "config/test_load.py::test_resolved_text_of_a_section": "TOML",
    "conversion/test_partial.py::test_progress": "the progress line of a conversion",
    "observability/test_progress.py": "the progress line of a run",
    "observability/test_sinks.py::test_what_is_not_finite_is_null_and_read_as_nan": "a line of JSON",
    "orchestrator/store/test_store_policies.py::test_the_history_answers_from_the_store_alone": "a table's totals",
    "planning/test_decisions.py": "a table of what a configuration decides",
    "report/test_terminal.py": "tables of a run",
    "run/test_integrity.py::test_a_sealed_text_comes_back_or_is_refused": "how Python shows a value",
    "tools/test_bench_step.py::test_curves_over_lengths": "a table of measurements",
    "tools/test_chaos.py::test_the_account_shows_every_recovery": "a table of recoveries",
}

#: Stands for what an f-string is filled with, a word.
FILLED = "{value}"


def text(node: ast.AST) -> str | None:
    """A string as it is written, joined strings as one."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) or FILLED for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text(node.left), text(node.right)]
        return None if parts == [None, None] else "".join(part or FILLED for part in parts)
    return None


def sentences(source: str) -> Iterator[tuple[str, int, str]]:
    """The test, the line and the string of each sentence that an assertion or an expected error holds."""
    left: list[tuple[ast.AST, str, bool]] = [(ast.parse(source), "", False)]
    while left:
        node, test, asserted = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            test = test or node.name
        elif isinstance(node, ast.Assert):
            left.append((node.test, test, True))
            continue  # not what it says when it fails
        elif isinstance(node, ast.keyword) and node.arg == "match":
            asserted = True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "assert_names":
            asserted = True
        elif asserted and isinstance(node, ast.expr) and (found := text(node)) is not None:
            if len(re.findall(r"\S*\w\S*", found)) >= SENTENCE:
                yield test, node.lineno, found
            continue
        left += [(child, test, asserted) for child in ast.iter_child_nodes(node)]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The text of each file of tests, by its path."""
    return {
        path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))
    }


def test_no_test_holds_a_sentence_of_its_own(sources: dict[str, str]) -> None:
    wrong, needed = [], set[str]()
    for path, source in sources.items():
        for test, line, found in sentences(source):
            held = FORMATS.keys() & {path, f"{path}::{test}"}
            needed |= held
            if not held:
                wrong.append(f"{path}:{line}: {found!r}: assert what it names, or move it to golden/messages.json")
    assert wrong == []
    assert needed == FORMATS.keys()


def test_every_sentence_of_the_golden_file_is_asserted(sources: dict[str, str]) -> None:
    """But for topics whose cases are computed: the test that computes them compares them."""
    asserted = re.compile(r'\bassert_said\(\s*"([^"]+)",\s*("[^"]+")?')
    used: dict[str, set[str]] = {topic: set() for topic in topics()}
    for source in sources.values():
        for topic, case in asserted.findall(source):
            used[topic].add(case.strip('"'))
    for topic, found in used.items():
        assert found == {""} or found == cases(topic), topic


NINE = "one two three four five six seven eight nine"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"assert said == {NINE!r}", 1),
        (f"assert any({NINE[4:]!r} in line for line in said)", 0),
        (f"assert said, {NINE!r}", 0),
        (f"assert {NINE!r} in said and said.startswith({NINE!r})", 2),
        ("assert said == 'one two three four ' f'{five} six ' 'seven eight nine'", 1),
        ("assert said == 'one two three four five ' + six + ' seven eight nine'", 1),
        (f"with pytest.raises(RunError, match=r{NINE!r}): work()", 1),
        (f"with pytest.raises(RunError, match=r{NINE.replace('two three', '.*')!r}): work()", 0),
        (f"assert_names(said, {NINE!r}, 2)", 1),
        (f"work({NINE!r})", 0),
        ("assert said == '2 - - - - - - - - -'", 0),
    ],
)
def test_sentences_are_found(source: str, found: int) -> None:
    assert [test for test, _, _ in sentences(f"def test():\n    if True:\n        {source}")] == found * ["test"]


@pytest.mark.parametrize(
    ("message", "values", "named"),
    [
        ("server 1 took 2.5 s", ("server 1", 2.5), True),
        ("server 12 took 2.5 s", ("server 1",), False),
        ("server 1 took 12.5 s", ("2.5 s",), False),
        ("took 2.5 s: server 1", ("server 1", "2.5 s"), False),
        ("server 1 died\nserver 2 took 2.5 s", ("server 1", "2.5 s"), False),
        ("server 1 died\nserver 2 took 2.5 s", ("server 2", "2.5 s"), True),
        ("see /r/logs/a.log: a.b [x] (y)", ("/r/logs/a.log", "a.b [x]", "(y)"), True),
        (ValueError("x = 3"), ("x = 3",), True),
        ("axb = 3", ("a.b = 3",), False),
    ],
)
def test_values_are_whole_words_of_one_line_in_order(message: object, values: tuple[object, ...], named: bool) -> None:
    if named:
        assert_names(message, *values)
    else:
        with pytest.raises(AssertionError, match="names"):
            assert_names(message, *values)
