"""What all tools share: their options, what they say beside the result, and how they end."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from vcpo_megatron.config.process import ERROR_PREFIX

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "modular_sum_cpu" / "run.toml"


def tool_parser(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Options that every tool has; ``quick``: what its short form does."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, prog=f"tools/{name}.py"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def progress(line: str) -> None:
    """One line on standard error, beside the result."""
    print(line, file=sys.stderr, flush=True)


def failed(error: object) -> int:
    """Say why there is no result; the exit code."""
    progress(f"{ERROR_PREFIX}{error}")
    return 1


def run_tool(main: Callable[[], int]) -> NoReturn:
    """Exit with what ``main`` returns; with 143 after SIGTERM and 130 after Ctrl-C, once temporary folders and
    processes of its own are gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
