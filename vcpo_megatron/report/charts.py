"""Charts as SVG text, drawn without a library: lines with bands, stacked areas, shares, timelines.

Every function gives one ``<svg>`` element, ``WIDTH`` units wide and as high as its legend needs, that scales to the
width it is given. In a page ``STYLE`` stands once for all of them, dark and light; ``standalone`` makes a file of one.

A line of more points than there are columns of pixels keeps the smallest and the largest of each column, in their
order: no spike is hidden. All text is escaped here, whoever wrote it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..run.text import printable

#: Units of a chart; about a CSS pixel each where three charts stand side by side.
WIDTH, PLOT_HEIGHT = 420, 150
_LEFT, _RIGHT, _BOTTOM, _TITLE, _ROW = 52, 10, 34, 22, 15
PLOT_WIDTH = WIDTH - _LEFT - _RIGHT
#: Colours, one a series or a run; a number beyond them begins anew. For light and for dark ground.
_LIGHT = ("#0b6fb8", "#d1495b", "#1b8a5a", "#b8860b", "#7b4fb5", "#00808a", "#c2571a", "#6b6b6b")
_DARK = ("#5ab0f2", "#ff8594", "#55c894", "#e3b64d", "#b594ec", "#4fc6cf", "#f2955c", "#a8a8a8")
COLORS = len(_LIGHT)
#: Width of a character of a chart's text, for the place of legends; a little more than it is on average.
_CHARACTER = 6.6
_LONGEST_NAME = 34
#: What lies beyond stands at the end of its axis: the length of one must be a number.
_MOST = 1e300


@dataclass(frozen=True)
class Axis:
    """``low`` and ``high`` lie on the axis, whatever the values are. ``log``: values that are not positive stand at its
    lower end. An axis of steps or counts has ``whole`` ticks."""

    label: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False


@dataclass(frozen=True)
class Series:
    """A line: ``ys`` at ascending ``xs``, broken where a value is not finite. ``color``: its number.

    ``band``: lower and upper ends of a band around it, such as the least and the most of some seeds. ``dots``: a dot a
    value, for few values. ``dashed``: tells two lines of one colour apart; so are those beyond the last colour.
    ``faint``: for single values behind a line of their median.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    band: tuple[Sequence[float], Sequence[float]] | None = None
    dots: bool = False
    dashed: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Guide:
    """A straight line with a label: vertical at ``x``, or level at ``y``."""

    label: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Interval:
    """From ``start`` to ``end``, on the axis of a timeline, something of ``kind`` went on. ``length``: how long, where
    it is drawn shorter."""

    start: float
    end: float
    kind: str
    length: float | None = None


def _style() -> str:
    rules = [
        ".chart{display:block;width:100%;height:auto;font:11px system-ui,-apple-system,'Segoe UI',sans-serif}",
        ".chart text{fill:#24292f}.chart .title{font-size:13px;font-weight:600}.chart .dim{fill:#5b6570}",
        ".chart .grid{stroke:#d9dee3;stroke-width:1}.chart .guide{stroke:#5b6570;stroke-width:1;stroke-dasharray:4 3}",
        ".chart .line{fill:none;stroke-width:1.5;stroke-linejoin:round;stroke-linecap:round}",
        ".chart .dashed{stroke-dasharray:5 3}.chart .faint{stroke-width:1;opacity:.35}",
        ".chart .band{opacity:.2}.chart .area{opacity:.85}",
        ".chart .label{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}",
    ]
    rules += [f".chart .l{i}{{stroke:{color}}}.chart .f{i}{{fill:{color}}}" for i, color in enumerate(_LIGHT)]
    dark = [".chart text{fill:#e6e9ec}.chart .dim{fill:#9aa4ae}.chart .grid{stroke:#343b43}"]
    dark += [".chart .guide{stroke:#9aa4ae}.chart .label{stroke:#14181d}"]
    dark += [f".chart .l{i}{{stroke:{color}}}.chart .f{i}{{fill:{color}}}" for i, color in enumerate(_DARK)]
    return "".join([*rules, "@media(prefers-color-scheme:dark){", *dark, "}"])


def colors(*, dark: bool) -> tuple[str, ...]:
    """The colours by number, for a swatch outside of a chart."""
    return _DARK if dark else _LIGHT


#: Rules for all charts of a page.
STYLE = _style()


