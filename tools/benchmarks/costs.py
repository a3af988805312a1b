"""FLOPs and bytes of every mode, as formulas; tests hold them against counted small cases.

A linear layer is (d_in, d_out) as one tensor-parallel rank holds it. T is the tokens of one trajectory.
What a plain step does for it: 2 T d_in d_out FLOPs each in the forward, the input gradient and the weight
gradient. A "pass" reads and rewrites every element of a weight-shaped fp32 tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vcpo_megatron.learner.gradients.weight_gradients import accumulate_limit, crossover


@dataclass(frozen=True)
class Machine:
    """What a device sustains; the last two as ``weight_gradients.costs`` has them."""

    flops: float
    bytes_per_s: float
    pass_flops: int
    gram_block: int


#: By data sheet, not measured: a bf16 matrix product at 40 % of peak, HBM3.
H100 = Machine(400e12, 3.35e12, 1500, 1024)


@dataclass(frozen=True)
class Shape:
    """A dense model with a gated MLP."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def linears(self, tensor: int = 1) -> list[tuple[int, int]]:
        """(d_in, d_out) of one decoder layer on one of ``tensor`` ranks: qkv, projection, gate and up, down."""
        q, kv = self.heads * self.head_dim // tensor, self.kv_heads * self.head_dim // tensor
        return [
            (self.hidden, q + 2 * kv),
            (q, self.hidden),
            (self.hidden, 2 * self.ffn // tensor),
            (self.ffn // tensor, self.hidden),
        ]

    @property
    def parameters(self) -> int:
        """Of all layers and both embeddings, without norms."""
        return self.layers * sum(i * o for i, o in self.linears()) + 2 * self.vocabulary * self.hidden


#: Llama 3 70B.
SEVENTY_B = Shape(8192, 80, 28672, 64, 8, 128, 128256)


def gram_flops(tokens: int, d_in: int, d_out: int, machine: Machine) -> int:
    """Of <A A^T, G G^T>, by the lower triangle of blocks; the padding of those that share a call is left out."""
    pairs = 0
    for start in range(0, tokens, machine.gram_block):
        rows = min(machine.gram_block, tokens - start)
        pairs += rows * (rows + start)
    return 2 * pairs * (d_in + d_out)


def plain_flops(tokens: int, d_in: int, d_out: int) -> int:
    """Forward, input gradient and weight gradient."""
    return 6 * tokens * d_in * d_out


def extra_flops(mode: str, tokens: int, d_in: int, d_out: int, machine: Machine) -> int:
    """Beyond a plain step, for one trajectory in one linear layer."""
    product = 2 * tokens * d_in * d_out
    if mode == "accumulate":
        short = tokens <= accumulate_limit(d_in, d_out, machine.pass_flops)
        return gram_flops(tokens, d_in, d_out, machine) + product if short else 0
    if mode == "accumulate_shared":
        short = tokens <= accumulate_limit(d_in, d_out, machine.pass_flops, shared=True)
        return gram_flops(tokens, d_in, d_out, machine) if short else 0
    short = tokens <= crossover(d_in, d_out)
    if mode == "deferred":
        return gram_flops(tokens, d_in, d_out, machine) if short else 0
    if mode == "two_pass":  # a forward, an input gradient, and norms
        return 2 * product + (gram_flops(tokens, d_in, d_out, machine) if short else product)
    if mode in ("proxy", "reference"):
        return 0
    raise ValueError(f"unknown mode {mode!r}")


def extra_traffic(mode: str, tokens: int, d_in: int, d_out: int, machine: Machine) -> int:
    """Bytes of memory traffic beyond a plain step from weight-shaped tensors, for one trajectory in one layer."""
    size = d_in * d_out
    if mode == "accumulate":  # write W, read it for the norm, add it twice (read W, read and write the target)
        return size * 4 * (2 + 3 + 3) if tokens > accumulate_limit(d_in, d_out, machine.pass_flops) else 0
    if mode == "accumulate_shared":  # short ones: two additions a reward, not a trajectory; left out
        return size * 4 * (2 + 3 + 3) if tokens > accumulate_limit(d_in, d_out, machine.pass_flops, shared=True) else 0
    if mode == "deferred":
        return size * 4 * (2 + 3) if tokens > crossover(d_in, d_out) else 0
    if mode == "two_pass":
        return size * 4 * 2 if tokens > crossover(d_in, d_out) else 0
    if mode == "reference":  # zero the buffer, read it for the norm, add it twice
        return size * 4 * (1 + 1 + 3 + 3)
    if mode == "proxy":
        return 0
    raise ValueError(f"unknown mode {mode!r}")


def state_bytes(parameters: float, data: int = 1, element: int = 2) -> float:
    """Held for good by a plain step on one GPU: weights, fp32 gradients, and the optimizer's state.

    The state is Adam's two fp32 moments and, beside bf16 weights (``element`` 2), the fp32 weights that it steps.
    ``data``: ranks that share it, which is the data-parallel size with ``optimizer.distributed``.
    """
    return parameters * (element + 4 + (12 if element == 2 else 8) / data)


def staged_bytes(parameters: float, data: int = 1, element: int = 2, *, distributed: bool, first: bool = True) -> float:
    """Host memory that a rank holds while a checkpoint is written: one copy of what it writes.

    The first data-parallel rank (``first``) writes the weights of its shard. The optimizer's state is Adam's two fp32
    moments and the fp32 weights (beside fp32 weights, ``element`` 4, only with ``optimizer.distributed``): shared by
    the ``data`` ranks with it, the first one's alone without.
    """
    state = 8 if element == 4 and not distributed else 12
    mine = state / data if distributed else state * first
    return parameters * (element * first + mine)


def snapshot_bytes(
    parameters: float, element: int = 2, *, transport: str = "distributed", evaluates: bool = True
) -> float:
    """Host memory of the weights' copies on a rank of the first replica: one set with "disk", else two, and a third
    that is not pinned where evaluations run beside training (``train.eval_every`` > 0, not in exact lag)."""
    return parameters * element * (1 if transport == "disk" else 2 + evaluates)


def accumulator_bytes(parameters: float, accumulators: int, element: int = 4) -> float:
    """Held for good by ``accumulate``; ``element`` 2 in bf16."""
    return parameters * accumulators * element


def kept_bytes(lengths: Sequence[int], d_in: int, d_out: int, element: int = 4) -> int:
    """Held by ``deferred`` for one group in one layer: the smaller of W_i and (A_i, G_i)."""
    return sum(element * (n * (d_in + d_out) if n <= crossover(d_in, d_out) else d_in * d_out) for n in lengths)


@dataclass(frozen=True)
class ModeProjection:
    """One mode on one GPU: extra gradient bytes, and extra time over a plain step's linear layers."""

    mode: str
    extra_bytes: float
    extra_time: float


def project(
    shape: Shape, tensor: int, pipeline: int, lengths: Sequence[int], accumulators: int, machine: Machine = H100
) -> list[ModeProjection]:
    """Of a decoder stage for a group of these lengths; attention, norms and communication are left out."""
    layers = shape.linears(tensor)
    per_stage = shape.layers // pipeline
    plain = sum(plain_flops(n, *layer) for n in lengths for layer in layers) / machine.flops
    held = {
        "accumulate": accumulator_bytes(shape.parameters / (tensor * pipeline), accumulators),
        "accumulate_shared": accumulator_bytes(shape.parameters / (tensor * pipeline), accumulators),
        "deferred": float(per_stage * sum(kept_bytes(lengths, *layer, element=2) for layer in layers)),
        "two_pass": 0.0,
        "proxy": 0.0,
        "reference": accumulator_bytes(shape.parameters / (tensor * pipeline), 2),
    }
    found = []
    for mode, extra in held.items():
        flops = sum(extra_flops(mode, n, *layer, machine) for n in lengths for layer in layers)
        traffic = sum(extra_traffic(mode, n, *layer, machine) for n in lengths for layer in layers)
        found.append(ModeProjection(mode, extra, (flops / machine.flops + traffic / machine.bytes_per_s) / plain))
    return found
