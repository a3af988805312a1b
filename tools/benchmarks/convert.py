"""Seconds and peak memory of import and export against copying the same bytes, and what that means for large models.

The model is synthetic: a Llama whose files hold random bfloat16 numbers, written tensor by tensor. Copying reads
and writes the same number of bytes in blocks and makes them durable, as conversion does, in the same run and on
the same disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vcpo_megatron.conversion.writer import FolderWriter
from vcpo_megatron.learner.checkpoint.convert import CheckpointLayout, export_hf, import_hf
from vcpo_megatron.models.families.registry import model_shape, tensors

from .memory import PeakMemory

_BLOCK, _POOL = 16 * 2**20, 2**22
MIB = 2**20

#: Published sizes: config.json of Llama 3.1 70B and 405B.
LARGE: Mapping[str, Mapping[str, int]] = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


@dataclass(frozen=True)
class Measured:
    """Median seconds of an action, on the clock and of the processor, and the most memory above an idle process."""

    action: str
    seconds: float
    cpu_seconds: float
    bytes: int
    peak_bytes: int

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


@dataclass(frozen=True)
class ConversionProjection:
    """A large bfloat16 model at the measured rates: time grows with bytes, memory with the largest parameter."""

    model: str
    bytes: int
    largest_bytes: int
    import_s: float
    export_s: float
    peak_bytes: int


def llama_config(**sizes: int) -> dict[str, Any]:
    """config.json of a Llama 3.1 with other sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "dtype": "bfloat16",
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        **sizes,
    }


def make_model(folder: Path, config: dict[str, Any], seed: int = 0) -> int:
    """Write a folder of random weights (a few million numbers, over and over); returns their bytes."""
    folder.mkdir(parents=True)
    sizes = tensors(model_shape(config))
    writer = FolderWriter(folder, sizes, dict.fromkeys(sizes, torch.bfloat16), 10**9)
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed)).mul_(0.02).to(torch.bfloat16)
    for name, size in sizes.items():
        count = torch.Size(size).numel()
        writer.write(name, pool.repeat(-(-count // _POOL))[:count].view(size))
    writer.finish()
    (folder / "config.json").write_text(json.dumps(config))
    return writer.bytes_total


def largest_parameter(config: dict[str, Any]) -> int:
    """Bytes of the largest fused parameter in bfloat16: gate and up together, or the padded vocabulary."""
    shape = model_shape(config)
    return 2 * max(2 * shape.ffn_hidden_size, shape.vocab_size, shape.q_size + 2 * shape.kv_size) * shape.hidden_size


def copy_folder(source: Path, out: Path) -> None:
    """Copy every file in blocks, durably."""
    out.mkdir()
    for path in sorted(source.iterdir()):
        with open(path, "rb") as reader, open(out / path.name, "wb") as writer:
            while block := reader.read(_BLOCK):
                writer.write(block)
            writer.flush()
            os.fsync(writer.fileno())


def measure(action: str, size: int, run: Callable[..., None], *arguments: Any) -> Measured:
    """Run in a fresh process, so that its peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(sender, run, arguments))
    process.start()
    sender.close()
    try:
        seconds, cpu_seconds, peak = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{action} failed") from None
    finally:
        process.join()
    return Measured(action, seconds, cpu_seconds, size, peak)


def _measured(sender: Any, run: Callable[..., None], arguments: Sequence[Any]) -> None:
    with PeakMemory(0.005) as peak:
        started, cpu_started = time.perf_counter(), time.process_time()
        run(*arguments)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    sender.send((seconds, cpu_seconds, peak.extra))


def import_quietly(source: Path, out: Path, tensor: int) -> None:
    import_hf(source, out, CheckpointLayout(tensor), progress=False)


def export_quietly(source: Path, out: Path) -> None:
    export_hf(source, out, progress=False)


def compare(root: Path, config: dict[str, Any], rounds: int, tensor: int) -> list[Measured]:
    """Copy, import and export ``rounds`` times in turns; the median of each."""
    source = root / "model"
    size = make_model(source, config)
    found: dict[str, list[Measured]] = {}
    for _ in range(rounds):
        steps: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [
            ("copy", copy_folder, (source, root / "copy")),
            ("import", import_quietly, (source, root / "checkpoint", tensor)),
            ("export", export_quietly, (root / "checkpoint", root / "back")),
        ]
        for action, run, arguments in steps:
            found.setdefault(action, []).append(measure(action, size, run, *arguments))
            if action == "copy":
                shutil.rmtree(root / "copy")
        for name in ("checkpoint", "back"):
            shutil.rmtree(root / name)
    return [
        Measured(
            action,
            statistics.median(run.seconds for run in runs),
            statistics.median(run.cpu_seconds for run in runs),
            size,
            max(run.peak_bytes for run in runs),
        )
        for action, runs in found.items()
    ]


def project(config: dict[str, Any], measured: Sequence[Measured]) -> list[ConversionProjection]:
    """Formula: seconds = bytes / measured rate; peak = measured peak x (largest parameter / that of the model)."""
    by_action = {item.action: item for item in measured}
    peak = max(by_action[action].peak_bytes for action in ("import", "export"))
    found = []
    for name, sizes in LARGE.items():
        large = llama_config(**sizes)
        size = sum(2 * torch.Size(shape).numel() for shape in tensors(model_shape(large)).values())
        largest = largest_parameter(large)
        found.append(
            ConversionProjection(
                name,
                size,
                largest,
                size / by_action["import"].rate,
                size / by_action["export"].rate,
                round(peak * largest / largest_parameter(config)),
            )
        )
    return found


def as_dict(measured: Sequence[Measured], projections: Sequence[ConversionProjection]) -> dict[str, Any]:
    copy = measured[0].seconds
    return {
        "measured": [
            {**asdict(item), "bytes_per_s": item.rate, "times_copy": item.seconds / copy} for item in measured
        ],
        "projected": [asdict(item) for item in projections],
    }


def table(measured: Sequence[Measured], projections: Sequence[ConversionProjection], largest: int) -> str:
    """What is printed for people."""
    copy = measured[0].seconds
    lines = ["measured   seconds    MB/s  x copy   cpu s  peak MiB  x largest parameter"]
    lines += [
        f"{item.action:<9} {item.seconds:>8.1f} {item.rate / 1e6:>7.0f} {item.seconds / copy:>7.2f} "
        f"{item.cpu_seconds:>7.1f} "
        f"{item.peak_bytes / MIB:>9.0f} {item.peak_bytes / largest:>20.1f}"
        for item in measured
    ]
    lines += ["", "projected       GB  import min  export min  peak GiB"]
    lines += [
        f"{item.model:<9} {item.bytes / 1e9:>8.0f} {item.import_s / 60:>11.1f} {item.export_s / 60:>11.1f} "
        f"{item.peak_bytes / 2**30:>9.1f}"
        for item in projections
    ]
    return "\n".join(lines)