def standalone(chart: str) -> str:
    """The text of an SVG file of one chart, for a picture in a document: on white ground, or on a dark one where the
    reader prefers that."""
    ground = ".ground{fill:#fff}@media(prefers-color-scheme:dark){.ground{fill:#14181d}}"
    head, _, rest = chart.partition(">")
    return f'{head}><style>{ground}{STYLE}</style><rect class="ground" width="100%" height="100%"/>{rest}\n'


def escaped(text: object) -> str:
    """``text`` for HTML and XML, in one line: nothing of it is obeyed by a reader, what cannot be shown (control
    characters, halves of a surrogate pair) is written as in Python."""
    return html.escape(printable(str(text)))


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: Axis = Axis("step", whole=True),
    y: Axis = Axis(),
    guides: Sequence[Guide] = (),
    columns: int = PLOT_WIDTH,
    legend: bool | None = None,
) -> str:
    """Lines over one pair of axes, the first on top. ``columns``: a line has at most two points in each of so many.
    ``legend``: by default where there are two lines or more; faint ones have no name in it."""
    xs = [value for one in series for value in one.xs] + [guide.x for guide in guides if guide.x is not None]
    ys = [value for one in series for values in (one.ys, *(one.band or ())) for value in values]
    ys += [guide.y for guide in guides if guide.y is not None]
    names = _entries(series)
    frame = _Frame(title, names if legend or (legend is None and len(names) > 1) else [])
    across, up = _Scale.over(xs, x, _LEFT, _LEFT + PLOT_WIDTH), _Scale.over(ys, y, frame.bottom, frame.top)
    body = [frame.axes(across, up, x, y)]
    for one in series:
        body += _band(one, across, up, columns)
    for one in sorted(reversed(series), key=lambda one: not one.faint):  # the first one on top
        path = "".join(_pen(points) for points in _strokes(one.xs, one.ys, across, up, columns))
        if path:
            look = " dashed" if one.dashed or one.color >= COLORS else ""
            look += " faint" if one.faint else ""
            body.append(f'<path class="line l{one.color % COLORS}{look}" d="{path}"/>')
        if one.dots:
            body += _dots(one, across, up)
    body += [_guide(guide, across, up, frame) for guide in guides]
    return frame.svg("".join(body))


def stacked_chart(
    title: str,
    xs: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    *,
    x: Axis = Axis("step", whole=True),
    y: Axis = Axis(low=0.0),
    total: Sequence[float] | None = None,
    columns: int = PLOT_WIDTH // 2,
) -> str:
    """Areas on top of each other, in order: each the mean of its column of pixels, what is not finite as 0.

    ``total``: a line over them that keeps the extremes, by default the sum of the parts.
    """
    areas = {name: np.nan_to_num(np.asarray(values, float), posinf=0.0, neginf=0.0) for name, values in parts.items()}
    sums = list(total) if total is not None else list(np.sum(list(areas.values()), axis=0)) if areas else []
    names = [(name, f"f{i % COLORS}") for i, name in enumerate(areas)]
    frame = _Frame(title, names)
    across, up = _Scale.over(xs, x, _LEFT, _LEFT + PLOT_WIDTH), _Scale.over(sums, y, frame.bottom, frame.top)
    body = [frame.axes(across, up, x, y)]
    below: np.ndarray | None = None
    for i, values in enumerate(areas.values()):
        centers, means = _column_means(xs, values, across, columns)
        above = means if below is None else below + means
        top = [(at, up(value)) for at, value in zip(centers, above, strict=True)]
        floor = np.zeros_like(above) if below is None else below
        base = [(at, up(value)) for at, value in zip(centers[::-1], floor[::-1], strict=True)]
        if top:
            body.append(f'<path class="area f{i % COLORS}" d="{_pen([*top, *base])}Z"/>')
        below = above
    strokes = "".join(_pen(points) for points in _strokes(xs, sums, across, up, PLOT_WIDTH))
    if strokes:
        body.append(f'<path class="line l{COLORS - 1}" style="stroke-width:.8" d="{strokes}"/>')
    return frame.svg("".join(body))


