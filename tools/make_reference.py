#!/usr/bin/env python3
"""Writes docs/configuration.md and docs/metrics.md from the code, so that the pages cannot say anything else.

What a key means is its ``description`` in vcpo_megatron/config/schema.py; a section's paragraph is its docstring. What
a metric means is in the table of vcpo_megatron/observability/metrics.py; in which section it stands is said here.

    python tools/make_reference.py              write the pages
    python tools/make_reference.py --check      say whether they are up to date (exit 1 when not)
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vcpo_megatron.config.checks.limits import least  # noqa: E402
from vcpo_megatron.config.methods import METHODS, MethodPreset  # noqa: E402
from vcpo_megatron.config.schema import AlgorithmConfig, RunConfig, Section  # noqa: E402
from vcpo_megatron.launch.resume import CHANGEABLE_ON_RESUME  # noqa: E402
from vcpo_megatron.observability.metrics import METRICS  # noqa: E402

DOCS = ROOT / "docs"
CONFIGURATION = """\
# Configuration

<!-- Written by tools/make_reference.py from vcpo_megatron/config/schema.py: change it there. -->

A run is one TOML file: `vcpo train RUN.toml`. A key may be overridden by `--set SECTION.KEY=VALUE`, any number of
times; the value is TOML, or a bare string. Relative paths in the file are taken from the file's folder, those of
`--set` from the working directory. The run directory keeps every value, defaults included, in `resolved.toml`; a key
without a value is not in it, and is the method's (`config/methods.py`) or the model's.

Values are typed: `steps = "30"` is an error, not 30. An unknown key is refused with the nearest known one. What several
keys must satisfy together is checked before anything starts, and every problem is said at once
(`vcpo train RUN.toml --dry-run`, `vcpo doctor --config RUN.toml`). No value is ever changed by a check. A key of the
method or the schedule that nothing would read, `ratio_low` for a method without bounds, is refused, too.

Keys that end in `_s` are seconds. "resume: yes" marks keys that `--resume --set` may change; the others decide what is
trained, and a run keeps them. "-" as default: not set, which the meaning explains.
"""
KEY_HEADER = "| key | value | default | resume | meaning |\n|---|---|---|---|---|\n"
METHOD_TABLE = """\
### Methods

What each `algorithm.method` sets; each of these keys overrides its preset. [method.md](method.md) has the formulas.
"""
METRICS_PAGE = """\
# Metrics

<!-- Written by tools/make_reference.py from vcpo_megatron/observability/metrics.py: change it there. -->

One row a step in `metrics.jsonl` (one JSON object a line), and the same in TensorBoard. Absent keys were not observed
in that step; a value that is not finite is written as `null` and read as nan, never averaged away. A resume cuts the
file back to its checkpoint, so a step has one row.

**Over ranks.** A number speaks of the whole batch, not of one rank: the learner's ranks sum one table of per-trajectory
numbers over data-parallel replicas and pipeline stages, every rank computes the same metrics from all N trajectories,
and ESS and learning rate are asserted equal on all. No mean is ever a mean of ranks' means. The column *of* says what
the row holds of several observations of one step: their `mean`, `sum`, `max`, `p95` (nearest rank) or the `last`.

Healthy values are those of `make demo` where numbers are given.
"""
METRIC_HEADER = "| metric | unit | of | meaning | healthy | otherwise |\n|---|---|---|---|---|---|\n"
#: Section of the page of metrics -> (what is said of all of them, their names or the beginnings of names, in order).
METRIC_SECTIONS: dict[str, tuple[str, str]] = {
    "Where the run is": ("", "step policy_version step/skipped"),
    "Is it learning": ("", "loss reward/ eval/ entropy experts/ groups/ kl/reference"),
    "How far off-policy": ("", "ess/ bound/ lr/ weight/ kl/behavior kl/behavior_trajectory mismatch/ lag/"),
    "Gradient and baseline": ("", "grad_norm/ baseline/"),
    "Staleness": ("", "staleness/"),
    "Where trajectories are": (
        "Counts since the start of the run, attempts before a resume included; evaluation is not counted.\n"
        "`generated = queued + trained + dropped + failed` in every row.",
        "rollouts/",
    ),
    "Work and time": ("", "tokens/ time/ sync/"),
}
_OF_A_METHOD = {f"algorithm.{field.name}" for field in dataclasses.fields(MethodPreset)}
_WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", datetime.date: "date"}
_BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Name and model of every section, in the order of a file."""
    for name, field in RunConfig.model_fields.items():
        yield name, typing.cast(type[Section], field.annotation)


