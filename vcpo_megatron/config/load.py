"""Reading a configuration: TOML text and dotted overrides in, a validated ``RunConfig`` out, and back.

Everything that is wrong is reported together, one line a problem, each naming key, value and remedy.
TOML is typed, so validation is strict: ``steps = "30"`` is an error, not 30.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import json
import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..run.errors import ConfigError
from ..run.text import encodable, one_line
from .schema import RunConfig
from .synonyms import known_as, section_known_as, value_known_as

Key = tuple[str, ...]
#: Sections of keys, as a file holds them.
Tables = Mapping[str, Any]


def load_config(path: Path, overrides: Sequence[str] = (), layers: Sequence[tuple[Path, Tables]] = ()) -> RunConfig:
    """Read ``path``, lay ``layers`` over it and apply ``overrides`` ("section.key=value", the value in TOML syntax or a
    bare string).

    Relative paths in the file are taken from the file's folder, those of overrides from the working
    directory; that folder is also where a user's own modules are (``environment.modules``), unless the file says
    otherwise. A layer is a folder, from which its relative paths are taken, and sections of keys, as another file of
    that folder would hold them; a later one wins. Raises ConfigError with all problems.
    """
    data = _read(Path(path))
    if isinstance(environment := data.get("environment"), dict):
        environment.setdefault("modules", os.path.abspath(Path(path).parent))
    for folder, tables in layers:
        data = _laid_over(data, _resolve_paths(copy.deepcopy(dict(tables)), folder))
    return _validated(data, overrides)


def _laid_over(below: Tables, above: Tables) -> dict[str, Any]:
    """``below`` with the values of ``above``; tables that both have become one."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _laid_over(merged[key], value) if both else value
    return merged


def _read(path: Path) -> dict[str, Any]:
    return _resolve_paths(read_toml(path), path.parent)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """``config`` with ``overrides`` applied on top; raises ConfigError with all problems."""
    return _validated(config.model_dump(mode="python", exclude_none=True), overrides)


def load_resolved(path: Path) -> RunConfig:
    """Read what ``dump_resolved`` wrote; raises ConfigError, with the remedy for a file that somebody has changed."""
    try:
        return _validated(_read(path), ())
    except ConfigError as error:
        raise ConfigError(
            [
                *error.problems,
                f"{path} is the run's own copy of its configuration: undo the change, or put the configuration that "
                "the run was started with in its place, with paths from the root",
            ]
        ) from None


def dump_resolved(config: RunConfig) -> str:
    """``config`` as TOML with every default filled in; ``load_resolved`` reads the same config back.

    Keys whose value is None are left out: TOML has no null, and None is their default.
    """
    lines: list[str] = []
    for section, values in config.model_dump(mode="python", exclude_none=True).items():
        lines += ["", f"[{section}]", *(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in values.items())]
    return "\n".join(lines[1:]) + "\n"


def written(config: RunConfig) -> dict[str, str | None]:
    """Every key of ``config`` as "section.key" with its TOML text, None where it is not set."""
    return {key: None if value is None else _toml_value(value) for key, value in flatten(config).items()}


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every key of ``config`` as "section.key" with its value, for comparing two configurations."""
    return {f"{section}.{key}": value for section, model in config for key, value in model}


# --- reading ----------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """What ``path`` says, unchecked; raises ConfigError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from None