def shares_chart(title: str, rows: Mapping[str, Mapping[str, float]], *, unit: str = "") -> str:
    """One bar a row, of the parts of its total; the largest row is as wide as the chart. Values are not negative."""
    kinds = list(dict.fromkeys(kind for parts in rows.values() for kind in parts))
    color = {kind: i % COLORS for i, kind in enumerate(kinds)}
    frame = _Frame(title, [(kind, f"f{color[kind]}") for kind in kinds], plot_height=34 * len(rows) + 4)
    most = max((math.fsum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    full, body = WIDTH - 2 * _RIGHT, []
    for number, (name, parts) in enumerate(rows.items()):
        at, top = float(_RIGHT), frame.top + 34 * number
        sum_text = f"{number_text(math.fsum(parts.values()))} {unit}".rstrip()
        body.append(f'<text x="{_RIGHT}" y="{top + 10}">{_short(name)}</text>')
        body.append(
            f'<text class="dim" x="{WIDTH - _RIGHT}" y="{top + 10}" text-anchor="end">{escaped(sum_text)}</text>'
        )
        for kind, value in parts.items():
            width = value / most * full
            hover = escaped(f"{kind}: {number_text(value)} {unit}".rstrip())
            body.append(
                f'<rect class="area f{color[kind]}" x="{_unit(at)}" y="{top + 14}" width="{_unit(width)}" height="13">'
                f"<title>{hover}</title></rect>"
            )
            at += width
    return frame.svg("".join(body), axes=False)


def timeline_chart(
    title: str, rows: Sequence[tuple[str, Sequence[Interval]]], kinds: Sequence[str], *, x: Axis = Axis("s")
) -> str:
    """One bar a row, of its intervals; a kind's colour is that of its place in ``kinds``. An interval is at least half
    a unit wide, so that none is hidden."""
    height = 12
    color = {kind: i % COLORS for i, kind in enumerate(kinds)}
    frame = _Frame(title, [(kind, f"f{color[kind]}") for kind in kinds], plot_height=max(height * len(rows), height))
    ends = [value for _, intervals in rows for one in intervals for value in (one.start, one.end)]
    across = _Scale.over(ends, x, _LEFT, _LEFT + PLOT_WIDTH)
    body = [frame.x_axis(across, x)]
    for number, (name, intervals) in enumerate(rows):
        top = frame.top + height * number
        label = _short(name, 8)
        body.append(f'<text class="dim" x="{_LEFT - 4}" y="{top + 9}" text-anchor="end">{label}</text>')
        for one in intervals:
            left, right = across(one.start), across(one.end)
            length = one.end - one.start if one.length is None else one.length
            hover = escaped(f"{name}: {one.kind}, {number_text(length)} {x.label}")
            body.append(
                f'<rect class="area f{color[one.kind]}" x="{_unit(left)}" y="{top + 1}" '
                f'width="{_unit(max(right - left, 0.5))}" height="{height - 2}"><title>{hover}</title></rect>'
            )
    return frame.svg("".join(body), axes=False)


def number_text(value: float) -> str:
    """A number for a reader: four digits, and a power of ten only where it is far from 1; "-" where it is none."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        text = f"{value:.4g}"
        return text if "e" not in text else f"{value:.0f}"
    mantissa, _, power = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(power)}" if power else mantissa


# --- axes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """From values between ``low`` and ``high`` to units between ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], axis: Axis, start: float, end: float) -> _Scale:
        known = [min(max(value, -_MOST), _MOST) for value in values if math.isfinite(value)]
        known += [value for value in (axis.low, axis.high) if value is not None]
        if axis.log:
            known = [value for value in known if value > 0] or [1.0]
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        if low == high:
            room = 0.5 if axis.whole else abs(low) * 0.05 or 1.0
            low, high = (low / 2, high * 2) if axis.log else (low - room, high + room)
        return cls(low, high, start, end, axis.log)

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        share = (
            math.log(value / self.low) / math.log(self.high / self.low)
            if self.log
            else (value - self.low) / (self.high - self.low)
        )
        return self.start + share * (self.end - self.start)

    def array(self, values: np.ndarray) -> np.ndarray:
        values = np.clip(values, self.low, self.high)
        if self.log:
            share = np.log(values / self.low) / math.log(self.high / self.low)
        else:
            share = (values - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        """At most ``most`` and some round values, in order."""
        if self.log and self.high / self.low >= 100:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, math.ceil((last - first + 1) / most))
            return [10.0**power for power in range(first, last + 1, stride)]
        if self.log and self.high / self.low >= 4:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [
                at for power in powers for factor in (1, 2, 5) if self.low <= (at := factor * 10.0**power) <= self.high
            ]
        span = (self.high - self.low) / most
        base = 10.0 ** math.floor(math.log10(span)) if span > 0 else 1.0
        step = next((base * factor for factor in (1, 2, 5, 10) if base * factor >= span), base * 10)
        if whole:
            step = max(1.0, step)
        first = math.ceil(self.low / step - 1e-9)
        count = min(math.floor((self.high - first * step) / step + 1e-9) + 1, 2 * most)
        return [(first + i) * step for i in range(max(0, count))]


