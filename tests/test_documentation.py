"""README, docs and examples: links and paths lead somewhere, commands parse, keys and metrics that are named exist."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import ALLOWED, FLOORS, MOST_MODULES
from vcpo_megatron.cli.main import _parser
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.observability.metrics import METRICS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vcpo_megatron"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [
    *(ROOT / name for name in TOP),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
INDEX = ROOT / "docs" / "README.md"
KEYS = {f"{name}.{key}" for name, field in RunConfig.model_fields.items() for key in field.annotation.model_fields}
every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])

#: Endings of files that pages name, where they are files of this repository.
SOURCES = (".py", ".md", ".sh", ".toml", ".txt")
#: Files of a user or of a run, and the module that docs/environments.md writes.
OF_USERS = {"calculator.py", "run.toml", "resolved.toml", "resolved.next.toml"}
#: Folders that git ignores are not of the repository: a run leaves ``runs/``, a build ``build/``.
IGNORED = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
FOLDERS = {path.name for base in (ROOT, PACKAGE) for path in base.iterdir() if path.is_dir()} - IGNORED
FILES = {path.name for base in (ROOT, PACKAGE, *map(ROOT.joinpath, ("tests", "tools"))) for path in base.rglob("*.*")}


def text(page: Path) -> str:
    """The page without its fenced blocks, which are programs and files."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def code(page: Path) -> list[str]:
    """What stands in backticks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text(page))]


def commands(page: Path) -> list[list[str]]:
    """Words of every indented line that begins with "vcpo", without a remark after it; a synopsis ([...]) is none."""
    lines = re.findall(r"^ {4,}(?:\S*/)?vcpo ([^#\n]*)", text(page), flags=re.MULTILINE)
    return [shlex.split(re.split(r" {3,}", line.strip())[0]) for line in lines if "[" not in line]


def slugs(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text(file), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def links(page: Path) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text(page)) if "://" not in target]


@every_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in links(page):
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.relative_to(ROOT)} links {target}, which does not exist"
        assert not heading or heading in slugs(file), f"{page.relative_to(ROOT)} links {target}: no such heading"


def test_every_page_can_be_reached_from_the_index_and_the_index_from_the_readme() -> None:
    linked = {(INDEX.parent / target.partition("#")[0]).resolve() for target in links(INDEX)}
    missing = {str(page.relative_to(ROOT)) for page in PAGES} - {str(path.relative_to(ROOT)) for path in linked}
    assert missing == {"README.md", "docs/README.md"}, "docs/README.md must link every page"
    assert {"docs/README.md", "CONTRIBUTING.md"} <= set(links(ROOT / "README.md"))


def is_missing(path: str, page: Path) -> bool:
    """Whether ``path`` names a file or folder of this repository that is not there. From the repository's root, the
    package, or the page; a name alone may be anywhere. Words in capitals (RUN_DIR, NAME, step_N) are the reader's."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]*)*", path) or path in OF_USERS or path.startswith("."):
        return False
    first, slash, _ = path.partition("/")
    if not (path.endswith(SOURCES) or (slash and first in FOLDERS)):
        return False
    if path in FILES or any((base / path).exists() for base in (ROOT, PACKAGE, page.parent)):
        return False
    return not re.search(r"(?<![A-Za-z])[A-Z]+(?:_[A-Z]+)*(?![A-Za-z])", path)


@every_page
def test_paths_that_are_named_exist(page: Path) -> None:
    missing = sorted({path for path in code(page) if is_missing(path, page)})
    assert not missing, f"{page.relative_to(ROOT)} names {', '.join(missing)}: not there (from the root or the package)"


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("learner/step/vcpo_stop.py", True),
        ("tests/no_such_folder", True),
        ("no_such_module.py", True),
        ("learner/worker.py", False),
        ("worker.py", False),
        ("examples/modular_sum_cpu", False),
        ("models/families/NAME.py", False),
        ("tests/environments/test_NAME.py", False),
        ("RUN_DIR/metrics.jsonl", False),
        ("ess/ratio", False),
    ],
)
def test_a_missing_path_is_seen(path: str, missing: bool) -> None:
    assert is_missing(path, INDEX) is missing


@every_page
def test_commands_are_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page):
        try:
            _parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{page.relative_to(ROOT)}: vcpo {' '.join(words)}: {capsys.readouterr().err.splitlines()[-1]}")


def test_the_readme_s_commands_are_seen() -> None:
    assert len(commands(PAGES[0])) >= 6 and ["doctor"] in commands(PAGES[0])


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


