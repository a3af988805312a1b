"""No dead options: every key of the configuration is read by the program, not only declared, checked or written out."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import vcpo_megatron
from vcpo_megatron.config.schema import AlgorithmConfig, RunConfig

PACKAGE = Path(vcpo_megatron.__file__).parent
SECTIONS = {name: field.annotation for name, field in RunConfig.model_fields.items()}
KEYS = [f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields]
#: Modules of the configuration that decide for the program by a function of it.
DECIDED = ("weight_transport.py",)
#: What a user permits: the checks alone ask for it.
PERMISSIONS = {"algorithm.allow_uncorrected"}


def properties(model: type) -> dict[str, Callable[..., Any]]:
    return {name: value.fget for name, value in vars(model).items() if isinstance(value, property)}


#: Properties of [algorithm] that are the method with the keys that override it: its keys are read from them.
PRESETS = {
    name
    for name, read in properties(AlgorithmConfig).items()
    if dataclasses.is_dataclass(typing.get_type_hints(read)["return"])
}


def section_of(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """The section that ``node`` stands for: ``config.train``, or a name that was given to it."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    if node.attr in SECTIONS:
        return node.attr
    if node.attr in PRESETS and (section := section_of(node.value, names)) is not None:
        return section
    return names.get(node.attr)  # self._algorithm


def given_names(tree: ast.AST) -> dict[str, str]:
    """Name or attribute -> section, of every assignment and annotated parameter of a module."""
    models = {model.__name__: name for name, model in SECTIONS.items()}
    names: dict[str, str] = {}
    for _ in range(2):  # a name of a name
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id in models:
                names[node.arg] = models[node.annotation.id]
            for target, value in assignments(node):
                if (section := section_of(value, names)) is not None:
                    names[target] = section
    return names


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Name or attribute, and the expression that it is given."""
    if isinstance(node, ast.NamedExpr):
        yield node.target.id, node.value
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    for left, right in pairs:
        if isinstance(left, ast.Name):
            yield left.id, right
        elif isinstance(left, ast.Attribute):
            yield left.attr, right


def keys_read(source: str) -> set[str]:
    """ "section.key" of every key that ``source`` reads."""
    tree = ast.parse(source)
    names = given_names(tree)
    return {
        f"{section}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (section := section_of(node.value, names)) is not None
    }


@pytest.fixture(scope="module")
def read() -> set[str]:
    """What the package reads, without the configuration's own declaration and checks; and what properties that it reads
    are made of."""
    files = {path for path in PACKAGE.rglob("*.py") if "config" not in path.relative_to(PACKAGE).parts}
    files |= {PACKAGE / "config" / name for name in DECIDED}
    found = set().union(*(keys_read(path.read_text(encoding="utf-8")) for path in files))
    for name, model in SECTIONS.items():
        for derived, code in properties(model).items():
            if f"{name}.{derived}" in found:
                found |= {f"{name}.{key}" for key in code.__code__.co_names}
    return found


@pytest.mark.parametrize("key", sorted(set(KEYS) - PERMISSIONS))
def test_every_key_is_read(read: set[str], key: str) -> None:
    assert key in read, f"nothing reads {key}: remove it from config/schema.py, or use it"


def test_reading_is_told_from_names_that_look_alike() -> None:
    source = (
        "def f(config, other, rollout: RolloutConfig):\n"
        "    train, self._launch = config.train, config.launch\n"
        "    other.steps, train.seed, self._launch.grace_s, rollout.servers\n"
        f"    config.algorithm.{min(PRESETS)}.baseline\n"
    )
    assert keys_read(source) & set(KEYS) == {"train.seed", "launch.grace_s", "rollout.servers", "algorithm.baseline"}
