"""``vcpo convert import | export | verify``: Hugging Face folders and Megatron checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import DONE, FAILED, INTERRUPTED, Command, add_command, lost_output, positive, refuse, say

if TYPE_CHECKING:
    from torch import Tensor


def add_convert(commands: Any) -> None:
    """Add ``convert`` and its three actions to the parser of ``vcpo``."""
    parser = commands.add_parser(
        "convert",
        help="convert and compare models: Hugging Face folders and Megatron checkpoints",
        description="Convert between Hugging Face folders and Megatron distributed checkpoints, and compare models.",
        epilog="example: vcpo convert import Qwen2.5-0.5B checkpoint --tensor 2",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_import(actions)
    _add_export(actions)
    _add_verify(actions)


def _add_import(actions: Any) -> None:
    from ..models.dtypes import SAFETENSORS_NAMES

    parser = add_command(
        actions,
        "import",
        _guarded(_import),
        help="Hugging Face folder -> Megatron distributed checkpoint",
        description="Write a Megatron distributed checkpoint, tensor by tensor. Any layout can read it; the one "
        "given finds its shards in pieces of their own. An interrupted import goes on where it was.",
        example="vcpo convert import Qwen2.5-0.5B checkpoint --tensor 2 --pipeline 2",
    )
    parser.add_argument("source", type=Path, metavar="HF", help="Hugging Face folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="checkpoint to write; must not exist")
    for name in ("tensor", "pipeline", "expert"):
        parser.add_argument(
            f"--{name}", type=positive, default=1, metavar="N", help=f"{name}-parallel size (default: 1)"
        )
    parser.add_argument("--dtype", choices=tuple(SAFETENSORS_NAMES), help="default: that of the files")
    parser.add_argument(
        "--vocab-multiple",
        type=positive,
        default=128,
        metavar="N",
        help="the vocabulary is padded to a multiple of this; as model.vocab_multiple (default: %(default)s)",
    )
    _add_quiet(parser)


def _add_export(actions: Any) -> None:
    from ..models.dtypes import SAFETENSORS_NAMES

    parser = add_command(
        actions,
        "export",
        _guarded(_export),
        help="run or Megatron checkpoint -> Hugging Face folder",
        description="Write a Hugging Face folder with tokenizer, chat template and generation configuration, from an "
        "imported checkpoint, a run directory (its newest checkpoint), or RUN_DIR/checkpoints/step_N.",
        example="vcpo convert export runs/first trained-model",
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_CKPT", help="run directory or checkpoint")
    parser.add_argument("out", type=Path, metavar="HF_OUT", help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=tuple(SAFETENSORS_NAMES), help="default: that of the checkpoint")
    parser.add_argument(
        "--max-shard-gb", type=_gigabytes, default=5.0, metavar="GB", help="size of one file (default: %(default)s)"
    )
    _add_quiet(parser)


def _add_verify(actions: Any) -> None:
    parser = add_command(
        actions,
        "verify",
        _guarded(_verify),
        help="compare two models, name the first difference",
        description="Compare configuration, names, shapes, dtypes and values of two models bit for bit, then log-probs "
        "of prompts. Each is a Hugging Face folder, a checkpoint, a run directory, or http://HOST:PORT of a running "
        "server (whose weights cannot be read: log-probs only). Exit 1 when they differ.",
        example="vcpo convert verify Qwen2.5-0.5B checkpoint --logprobs",
    )
    parser.add_argument("a", metavar="A", help="folder, checkpoint, run or server")
    parser.add_argument("b", metavar="B", help="folder, checkpoint, run or server")
    parser.add_argument("--cast", action="store_true", help="compare different dtypes in the narrower one")
    parser.add_argument("--logprobs", action="store_true", help="compare log-probs too (loads both models whole)")
    parser.add_argument("--prompts", type=Path, metavar="JSONL", help='lines {"text": ...} or {"tokens": [...]}')
    parser.add_argument("--tolerance", type=_tolerance, metavar="X", help="largest difference of a log-prob")


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _gigabytes(text: str) -> float:
    value = _number(text)
    if not 1 <= value * 1e9 < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give a number above 0")
    return value


def _tolerance(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance; give 0 or more")
    return value


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if text.isascii():
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number; give one, as in 0.5")


class _Stopped(KeyboardInterrupt):
    """A signal that asks for the end: to the work the same as Ctrl-C. Its argument is the number."""


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``_Stopped``; one that is ignored (under nohup) stays so."""

    def stop(number: int, frame: object) -> None:
        raise _Stopped(number)

    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    former = {number: handler for number, handler in former.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in former:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _guarded(run: Command) -> Command:
    """``run`` with the errors a user can cause as one line and exit code 1, and Ctrl-C as one line and 130; SIGTERM and
    SIGHUP as Ctrl-C, with 143 and 129."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            from ..conversion.errors import ConversionError
            from ..run.output import surviving

            try:
                with _stopped_by_signals(), surviving(lost_output):  # hours of work need no reader
                    return run(args)
            except ConversionError as error:
                return refuse([str(error)], FAILED)
            except OSError as error:
                if error.filename is None:
                    raise
                return refuse([f"{error.filename}: {error.strerror}"], FAILED)
        except KeyboardInterrupt as stop:
            number = signal.Signals(stop.args[0]) if isinstance(stop, _Stopped) else None
            by = f" by {number.name}" if number else ""
            resumes = "; the same command goes on where the work was last recorded" if hasattr(args, "out") else ""
            return refuse([f"interrupted{by}{resumes}"], 128 + number if number else INTERRUPTED)

    return guarded


def _require_paths(args: argparse.Namespace) -> None:
    """What can be said of the paths before torch is imported, which takes seconds."""
    from ..conversion.partial import require_absent, require_apart, require_folder

    require_folder(args.source)
    require_apart(args.out, [args.source])
    require_absent(args.out)


def _import(args: argparse.Namespace) -> int:
    _require_paths(args)
    from ..learner.checkpoint.convert import CheckpointLayout, import_hf

    layout = CheckpointLayout(args.tensor, args.pipeline, args.expert)
    skipped = import_hf(
        args.source, args.out, layout, dtype=args.dtype, vocab_multiple=args.vocab_multiple, progress=not args.quiet
    )
    for name, reason in skipped.items():
        say(f"{name}: not imported: {reason}")
    say(f"{args.out}: imported from {args.source}")
    return DONE


def _export(args: argparse.Namespace) -> int:
    _require_paths(args)
    from ..learner.checkpoint.convert import export_hf

    export_hf(
        args.source, args.out, dtype=args.dtype, max_file_bytes=int(args.max_shard_gb * 1e9), progress=not args.quiet
    )
    say(f"{args.out}: exported from {args.source}")
    return DONE


# --- verify -----------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    if unused := _unused_options(args):
        return refuse([unused])
    from ..conversion.partial import require_folder

    for name in (args.a, args.b):
        if not _is_server(name):
            require_folder(Path(name))
    from ..conversion.verify import compare

    sides = [_side(name) for name in (args.a, args.b)]
    servers = [side for side in sides if side is None]
    if not servers:
        found = compare(sides[0], sides[1], cast=args.cast)
        if isinstance(found, str):
            say(f"A and B differ: {found}")
            return FAILED
        say(f"{found.tensors} tensors, {found.bytes} bytes: equal, SHA-256 {found.digest}")
    if servers or args.logprobs:
        return _verify_logprobs(args, sides)
    return DONE


def _unused_options(args: argparse.Namespace) -> str:
    """An option that nothing would come of; "" when there is none."""
    servers = [name for name in (args.a, args.b) if _is_server(name)]
    if args.cast and servers:
        return f"--cast compares tensors, which {servers[0]} does not show: leave it out"
    if not servers and not args.logprobs:
        for option, value in (("--prompts", args.prompts), ("--tolerance", args.tolerance)):
            if value is not None:
                return f"{option} is about log-probs: give --logprobs too"
    return ""


def _is_server(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _side(name: str) -> Any:
    """Tensors of one side; None for a server."""
    from ..conversion.verify import FolderTensors
    from ..learner.checkpoint.convert import OpenedCheckpoint

    if _is_server(name):
        return None
    path = Path(name)
    return FolderTensors(path) if (path / "config.json").is_file() else OpenedCheckpoint(path)


def _verify_logprobs(args: argparse.Namespace, sides: Sequence[Any]) -> int:
    from ..conversion.errors import ConversionError
    from ..conversion.families.registry import open_model
    from ..conversion.logprobs import TOLERANCES, read_prompts
    from ..conversion.verify import compare_logprobs
    from ..learner.checkpoint.convert import OpenedCheckpoint

    local = next((number for number, side in enumerate(sides) if side is not None), None)
    if local is None:
        raise ConversionError("one of A and B must be a folder or a checkpoint, which says what the vocabulary is")
    side = sides[local]
    shape = open_model(side.config)[1]
    folder = side.hf if isinstance(side, OpenedCheckpoint) else Path((args.a, args.b)[local])
    prompts = read_prompts(args.prompts, folder, shape.vocab_size, shape.max_position_embeddings)
    tolerance = args.tolerance
    if tolerance is None:
        tolerance = max(TOLERANCES[side.computes_in] for side in sides if side is not None)
    # Checkpoints last: preparing this process for Megatron replaces functions of torch that transformers builds on.
    order = sorted((0, 1), key=lambda number: isinstance(sides[number], OpenedCheckpoint))
    names = (args.a, args.b)
    scored = {number: _logprobs(names[number], sides[number], prompts, shape.vocab_size) for number in order}
    found = compare_logprobs(scored[0], scored[1], tolerance)
    if isinstance(found, str):
        say(f"A and B differ: {found}")
        return FAILED
    say(f"log-probs of {len(prompts)} prompts: equal to {found:.3g} (at most {tolerance:g})")
    return DONE


def _logprobs(name: str, side: Any, prompts: Sequence[Sequence[int]], vocab_size: int) -> list[Tensor]:
    from ..conversion.verify import FolderTensors

    if side is None:
        return _server_logprobs(name, prompts, vocab_size)
    if isinstance(side, FolderTensors):
        from ..conversion.logprobs import reference_logprobs

        return reference_logprobs(Path(name), prompts)
    from ..learner.megatron import platform

    platform.prepare()  # before Megatron is imported: it warns of what it lacks
    from ..learner.checkpoint.logprobs import checkpoint_logprobs

    return checkpoint_logprobs(side, prompts)


def _server_logprobs(url: str, prompts: Sequence[Sequence[int]], vocab_size: int) -> list[Tensor]:
    import asyncio

    import torch

    from ..conversion.errors import ConversionError
    from ..rollout.client.http import ServerClient, ServerError, ServerUnavailable
    from ..rollout.client.protocol import ProtocolError

    async def score() -> list[list[float]]:
        client = ServerClient(url, vocab_size, 600.0)
        try:
            return [await client.score(list(prompt)) for prompt in prompts]
        finally:
            await client.close()

    try:
        return [torch.tensor(row) for row in asyncio.run(score())]
    except (ServerError, ServerUnavailable, ProtocolError) as error:
        raise ConversionError(f"{url} could not score the prompts: {error}") from None
