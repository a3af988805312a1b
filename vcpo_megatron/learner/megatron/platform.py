"""The one module that decides between GPUs (NCCL) and CPUs (gloo), and which fused GPU kernels are used.

Megatron-core calls torch.cuda in many places. Where there is no GPU, ``prepare`` replaces those functions by CPU ones
before any Megatron object is built; every replacement is an attribute of torch or of a Megatron module and has its
reason beside it. With a GPU nothing is replaced, so the GPU path is Megatron's own; names of TransformerEngine that
Megatron uses where there is none are completed on both.

Fused kernels, of those that are installed:

    Adam              Megatron takes TransformerEngine's or Apex's where it can import one; what cannot run here is
                      hidden from it
    weight gradients  Apex's kernel adds grads^T inputs to an fp32 gradient without a tensor of its size in between.
                      Megatron's layers call it for a plain backward. Where a trajectory's gradient is separated it is
                      ``add_product`` that does, on the gradient and on S_g alike

A kernel that is found and not used is named in the log, with the reason. A TransformerEngine that is installed and
cannot be imported is refused: Megatron would end in the middle of an import, or go without it unasked.

Numbers pass from the device to the host through ``read`` and ``start_read`` only, and back through ``to_device``: the
host must be ahead of a GPU to keep it busy, and a copy that it waits for ends that. ``watched_reads`` counts them by
the line that asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config.fused_kernels import InstalledKernels, engine_problem, find_kernels
from ...run.text import one_line

_CPU = torch.device("cpu")


@dataclass
class _Place:
    """Where tensors of the device are, in a process without a GPU."""

    device: torch.device = _CPU


_place = _Place()


@contextlib.contextmanager
def without_storage() -> Iterator[torch.device]:
    """Inside the block the device is torch's "meta", where tensors have shapes and no numbers. Not with a GPU."""
    _place.device = torch.device("meta")
    try:
        yield _place.device
    finally:
        _place.device = _CPU


def has_gpu() -> bool:
    """True where learner ranks use GPUs."""
    return torch.cuda.is_available()


def backend() -> str:
    """torch.distributed backend of the learner's groups."""
    return "nccl" if has_gpu() else "gloo"


def _gpu() -> int:
    """Number of this rank's GPU among those that the process sees."""
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def device() -> torch.device:
    """Device of this rank's parameters and activations."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else _place.device


def runs_kernels() -> bool:
    """True where fused GPU kernels can run."""
    return has_gpu()


@functools.cache
def prepare() -> None:
    """Bind this process to its GPU, or make Megatron run on CPUs. Call before Megatron is imported; once is enough."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)  # checkpoints are read as Megatron does
    if os.environ.get("RANK", "0") == "0":
        for note in kernels().notes:
            print(f"kernels: {note}", file=sys.stderr, flush=True)  # a tool may print JSON
    kernels()
    _complete_names()
    if has_gpu():
        torch.cuda.set_device(_gpu())
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _replace_cuda()
    _patch_megatron()


class DeviceError(RuntimeError):
    """The rank does not see the GPUs that it was given; one line for the user."""


def require_devices(given: Sequence[str]) -> None:
    """DeviceError unless torch sees every one of the GPUs ``given`` to the learner's ranks, as CUDA_VISIBLE_DEVICES
    names them: Megatron would be made to run on CPUs, or ranks would share a GPU."""
    seen = torch.cuda.device_count() if has_gpu() else 0
    if seen >= len(given):
        return
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    reason = f"torch {torch.__version__}, built for {built_for}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without CUDA
        reason += f": {one_line(error)}"
    raise DeviceError(
        f"the learner was given GPUs {','.join(given)} (CUDA_VISIBLE_DEVICES) and sees {seen} of {len(given)} "
        f"({reason}); compare with nvidia-smi and vcpo doctor, or hide the GPUs (CUDA_VISIBLE_DEVICES= ) to run on CPUs"
    )


