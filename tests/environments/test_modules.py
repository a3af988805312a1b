"""A user's own code by name: the folder of RUN.toml, and what is said when it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcpo_megatron.config.load import dump_resolved, load_config, load_resolved
from vcpo_megatron.environments.base import EnvironmentSetupError
from vcpo_megatron.environments.modules import load_attribute


def problem(name: str, folder: Path | None) -> str:
    with pytest.raises(EnvironmentSetupError) as caught:
        load_attribute(name, folder, "environment.name")
    (line,) = caught.value.problems
    assert line.startswith(f"environment.name = {name!r}: ") and "\n" not in line
    return line


def test_the_folder_is_searched_also_for_what_a_module_imports_later(tmp_path: Path) -> None:
    (tmp_path / "found_here.py").write_text("def late():\n    import found_too\n    return found_too.VALUE\n")
    (tmp_path / "found_too.py").write_text("VALUE = 5\n")
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    (tmp_path / "a_package" / "inner.py").write_text("VALUE = 6\n")
    assert load_attribute("found_here:late", tmp_path, "key")() == 5
    assert load_attribute("a_package.inner:VALUE", tmp_path, "key") == 6


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1 / 0\n", "importing {name} raised ZeroDivisionError: division by zero ({file} line 1); correct it"),
        ("x = {}\nx['a']\n", "importing {name} raised KeyError: 'a' ({file} line 2)"),
        ("def f(:\n", "importing {name} raised SyntaxError: "),
        ("import json\njson.loads('')\n", "line 1 column 1 (char 0) ({file} line 2)"),
        ("import sys\nsys.exit('no')\n", "importing {name} raised SystemExit: no ({file} line 2)"),
        ("import no_such_library.x\n", "importing {name} needs 'no_such_library', which is not there ({file} line 1)"),
        ("raise ValueError\n", "importing {name} raised ValueError ({file} line 1)"),
        ("def factor(): ...\n", "{file} has no 'factory'; did you mean {name}:factor?"),
        ("", "{file} has no 'factory'; name something that it defines"),
    ],
)
def test_what_is_wrong_with_a_module_is_one_line_with_its_place(
    tmp_path: Path, request: pytest.FixtureRequest, source: str, said: str
) -> None:
    name = f"wrong_{abs(hash(request.node.name))}"
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    assert said.format(name=name, file=file) in problem(f"{name}:factory", tmp_path)


def test_a_module_that_is_nowhere(tmp_path: Path) -> None:
    line = problem("no_such_module_here:factory", tmp_path)
    assert "No module named 'no_such_module_here'" in line and f"{tmp_path} (the folder of RUN.toml)" in line
    assert "RUN.toml" not in problem("no_such_module_here:factory", None)


@pytest.mark.parametrize("name", ["json", "sys", "json.mine"])
def test_an_installed_module_of_the_same_name_is_never_taken_for_yours(tmp_path: Path, name: str) -> None:
    file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("factory = 1\n")
    assert f"{file} is hidden by " in problem(f"{name}:factory", tmp_path)


@pytest.mark.parametrize("name", [":factory", "module:", "a..b:c", "a-b:c", "./a:c"])
def test_a_name_that_is_none(name: str) -> None:
    assert "give 'package.module:name'" in problem(name, None)


def test_a_configuration_s_folder_is_searched_and_a_resume_keeps_it(tmp_path: Path) -> None:
    text = '[model]\npath = "m"\n[train]\nsteps = 3\n[environment]\nname = "e"\n'
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml")
    assert config.environment.modules == tmp_path
    (tmp_path / "elsewhere").mkdir()
    resolved = tmp_path / "elsewhere" / "resolved.toml"
    resolved.write_text(dump_resolved(config))
    assert load_resolved(resolved).environment.modules == load_config(resolved).environment.modules == tmp_path
    (tmp_path / "run.toml").write_text(text + 'modules = "code"\n')
    assert load_config(tmp_path / "run.toml").environment.modules == tmp_path / "code"
