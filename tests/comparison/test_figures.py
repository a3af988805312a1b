"""Which pictures a comparison has, and that they hold what was measured: no browser needed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.comparison.records import record
from vcpo_megatron.comparison.figures import charts, write_figures
from vcpo_megatron.comparison.summary import by_setting

SVG = "{http://www.w3.org/2000/svg}"


def test_pictures_of_two_methods(tmp_path: Path) -> None:
    groups = by_setting([record(), record(seed=1, accuracy=(0.1, 0.2, 0.7)), record("sync", lag=0)])
    paths = write_figures(groups, tmp_path / "figures", target=0.9)
    assert [path.name for path in paths] == ["accuracy-lag16-rate0.001.svg", "accuracy-cost-lag16-rate0.001.svg"]
    root = ElementTree.fromstring(paths[0].read_text())
    assert {"vcpo", "sync, lag 0", "0.9"} <= {"".join(text.itertext()) for text in root.iter(f"{SVG}text")}
    bands = [path for path in root.iter(f"{SVG}path") if path.get("class", "").startswith("band")]
    assert len(bands) == 2
    titles = {title.text for title in root.iter(f"{SVG}title")}
    assert "vcpo: 0.8 at 4" in titles  # the mean of both seeds


def test_a_chart_each_for_what_tells_of_a_collapse() -> None:
    step = tuple(range(20))
    names = ("ess/ratio", "weight/mean", "kl/behavior", "grad_norm/total")
    run = record(step=step, process_seconds=(1.0,) * 20, series={name: (0.5,) * 20 for name in names})
    found = [name for name, _ in charts(by_setting([run]), target=0.9)]
    assert found == [f"{stem}-lag16-rate0.001" for stem in ("accuracy", "accuracy-cost", "ess", "weight", "kl", "norm")]


def test_finals_over_lags_and_rates() -> None:
    runs = [record(lag=lag, rate=rate) for lag in (4, 16) for rate in (1e-3, 2e-3)]
    found = [name for name, _ in charts(by_setting(runs), target=0.9)]
    assert found[-2:] == ["final-lags", "final-rates"]
    assert [name for name in found if name.startswith("accuracy-lag")] == [
        f"accuracy-lag{lag}-rate{rate}" for rate in (0.001, 0.002) for lag in (16, 4)
    ]
