"""The one reader of JSON files: what cannot be read is one error with the path and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonFileError(ValueError):
    """A file is missing, cannot be read, is not JSON, or holds no object. The message begins with ``path``."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} {reason}")


def read_json(path: Path, *, byte_order_mark: bool = False) -> Any:
    """Content of ``path``, UTF-8; JsonFileError. ``byte_order_mark``: the text may begin with one."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig" if byte_order_mark else "utf-8"))
    except FileNotFoundError:
        raise JsonFileError(path, "does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise JsonFileError(path, f"cannot be read as JSON: {error}") from None


def read_json_object(path: Path, *, byte_order_mark: bool = False) -> dict[str, Any]:
    """As ``read_json``, and the content is an object."""
    content = read_json(path, byte_order_mark=byte_order_mark)
    if not isinstance(content, dict):
        raise JsonFileError(path, f"holds no JSON object, but {type(content).__name__}")
    return content