#: What libraries must read in the environment to give the same bits again -> values that do, the first of them where
#: none is given. cuBLAS chooses among algorithms by the workspace of a stream; NCCL adds up in switches (NVLS) in the
#: order of arrival; TransformerEngine's attention adds up gradients of keys and values in it.
_REPEATABLE: dict[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "Ring,Tree", "Tree,Ring"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


class NotRepeatable(RuntimeError):
    """The environment asks for what does not give the same bits twice."""


def repeat_to_the_last_bit() -> None:
    """Have a GPU give the same bits again, as ``staleness.lag = "exact"`` promises; nothing on CPUs, which do.

    After ``prepare`` and before anything is computed. torch's sums by index, which GPUs make with atomics in any order
    (``index_add_``, ``scatter_add_``), are then sorted first, and an operation that has no such form raises a
    RuntimeError with its name instead of running. NotRepeatable where a variable of the environment rules it out.
    """
    if not has_gpu():
        return
    for name, values in _REPEATABLE.items():
        if (given := os.environ.setdefault(name, values[0])) not in values:
            raise NotRepeatable(
                f'{name}={given} does not repeat a run bit for bit, as staleness.lag = "exact" does; unset it, or set '
                f"{name}={values[0]}"
            )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a write of everything


class _NullStream:
    """Stands for side streams and events: on CPUs everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> _NullStream:
        return self

    def synchronize(self) -> None: ...


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """``factory`` with device="cuda" read as where tensors of the device are, and pin_memory dropped."""

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = _place.device
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    # device=torch.cuda.current_device(); synchronize and empty_cache are barriers of the device.
    cuda.current_device = lambda: _place.device
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
        return f"torch.cuda.{answer.rpartition('.')[2]}" if isinstance(answer, str) else answer

    tensor.type = cuda_type


def _complete_names() -> None:
    """What Megatron 0.16.1 asks of TransformerEngine's names where it is missing, on GPUs and CPUs alike."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as latent

    # A router leaves this name undefined and then compares it with None.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Wrappers import as None or as mocks, and latent attention asks isinstance(x, ...).
    if not isinstance(latent.TELinear, type):
        latent.HAVE_TE = False


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
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


# --- between device and host -------------------------------------------------------------------


@dataclass
class DeviceReads:
    """Copies from the device to the host by the line that asked for them, "folder/file.py:line".

    blocking      the host waited for everything that was queued on the device before them
    in_schedule   those of them between the first forward and the last backward of a schedule
    asynchronous  it went on, and looks at the numbers later
    awaited       it queued what needs none of the numbers, and then waited for them within the same pass: the device
                  goes on with that, but the host's lead is no more than that
    """

    blocking: Counter[str] = field(default_factory=Counter)
    in_schedule: Counter[str] = field(default_factory=Counter)
    asynchronous: Counter[str] = field(default_factory=Counter)
    awaited: Counter[str] = field(default_factory=Counter)

    def note_blocking(self) -> None:
        """One more, for the line that is being executed."""
        line, inside = _asked_by()
        self.blocking[line] += 1
        if inside:
            self.in_schedule[line] += 1


#: Whoever counts at the moment; see ``watched_reads``.
_WATCHERS: list[DeviceReads] = []


@contextlib.contextmanager
def watched_reads(reads: DeviceReads) -> Iterator[DeviceReads]:
    """Count the reads inside the block, on CPUs, too: there a read costs nothing and is counted all the same."""
    _WATCHERS.append(reads)
    try:
        yield reads
    finally:
        _WATCHERS.remove(reads)


def _asked_by() -> tuple[str, bool]:
    """The line of the learner or of Megatron, outside of this module, that is being executed, and whether it is inside
    a schedule."""
    line, frame, inside = "", sys._getframe(1), False
    while True:
        path = Path(frame.f_code.co_filename)
        named = {"learner", "megatron"} & set(path.parts) and path.name not in ("platform.py", "rehearsal.py")
        if named and not line:
            line = f"{'/'.join(path.parts[-2:])}:{frame.f_lineno}"
        inside = inside or frame.f_code.co_name == "run_schedule"
        if frame.f_back is None:
            return line, inside
        frame = frame.f_back


def asked_by() -> str:
    """The line of the learner or of Megatron that is being executed, "folder/file.py:line", this module's skipped."""
    return _asked_by()[0]


def read(tensor: Tensor) -> Tensor:
    """The numbers of ``tensor`` on the host; the host waits until the device has them."""
    for reads in _WATCHERS:
        reads.note_blocking()
    return _stand_ins(tensor) if tensor.is_meta else tensor.cpu()


def bind_thread() -> None:
    """Let this thread use the process's GPU, like the main thread; nothing without one."""
    if has_gpu():
        torch.cuda.set_device(_gpu())


class HostCopy:
    """Numbers on their way to the host, as they are on the device when this is made."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrival: Any = None
        if tensor.is_meta:
            self._numbers = _stand_ins(tensor)
        elif tensor.is_cuda:
            self._numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers.copy_(tensor, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()
        else:
            self._numbers = tensor.clone()

    def wait(self) -> Tensor:
        """The numbers, on the host; waits for this copy alone, in any thread."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers


def start_read(tensor: Tensor, *, awaited: bool = False) -> HostCopy:
    """Send the numbers of ``tensor`` to the host, which goes on; ``awaited``: it waits for them in the same pass."""
    for reads in _WATCHERS:
        (reads.awaited if awaited else reads.asynchronous)[_asked_by()[0]] += 1
    return HostCopy(tensor.detach())


def to_device(numbers: Tensor, target: torch.device) -> Tensor:
    """``numbers`` of the host on ``target``; nobody waits for the copy. A copy from memory that is not pinned waits for
    all that is queued on a GPU."""
    if target.type != "cuda":
        return numbers.to(target)
    return numbers.pin_memory().to(target, non_blocking=True)


def _stand_ins(tensor: Tensor) -> Tensor:
    """What the host reads of a tensor without storage (``rehearsal``): ones."""
    return torch.ones(tensor.shape, dtype=tensor.dtype)


# --- fused kernels ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """adam: whose ("TransformerEngine", "Apex", "torch"). adds_products: weight gradients by Apex's kernel.

    hidden  modules that would be imported and do not work
    notes   lines for the log
    """

    adam: str
    adds_products: bool
    hidden: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose_kernels(installed: InstalledKernels, *, can_run: bool) -> Kernels:
    """What to use of ``installed``; ``can_run``: on this device at all."""
    notes = [f"{installed.apex_problem}: not used"] if installed.apex_problem else []
    if can_run:
        adam = installed.fused_adam
        notes.append(f"Adam: {adam}'s, fused" if adam else "Adam: torch's; TransformerEngine and Apex are missing")
        if installed.weight_gradients:
            notes.append("weight gradients: added by Apex's kernel")
        hidden = ("apex",) * bool(installed.apex_problem)
        return Kernels(adam or "torch", installed.weight_gradients, hidden, tuple(notes))
    names = {
        "transformer_engine": installed.transformer_engine,
        "apex": installed.apex != "none",
        "fused_weight_gradient_mlp_cuda": installed.weight_gradients,
    }
    hidden = tuple(name for name, found in names.items() if found)
    notes += [
        f"{name} is installed and needs a GPU: not used"
        for name in hidden
        if name != "apex" or not installed.apex_problem
    ]
    return Kernels("torch", False, hidden, tuple(notes))


class LibraryError(RuntimeError):
    """A library is installed and cannot be used; one line for the user."""


def _refuse_broken_engine() -> None:
    """LibraryError when TransformerEngine cannot be imported."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # fault boundary: a broken install raises what it likes (OSError, AssertionError, ...)
        raise LibraryError(engine_problem(f"{type(error).__name__}: {one_line(error)}")) from error


def _configure_megatron(kernels: Kernels) -> Kernels:
    """Make Megatron use ``kernels``, before it is imported. Returns what it really uses."""
    for module in kernels.hidden:
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]  # by definition an import of it then fails
    from megatron.core import optimizer

    if kernels.adam == "torch" and not optimizer.USING_PYTORCH_OPTIMIZER:
        raise RuntimeError("Megatron was imported before its fused kernels were decided on")
    if kernels.adam != "torch" and optimizer.USING_PYTORCH_OPTIMIZER:
        kept = [note for note in kernels.notes if not note.startswith("Adam:")]
        note = f"Adam: torch's; {kernels.adam} is installed, but its FusedAdam cannot be imported"
        return dataclasses.replace(kernels, adam="torch", notes=(*kept, note))
    return kernels


