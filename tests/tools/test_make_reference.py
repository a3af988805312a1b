"""The pages of configuration keys and metrics: they say what the code says."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.launch.resume import CHANGEABLE_ON_RESUME
from vcpo_megatron.observability.metrics import METRICS

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
    found = re.findall(r"^\| `([a-z_]+\.[a-z0-9_]+)` \|(.*)\|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
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


@pytest.mark.parametrize("page", ["configuration.md", "metrics.md"])
def test_a_page_is_up_to_date(tool: ModuleType, page: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == tool.pages()[page], (
        f"docs/{page} no longer says what config/schema.py, config/methods.py, launch/resume.py and "
        "observability/metrics.py say; run: python tools/make_reference.py"
    )


def test_every_metric_stands_on_the_page_once(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert Counter(re.findall(r"^\| `(\S+)` \|", page, flags=re.MULTILINE)) == Counter(METRICS.keys())
    row = "| `grad_norm/trajectory_max` | | max | largest \\|g_i\\| | within a few tens of the mean | one trajectory "
    assert row in page
    sections = {**tool.METRIC_SECTIONS, "Staleness": ("", "")}
    monkeypatch.setattr(tool, "METRIC_SECTIONS", sections)
    with pytest.raises(ValueError, match="staleness/mean, staleness/p95"):
        tool.metrics()


def test_the_page_has_exactly_the_keys_there_are() -> None:
    fields = RunConfig.model_fields.items()
    assert list(rows()) == [f"{name}.{key}" for name, section in fields for key in section.annotation.model_fields]


@pytest.mark.parametrize(
    ("key", "value", "default", "resume"),
    [
        ("train.steps", "integer above 0", "**required**", "yes"),
        ("optimizer.lr", "number above 0", "`1e-06`", "yes"),
        ("optimizer.betas", "2 numbers", "`[0.9, 0.999]`", ""),
        ("algorithm.is_threshold", "number above 0, or inf", "`8.0`", ""),
        ("algorithm.is_level", '`"sequence"`, `"turn"`, `"token"`, `"none"`', "by method", ""),
        ("algorithm.base_ess_ratio", 'number or `"auto"`', "`1.0`", ""),
        ("staleness.adaptive_ess", "number above 0 and below 1", "`0.5`", "yes"),
        ("staleness.max_staleness", "integer at least 0", "`4`", "yes"),
        ("environment.date", "date", "-", ""),
        ("rollout.replay", "path", "-", ""),
        ("environment.fields", "table of text", "`{}`", ""),
        ("environment.options", "table", "`{}`", ""),
        ("parallel.sequence_parallel", "true or false", "`false`", "yes"),
    ],
)
def test_known_rows(key: str, value: str, default: str, resume: str) -> None:
    assert rows()[key][:3] == [value, default, resume]


def test_a_method_s_row_is_there() -> None:
    row = "| `dr_grpo` | group_mean | none | false | false | constant | 0.8 | 1.2 | off | 0.0 |"
    assert f"{row} GRPO without std and length terms |\n" in PAGE.read_text(encoding="utf-8")


def test_resume_is_what_the_command_line_allows() -> None:
    assert {key for key, cells in rows().items() if cells[2] == "yes"} == CHANGEABLE_ON_RESUME


def test_check_says_when_the_page_is_old(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "DOCS", tmp_path)
    assert tool.main(["--check"]) == 1
    says = "docs/{} is not up to date; run: python tools/make_reference.py"
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"make_reference: {says.format(name)}" for name in ("configuration.md", "metrics.md")]
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0
    for name, number in (("configuration.md", "1e-06"), ("metrics.md", "0.6 to 1")):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace(number, "1e-05"))
        assert tool.main(["--check"]) == 1 and says.format(name) in capsys.readouterr().err
        (tmp_path / name).write_text(text)
