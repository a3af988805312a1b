"""The page of configuration keys: it says what the models say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.launch.resume import CHANGEABLE_ON_RESUME

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration.md"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows() -> dict[str, list[str]]:
    """Key -> value, default, resume and meaning, as the page has them."""
    found = re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|(.*)\|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    keys = [key for key, _ in found]
    assert len(set(keys)) == len(keys), "a key has two rows"
    return {key: [cell.strip() for cell in re.split(r"(?<!\\)\|", cells)] for key, cells in found}


@pytest.mark.parametrize("section", RunConfig.model_fields)
def test_every_key_says_what_it_means(section: str) -> None:
    model = RunConfig.model_fields[section].annotation
    assert model is not None and model.__doc__, f"config/schema.py: {model} needs a docstring"
    silent = [f"{section}.{key}" for key, field in model.model_fields.items() if not field.description]
    assert not silent, (
        f"config/schema.py: {', '.join(silent)} must say what it means, with unit and special values: "
        'Field(DEFAULT, description="..."); then run: python tools/make_reference.py'
    )


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    assert PAGE.read_text(encoding="utf-8") == tool.page(), (
        "docs/configuration.md no longer says what config/schema.py, config/methods.py and launch/resume.py say; run: "
        "python tools/make_reference.py"
    )


def test_the_page_has_exactly_the_keys_there_are() -> None:
    fields = RunConfig.model_fields.items()
    assert list(rows()) == [f"{name}.{key}" for name, section in fields for key in section.annotation.model_fields]


@pytest.mark.parametrize(
    ("key", "value", "default", "resume"),
    [
        ("train.steps", "integer above 0", "**required**", "yes"),
        ("optimizer.lr", "number above 0", "`1e-06`", ""),
        ("optimizer.betas", "2 numbers", "`[0.9, 0.999]`", ""),
        ("algorithm.is_threshold", "number above 0, or inf", "`8.0`", ""),
        ("algorithm.is_level", '`"sequence"`, `"token"`, `"none"`', "by method", ""),
        ("algorithm.base_ess_ratio", 'number or `"auto"`', "`1.0`", ""),
        ("staleness.adaptive_ess", "number above 0 and below 1", "`0.5`", "yes"),
        ("staleness.max_staleness", "integer at least 0", "`4`", ""),
        ("rollout.replay", "path", "-", ""),
        ("environment.fields", "table of text", "`{}`", ""),
        ("environment.options", "table", "`{}`", ""),
        ("parallel.sequence_parallel", "true or false", "`false`", "yes"),
    ],
)
def test_known_rows(key: str, value: str, default: str, resume: str) -> None:
    assert rows()[key][:3] == [value, default, resume]


def test_a_method_s_row_is_there() -> None:
    row = "| `dr_grpo` | group_mean | none | false | false | constant | 0.8 | 1.2 | GRPO without std and length terms"
    assert f"{row} |\n" in PAGE.read_text(encoding="utf-8")


def test_resume_is_what_the_command_line_allows() -> None:
    assert {key for key, cells in rows().items() if cells[2] == "yes"} == CHANGEABLE_ON_RESUME


def test_check_says_when_the_page_is_old(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    assert tool.main(["--check"]) == 1
    assert "page.md is not up to date; run: python tools/make_reference.py" in capsys.readouterr().err
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0
    (tmp_path / "page.md").write_text((tmp_path / "page.md").read_text().replace("1e-06", "1e-05"))
    assert tool.main(["--check"]) == 1
