"""The file of the rollout store: its tables, how it is opened, and what its errors mean to a user."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

APPLICATION_ID = 0x5643504F  # "VCPO" in the header of the file: tells it from any other SQLite file
SCHEMA_VERSION = 5
#: Seconds for which opening waits for a process that has the file open.
BUSY_S = 5.0
#: Times that a store is copied until one copy is of one moment.
_COPIES = 10

#: States of a group and of a trajectory. The first two are queued, the others are final.
ADMITTED, SAMPLED, TRAINED, DROPPED, FAILED = "admitted", "sampled", "trained", "dropped", "failed"

#: Begins the reason of a failure that is not the trajectory's own: another one ended the process that it ran in.
WORKER_ENDED = "environment worker ended: "

# ``current`` is 1 for the group that stands for its data position (``cursor_index``), one at most: a group
# gives it up when the position is admitted again, or when resuming from a checkpoint undoes the group.
# ``ended_at`` is the number of steps done when a group ended; for a trained group that is its ``step``.
# ``routing`` holds the experts of samples whose routing is replayed, until no checkpoint brings them back.
# ``recorded`` holds what the learner itself, by policy number ``version``, gave the tokens of samples.
# ``partial_rollouts`` holds what unfinished trajectories had of answers at an orderly stop.
# ``evaluations`` holds the samples of held-out prompts, by number of the version and place of the prompt; ``content``
# is the trajectory, until it is pruned.
# ``identity`` is a random id, made with the file: which run the file is of.
# Blobs are in tables of their own, because SQLite rewrites a whole row when one column changes.
_SCHEMA = f"""
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, cursor_index INTEGER NOT NULL,
    size INTEGER NOT NULL CONSTRAINT "a group has at least one trajectory" CHECK (size >= 1),
    admitted_version TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('{ADMITTED}', '{SAMPLED}', '{TRAINED}', '{DROPPED}', '{FAILED}')),
    reason TEXT NOT NULL DEFAULT '', ended_at INTEGER, step INTEGER, position INTEGER, staleness INTEGER,
    current INTEGER NOT NULL DEFAULT 1 CHECK (current IN (0, 1)),
    CONSTRAINT "a group has ended, or is queued" CHECK ((state IN ('{ADMITTED}', '{SAMPLED}')) = (ended_at IS NULL)),
    CONSTRAINT "a trained group has a step" CHECK (state != '{TRAINED}' OR step IS NOT NULL));
CREATE INDEX groups_by_state ON groups (state, group_id);
CREATE UNIQUE INDEX groups_by_step ON groups (step, position);
CREATE INDEX groups_by_cursor ON groups (cursor_index);
CREATE UNIQUE INDEX current_groups ON groups (cursor_index) WHERE current = 1;
CREATE TABLE trajectories (
    group_id INTEGER NOT NULL REFERENCES groups, sample_index INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('{ADMITTED}', '{SAMPLED}', '{TRAINED}', '{DROPPED}', '{FAILED}')),
    reason TEXT NOT NULL DEFAULT '',
    reward REAL CONSTRAINT "a reward is finite" CHECK (abs(reward) < 9e999),
    oldest_version INTEGER, newest_version INTEGER, log_ratio REAL, weight REAL, grad_norm REAL, baseline REAL,
    CONSTRAINT "what was sampled has a reward" CHECK (state NOT IN ('{SAMPLED}', '{TRAINED}') OR reward IS NOT NULL),
    CONSTRAINT "what was sampled has a sampled token"
        CHECK (state NOT IN ('{SAMPLED}', '{TRAINED}') OR oldest_version + newest_version IS NOT NULL),
    PRIMARY KEY (group_id, sample_index)) WITHOUT ROWID;
CREATE TABLE samples (
    group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, prompt_length INTEGER NOT NULL, length INTEGER NOT NULL,
    content BLOB NOT NULL, checksum INTEGER NOT NULL,
    UNIQUE (group_id, sample_index), FOREIGN KEY (group_id, sample_index) REFERENCES trajectories);
CREATE TABLE routing (
    group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, content BLOB NOT NULL, checksum INTEGER NOT NULL,
    UNIQUE (group_id, sample_index), FOREIGN KEY (group_id, sample_index) REFERENCES trajectories);
CREATE TABLE recorded (
    group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, version INTEGER NOT NULL,
    content BLOB NOT NULL, checksum INTEGER NOT NULL,
    UNIQUE (group_id, sample_index), FOREIGN KEY (group_id, sample_index) REFERENCES trajectories);