def allowed(key: str, field: FieldInfo) -> str:
    """What may be written for this key, in words."""
    floor = least(key)
    bounds = [
        f"{words} {getattr(item, attribute):g}"
        for item in field.metadata
        for kind, (attribute, words) in _BOUNDS.items()
        if isinstance(item, kind) and (floor is None or kind not in (Ge, Gt))
    ]
    bounds = bounds if floor is None else [f"at least {floor:.7g}", *bounds]
    text = " and ".join([" ".join([_type(field.annotation), *bounds[:1]]), *bounds[1:]])
    infinite = any(getattr(item, "allow_inf_nan", False) for item in field.metadata)
    return text + ", or inf" if infinite else text


def _type(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in parts)
    if origin is tuple:
        return f"list of {_type(parts[0])}" if parts[-1] is ... else f"{len(parts)} {_type(parts[0])}s"
    if origin is dict:
        return f"table of {_type(parts[1])}" if parts[1] in _WORDS else "table"
    if parts:  # a union
        return " or ".join(_type(part) for part in parts if part is not NoneType)
    return _WORDS[annotation]


def default(key: str, field: FieldInfo) -> str:
    """The default as TOML; in words where the method's preset gives it, or where there is none."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "by method" if key in _OF_A_METHOD else "-"
    return f"`{json.dumps(value, default=str)}`"


def pages() -> dict[str, str]:
    """File name in docs/ -> text, of every page that is written here."""
    return {"configuration.md": configuration(), "metrics.md": metrics()}


def configuration() -> str:
    """The page of configuration keys."""
    parts = [CONFIGURATION]
    for name, model in sections():
        about = " ".join((model.__doc__ or "").split()).replace("``", "`")
        parts.append(f"\n## [{name}]\n\n{_linked(about)}\n\n{KEY_HEADER}")
        for key, field in model.model_fields.items():
            dotted = f"{name}.{key}"
            resume = "yes" if dotted in CHANGEABLE_ON_RESUME else ""
            cells = (
                f"`{dotted}`",
                allowed(dotted, field),
                default(dotted, field),
                resume,
                _linked(field.description or ""),
            )
            parts.append("| " + " | ".join(cells) + " |\n")
        if name == "algorithm":
            parts.append(f"\n{METHOD_TABLE}\n{_methods()}")
    return "".join(parts)


def metrics() -> str:
    """The page of metrics; ValueError when one of them belongs to no section, or to two."""
    parts, placed = [METRICS_PAGE], Counter[str]()
    for title, (about, beginnings) in METRIC_SECTIONS.items():
        names = [name for part in beginnings.split() for name in METRICS if _belongs(name, part)]
        placed.update(names)
        parts.append(f"\n## {title}\n\n{about and about + chr(10) * 2}{METRIC_HEADER}")
        for name in names:
            metric = METRICS[name]
            cells = (metric.unit, metric.reducer, *map(_linked, (metric.description, metric.healthy, metric.otherwise)))
            parts.append(f"| `{name}` | " + " | ".join(cells).replace("|  |", "| |").strip() + " |\n")
    if wrong := [name for name in METRICS if placed[name] != 1]:
        raise ValueError(f"METRIC_SECTIONS must name the section of {', '.join(wrong)}, once")
    return "".join(parts)


def _belongs(name: str, part: str) -> bool:
    return name.startswith(part) if part.endswith("/") else name == part


def _methods() -> str:
    keys = [field.name for field in dataclasses.fields(MethodPreset) if field.name in AlgorithmConfig.model_fields]
    lines = [f"| method | {' | '.join(f'`{key}`' for key in keys)} | what it is |", "|---" * (len(keys) + 2) + "|"]
    for name, preset in METHODS.items():
        values = [str(getattr(preset, key)).lower() for key in keys]
        lines.append(f"| `{name}` | {' | '.join(values)} | {preset.summary} |")
    return "\n".join(lines) + "\n"


def _linked(text: str) -> str:
    """Names of pages beside this one become links; a bar would end a cell."""
    return re.sub(r"\b(\w+\.md)\b", r"[\1](\1)", text.replace("|", "\\|"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="example: python tools/make_reference.py --check"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not up to date")
    args = parser.parse_args(arguments)
    texts = {DOCS / name: text for name, text in pages().items()}
    if not args.check:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return 0
    old = [p for p, text in texts.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    for path in old:
        name = f"docs/{path.name}"
        print(f"make_reference: {name} is not up to date; run: python tools/make_reference.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
