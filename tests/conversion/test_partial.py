"""Work that is taken up again, and the line that says how far it is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from vcpo_megatron.conversion.errors import ConversionError
from vcpo_megatron.conversion.partial import Partial, Progress, carried_files


def test_only_the_same_plan_is_taken_up_again(tmp_path: Path) -> None:
    first = Partial(tmp_path / "out", {"of": "a"}, 0)
    (first.path / "data").write_text("half")
    first.record({"done": 1})
    first.record({"done": 2})
    assert Partial(tmp_path / "out", {"of": "a"}, 0).steps == [{"done": 1}, {"done": 2}]
    with open(first.path / "conversion.journal.jsonl", "a") as journal:
        journal.write('{"done": 3')  # killed while writing
    again = Partial(tmp_path / "out", {"of": "a"}, 0)
    assert again.steps == [{"done": 1}, {"done": 2}] and (again.path / "data").exists()
    other = Partial(tmp_path / "out", {"of": "b"}, 0)
    assert other.steps == [] and not (other.path / "data").exists()


def test_the_result_appears_whole(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "out", {}, 0)
    (partial.path / "data").write_text("whole")
    partial.record({"done": 1})
    assert not (tmp_path / "out").exists()
    partial.finish()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"] and not partial.path.exists()
    with pytest.raises(ConversionError, match="exists"):
        Partial(tmp_path / "out", {}, 0)


def test_errors_leave_nothing_and_interruptions_everything(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "out", {}, 0)
    with pytest.raises(ConversionError, match="no good"), partial.guarded():
        raise ConversionError("no good")
    assert list(tmp_path.iterdir()) == []
    partial = Partial(tmp_path / "out", {}, 0)
    with pytest.raises(KeyboardInterrupt), partial.guarded():
        raise KeyboardInterrupt
    assert partial.path.exists()


def test_progress() -> None:
    stream = io.StringIO()
    progress = Progress("import m", 4 * 10**9, stream, every_s=0.0)
    progress.skip(10**9)
    progress.add(10**9)
    assert progress.line(10.0) == "import m: 2.00 of 4.00 GB (50 %), 100 MB/s, 20 s left"
    assert stream.getvalue().startswith("import m: 2.00 of 4.00 GB (50 %), ") and stream.getvalue().endswith("left\n")
    assert Progress("x", 10, None).line(1.0) == "x: 0.00 of 0.00 GB (0 %), 0 MB/s, time left unknown"


def test_what_is_carried_over(tmp_path: Path) -> None:
    kept = ["chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "tokenizer.json"]
    left = [".gitattributes", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
    for name in (*kept, *left):
        (tmp_path / name).write_text("x")
    (tmp_path / "original").mkdir()
    assert [path.name for path in carried_files(tmp_path)] == kept