@dataclass(frozen=True)
class _Frame:
    """Title, legend and the place of the plot below them. ``names``: (text, class of its colour)."""

    title: str
    names: Sequence[tuple[str, str]]
    plot_height: int = PLOT_HEIGHT

    @property
    def top(self) -> int:
        return _TITLE + _ROW * len(self._legend_rows()) + 6

    @property
    def bottom(self) -> int:
        return self.top + self.plot_height

    def _legend_rows(self) -> list[list[tuple[float, str, str]]]:
        """(place, text, class) of each name, in rows that fit."""
        rows: list[list[tuple[float, str, str]]] = []
        at = math.inf
        for name, shade in self.names:
            width = 16 + _CHARACTER * min(len(name), _LONGEST_NAME) + 8
            if at + width > WIDTH - _RIGHT:
                rows.append([])
                at = float(_RIGHT)
            rows[-1].append((at, name, shade))
            at += width
        return rows

    def axes(self, across: _Scale, up: _Scale, x: Axis, y: Axis) -> str:
        parts = []
        for value in up.ticks(5, whole=y.whole):
            at = _unit(up(value))
            parts.append(f'<path class="grid" d="M{_LEFT} {at}h{PLOT_WIDTH}"/>')
            parts.append(f'<text class="dim" x="{_LEFT - 5}" y="{_unit(up(value) + 3.5)}" text-anchor="end">')
            parts.append(f"{number_text(value)}</text>")
        if y.label:
            at = f'x="{WIDTH - _RIGHT}" y="15" text-anchor="end"'
            parts.append(f'<text class="dim" {at}>{escaped(y.label)}</text>')
        return self.x_axis(across, x) + "".join(parts)

    def x_axis(self, across: _Scale, x: Axis) -> str:
        parts = [f'<path class="grid" d="M{_LEFT} {self.bottom}h{PLOT_WIDTH}"/>']
        for value in across.ticks(6, whole=x.whole):
            parts.append(f'<path class="grid" d="M{_unit(across(value))} {self.bottom}v4"/>')
            parts.append(f'<text class="dim" x="{_unit(across(value))}" y="{self.bottom + 16}" text-anchor="middle">')
            parts.append(f"{number_text(value)}</text>")
        at = WIDTH - _RIGHT
        parts.append(f'<text class="dim" x="{at}" y="{self.bottom + 29}" text-anchor="end">{escaped(x.label)}</text>')
        return "".join(parts)

    def svg(self, body: str, *, axes: bool = True) -> str:
        legend = []
        for row, entries in enumerate(self._legend_rows()):
            for at, name, shade in entries:
                top = _TITLE + _ROW * row
                swatch = "".join(f'<rect class="{shade}" x="{_unit(at)}" y="{top + 3}" width="11" height="6" rx="1"/>')
                legend.append(f'{swatch}<text x="{_unit(at + 15)}" y="{top + 10}">{_short(name)}</text>')
        height = self.bottom + _BOTTOM
        return (
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escaped(self.title)}"><text class="title" x="{_RIGHT}" y="15">{escaped(self.title)}</text>'
            f"{''.join(legend)}{body}</svg>"
        )


def _entries(series: Sequence[Series]) -> list[tuple[str, str]]:
    return [(one.name, f"f{one.color % COLORS}") for one in series if not one.faint]


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    """The name where there is room for it, else its beginning and its whole when it is pointed at."""
    if len(name) <= longest:
        return escaped(name)
    return f"{escaped(name[: longest - 1])}…<title>{escaped(name)}</title>"


# --- lines ------------------------------------------------------------------------------------


