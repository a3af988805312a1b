"""``python -m vcpo_megatron.learner``: one learner rank, configured by its environment (config/process.py)."""

from __future__ import annotations

import os
import sys
import traceback

from ..config.process import ERROR_PREFIX, ProcessContext
from ..run.output import exit_now, surviving
from .megatron import platform


def main() -> int:
    """Run the rank; 0 after Stop, 1 with a last line that says why. A full disk under its log ends nothing."""
    with surviving():
        return _run()


def _run() -> int:
    worker = None
    try:
        context = ProcessContext.from_environment()
        config = context.config()
        platform.require_devices(context.learner_devices)
        platform.prepare()
        if config.staleness.lag == "exact":
            platform.repeat_to_the_last_bit()
        from .worker import Worker

        worker = Worker(config, context)
        worker.run()
        worker.close()
        return 0
    except Exception as error:  # the rank's fault boundary: everything ends up in the log, and in its last line
        traceback.print_exc()
        if worker is not None:
            worker.report_failure(error)
            worker.close()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{ERROR_PREFIX}learner rank {os.environ.get('RANK', '?')}: {message}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    exit_now(main())
