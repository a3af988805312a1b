"""The roofline of a step's extra work: the formulas of ``costs`` at the rates that this machine sustains.

MachineRates are measured beside the contenders, so that load on the machine falls on both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vcpo_megatron.learner.gradients import weight_gradients
from vcpo_megatron.learner.megatron import platform

from .costs import Machine, extra_flops, extra_traffic, plain_flops

#: Elements of a buffer that no cache holds, and of one that a core's cache holds.
_FAR, _NEAR = 1 << 25, 1 << 17


@dataclass(frozen=True)
class MachineRates:
    """FLOP/s of a matrix product; bytes/s of ``x += a y`` in memory (far) and in a core's cache (near)."""

    product: float
    far: float
    near: float


def clock() -> float:
    """Seconds: wall time once the GPU is idle; on CPUs processor time, which other processes do not stretch."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def _best(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started = clock()
        run()
        seconds.append(clock() - started)
    return min(seconds)


def measure(d_in: int, d_out: int, tokens: int) -> MachineRates:
    """Best of five: a weight gradient of this shape, and additions."""
    device = platform.device()
    a, g = torch.ones(tokens, d_in, device=device), torch.ones(tokens, d_out, device=device)
    w = torch.zeros(d_out, d_in, device=device)
    product = 2 * tokens * d_in * d_out / _best(lambda: w.addmm_(g.t(), a))

    def addition(size: int, times: int) -> float:
        x, y = torch.zeros(size, device=device), torch.ones(size, device=device)
        return 12 * size * times / _best(lambda: [x.add_(y, alpha=0.5) for _ in range(times)])

    return MachineRates(product, addition(_FAR, 1), addition(_NEAR, 64))


def extra_seconds(
    mode: str, lengths: Sequence[int], layers: Sequence[tuple[int, int]], parameters: int, rates: MachineRates
) -> float:
    """Beyond a plain step, at least, for trajectories of these lengths: linear layers alone; rewards all distinct.

    The reference's mode passes over buffers of all ``parameters``, in memory. An exact mode's W_i are in cache on a
    CPU, whose blocks are made to fit, and in memory on a GPU.
    """
    gpu = platform.has_gpu()
    costs = weight_gradients.costs(gpu=gpu)
    constants = (costs.pass_flops, costs.block)
    if mode == "reference":
        machine = Machine(rates.product, rates.far, *constants)
        return len(lengths) * extra_traffic(mode, 0, parameters, 1, machine) / machine.bytes_per_s
    machine = Machine(rates.product, rates.far if gpu else rates.near, *constants)
    flops = sum(extra_flops(mode, n, *layer, machine) for n in lengths for layer in layers)
    traffic = sum(extra_traffic(mode, n, *layer, machine) for n in lengths for layer in layers)
    return flops / machine.flops + traffic / machine.bytes_per_s


def plain_seconds(lengths: Sequence[int], layers: Sequence[tuple[int, int]], rates: MachineRates) -> float:
    """Of a plain step's linear layers."""
    return sum(plain_flops(n, *layer) for n in lengths for layer in layers) / rates.product
