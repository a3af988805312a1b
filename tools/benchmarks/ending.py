"""How a tool ends that is told to: temporary folders and processes of its own go with it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def run_tool(main: Callable[[], int]) -> NoReturn:
    """Exit with what ``main`` returns; with 143 after SIGTERM and 130 after Ctrl-C, once its contexts are left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
