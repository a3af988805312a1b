"""Files of JSON are read, or refused by one error that names the file and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcpo_megatron.run.json_file import JsonFileError, read_json, read_json_object


def test_content_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"ä": [1, null]}', encoding="utf-8")
    assert read_json(path) == read_json_object(path) == {"ä": [1, None]}
    path.write_text("[1]")
    assert read_json(path) == [1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"{", "cannot be read as JSON: Expecting property name"),
        (b'"\xff"', "cannot be read as JSON: 'utf-8' codec"),
        (b"[" * 100_000, "cannot be read as JSON: maximum recursion depth"),
        (b"[1]", "holds no JSON object, but list"),
        (b"\xef\xbb\xbf{}", "cannot be read as JSON: Unexpected UTF-8 BOM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JsonFileError) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(f"{path} {reason}")
    assert caught.value.path == path and caught.value.reason.startswith(reason)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(JsonFileError, match="cannot be read as JSON: .*Is a directory"):
        read_json(tmp_path)


def test_a_byte_order_mark_is_taken_where_it_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert read_json_object(path, byte_order_mark=True) == {}
