"""README, docs and examples: links lead somewhere, commands parse, keys and metrics that are named exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vcpo_megatron.cli.main import _parser
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.observability.metrics import METRICS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
KEYS = {f"{name}.{key}" for name, field in RunConfig.model_fields.items() for key in field.annotation.model_fields}
every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def text(page: Path) -> str:
    """The page without its fenced blocks, which are programs and files."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Words of every indented line that begins with "vcpo", without a remark after it; a synopsis ([...]) is none."""
    lines = re.findall(r"^ {4,}(?:\S*/)?vcpo ([^#\n]*)", text(page), flags=re.MULTILINE)
    return [shlex.split(re.split(r" {3,}", line.strip())[0]) for line in lines if "[" not in line]


@every_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.relative_to(ROOT)} links {target}, which does not exist"
        if heading:
            headings = re.findall(r"^#+ (.*)$", text(file), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}, target


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md|examples/\w+/README\.md)\)", text(PAGES[0])))
    missing = {str(page.relative_to(ROOT)) for page in PAGES[1:]} - linked
    assert not missing, f"README.md, Read next: link {', '.join(sorted(missing))}"


@every_page
def test_commands_are_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page):
        try:
            _parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{page.relative_to(ROOT)}: vcpo {' '.join(words)}: {capsys.readouterr().err.splitlines()[-1]}")


def test_the_readme_s_commands_are_seen() -> None:
    assert len(commands(PAGES[0])) >= 6 and ["doctor"] in commands(PAGES[0])


@every_page
def test_keys_that_are_named_exist(page: Path) -> None:
    sections = "|".join(RunConfig.model_fields)
    named = re.findall(rf"(?:--set |`)((?:{sections})\.[a-z_]+)\b(?!\.\w|/)", text(page))
    unknown = sorted({key for key in named if key not in KEYS and not key.endswith((".py", ".jsonl"))})
    assert not unknown, f"{page.relative_to(ROOT)}: no such configuration key: {', '.join(unknown)}"


@every_page
def test_metrics_that_are_named_exist(page: Path) -> None:
    prefixes = {name.split("/")[0] for name in METRICS if "/" in name} - {"rollouts"}
    named = set(re.findall(rf"`((?:{'|'.join(prefixes)})/[a-z_0-9]+)`", text(page)))
    assert named <= METRICS.keys(), f"{page.relative_to(ROOT)}: no such metric: {', '.join(named - METRICS.keys())}"
