"""Files and texts that have changed are found, by name; each file is looked at by one of those who share the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vcpo_megatron.run.integrity import ChangedError, changed_files, crc_of_file, sealed, unsealed


def test_the_checksum_is_the_standard_one(tmp_path: Path) -> None:
    (tmp_path / "check").write_bytes(b"123456789")
    assert crc_of_file(tmp_path / "check") == 0xCBF43926  # the check value of CRC-32 (ISO-HDLC)
    (tmp_path / "long").write_bytes(b"123456789" * 1_000_000)  # more than a block
    assert crc_of_file(tmp_path / "long") == LONG


#: `python -c "print('123456789' * 1000000, end='')" | gzip -c | tail -c8`, little-endian
LONG = 0x1B815C98


def test_what_has_changed_is_named_by_one_reader_each(tmp_path: Path) -> None:
    known = {}
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_text(name * 10)
        known[name] = crc_of_file(tmp_path / name)
    assert changed_files(tmp_path, known) == []
    (tmp_path / "b").write_text("bbbbbbbbbx")
    (tmp_path / "d").unlink()
    assert changed_files(tmp_path, known, 0, 2) == []  # a and c
    changed, gone = changed_files(tmp_path, known, 1, 2)
    assert changed == f"b has CRC-32 {crc_of_file(tmp_path / 'b'):08x}, not {known['b']:08x}"
    assert gone.startswith("d cannot be read ") and "No such file or directory" in gone


def test_a_sealed_text_comes_back_or_is_refused() -> None:
    values = {"step": 3, "rows": [{"loss": 0.1, "x": float("nan")}], "of": {4: "ä"}}
    text = sealed(values)
    assert repr(unsealed(text)) == "{'step': 3, 'rows': [{'loss': 0.1, 'x': nan}], 'of': {'4': 'ä'}}"
    with pytest.raises(ChangedError, match="its checksum does not match"):
        unsealed(text.replace("0.1", "0.2"))
    with pytest.raises(ChangedError, match="it has no checksum"):
        unsealed(json.dumps({"step": 3}))
    with pytest.raises(ChangedError, match="no object"):
        unsealed("[1]")
