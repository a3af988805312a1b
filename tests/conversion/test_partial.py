"""Work that is taken up again, and the line that says how far it is."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcpo_megatron.conversion.errors import ConversionError
from vcpo_megatron.conversion.partial import CopyProgress, Partial, carried_files, size_text


def test_only_the_same_plan_is_taken_up_again(tmp_path: Path) -> None:
    first = Partial(tmp_path / "out", {"of": "a"}, 0)
    (first.path / "data").write_text("half")
    first.record({"done": 1})
    first.record({"done": 2})
    first.release()
    second = Partial(tmp_path / "out", {"of": "a"}, 0)
    assert second.steps == [{"done": 1}, {"done": 2}]
    second.release()
    with open(first.path / "conversion.journal.jsonl", "a") as journal:
        journal.write('{"done": 3')  # killed while writing
    again = Partial(tmp_path / "out", {"of": "a"}, 0)
    assert again.steps == [{"done": 1}, {"done": 2}] and (again.path / "data").exists()
    again.release()
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
    progress = CopyProgress("import m", 4 * 10**9, stream, every_s=0.0)
    progress.skip(10**9)
    progress.add(10**9)
    assert progress.line(10.0) == "import m: 2.00 GB of 4.00 GB (50 %), 100.00 MB/s, 20 s left"
    told = stream.getvalue()
    assert told.startswith("import m: 2.00 GB of 4.00 GB (50 %), ") and told.endswith("left\n")
    assert CopyProgress("x", 10, None).line(1.0) == "x: 0 bytes of 10 bytes (0 %), 0 bytes/s, time left unknown"


def test_sizes_are_never_zero_gigabytes() -> None:
    assert [size_text(count) for count in (0, 999, 1000, 34_500, 2_500_000, 2.11e9, 1.5e12)] == [
        "0 bytes",
        "999 bytes",
        "1.00 kB",
        "34.50 kB",
        "2.50 MB",
        "2.11 GB",
        "1500.00 GB",
    ]


def test_what_is_carried_over(tmp_path: Path) -> None:
    kept = ["chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "tokenizer.json"]
    left = [".gitattributes", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
    for name in (*kept, *left):
        (tmp_path / name).write_text("x")
    (tmp_path / "original").mkdir()
    assert [path.name for path in carried_files(tmp_path)] == kept


def test_a_link_to_nothing_is_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")  # its own reader says so
    (tmp_path / "tokenizer.json").symlink_to("../blobs/gone")
    with pytest.raises(ConversionError, match=r"do not exist: tokenizer\.json: download"):
        carried_files(tmp_path)


# --- OUT.partial of others --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_no_conversion_has_left_is_not_touched(tmp_path: Path, kind: str) -> None:
    path, elsewhere = tmp_path / "out.partial", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "conversion.plan.json").write_text("{}")
    if kind == "folder":
        path.mkdir()
        (path / "thesis.tex").write_text("years")
    elif kind == "file":
        path.write_text("years")
    else:
        path.symlink_to(elsewhere)
    before = sorted(str(file) for file in tmp_path.rglob("*"))
    with pytest.raises(ConversionError, match=r"out\.partial, where .*move it away"):
        Partial(tmp_path / "out", {}, 0)
    assert sorted(str(file) for file in tmp_path.rglob("*")) == before


def test_what_a_killed_start_leaves_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "out.partial"
    path.mkdir()
    Partial(tmp_path / "out", {}, 0).finish()  # killed before the lock was made
    (tmp_path / "out").rmdir()
    path.mkdir()
    (path / "conversion.lock").touch()  # or before the plan
    Partial(tmp_path / "out", {}, 0).finish()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("out", ["source", "source/out", "source/deep/out", "holds"])
def test_a_source_is_not_written_into(tmp_path: Path, out: str) -> None:
    source = tmp_path / ("holds.partial/source" if out == "holds" else "source")
    source.mkdir(parents=True)
    (source.parent / "conversion.plan.json").write_text("{}")  # so that holds.partial looks like our own
    (tmp_path / "other").symlink_to(tmp_path)
    before = sorted(str(file) for file in tmp_path.rglob("*"))
    for name in (tmp_path / out, tmp_path / "other" / out):
        with pytest.raises(ConversionError, match="lies in .*/source, .*name elsewhere"):
            Partial(name, {}, 0, [tmp_path, source][1:])
    assert sorted(str(file) for file in tmp_path.rglob("*")) == before


# --- two at once ------------------------------------------------------------------------------


def test_the_second_of_two_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    program = """
import sys, pathlib
from vcpo_megatron.conversion.partial import Partial
partial = Partial(pathlib.Path(sys.argv[1]), {}, 0)
partial.record({"done": 1})
print("ready", flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        for plan in ({}, {"of": "another"}):
            with pytest.raises(ConversionError, match=f"written by process {holder.pid} on .*: wait"):
                Partial(tmp_path / "out", plan, 0)
        assert (tmp_path / "out.partial" / "conversion.journal.jsonl").read_text() == '{"done": 1}\n'
        holder.kill()
        holder.wait(30)
    partial = Partial(tmp_path / "out", {}, 0)  # nobody has it any more
    assert partial.steps == [{"done": 1}]
    partial.finish()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", unsupported)
    Partial(tmp_path / "out", {}, 0).finish()
    assert (tmp_path / "out").is_dir()


# --- errors at the start ----------------------------------------------------------------------


def test_errors_at_the_start_are_named_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, *arguments: str) -> int:
        if path.name == "conversion.plan.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConversionError, match="out was not written: the disk is full"):
        Partial(tmp_path / "new" / "folders" / "out", {}, 0)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for out, reason in (("file/out", "Not a directory"), ("x" * 300, "File name too long")):
        with pytest.raises(ConversionError, match=f"was not written: .*{reason}; nothing was left behind"):
            Partial(tmp_path / out, {}, 0)
    (tmp_path / "dangling").symlink_to("nowhere")
    for exists in ("dangling", "..", ""):
        with pytest.raises(ConversionError, match="exists: give another name, or remove it"):
            Partial(tmp_path / exists, {}, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_too_little_room_keeps_what_was_done(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "out", {}, 0)
    partial.record({"done": 1})
    partial.release()
    with pytest.raises(ConversionError, match=r"GB free, .*out needs 1000000000\.00 GB"):
        Partial(tmp_path / "out", {}, 10**18)
    assert json.loads((partial.path / "conversion.journal.jsonl").read_text()) == {"done": 1}


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "out", {}, 0)
    missing = tmp_path / "hf" / "tokenizer.json"
    with pytest.raises(ConversionError, match=f"out was not written: {missing}: No such file"), partial.guarded():
        missing.read_text()
    assert list(tmp_path.iterdir()) == []


def test_work_on_another_source_is_said_to_be_begun_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(plan: dict[str, str], *, steps: bool = True) -> str:
        partial = Partial(tmp_path / "out", plan, 0)
        if steps:
            partial.record({"done": 1})
        partial.release()
        return capsys.readouterr().err

    held = f"vcpo: warning: {tmp_path}/out.partial held an interrupted conversion"
    assert interrupted({"source": "/a", "dtype": "float32"}) == ""
    assert interrupted({"source": "/a", "dtype": "float32"}) == ""  # taken up
    assert interrupted({"source": "/b"}) == f"{held} from /a: it is begun anew\n"
    changed = f"{held} with other settings, or of other files: it is begun anew\n"
    assert interrupted({"source": "/b", "dtype": "float32"}, steps=False) == changed
    assert interrupted({"source": "/c"}) == ""  # nothing was recorded