@functools.cache
def kernels() -> Kernels:
    """The fused kernels that this rank uses; the first call configures Megatron."""
    installed = find_kernels()
    if installed.transformer_engine and runs_kernels():
        _refuse_broken_engine()
    chosen = choose_kernels(installed, can_run=runs_kernels())
    with contextlib.nullcontext() if has_gpu() else _uncompiled():
        return _configure_megatron(chosen)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Megatron is imported within, and its fused functions stay plain Python. Nothing on CPUs calls for a compiler, and
    ``torch.compile`` imports one, TorchInductor, as soon as it decorates: 800 modules of 3,200."""
    compiled, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, whatever their dtype: [.., m, k] and [.., k, n], both of two dimensions or both of three."""
    if a.dtype is torch.float32:
        return a @ b
    if a.is_cuda:  # the matrix units accumulate in fp32: keep what they have
        return torch.bmm(a, b, out_dtype=torch.float32) if a.dim() == 3 else torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(total: Tensor, grads: Tensor, inputs: Tensor) -> None:
    """total += grads^T inputs by Apex's kernel: total fp32 [d_out, d_in], grads [T, d_out], inputs [T, d_in]."""
    import fused_weight_gradient_mlp_cuda

    fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs.contiguous(), grads.contiguous(), total)