CREATE TABLE partial_rollouts (
    group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, newest_version INTEGER NOT NULL,
    content BLOB NOT NULL, checksum INTEGER NOT NULL,
    UNIQUE (group_id, sample_index), FOREIGN KEY (group_id, sample_index) REFERENCES trajectories);
CREATE TABLE evaluations (
    version INTEGER NOT NULL, position INTEGER NOT NULL, prompt_id TEXT NOT NULL,
    reward REAL CONSTRAINT "a reward is finite" CHECK (abs(reward) < 9e999), reason TEXT NOT NULL DEFAULT '',
    checksum INTEGER, content BLOB,
    CONSTRAINT "a held-out sample has a reward, or a reason why it has none" CHECK ((reward IS NULL) = (reason != '')),
    UNIQUE (version, position));
CREATE TABLE progress (steps_done INTEGER NOT NULL CHECK (steps_done >= 0));
INSERT INTO progress VALUES (0);
CREATE TABLE identity (run TEXT NOT NULL);
INSERT INTO identity VALUES (lower(hex(randomblob(16))));
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

# When things went on, for whoever looks at a run: seconds since 1970. Nothing else depends on it, and a store of before
# these tables were made gets them when a run opens it. ``spans``: float32, start and end of each wait for a server's
# answer, in seconds since ``began``.
_TIMES = """
CREATE TABLE IF NOT EXISTS episode_times (
    group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, began REAL NOT NULL, ended REAL NOT NULL,
    spans BLOB NOT NULL, PRIMARY KEY (group_id, sample_index)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS step_times (step INTEGER PRIMARY KEY, began REAL NOT NULL, ended REAL NOT NULL);
"""

#: Reasons for which a group is dropped that a resume has to tell from others.
ZERO_VARIANCE, SUPERSEDED, RUN_ENDED = "zero variance", "superseded", "run ended"


class StoreError(RuntimeError):
    """The rollout store cannot be opened, read or written, or was asked for what contradicts it.

    The message is one line that names the file or the group and says what to do.
    """


class StoreFullError(StoreError):
    """The disk takes no more. Nothing of the transaction is written; the same can be tried again later."""


@contextmanager
def store_errors(path: Path, what: str = "a change") -> Iterator[None]:
    """Turn an error of SQLite into a ``StoreError`` that names ``path`` and the remedy; ``what`` is done, for a change
    that a constraint of the schema refuses."""
    try:
        yield
    except sqlite3.Error as error:
        # A quota or a limit on file sizes comes as an error of writing, a full disk as FULL.
        full = (getattr(error, "sqlite_errorname", "") or "").startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE"))
        raise (StoreFullError if full else StoreError)(_explain(path, what, error)) from error


def _explain(path: Path, what: str, error: sqlite3.Error) -> str:
    match getattr(error, "sqlite_errorname", "") or "":
        case name if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return (
                f"rollout store {path} is in use by another process: another run, or a reader, for instance a sqlite3 "
                "shell; close it and try again"
            )
        case name if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE")):
            return f"rollout store {path} cannot grow ({error}); free space on its disk"
        case name if name.startswith("SQLITE_NOTADB"):
            return f"{path} is not a rollout store ({error}); give another run directory or move the file away"
        case name if name.startswith("SQLITE_CORRUPT"):
            return f"rollout store {path} is damaged ({error}); restore it from a copy or start a new run"
        case name if name.startswith("SQLITE_READONLY"):
            return f"rollout store {path} cannot be written ({error}); check the permissions of its folder"
        case name if name.startswith("SQLITE_CANTOPEN"):
            return f"rollout store {path} cannot be opened ({error}); check that its folder exists and is readable"
        case name if name.startswith("SQLITE_CONSTRAINT"):
            return f"{what} contradicts what rollout store {path} holds: {error}"
        case name:
            return f"rollout store {path}: {error}{f' ({name})' if name else ''}"


def check_identity(connection: sqlite3.Connection, path: Path) -> None:
    """StoreError when the file was made by another program or by another version of this one."""
    application, schema = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application != APPLICATION_ID:
        raise StoreError(
            f"{path} is an SQLite file of another program (application id {application:#x}); "
            "give another run directory or move the file away"
        )
    if schema != SCHEMA_VERSION:
        raise StoreError(
            f"rollout store {path} has format {schema}, this version reads format {SCHEMA_VERSION}; "
            "use the version of vcpo_megatron that wrote it, or start a new run in another --run-dir"
        )


