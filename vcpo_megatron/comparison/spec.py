"""What is compared: a SPEC.toml, read and checked by itself. Its runs are made in ``matrix``.

    run = "../modular_sum_cpu/run.toml"   # what all runs have in common
    steps = 300                           # optimizer steps of every run
    eval_every = 20                       # steps between evaluations
    lags = [0, 16, 64]                    # staleness.lag = "exact" with each of these
    rates = [5e-4]                        # optimizer.lr
    seeds = [0, 1]                        # train.seed
    target = 0.9                          # accuracy, the time to which is told (default)

    [set]                                 # keys of RUN.toml, for every run
    optimizer.schedule = "constant"

    [[methods]]
    name = "vcpo"                         # a method preset of that name, unless ``set`` names another

    [[methods]]
    name = "synchronous_grpo"             # a control: lags or rates of its own
    lags = [0]
    set.algorithm.method = "grpo"

Relative paths are taken from the folder of the file that holds them.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ..config.load import read_toml
from ..config.methods import METHODS
from ..run.errors import ConfigError
from ..run.text import one_line

#: Keys of RUN.toml that a spec gives in its own words -> that word.
GIVEN = {
    "train.steps": "steps",
    "train.eval_every": "eval_every",
    "train.seed": "seeds",
    "optimizer.lr": "rates",
    "staleness.max_staleness": "lags",
    "staleness.lag": "lags",
}
#: What others call our keys.
_KNOWN_AS = {
    **dict.fromkeys(("base", "config", "run_toml", "runs"), "run"),
    **dict.fromkeys(("lag", "k", "max_staleness", "staleness"), "lags"),
    **dict.fromkeys(("lr", "lrs", "rate", "learning_rates"), "rates"),
    **dict.fromkeys(("seed",), "seeds"),
    **dict.fromkeys(("method",), "methods"),
    **dict.fromkeys(("overrides", "override"), "set"),
}
#: A name is part of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")

Lag = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0)]
Tables = dict[str, dict[str, Any]]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ComparedMethod(_Table):
    """A method, or a control: the keys that make it, and lags and rates where they are not everybody's."""

    name: str
    lags: tuple[Lag, ...] | None = None
    rates: tuple[Rate, ...] | None = None
    set: Tables = {}


class ComparisonSpec(_Table):
    """A SPEC.toml; ``folder`` is where it lies."""

    run: str
    steps: int = Field(ge=1)
    eval_every: int = Field(20, ge=1)
    lags: tuple[Lag, ...] = Field(min_length=1)
    rates: tuple[Rate, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field((0,), min_length=1)
    target: float = 0.9
    set: Tables = {}
    methods: tuple[ComparedMethod, ...] = Field(min_length=1)
    name: str = Field(exclude=True)
    folder: Path = Field(exclude=True)

    @property
    def base(self) -> Path:
        """The RUN.toml that all runs have in common."""
        return self.folder / Path(self.run).expanduser()


def load_spec(path: Path) -> ComparisonSpec:
    """Read and check ``path``; ConfigError with every problem, one line each."""
    data = read_toml(path)
    if own := {"name", "folder"} & data.keys():
        raise ConfigError([f"{path}: {key}: unknown key{_near(key, ComparisonSpec)}" for key in sorted(own)])
    data |= {"name": path.stem, "folder": path.absolute().parent}
    try:
        spec = ComparisonSpec.model_validate(_tupled(data), strict=True)
    except ValidationError as error:
        raise ConfigError([f"{path}: {line}" for line in map(_line, error.errors(include_url=False))]) from None
    if problems := list(_problems(spec)):
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return spec


def _tupled(data: Mapping[str, Any]) -> dict[str, Any]:
    """TOML's lists as tuples, and its whole numbers as rates: what strict validation takes."""

    def listed(key: str, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        items = [float(item) if key == "rates" and type(item) is int else item for item in value]
        return tuple(_tupled(item) if key == "methods" and isinstance(item, dict) else item for item in items)

    return {key: listed(key, value) for key, value in data.items()}


def _line(error: ErrorDetails) -> str:
    """What is wrong with one key, and what to do."""
    place = error["loc"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    match error["type"]:
        case "extra_forbidden":
            table = ComparedMethod if place[0] == "methods" else ComparisonSpec
            return f"{key}: unknown key{_near(str(place[-1]), table)}"
        case "missing":
            return f"{key}: missing; add it"
        case "too_short":
            return f"{key}: must not be empty"
        case _:
            return f"{key} = {one_line(repr(error['input']), 80)}: {error['msg'].lower()}"


def _near(key: str, table: type[_Table]) -> str:
    keys = [name for name in table.model_fields if name not in ("name", "folder") or table is ComparedMethod]
    known = _KNOWN_AS.get(key)
    close = [known] if known in keys else difflib.get_close_matches(key, keys, 1)
    return f"; did you mean {close[0]}?" if close else f"; keys here are {', '.join(keys)}"


def _problems(spec: ComparisonSpec) -> Iterator[str]:
    """What single keys do not show."""
    if spec.eval_every > spec.steps:
        yield f"eval_every = {spec.eval_every}: above steps = {spec.steps}, so that only ends are seen; lower it"
    for key in ("lags", "rates", "seeds"):
        yield from _repeated(key, getattr(spec, key))
    yield from _given("set", spec.set)
    yield from _repeated("methods: name", [method.name for method in spec.methods])
    for method in spec.methods:
        where = f"method {one_line(repr(method.name), 80)}"
        if not _NAME.fullmatch(method.name):
            yield f"{where}: a name is of letters, digits, '_', '-' and '.', 60 at most, and begins with none of these"
        for key in ("lags", "rates"):
            if (own := getattr(method, key)) is not None:
                yield from _repeated(f"{where}: {key}", own)
                if not own:
                    yield f"{where}: {key}: must not be empty; leave it out for those of the whole comparison"
        yield from _given(f"{where}: set", method.set)
        tables = (spec.set, method.set)
        if method.name not in METHODS and not any("method" in table.get("algorithm", {}) for table in tables):
            close = difflib.get_close_matches(method.name, METHODS, 1)
            yield (
                f"{where}: there is no method preset of that name{f', but {close[0]}' if close else ''}; "
                "say which one is meant by set.algorithm.method"
            )


def _repeated(key: str, values: Sequence[object]) -> Iterator[str]:
    for value, count in Counter(values).items():
        if count > 1:
            yield f"{key}: {value} stands there {count} times; leave it once"


def _given(where: str, tables: Tables) -> Iterator[str]:
    """Keys that the comparison itself decides."""
    for dotted, word in GIVEN.items():
        section, _, key = dotted.partition(".")
        if key in tables.get(section, {}):
            yield f"{where}.{dotted}: is given by {word} here; remove it"
