"""The one place that knows whether the learner runs on GPUs (NCCL) or on CPUs (gloo).

Megatron-core asks torch.cuda in many places. Where there is no GPU, ``install`` replaces those
questions by plain CPU answers before any Megatron object is built; every replacement is an
attribute of torch or of a Megatron module and has its reason beside it. With a GPU nothing is
replaced, so the GPU path is Megatron's own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...config.fused_kernels import find_kernels
from .kernels import Kernels, choose_kernels, tell_megatron

_CPU = torch.device("cpu")


def has_gpu() -> bool:
    """True where learner ranks use GPUs."""
    return torch.cuda.is_available()


def backend() -> str:
    """torch.distributed backend of the learner's groups."""
    return "nccl" if has_gpu() else "gloo"


def device() -> torch.device:
    """Device of this rank's parameters and activations."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else _CPU


def runs_kernels() -> bool:
    """True where fused GPU kernels can run."""
    return has_gpu()


@functools.cache
def kernels() -> Kernels:
    """The fused kernels that this rank uses; Megatron is told on the first call."""
    chosen = choose_kernels(find_kernels(), can_run=runs_kernels())
    with contextlib.nullcontext() if has_gpu() else _uncompiled():
        return tell_megatron(chosen)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Megatron is imported within, and its fused functions stay plain Python. Nothing on CPUs calls for a compiler, and
    ``torch.compile`` imports one, TorchInductor, as soon as it decorates: 800 modules of 3,200."""
    compiled, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled


@functools.cache
def prepare() -> None:
    """Bind this process to its GPU, or make Megatron run on CPUs. Call before Megatron is imported; once is enough."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)  # checkpoints are read as Megatron does
    if os.environ.get("RANK", "0") == "0":
        for note in kernels().notes:
            print(f"kernels: {note}", file=sys.stderr, flush=True)  # a tool may print JSON
    kernels()
    if has_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _answer_for_cuda()
    _mend_megatron()


class _NullStream:
    """Stands for side streams and events: on CPUs everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> _NullStream:
        return self

    def synchronize(self) -> None: ...


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """``factory`` with device="cuda" read as the CPU and pin_memory dropped."""

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


def _answer_for_cuda() -> None:
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    # device=torch.cuda.current_device(); synchronize and empty_cache are barriers of the device.
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *a, **k: None
    cuda.empty_cache = lambda: None
    # Literal device="cuda" in factories, and tensor.cuda().
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor.cuda = lambda self, *a, **k: self
    # Side streams of the MoE dispatchers.
    null = _NullStream()
    cuda.Stream = cuda.Event = _NullStream
    cuda.current_stream = lambda *a, **k: null
    cuda.stream = lambda stream: contextlib.nullcontext()
    # The model-parallel RNG tracker keeps states of the CPU generator.
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    # Optimizers sort parameters by type() == "torch.cuda.FloatTensor".
    tensor_type = tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    tensor.type = cuda_type


def _mend_megatron() -> None:
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.transformer.multi_latent_attention as latent

    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    # 0.16.1 leaves this name undefined without TransformerEngine and then compares it with None.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Without TransformerEngine its wrappers import as None or as mocks, and latent attention asks isinstance(x, ...).
    if not isinstance(latent.TELinear, type):
        latent.HAVE_TE = False
    # Split sizes stay tensors when they already are on the CPU; all_to_all_single wants lists.
    dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, record_stream=False: (
        t.numpy() if as_numpy and torch.is_tensor(t) else t
    )
    # gloo gathers and scatters equal parts only; experts cut over tensor ranks get unequal ones.
    mappings._gather_along_first_dim = _uneven_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim)


def _uneven_gather(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``even``, and parts of ``sizes`` rows by padding them to the longest."""

    def gather(x: torch.Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or len(set(sizes)) == 1 or group.size() == 1:
            return even(x, group, None, use_global_buffer)
        padded = torch.cat([x, x.new_zeros(max(sizes) - len(x), *x.shape[1:])])
        parts = even(padded, group).split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def _uneven_reduce_scatter(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``even``, and parts of ``sizes`` rows by summing everything everywhere."""

    def scatter(x: torch.Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or len(set(sizes)) == 1 or group.size() == 1:
            return even(x, group, None, use_global_buffer)
        total = x.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()

    return scatter
