"""A checkpoint that cannot be written or read: one line for the user, with its path and the reason.

Megatron writes with several workers and says of a failed one little more than that it failed: whether the disk is
full is therefore also asked of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...run.text import one_line

#: With less than this free a failed write is put down to the full disk, in bytes.
_FULL = 16 * 2**20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or does not fit the run; one line for the user."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever fails inside is a CheckpointError that names ``path``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # fault boundary: torch and Megatron raise errors of every kind here
        if _is_full(path, error):
            reason = f"no space left on device; free space on its disk, then resume the run ({_shown(error)})"
        else:
            reason = _shown(error)
        raise CheckpointError(f"cannot write checkpoint {path}: {reason}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever fails inside is a CheckpointError that names ``path``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # fault boundary: a damaged file fails in as many ways as there are readers
        raise CheckpointError(
            f"cannot read checkpoint {path}: {_shown(error)}; put its files back, or go back to an earlier one with "
            "--from-step N"
        ) from error


def _is_full(path: Path, error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_SPACE:
            return True
        cause = cause.__cause__ or cause.__context__
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free < _FULL


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
