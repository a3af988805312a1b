"""Prompts from JSONL and parquet files, and their order.

A file's records are addressed by the environment's own field names; ``environment.fields`` maps them to the names in
the file ({"prompt": "question"}: the column "question" is the prompt). A name with dots leads into nested records
({"answer": "reward_model.ground_truth"}), unless the file has a column of that very name. Only what is wanted is read.
Every error names the file, the line (JSONL) or row (parquet), what is wrong, and what to do.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..run.text import encodable, one_line
from .base import EnvironmentSetupError


@dataclass(frozen=True)
class DatasetRecord:
    """One record of a file. ``where`` is "FILE: line N", for errors; ``values`` are by the environment's names."""

    where: str
    values: Mapping[str, Any]


def read_records(path: Path, wanted: Sequence[str], fields: Mapping[str, str]) -> list[DatasetRecord]:
    """All records of ``path`` (.jsonl, or .parquet, which needs pyarrow), reduced to ``wanted``.

    Raises EnvironmentSetupError for a missing, unreadable, malformed or empty file and for a record that
    lacks a wanted field; at the first such record.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise EnvironmentSetupError(f"{path}: unknown format {path.suffix!r}; give a .jsonl or .parquet file")
    if not path.is_file():
        raise EnvironmentSetupError(f"{path}: no such file; correct the path in [environment]")
    if unknown := sorted(set(fields) - set(wanted)):
        raise EnvironmentSetupError(
            f"environment.fields names {', '.join(map(repr, unknown))}, which this environment does not read; "
            f"it reads {', '.join(map(repr, wanted))}"
        )
    names = {name: fields.get(name, name) for name in wanted}
    records = []
    for where, record in readers[path.suffix](path, names):
        _refuse_lone_surrogates(record, where)
        records.append(DatasetRecord(where, _pick(record, names, where)))
    if not records:
        raise EnvironmentSetupError(f"{path}: the file holds no record; give at least one")
    return records


def _pick(record: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    found = {name: _value(record, column) for name, column in names.items()}
    for name, value in found.items():
        if value is None:
            raise _missing(where, name, names[name], record)
    return found


def _refuse_lone_surrogates(value: Any, where: str) -> None:
    """Half of a pair ("\\ud83d" in JSON) is no character: no tokenizer, message or file could hold it."""
    match value:
        case str() if encodable(value) != value:
            raise EnvironmentSetupError(
                f"{where}: '{one_line(value, 80)}' has half of a surrogate pair, which is no character; correct the row"
            )
        case dict():
            for key, item in value.items():
                _refuse_lone_surrogates(key, where)
                _refuse_lone_surrogates(item, where)
        case list() | tuple():
            for item in value:
                _refuse_lone_surrogates(item, where)


def _value(record: Mapping[str, Any], column: str) -> Any:
    """What ``record`` holds under ``column``, which may lead into nested records; None where there is nothing."""
    if column in record:
        return record[column]
    for end, char in enumerate(column):
        if char == "." and isinstance(inner := record.get(column[:end]), Mapping):
            if (value := _value(inner, column[end + 1 :])) is not None:
                return value
    return None


def _missing(where: str, name: str, column: str, present: Mapping[str, Any]) -> EnvironmentSetupError:
    """The error for a record, or for a file whose columns are ``present``, without the field ``name``."""
    shown = ", ".join(map(repr, sorted(_names(present)))) or "nothing"
    key = f"environment.fields.{name}"
    return EnvironmentSetupError(
        f"{where}: field {column!r} is missing or null (present: {shown}); "
        + (
            f"{key} = {column!r} holds for data and heldout alike: name the field the same in both files"
            if name in present and name != column
            else f"add it, or set {key} to the name that data and heldout use"
        )
    )


def _names(record: Mapping[str, Any]) -> Iterator[str]:
    """Names that a field may be mapped to: those of nested records with dots."""
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in _names(value))
        else:
            yield name


def _read_jsonl(path: Path, _: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentSetupError(f"{path}: cannot be read as UTF-8 text ({error}); correct the file") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise EnvironmentSetupError(
                f"{where}: not JSON ({error.msg} at column {error.colno}); write one JSON object a line"
            ) from error
        except RecursionError as error:
            raise EnvironmentSetupError(f"{where}: nested too deeply; write one JSON object a line") from error
        except ValueError as error:  # an integer of thousands of digits
            raise EnvironmentSetupError(f"{where}: not JSON that can be read ({error}); correct the line") from error
        if not isinstance(record, dict):
            raise EnvironmentSetupError(
                f'{where}: a JSON {type(record).__name__}, not an object; write {{"field": value}}'
            )
        yield where, record


def _read_parquet(path: Path, names: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Records with the columns of ``names`` alone, some at a time: a file may be far larger than these."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentSetupError(
            f"{path}: reading parquet needs pyarrow; pip install pyarrow, or convert the file to JSONL"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = _columns(file.schema_arrow)
            for name, column in names.items():
                if _value(columns, column) is None:
                    raise _missing(str(path), name, column, columns)
            first = 1
            for batch in file.iter_batches(batch_size=1024, columns=sorted(set(names.values()))):
                where = [f"{path}: row {first + index}" for index in range(len(batch))]
                yield from zip(where, _records(batch, where), strict=True)
                first += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentSetupError(f"{path}: not a readable parquet file ({reason}); correct the file") from error


def _records(batch: Any, where: Sequence[str]) -> list[Mapping[str, Any]]:
    """The records of a batch of Arrow; EnvironmentSetupError names the first that holds bytes which are no text."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        return [_record(batch, index, place) for index, place in enumerate(where)]


def _record(batch: Any, index: int, where: str) -> Mapping[str, Any]:
    try:
        (record,) = batch.slice(index, 1).to_pylist()
    except UnicodeDecodeError as error:
        raise EnvironmentSetupError(f"{where}: holds text that is no UTF-8 ({error}); correct the row") from error
    return record


def _columns(fields: Any) -> dict[str, Any]:
    """Names of an Arrow schema or struct type: nested ones as dictionaries, True for all others."""
    from pyarrow import StructType

    return {field.name: _columns(field.type) if isinstance(field.type, StructType) else True for field in fields}


class ShuffledOrder:
    """An endless order over ``size`` rows: every epoch visits each row once, in an order of its own.

    Random access, a function of (seed, index) alone: the same on every machine and library version,
    since rows are sorted by a BLAKE2 hash of (seed, epoch, row).
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"an order needs at least one row, not {size}")
        self._size = size
        self._seed = seed
        # Neighbouring indices straddle two epochs at most; requeued ones may lie one further back.
        self._permutation = functools.lru_cache(maxsize=3)(self._make_permutation)

    def __call__(self, index: int) -> tuple[int, int]:
        """(epoch, row) of position ``index`` >= 0 of the stream."""
        if index < 0:
            raise ValueError(f"index {index} is negative")
        epoch, position = divmod(index, self._size)
        return epoch, self._permutation(epoch)[position]

    def _make_permutation(self, epoch: int) -> list[int]:
        def key(row: int) -> bytes:
            return hashlib.blake2b(f"{self._seed}/{epoch}/{row}".encode(), digest_size=16).digest()

        return sorted(range(self._size), key=key)
