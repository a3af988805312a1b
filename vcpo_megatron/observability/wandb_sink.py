"""Rows to Weights & Biases, beside ``metrics.jsonl``: a view of the run that may fail without the run noticing.

Everything of the package ``wandb`` happens in a thread of its own: the import, the login, a network that hangs. A row
is handed over and forgotten. What fails there is counted; the first failure is said, and metrics.jsonl has it all.

The key of the account is taken from the environment by ``wandb`` itself (WANDB_API_KEY); so are WANDB_ENTITY,
WANDB_RUN_GROUP, WANDB_BASE_URL and their like. A resumed run continues under the same run id, and since steps may be
repeated there, charts go by the metric ``step``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..run.text import encodable, one_line
from .sinks import Row

#: Rows that wait for a slow network at most; more are left out, and counted.
MOST_WAITING = 10_000
#: Seconds that the end of a run waits for what is still on its way.
CLOSE_S = 30.0
#: Seconds that a login may take.
INIT_S = 60.0


@dataclass(frozen=True)
class WandbRun:
    """What a run is there: ``run_id`` is the same in every attempt; ``directory`` gets the folder ``wandb``, ``config``
    is shown with the run. ``mode``: "online", or "offline", of which ``wandb sync`` sends the files later."""

    project: str
    mode: str
    run_id: str
    name: str
    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)


class WandbSink:
    """Hands rows to the thread; ``failures`` counts what went wrong there. ``warn`` is called once, by that thread."""

    def __init__(self, run: WandbRun, *, warn: Callable[[str], None], close_s: float = CLOSE_S) -> None:
        self._run, self._warn, self._close_s = run, warn, close_s
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._warned = threading.Lock()
        self.failures = 0
        self._thread = threading.Thread(target=self._send, name="wandb", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Numbers of the row; text is left out."""
        numbers = {encodable(name): value for name, value in row.items() if isinstance(value, int | float | np.number)}
        try:
            self._rows.put_nowait(numbers)
        except queue.Full:
            self._failed(f"{MOST_WAITING} rows wait to be sent, more are left out")

    def close(self) -> None:
        """Waits ``close_s`` seconds at most for what is on its way; harmless a second time."""
        if not self._thread.is_alive():
            return
        try:
            self._rows.put_nowait(None)
        except queue.Full:  # the thread hangs; what waits is lost with it
            pass
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._failed(f"rows were not sent within {self._close_s:g} s of the end")

    def _send(self) -> None:
        """The thread. It is the fault boundary of whatever ``wandb`` does."""
        try:
            run = self._begin()
        except (Exception, SystemExit) as error:
            self._failed(one_line(error))
            return
        while (row := self._rows.get()) is not None:
            try:
                run.log(row)
            except (Exception, SystemExit) as error:
                self._failed(one_line(error))
        try:
            run.finish()
        except (Exception, SystemExit) as error:
            self._failed(one_line(error))

    def _begin(self) -> Any:
        import wandb

        run = wandb.init(
            project=self._run.project,
            id=self._run.run_id,
            name=self._run.name,
            mode=self._run.mode,
            dir=str(self._run.directory),
            config=dict(self._run.config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self._warned.acquire(blocking=False):  # and never released: once a run
            self._warn(
                f"Weights & Biases: {why}; the run goes on, metrics.jsonl has every row (observability.wandb_project)"
            )
