"""Mutation tests: what is drawn, and that mutants which die, survive and are not covered are told apart."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import mutation
from benchmarks.mutation import Area

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import mutants  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""A module."""

from __future__ import annotations

__all__ = ["add" + "s", "unused"]


def adds(a: int | None, b: int = 3) -> int | None:
    """1 + 1"""
    if a is None:
        raise ValueError(f"{a} is {1 + 1}")
    elif a > 100:
        a = 100
    assert a != 7, "seven"
    print(a + 2)
    return a + b


def unheld(a: int, *, b: float = 0.5) -> float:
    return a * b


def unused(a: int) -> int:
    return a - 4
'''
TESTS = """from package.sums import adds, unheld

def test_sums():
    assert adds(1) == 4 and adds(2, 2) == 4 and adds(101) == 103 and adds(100) == 103
    unheld(2)
"""
SETTINGS = "[pytest]\nmarkers =\n    slow\n    by_hand\n    gpu\n    sglang\n"
AREAS = (Area("sums", 1, ("package/*.py",), ("tests",)),)


def cosmic_ray() -> None:
    pytest.importorskip("cosmic_ray", reason='draws need the extra "mutation"')


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with one module that its tests hold in part."""
    root = tmp_path / "project"
    files = {"package/sums.py": SOURCE, "tests/test_sums.py": TESTS, "pytest.ini": SETTINGS, ".gitignore": "/out/\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def test_the_table_of_areas_names_what_there_is() -> None:
    for area in mutants.AREAS:
        for pattern in (*area.modules, *(test.partition("::")[0] for test in area.tests)):
            assert list(ROOT.glob(pattern)), f"tools/mutants.py: area {area.name}: nothing is like {pattern}"


def test_parts_are_as_the_weights_and_never_above_what_there_is() -> None:
    assert mutation.allot(300, [60, 80, 70, 25, 25, 40], [1000] * 6) == [60, 80, 70, 25, 25, 40]
    assert mutation.allot(10, [1, 1], [2, 100]) == [2, 8]
    assert mutation.allot(10, [1, 3], [2, 3]) == [2, 3]


def test_what_no_test_should_hold_is_left_out() -> None:
    lines = SOURCE.splitlines()
    said = {lines[start[0] - 1][start[1] : end[1]] for start, end in mutation.left_out(SOURCE) if start[0] == end[0]}
    assert {"int | None", '__all__ = ["add" + "s", "unused"]', 'raise ValueError(f"{a} is {1 + 1}")', "a + 2"} <= said
    assert 'assert a != 7, "seven"' in said and not {"a + b", "a > 100"} & said


def test_marks_stand_before_the_statement_that_holds_the_change() -> None:
    marked = mutation.with_marks(SOURCE, {"elif": (12, 11), "return": (16, 13), "default": (19, 31)})
    ast.parse(marked)
    lines = marked.splitlines()
    assert lines[lines.index("    open('elif', 'a').close()") + 1] == "    if a is None:"
    assert lines[lines.index("    open('return', 'a').close()") + 1] == "    return a + b"
    assert lines[lines.index("open('default', 'a').close()") + 1].startswith("def unheld")


def test_sites_are_those_of_the_code_alone() -> None:
    cosmic_ray()
    lines = SOURCE.splitlines()
    found = {lines[start[0] - 1][start[1] : end[1]] for start, end in mutation.sites(SOURCE)}
    assert found == {"3", "a is None", "is", ">", "100", "+", "0.5", "*", "-", "4"}
    assert {start[0] for start, _ in mutation.sites(SOURCE)} == {8, 10, 12, 13, 16, 19, 20, 24}
    kinds = {operator for changes in mutation.sites("x = a + b").values() for operator, _ in changes}
    assert len(kinds) == 6 and not any("Bit" in kind for kind in kinds)


def test_a_draw_is_decided_by_its_seed(project: Path) -> None:
    cosmic_ray()
    drawn = mutation.draw(project, AREAS, 6, 0)
    assert drawn == mutation.draw(project, AREAS, 6, 0) and len(drawn) == 6
    assert any(mutation.draw(project, AREAS, 6, seed) != drawn for seed in (1, 2))
    assert len({(mutant.line, mutant.column, mutant.operator) for mutant in drawn}) == 6
    assert all(mutation.difference(mutant, project) for mutant in drawn)


def test_a_change_that_no_test_could_see_is_passed_over_for_another(project: Path) -> None:
    cosmic_ray()
    drawn = mutation.draw(project, AREAS, 6, 0)
    code = mutation.mutated(SOURCE, drawn[0].operator, drawn[0].occurrence)
    passed_over = {("package/sums.py", *mutation.change(SOURCE, code)): "a reason"}
    without = {mutant.key for mutant in mutation.draw(project, AREAS, 6, 0, passed_over)}
    assert len(without) == 6 and without >= {mutant.key for mutant in drawn[1:]} and drawn[0].key not in without


def test_changes_passed_over_are_of_lines_that_there_are() -> None:
    for module, before, after in mutation.equivalent():
        lines = list(map(str.strip, (ROOT / module).read_text().splitlines()))
        assert all(line in lines for line in before.splitlines()), f"{module} has no line {before!r} (now {after!r})"


@pytest.mark.timeout(300)
def test_mutants_that_die_survive_or_are_not_covered_are_told_apart(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cosmic_ray()
    out = project / "out"
    arguments = ["--count", "30", "--workers", "1", "--out", str(out)]
    assert mutants.main(arguments, AREAS, project) == 1  # fewer than 90 % died
    assert (project / "package/sums.py").read_text() == SOURCE
    drawn = {mutant.key: mutant for mutant in mutation.draw(project, AREAS, 30, 0)}
    lines = (out / "results.jsonl").read_text().splitlines()
    outcomes = {found["mutant"]: found for found in map(json.loads, lines) if "mutant" in found}
    assert outcomes.keys() == drawn.keys()
    by_line = {mutant.line: set() for mutant in drawn.values()}
    for key, found in outcomes.items():
        by_line[drawn[key].line].add(found["outcome"])
    assert by_line[16] == {"killed"} and by_line[20] == {"survived"} and by_line[24] == {"not covered"}
    assert any("test_sums" in found["by"] for found in outcomes.values())
    survivors = (out / "survivors.md").read_text()
    assert "+    return a " in survivors and "package/sums.py:20 (survived)" in survivors
    assert f"| all | {len(drawn)} |" in (out / "table.md").read_text()

    # a run that was killed in its middle: the last line is cut short, and only what is missing is run
    (out / "results.jsonl").write_text("\n".join(lines[:-2]) + "\n" + lines[-1][:9])
    capsys.readouterr()
    assert mutants.main(arguments, AREAS, project) == 2
    assert "go on with them by --resume" in capsys.readouterr().err
    assert mutants.main([*arguments, "--resume"], AREAS, project) == 1
    assert capsys.readouterr().out.count("/11 ") == 2
    (project / "package/sums.py").write_text(SOURCE + "\n")
    assert mutants.main([*arguments, "--resume"], AREAS, project) == 2
    assert "is of another run (sources differ)" in capsys.readouterr().err