def _validated(data: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    problems: list[str] = []
    given = {key: override for override in overrides if (key := _apply(data, override, problems))}
    if unwritable := list(_unwritable(data)):
        raise ConfigError([*problems, *unwritable])
    try:
        # JSON mode: strict about types, yet a list is a tuple there and a string a path.
        config = RunConfig.model_validate_json(json.dumps(data, default=_jsonable), strict=True)
    except ValidationError as error:
        problems += _explain(error, given)
    if problems:
        raise ConfigError(problems)
    return _restored(config, data)


#: Levels of tables and lists in a value; what reads and writes configurations takes about 200.
_DEEPEST = 100


def _unwritable(data: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key whose value no configuration can hold, since nothing could write it down again."""
    for section, table in data.items():
        for key, value in table.items() if isinstance(table, Mapping) else [("", table)]:
            name = f"{section}.{key}" if key else section
            for fault in dict.fromkeys(_faults(key, 0)) | dict.fromkeys(_faults(section, 0)):
                yield f"{name}: {fault}"
            for fault in dict.fromkeys(_faults(value, 0)):
                shown = f" = {one_line(_shown(value))}" if isinstance(value, str) else ""
                yield f"{name}{shown}: {fault}"


def _faults(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if encodable(value) != value:
            yield "must be text in UTF-8; write it so, or give the file another name"
    elif isinstance(value, (Mapping, list, tuple)) and depth == _DEEPEST:
        yield f"must have at most {_DEEPEST} tables and lists within each other"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _faults(key, depth)
            yield from _faults(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _faults(item, depth + 1)


def _restored(config: RunConfig, data: Mapping[str, Any]) -> RunConfig:
    """``environment.options`` as TOML had it: JSON knows no dates."""
    options = data.get("environment", {}).get("options", {})
    return config.model_copy(update={"environment": config.environment.model_copy(update={"options": options})})


def _jsonable(value: Any) -> str:
    if isinstance(value, (Path, datetime.datetime, datetime.date, datetime.time)):
        return str(value)
    raise TypeError(f"{value!r} is no TOML value")


def _apply(data: dict[str, Any], override: str, problems: list[str]) -> Key | None:
    """Put one override into ``data``; returns its key, or None after adding to ``problems``."""
    name, equals, text = override.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or len(key) < 2 or not all(key):
        problems.append(f"--set {override}: not of the form section.key=value, as in --set train.steps=100")
        return None
    value = _override_value(text.strip())
    if isinstance(value, str) and key in _path_keys():
        value = _absolute(value, Path.cwd(), name)
    table: Any = data
    for depth, part in enumerate(key[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            problems.append(f"--set {override}: {'.'.join(key[:depth])} is a value, not a table")
            return None
    table[key[-1]] = value
    return key


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # as in read_toml
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


# --- paths ------------------------------------------------------------------------------------


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        yield name, field.annotation


def _path_keys() -> set[Key]:
    """Keys that hold a file system path."""
    return {
        (section, key)
        for section, model in _sections()
        for key, field in model.model_fields.items()
        if field.annotation is Path or Path in typing.get_args(field.annotation)
    }


def _absolute(value: str, base: Path, name: str) -> str:
    try:
        return os.path.abspath(base / Path(value).expanduser())
    except RuntimeError:  # ~user
        raise ConfigError([f"{name} = {_shown(value)}: there is no such user; give another path"]) from None


def _resolve_paths(data: dict[str, Any], base: Path) -> dict[str, Any]:
    for section, key in _path_keys():
        table = data.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = _absolute(table[key], base, f"{section}.{key}")
    return data


# --- explaining -------------------------------------------------------------------------------

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path, as a string",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "tuple_type": "a list",
    "date_type": "a date, as 2026-12-31",
    "date_parsing": "a date, as 2026-12-31",
    "date_from_datetime_parsing": "a date, as 2026-12-31",
}


def _explain(error: ValidationError, given: Mapping[Key, str]) -> list[str]:
    """One line for each key that is wrong, in the order of the file."""
    by_key: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_config_key(detail["loc"]), []).append(detail)
    return [_explain_key(key, details, given) for key, details in by_key.items()]


def _config_key(location: tuple[int | str, ...]) -> Key:
    """Location of an error without what pydantic adds below a field (union branches, list positions)."""
    parts = tuple(str(part) for part in location)
    return parts if parts[:2] in {("environment", "fields"), ("environment", "options")} else parts[:2]


def _explain_key(key: Key, details: Sequence[ErrorDetails], given: Mapping[Key, str]) -> str:
    name = ".".join(key)
    kinds = {detail["type"] for detail in details}
    if "extra_forbidden" in kinds:
        return f"{name}: unknown {'key' if len(key) > 1 else 'section'}{_nearest(key, details[0]['input'])}"
    if "missing" in kinds and len(details[0]["loc"]) == len(key):
        section = f"[{key[0]}]"
        what = f"add `{key[1]} = ...` to {section}" if len(key) > 1 else f"add the section {section}"
        return f"{name}: missing; {what}"
    value = details[0]["input"]
    shown = "" if isinstance(value, (dict, list)) else f" = {one_line(_shown(value))}"
    source = f" (from --set {one_line(given[key])})" if key in given else ""
    expected = " or ".join(dict.fromkeys(map(_expected, details)))
    return f"{name}{shown}{source}: must be {expected}{_near_value(key, details)}"


def _expected(detail: ErrorDetails) -> str:
    limits = detail.get("ctx", {})
    match detail["type"]:
        case "greater_than":
            return f"greater than {limits['gt']}"
        case "greater_than_equal":
            return f"at least {limits['ge']}"
        case "less_than":
            return f"less than {limits['lt']}"
        case "less_than_equal":
            return f"at most {limits['le']}"
        case "literal_error":
            return f"one of {limits['expected']}"
        case "missing" | "too_short" | "too_long":  # in a field: the only sequences are pairs of numbers
            return "a list of two numbers"
        case kind:
            return _EXPECTED.get(kind, detail["msg"])


def _near_value(key: Key, details: Sequence[ErrorDetails]) -> str:
    """Suggestion for a choice that is misspelt, or has another name elsewhere."""
    for detail in details:
        if detail["type"] == "literal_error" and isinstance(detail["input"], str):
            choices = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
            known = value_known_as(".".join(key), detail["input"])
            if close := [known] if known else difflib.get_close_matches(detail["input"], choices, 1):
                return f"; did you mean {_shown(close[0])}?"
    return ""


def _shown(value: Any) -> str:
    try:
        return _toml_value(value)
    except TypeError:
        return repr(value)


#: Keys of an unknown section that are named with ours.
_NAMED_BELOW = 4


def _nearest(key: Key, content: Any) -> str:
    """Suggestion for an unknown key: its name here, near in its section, or of the same name in another. ``content``:
    what was given."""
    sections = dict(_sections())
    if len(key) == 1:
        return _nearest_section(key[0], content, sections)
    if ours := known_as(key[0], key[1]):
        return f"; {ours}" if " " in ours else f"; did you mean {ours}?"
    own = [f"{key[0]}.{name}" for name in sections[key[0]].model_fields] if key[0] in sections else []
    close = difflib.get_close_matches(".".join(key), own, 1, cutoff=0.75)
    elsewhere = [f"{section}.{key[1]}" for section, model in sections.items() if key[1] in model.model_fields]
    if not close and not elsewhere:
        leaves = {f"{s}.{name}": name for s, model in sections.items() for name in model.model_fields}
        near = difflib.get_close_matches(key[1], leaves.values(), 1, cutoff=0.8)
        elsewhere = [dotted for dotted, name in leaves.items() if near and name == near[0]]
    found = (elsewhere if key[0] not in sections else close or elsewhere)[:1]
    if found:
        return f"; did you mean {found[0]}?"
    return f"; keys of [{key[0]}] are {', '.join(name.split('.', 1)[1] for name in own)}" if own else ""


def _nearest_section(name: str, content: Any, sections: Mapping[str, type[BaseModel]]) -> str:
    close = difflib.get_close_matches(name, sections, 1)
    section = section_known_as(name) or (close[0] if close else None)
    found = {}
    for dotted in _leaves(name, content):
        parent, _, leaf = dotted.rpartition(".")
        same = (f"{other}.{leaf}" for other, model in sections.items() if leaf in model.model_fields)
        if ours := known_as(parent.rpartition(".")[2], leaf) or next(same, None):
            found[dotted] = f"for {dotted}: {ours}" if " " in ours else f"{dotted} is {ours} here"
    if section and all(dotted.partition(".")[2] in sections[section].model_fields for dotted in found):
        return f"; did you mean [{section}]?"
    if found:
        more = f" (and {len(found) - _NAMED_BELOW} more)" if len(found) > _NAMED_BELOW else ""
        return f"; {'; '.join([*found.values()][:_NAMED_BELOW])}{more}"
    return f"; sections are {', '.join(sections)}"


def _leaves(name: str, content: Any) -> Iterator[str]:
    """Dotted names of all values in the table ``content`` called ``name``."""
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{name}.{key}", value)
        else:
            yield f"{name}.{key}"


# --- writing ----------------------------------------------------------------------------------


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_string(key)


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    """One TOML value; floats as ``repr``, which reads back to the same bits."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | Path():
            return _toml_string(str(value))
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case list() | tuple():
            return f"[{', '.join(map(_toml_value, value))}]"
        case dict():
            pairs = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
            return f"{{ {', '.join(pairs)} }}" if value else "{}"
        case _:
            raise TypeError(f"{value!r} of type {type(value).__name__} has no TOML form")