def refuse_missing(path: Path) -> None:
    """StoreError when there is no store in ``path``, of a run that has checkpoints."""
    if not path.exists() or path.stat().st_size == 0:
        what = "empty" if path.exists() else "missing"
        raise StoreError(
            f"rollout store {path} is {what}, and the run has checkpoints that need it; put back the file that belongs "
            "to them, with its -wal file if there is one, or start a new run in another --run-dir"
        )


def open_exclusively(path: Path, *, create: bool = True) -> sqlite3.Connection:
    """Open ``path`` for the one process that writes it, and make it when it is missing or empty, or refuse it then.

    A reader that looks into it keeps it busy; it is waited for ``BUSY_S`` seconds. Each commit is on disk before it
    returns (synchronous FULL). The connection may be used by any one thread at a time.
    """
    if not create:
        refuse_missing(path)
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return _open_at_once(path)
        except StoreError as error:
            name = getattr(error.__cause__, "sqlite_errorname", "") or ""
            if not name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or time.monotonic() >= deadline:
                raise
        time.sleep(0.1)  # in the store's own thread


def _open_at_once(path: Path) -> sqlite3.Connection:
    with store_errors(path), ExitStack() as on_error:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        on_error.callback(connection.close)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        empty = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0
        connection.execute("COMMIT")
        if not empty:
            check_identity(connection, path)  # before anything is changed in a file that is not ours
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(f"rollout store {path}: its file system does not allow a write-ahead log")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        if empty:
            connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        check_identity(connection, path)
        connection.executescript(f"BEGIN; {_TIMES} COMMIT;")
        on_error.pop_all()
    return connection


class ReadOnlyFile:
    """A rollout store opened for reading alone; ``close`` removes the copy where one was needed.

    A run that ended by itself leaves one file, which is read in place, as a file that nobody changes. A
    killed run leaves a write-ahead log too. SQLite can read the two only where it may make a third file
    beside them; in a folder that is read-only they are copied to a temporary folder first. So are those of a run
    that is going on, which has its file locked: the copy is the store as it was at one of its last commits. Not for
    the process that has the store open: closing a file drops a process's locks on it.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise StoreError(f"no rollout store at {path}; give the directory of a run that has sampled something")
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        log = _log_of(path)
        if not log.exists():
            self.connection = _open_uri(path, "mode=ro&immutable=1")
            return
        try:
            self.connection = _open_uri(path, "mode=ro")
        except StoreError as error:
            name = str(getattr(error.__cause__, "sqlite_errorname", ""))
            if not name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_BUSY")):
                raise
            self._copy = tempfile.TemporaryDirectory(prefix="vcpo-store-")
            copied = Path(self._copy.name) / path.name
            with ExitStack() as on_error:
                on_error.callback(self._copy.cleanup)
                _copy_consistently(path, copied)
                self.connection = _open_uri(copied, "mode=ro")
                on_error.pop_all()

    def close(self) -> None:
        self.connection.close()
        if self._copy is not None:
            self._copy.cleanup()


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _copy_consistently(path: Path, copied: Path) -> None:
    """Copy file and log while a run may be writing them.

    The log is copied last. As long as it is the same log that was there before the file was copied, it holds every
    page that has changed in the file meanwhile, and a transaction that is cut off at its end does not count. A log
    that was begun anew has other salts in its header (SQLite's file format, section 4.1): the copy is made again.
    """
    for _ in range(_COPIES):
        before = _salts(path)
        try:
            shutil.copyfile(path, copied)
            shutil.copyfile(_log_of(path), _log_of(copied))
        except OSError as error:
            raise StoreError(f"{path} cannot be copied to {copied.parent} ({error.strerror}); set TMPDIR") from error
        if before == _salts(path) == _salts(copied):
            return
    raise StoreError(f"rollout store {path} changes faster than it can be copied; try again, or after the run")


def _salts(path: Path) -> bytes:
    """What tells one write-ahead log of ``path`` from the next; b"" without one."""
    try:
        with open(_log_of(path), "rb") as file:
            return file.read(24)[16:]
    except FileNotFoundError:
        return b""


def _open_uri(path: Path, options: str) -> sqlite3.Connection:
    with store_errors(path), ExitStack() as on_error:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{options}", uri=True, timeout=0, isolation_level=None, check_same_thread=False
        )
        on_error.callback(connection.close)
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        check_identity(connection, path)
        on_error.pop_all()
    return connection
