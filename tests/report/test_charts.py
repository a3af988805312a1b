"""Charts as SVG: values stand where they belong, spikes are kept, text is escaped, whatever the values are."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

from vcpo_megatron.report import charts
from vcpo_megatron.report.charts import (
    PLOT_HEIGHT,
    PLOT_WIDTH,
    WIDTH,
    Axis,
    Guide,
    Interval,
    Series,
    escaped,
    line_chart,
    number_text,
    shares_chart,
    stacked_chart,
    standalone,
    timeline_chart,
)

SVG = "{http://www.w3.org/2000/svg}"
Points = list[list[tuple[float, float]]]


def lines(chart: str) -> list[Points]:
    """Points of each line of a chart, by its pieces; of the plot: from the left, from its bottom, as shares."""
    root = ET.fromstring(chart)
    bottom = float(root.attrib["viewBox"].split()[3]) - charts._BOTTOM
    found = []
    for path in root.iter(f"{SVG}path"):
        if path.attrib["class"].startswith("line"):
            pieces = path.attrib["d"].replace("h2", "").split("M")[1:]
            units = [[tuple(map(float, point.split())) for point in piece.split("L")] for piece in pieces]
            found.append(
                [[((x - charts._LEFT) / PLOT_WIDTH, (bottom - y) / PLOT_HEIGHT) for x, y in piece] for piece in units]
            )
    return found


def texts(chart: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(chart).iter() if node.tag in (f"{SVG}text",)]


def test_values_stand_where_they_belong() -> None:
    chart = line_chart("a", [Series("a", [0, 10, 20, 40], [1, 3, 5, 2])], y=Axis(low=0, high=10))
    ((piece,),) = lines(chart)
    assert piece == [pytest.approx(at, abs=1e-3) for at in [(0, 0.1), (0.25, 0.3), (0.5, 0.5), (1, 0.2)]]


def test_a_logarithmic_axis() -> None:
    chart = line_chart("a", [Series("a", [0, 1, 2, 3], [1, 10, 1000, 0])], y=Axis(log=True))
    ((piece,),) = lines(chart)
    assert [height for _, height in piece] == pytest.approx([0, 1 / 3, 1, 0], abs=1e-3)  # 0 stands at the lower end
    assert {"1", "10", "100", "1000"} <= set(texts(chart))


@pytest.mark.parametrize("spike", [0, 1, 777, 5_000, 99_999])
@pytest.mark.parametrize("value", [-9.0, 9.0])
def test_no_spike_is_hidden(spike: int, value: float) -> None:
    ys = [math.sin(step / 50) for step in range(100_000)]
    ys[spike] = value
    ((piece,),) = lines(line_chart("a", [Series("a", range(len(ys)), ys)], y=Axis(low=-10, high=10)))
    assert len(piece) <= 2 * PLOT_WIDTH + 2
    at = next(x for x, height in piece if height == pytest.approx((value + 10) / 20, abs=1e-3))
    assert at == pytest.approx(spike / (len(ys) - 1), abs=1e-3)


def test_a_line_is_broken_where_a_value_is_not_finite() -> None:
    ys = [1.0, 2.0, math.nan, 3.0, math.inf, 1.0, 1.0]
    ((first, single, last),) = lines(line_chart("a", [Series("a", range(7), ys)]))
    assert (len(first), len(single), len(last)) == (2, 1, 2)


@pytest.mark.parametrize(
    "ys", [[], [math.nan], [0.0], [5.0, 5.0], [0.0, 1e308, -1e308], [1e-300, 2e-300], [-3.0, -2.0], [math.inf, 1.0]]
)
@pytest.mark.parametrize("log", [False, True])
def test_any_values_give_a_chart(ys: list[float], log: bool) -> None:
    chart = line_chart("a", [Series("a", range(len(ys)), ys, band=(ys, ys), dots=True)], y=Axis(log=log))
    for piece in (piece for line in lines(chart) for piece in line):
        assert all(-0.01 <= x <= 1.01 and -0.01 <= height <= 1.01 for x, height in piece)
    assert "nan" not in chart and "inf" not in chart


def test_a_band_is_as_wide_as_its_widest_in_a_column() -> None:
    low, high = [0.0] * 10_000, [1.0] * 10_000
    high[1234] = 5.0
    chart = line_chart("a", [Series("a", range(10_000), high, band=(low, high))], y=Axis(high=10))
    path = next(p.attrib["d"] for p in ET.fromstring(chart).iter(f"{SVG}path") if p.attrib["class"].startswith("band"))
    heights = {float(point.split()[1]) for point in path.strip("MZ").split("L")}
    top, bottom = min(heights), max(heights)
    assert bottom - top == pytest.approx(PLOT_HEIGHT / 2, abs=0.1)


def test_names_and_guides() -> None:
    two = [Series("one", [0, 1], [0, 1]), Series("two", [0, 1], [1, 0]), Series("behind", [0, 1], [1, 1], faint=True)]
    shown = texts(line_chart("title", two, guides=[Guide("turned", x=0.5), Guide("bound", y=2.0)]))
    assert {"title", "one", "two", "turned", "bound"} <= set(shown) and "behind" not in shown
    assert "one" not in texts(line_chart("title", two[:1]))
    assert "one" in texts(line_chart("title", two[:1], legend=True))


def test_a_stack_is_the_sum_of_its_parts() -> None:
    chart = stacked_chart("time", [0, 1, 2], {"wait": [1, 2, math.nan], "train": [3, 2, 4]}, y=Axis(low=0, high=8))
    areas = [p.attrib["d"] for p in ET.fromstring(chart).iter(f"{SVG}path") if p.attrib["class"].startswith("area")]
    tops = [[float(point.split()[1]) for point in path[1:-1].split("L")][:3] for path in areas]
    floor = float(areas[0][1:-1].split("L")[-1].split()[1])
    heights = [[(floor - y) / PLOT_HEIGHT * 8 for y in top] for top in tops]
    assert heights == [pytest.approx([1, 2, 0], abs=0.01), pytest.approx([4, 4, 4], abs=0.01)]
    ((total,),) = lines(chart)
    assert [height for _, height in total] == pytest.approx([0.5, 0.5, 0.5], abs=0.01)


def test_a_stack_of_many_steps_keeps_means_and_the_extremes_of_its_total() -> None:
    values = [1.0] * 20_000
    values[4321] = 101.0
    chart = stacked_chart("time", range(20_000), {"a": values}, y=Axis(low=0, high=200))
    ((total,),) = lines(chart)
    assert max(height for _, height in total) == pytest.approx(101 / 200, abs=0.01) and len(chart) < 40_000


def test_shares_are_as_wide_as_their_values() -> None:
    chart = shares_chart("where", {"a": {"wait": 10.0, "train": 30.0}, "b": {"train": 20.0}}, unit="s")
    bars = [node for node in ET.fromstring(chart).iter(f"{SVG}rect") if node.attrib["class"].startswith("area")]
    assert [float(bar.attrib["width"]) for bar in bars] == pytest.approx([100, 300, 200], abs=0.1)
    assert ["".join(bar.itertext()) for bar in bars] == ["wait: 10 s", "train: 30 s", "train: 20 s"]
    assert {"40 s", "20 s"} <= set(texts(chart))


def test_a_timeline() -> None:
    rows = [("0/0", [Interval(0, 2, "generate"), Interval(2, 2, "tool"), Interval(2, 10, "wait")])]
    root = ET.fromstring(timeline_chart("when", rows, ["generate", "tool", "wait"]))
    bars = [node for node in root.iter(f"{SVG}rect") if node.attrib["class"].startswith("area")]
    assert [float(bar.attrib["width"]) for bar in bars] == pytest.approx(
        [PLOT_WIDTH * 0.2, 0.5, PLOT_WIDTH * 0.8], abs=0.1
    )
    assert [bar.attrib["class"] for bar in bars] == ["area f0", "area f1", "area f2"]


WRITTEN = "</svg><script>alert(1)</script>\" ' & \ud83d \x00 \x1b[31m \u202e"
CHARTS: list[Callable[[str], str]] = [
    lambda text: line_chart(text, [Series(text, [1], [1], dots=True), Series(text * 9, [1], [1])], x=Axis(text)),
    lambda text: line_chart("a", [], y=Axis(text), guides=[Guide(text, x=1.0), Guide(text, y=1.0)]),
    lambda text: stacked_chart(text, [0], {text: [1]}),
    lambda text: shares_chart(text, {text: {text: 1.0}}, unit=text),
    lambda text: timeline_chart(text, [(text, [Interval(0, 1, text)])], [text]),
]


@pytest.mark.parametrize("chart", CHARTS)
def test_no_text_is_obeyed(chart: Callable[[str], str]) -> None:
    text = chart(WRITTEN)
    text.encode()  # no half of a pair
    assert not {node.tag for node in ET.fromstring(text).iter()} & {f"{SVG}script", "script"}
    assert escaped(WRITTEN)[:20] in text and "<script" not in text and "\x00" not in text


def test_a_chart_as_a_file() -> None:
    text = standalone(line_chart("a", [Series("a", [0, 1], [0, 1])]))
    root = ET.fromstring(text)
    assert root.attrib["viewBox"].startswith(f"0 0 {WIDTH} ") and root[0].tag == f"{SVG}style"
    assert not re.findall(r"(?:href|src|url)\b", text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345, "12345"), (999_999.4, "999999"), (0.25, "0.25"), (1e-6, "1e-6"), (2.5e9, "2.5e9")]
    + [(-0.00123, "-0.00123"), (1 / 3, "0.3333"), (math.nan, "-"), (math.inf, "-"), (2000.0, "2000")],
)
def test_numbers_for_a_reader(value: float, text: str) -> None:
    assert number_text(value) == text