def _unit(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def _pen(points: Sequence[tuple[float, float]]) -> str:
    """A path along ``points``; a single one is a short stroke."""
    if len(points) == 1:
        return f"M{_unit(points[0][0] - 1)} {_unit(points[0][1])}h2"
    return "M" + "L".join(f"{_unit(a)} {_unit(b)}" for a, b in points)


def _strokes(
    xs: Sequence[float], ys: Sequence[float], across: _Scale, up: _Scale, columns: int
) -> Iterator[list[tuple[float, float]]]:
    """Points of each unbroken piece of a line, at most two a column."""
    places, values = np.asarray(xs, float), np.asarray(ys, float)
    known = np.isfinite(values) & np.isfinite(places)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
    for start, end in edges.reshape(-1, 2):
        kept = start + _extremes(across.array(places[start:end]), values[start:end], across, columns)
        yield list(zip(across.array(places[kept]).tolist(), up.array(values[kept]).tolist(), strict=True))


def _extremes(places: np.ndarray, values: np.ndarray, across: _Scale, columns: int) -> np.ndarray:
    """Indices that are kept of a piece of a line: all where they are few, else the smallest and the largest value of
    each column, and both ends."""
    if len(places) <= 2 * columns:
        return np.arange(len(places))
    of = np.floor((places - across.start) / (across.end - across.start) * columns).clip(0, columns - 1)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(of) != 0]))
    ends = np.append(starts[1:], len(places))
    kept = {0, len(places) - 1}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        kept |= {start + int(values[start:end].argmin()), start + int(values[start:end].argmax())}
    return np.array(sorted(kept))


def _column_means(
    xs: Sequence[float], values: np.ndarray, across: _Scale, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """(place, mean) of each column that has values."""
    places = across.array(np.asarray(xs, float))
    if len(places) <= columns:
        return places, values
    of = np.floor((places - across.start) / (across.end - across.start) * columns).clip(0, columns - 1).astype(int)
    counts = np.bincount(of, minlength=columns)
    there = counts > 0
    means = np.bincount(of, values, columns)[there] / counts[there]
    centers = np.bincount(of, places, columns)[there] / counts[there]
    return centers, means


def _band(one: Series, across: _Scale, up: _Scale, columns: int) -> Iterator[str]:
    if one.band is None:
        return
    lower, upper = (np.asarray(values, float) for values in one.band)
    known = np.isfinite(lower) & np.isfinite(upper)
    places = across.array(np.asarray(one.xs, float)[known])
    lower, upper = lower[known], upper[known]
    if not len(places):
        return
    if len(places) > 2 * columns:  # the widest of each column
        of = np.floor((places - across.start) / (across.end - across.start) * columns)
        starts = np.flatnonzero(np.concatenate([[True], np.diff(of) != 0]))
        lower, upper = np.minimum.reduceat(lower, starts), np.maximum.reduceat(upper, starts)
        places = places[starts]
    top = zip(places.tolist(), up.array(upper).tolist(), strict=True)
    base = zip(places[::-1].tolist(), up.array(lower)[::-1].tolist(), strict=True)
    yield f'<path class="band f{one.color % COLORS}" d="{_pen([*top, *base])}Z"/>'


def _dots(one: Series, across: _Scale, up: _Scale) -> Iterator[str]:
    for place, value in zip(one.xs, one.ys, strict=True):
        if math.isfinite(value):
            hover = escaped(f"{one.name}: {number_text(value)} at {number_text(place)}")
            at = f'cx="{_unit(across(place))}" cy="{_unit(up(value))}"'
            yield f'<circle class="f{one.color % COLORS}" {at} r="2.2"><title>{hover}</title></circle>'


def _guide(guide: Guide, across: _Scale, up: _Scale, frame: _Frame) -> str:
    if guide.x is not None:
        at = across(guide.x)
        path, anchor = f"M{_unit(at)} {frame.top}V{frame.bottom}", "end" if at > WIDTH * 0.7 else "start"
        place = f'x="{_unit(at + (-3 if anchor == "end" else 3))}" y="{frame.bottom - 4}" text-anchor="{anchor}"'
    else:
        assert guide.y is not None, "a guide has a place"
        at = up(guide.y)
        path = f"M{_LEFT} {_unit(at)}h{PLOT_WIDTH}"
        place = f'x="{_LEFT + PLOT_WIDTH}" y="{_unit(at - 3 if at > frame.top + 12 else at + 11)}" text-anchor="end"'
    return f'<path class="guide" d="{path}"/><text class="dim label" {place}>{escaped(guide.label)}</text>'