def unknown_word(words: list[str]) -> str | None:
    """The first subcommand or option of "vcpo ..." that there is not; arguments may be left out, or be a synopsis."""
    parser, options = _parser(), {"--version"}
    for word in words:
        if below := subcommands(parser):
            if word.startswith("-"):
                return None if word in options else word
            if word not in below:
                return word
            parser = below[word]
            options = {option for action in parser._actions for option in action.option_strings}
        elif word.startswith("--") and word.partition("=")[0] not in options:
            return word
    return None


def test_an_unknown_word_is_seen() -> None:
    assert unknown_word(["trian", "RUN.toml"]) == "trian"
    assert unknown_word(["convert", "inport"]) == "inport"
    assert unknown_word(["train", "--resune"]) == "--resune"
    assert unknown_word(["train", "--resume"]) is None and unknown_word(["convert"]) is None


@every_page
def test_commands_in_a_sentence_exist(page: Path) -> None:
    """Also synopses, and what stands in backticks: subcommands and options, complete or not."""
    lines = re.findall(r"^ {4,}(?:\S*/)?vcpo ([^#\n]*)", text(page), flags=re.MULTILINE)
    for line in (*lines, *(span.partition("vcpo ")[2] for span in code(page) if re.search(r"(^|[ /])vcpo ", span))):
        words = re.sub(r"[][|]", " ", re.split(r" {3,}", line.strip())[0]).split()
        assert not (word := unknown_word(words)), f"{page.relative_to(ROOT)}: vcpo {line.strip()}: no {word}"


def toml_blocks(page: Path) -> Iterator[str]:
    """Configurations: fenced ones, and indented ones that begin with a [section]."""
    whole = page.read_text(encoding="utf-8")
    yield from re.findall(r"^```toml\n(.*?)^```$", whole, flags=re.MULTILINE | re.DOTALL)
    yield from map(textwrap.dedent, re.findall(r"^(?: {4,}\[[a-z]+\]\n(?: {4,}.*\n)+)", text(page), flags=re.MULTILINE))


@every_page
def test_keys_that_are_named_exist(page: Path) -> None:
    sections = "|".join(RunConfig.model_fields)
    named = re.findall(rf"(?:--set |`)((?:{sections})\.[a-z_]+)\b(?!\.\w|/)", text(page))
    for block in toml_blocks(page):
        named += [f"{section}.{key}" for section, keys in tomllib.loads(block).items() for key in keys]
    named = [key for key in named if not (PACKAGE / key.replace(".", "/")).exists()]  # a folder: rollout.client
    unknown = sorted({key for key in named if key not in KEYS and not key.endswith((".py", ".jsonl"))})
    assert not unknown, f"{page.relative_to(ROOT)}: no such configuration key: {', '.join(unknown)}"


@every_page
def test_keys_that_are_given_a_value_exist(page: Path) -> None:
    """`lag = "exact"`: a key of some section, and one of its values where it has few."""
    sections = "|".join(RunConfig.model_fields)
    keys = {key.partition(".")[2] for key in KEYS}
    for span in code(page):
        found = re.fullmatch(rf"(?:(?:{sections})\.)?([a-z_]+) = (\".*\"|\[.*\]|[\d.e+-]+|true|false)", span)
        assert not found or found[1] in keys, f"{page.relative_to(ROOT)}: `{span}`: no such configuration key"


@every_page
def test_metrics_that_are_named_exist(page: Path) -> None:
    prefixes = {name.split("/")[0] for name in METRICS if "/" in name} - {"rollouts"}
    named = set(re.findall(rf"`((?:{'|'.join(prefixes)})/[a-z_0-9]+)`", text(page)))
    assert named <= METRICS.keys(), f"{page.relative_to(ROOT)}: no such metric: {', '.join(named - METRICS.keys())}"


def test_the_table_of_packages_is_the_one_that_is_held() -> None:
    """CONTRIBUTING.md against tests/test_architecture.py."""
    page = ROOT / "CONTRIBUTING.md"
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", text(page), flags=re.MULTILINE)
    table = {package: set(re.findall(r"`([\w.]+)`", allowed)) for package, allowed in rows if package != "cli"}
    assert table == ALLOWED
    for package, folders in FLOORS.items():
        order = f"`{package}`: {', '.join(folders)}"
        assert order in " ".join(text(page).split()), order
    assert f"at most {MOST_MODULES} modules" in text(page)


def test_measured_numbers_stand_in_one_page() -> None:
    """A date says when something was measured or run: only these pages, and a generated one, hold any."""
    dated = {str(page.relative_to(ROOT)) for page in PAGES if re.search(r"\b20\d\d-\d\d-\d\d\b", text(page))}
    assert dated <= {"README.md", "docs/measurements.md", "docs/results.md", "docs/status.md", "docs/metrics.md"}
