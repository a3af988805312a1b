"""A GPU that is claimed and not there: code takes its path for GPUs, and what it puts on the GPU lies in host memory.

Everything that asks torch.cuda is answered as by one device, and every device "cuda" that torch is given is read as the
CPU. Of a GPU nothing is shown but which code runs, which names it needs, and that its numbers are the CPU path's.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.types import Batch

_CPU = torch.device("cpu")


class _HostMemory(TorchFunctionMode):
    """Devices as arguments of torch's functions: CUDA's become the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.device:
            return function(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _CPU
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "record_stream":
            return None
        if name == "type" and len(args) == 1 and not kwargs:  # optimizers sort parameters by this name
            return function(*args).replace("torch.", "torch.cuda.", 1)
        kwargs = {key: _moved(value) for key, value in kwargs.items()}
        return function(*map(_moved, args), **kwargs)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return _CPU if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class _Stream:
    """A stream or an event of a device that has done everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def is_capturing(self) -> bool:
        """Whether it records a graph in place of running."""
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def claim() -> None:
    """From now on this process has a GPU; before anything of Megatron is imported."""
    cuda: Any = torch.cuda
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "manual_seed_all", "init", "_lazy_init")),
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
    stream = _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    torch.accelerator.current_stream = cuda.current_stream
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.default_generators = (torch.default_generator,)
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.compile = lambda function=None, **kwargs: function or (lambda inner: inner)  # type: ignore[assignment]
    _HostMemory().__enter__()


def one_step_each(cases: list[tuple[RunConfig, list[Batch]]]) -> list[dict[str, Any]]:
    """``run_layouts.one_step_each`` on a GPU that is claimed, in a world of one rank; the collectives are gloo's."""
    claim()
    torch.distributed.init_process_group("gloo")
    from . import run_layouts

    return run_layouts.one_step_each(cases)
