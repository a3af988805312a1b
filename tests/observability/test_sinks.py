"""metrics.jsonl survives kills and resumes; TensorBoard files hold the same numbers without torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vcpo_megatron.observability.sinks import JsonlFollower, JsonlSink, TensorBoardSink, cut_back, read_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *steps: int) -> None:
    sink = JsonlSink(path)
    for step in steps:
        sink.write({"step": step, "loss": step / 4})
    sink.close()


# --- JsonlSink --------------------------------------------------------------------------------


def test_one_flushed_line_a_row(path: Path) -> None:
    sink = JsonlSink(path)
    sink.write({"step": 0, "loss": -0.5, "step/skipped": 0})
    assert path.read_text() == '{"step": 0, "loss": -0.5, "step/skipped": 0}\n'  # before close
    sink.write({"step": np.int64(1), "loss": np.float32(0.25), "reward/mean": np.float64(1)})
    sink.close()
    assert path.read_text().splitlines()[1] == '{"step": 1, "loss": 0.25, "reward/mean": 1.0}'


def test_what_is_not_finite_is_null_and_read_as_nan(path: Path) -> None:
    sink = JsonlSink(path)
    sink.write({"step": 0, "a": math.nan, "b": -math.inf, "c": np.float32("inf"), "d": 1.5})
    sink.close()
    assert path.read_text() == '{"step": 0, "a": null, "b": null, "c": null, "d": 1.5}\n'
    (row,) = read_rows(path)
    assert row["d"] == 1.5 and all(math.isnan(row[name]) for name in "abc")


def test_a_row_needs_a_step(path: Path) -> None:
    with pytest.raises(ValueError, match="needs 'step'.*loss"):
        JsonlSink(path).write({"loss": 1.0})
    assert path.read_text() == ""


@pytest.mark.parametrize("torn", ["", '{"step": 2, "lo', "x" * 200_000])
def test_opening_drops_a_torn_line_and_keeps_the_rest(path: Path, torn: str) -> None:
    write(path, 0, 1)
    whole = path.read_text()
    path.write_text(whole + torn)
    write(path, 2)
    assert path.read_text() == whole + '{"step": 2, "loss": 0.5}\n'


def test_opening_a_file_that_is_one_torn_line(path: Path) -> None:
    path.write_text('{"step"')
    write(path, 0)
    assert path.read_text() == '{"step": 0, "loss": 0.0}\n'


# --- cut_back ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "kept"), [(0, []), (2, [0, 1]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
@pytest.mark.parametrize("torn", ["", '{"step": 4, "lo', '{"step": 1}'])
def test_cut_back(path: Path, first: int, kept: list[int], torn: str) -> None:
    write(path, 0, 1, 2, 3)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + torn)
    assert cut_back(path, first) == []
    assert path.read_text() == "".join(lines[: len(kept)])  # byte for byte


def test_cut_back_without_a_file(path: Path) -> None:
    assert cut_back(path, 3) == []
    assert not path.exists()


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 1}', "7", '{"step": "x"}'])
def test_cut_back_leaves_out_a_line_that_is_no_row_and_tells_its_number(path: Path, line: str) -> None:
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 1}}\n{{"step": 2}}\n')
    assert cut_back(path, 2) == [2]
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_cut_back_is_atomic(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, 0, 1)
    text = path.read_text()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cut_back(path, 1)
    assert path.read_text() == text


# --- reading ----------------------------------------------------------------------------------


def steps(rows: list[dict]) -> list[int]:
    return [row["step"] for row in rows]


def test_follower_gives_each_whole_row_once(path: Path) -> None:
    follower = JsonlFollower(path)
    assert follower.poll() == []
    write(path, 0, 1)
    assert steps(follower.poll()) == [0, 1]
    with open(path, "a") as file:
        file.write('{"step": 2, "los')
        file.flush()
        assert follower.poll() == []
        file.write('s": 0.5}\n{"step": 3}\n')
    assert follower.poll() == [{"step": 2, "loss": 0.5}, {"step": 3}]
    assert follower.poll() == []


def test_follower_reads_a_file_that_was_cut_back_again(path: Path) -> None:
    write(path, 0, 1, 2, 3)
    follower = JsonlFollower(path)
    follower.poll()
    cut_back(path, 2)
    write(path, 2)
    assert steps(follower.poll()) == [0, 1, 2]


def test_follower_leaves_out_lines_that_are_no_rows(path: Path) -> None:
    path.write_bytes(b'{"step": 0}\nbroken\n[1]\n\xff\n{"step": 1}\n')
    assert steps(JsonlFollower(path).poll()) == [0, 1]


# --- TensorBoard ------------------------------------------------------------------------------


def events(directory: Path) -> list:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [event for file in sorted(directory.iterdir()) for event in LegacyEventFileLoader(str(file)).Load()]


def test_tensorboard_scalars(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write({"step": 0, "loss": 0.5, "why": "text", "none": None})
    sink.write({"step": np.int64(7), "loss": np.float32(0.25), "ess/ratio": math.nan})
    sink.close()
    found = [(e.step, v.tag, v.simple_value) for e in events(tmp_path / "tensorboard") for v in e.summary.value]
    assert found[:2] == [(0, "loss", 0.5), (7, "loss", 0.25)]
    assert found[2][:2] == (7, "ess/ratio") and math.isnan(found[2][2]) and len(found) == 3


def test_tensorboard_hides_the_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    """TensorBoard's own reader is the oracle: after a resume at step 2 it shows each step once."""
    for first, values in ((0, [0.0, 1.0, 2.0, 3.0]), (2, [20.0, 30.0])):
        sink = TensorBoardSink(tmp_path, first_step=first)
        for offset, value in enumerate(values):
            sink.write({"step": first + offset, "loss": value})
        sink.close()
        time.sleep(1.1)  # file names hold whole seconds, and are read in their order
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (tag,) = accumulator.Tags()["tensors"] or accumulator.Tags()["scalars"]
    seen = accumulator.Tensors(tag) if accumulator.Tags()["tensors"] else accumulator.Scalars(tag)
    values = [e.value if hasattr(e, "value") else e.tensor_proto.float_val[0] for e in seen]
    assert [(e.step, v) for e, v in zip(seen, values, strict=True)] == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0)]


def test_tensorboard_writes_without_torch_and_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['tensorflow'] = None\n"
        "from pathlib import Path; from vcpo_megatron.observability.sinks import TensorBoardSink\n"
        "sink = TensorBoardSink(Path(sys.argv[1])); sink.write({'step': 0, 'loss': 1.0}); sink.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert [value.simple_value for event in events(tmp_path) for value in event.summary.value] == [1.0]


def test_rows_of_a_killed_writer_are_all_readable(path: Path) -> None:
    code = (
        "import itertools, sys; from pathlib import Path; from vcpo_megatron.observability.sinks import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]))\n"
        "for step in itertools.count(): sink.write({'step': step, 'x': 'y' * 500})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        deadline = time.monotonic() + 30
        while not path.exists() or path.stat().st_size < 100_000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait(timeout=30)
    rows = read_rows(path)
    assert steps(rows) == list(range(len(rows))) and len(rows) > 100
    cut_back(path, 50)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 50


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.close()
    with open("/dev/full", "wb", buffering=0) as sink._file, pytest.raises(OSError) as caught:
        sink.write({"step": 0})
    assert str(caught.value) == f"[Errno 28] No space left on device: '{tmp_path}/metrics.jsonl'"
