"""Every key of the schema is read by the package: a key that nothing reads is a promise that nothing keeps."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from vcpo_megatron.config.methods import MethodPreset
from vcpo_megatron.config.schema import RunConfig

PACKAGE = Path(__file__).parents[2] / "vcpo_megatron"
SECTIONS = {name: field.annotation for name, field in RunConfig.model_fields.items()}
KEYS = [(section, key) for section, model in SECTIONS.items() for key in model.model_fields]
#: A permission: it lets a check pass, and does nothing else.
FOR_CHECKS = {("algorithm", "allow_uncorrected")}


@cache
def readers(*, checks: bool) -> list[tuple[Path, set[str], set[str]]]:
    """(module, attributes that it reads, names that it uses) of the configuration's ``checks``, or of all that is not
    the configuration itself: a check looks at keys that may have no effect."""
    found = []
    for path in sorted((PACKAGE / "config/checks" if checks else PACKAGE).rglob("*.py")):
        if PACKAGE / "config" in path.parents and not checks:
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
        names = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
        found.append((path, attributes, names))
    return found


def read_by(section: str, key: str, model: type) -> list[Path]:
    """Modules that read ``.key`` and hold the section it belongs to."""
    holders = {section, model.__name__}
    if section == "algorithm" and key in MethodPreset.__dataclass_fields__:
        holders.add("preset")  # the method's preset with the keys of this section
    modules = readers(checks=(section, key) in FOR_CHECKS)
    return [path for path, attributes, names in modules if key in attributes and holders & (attributes | names)]


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_it_is_read(section: str, key: str) -> None:
    assert read_by(section, key, SECTIONS[section]), f"nothing reads {section}.{key}"


def test_a_key_that_nothing_reads_is_seen() -> None:
    assert read_by("train", "steps", SECTIONS["train"])
    assert not read_by("train", "no_such_key", SECTIONS["train"])
