"""``vcpo serve``: a model over HTTP by the embedded engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import add_command, refuse


def add_serve(commands: Any) -> None:
    """Add ``serve`` to the commands of ``vcpo``."""
    parser = add_command(
        commands,
        "serve",
        _serve,
        help="serve a model over HTTP with the embedded engine",
        description="Serve a Hugging Face model folder over HTTP with the embedded engine, until a signal.",
        example="vcpo serve examples/modular_sum_cpu/model --port 30000",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=30000, help="0: any free one (default: %(default)s)")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 0 to 65535")
    return int(text)


def _serve(args: argparse.Namespace) -> int:
    from ..models.folder import read_model, tokenizer_problems, weight_problems
    from ..run.errors import ConfigError

    try:
        shape = read_model(args.model)
    except ConfigError as error:
        return refuse(error.problems)
    if found := weight_problems(args.model, shape) + tokenizer_problems(args.model, shape):
        return refuse(found)

    from ..rollout.embedded.server import serve

    return serve(["--model-path", str(args.model), "--host", args.host, "--port", str(args.port)])
