"""Time and memory of one learner step, mode by mode, on one rank; shared code of tools/bench_step.py.

Contenders share one model and one optimizer and take their steps in turn, A B C A B C: load on the
machine falls on all alike, so ratios mean more than seconds. On CPUs seconds are processor time.
"reference" is the published implementation's way, written from its description: one trajectory a
micro-batch, its norm from a full gradient buffer, and two more buffers of the gradient's size.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.types import Batch, Group, PolicyVersion, Trajectory, Turn, VersionSpan

from . import roofline

#: Shapes by name: hidden, layers, ffn, heads, vocabulary. All heads have 64 dimensions, embeddings are not tied.
SHAPES = {
    "1M": (128, 3, 384, 2, 1024),
    "10M": (256, 8, 1024, 4, 4096),
    "60M": (640, 10, 1792, 10, 8192),
    "500M": (1024, 24, 4096, 16, 65536),
}
PROMPT = 16
SIGMA = 0.6  # of the logarithm of lengths
#: Contender -> keys of [algorithm].
MODES: dict[str, dict[str, str]] = {
    "plain": {"method": "vcpo_ess_only"},
    "accumulate": {"opob_mode": "accumulate"},
    "deferred": {"opob_mode": "deferred"},
    "two_pass": {"opob_mode": "two_pass"},
    "proxy": {"opob_mode": "proxy"},
}
#: A safetensors file without tensors: weights are drawn after the model is built.
_NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
CONTENDERS = (*MODES, "reference")


@dataclass(frozen=True)
class Workload:
    """groups of group_size trajectories whose lengths are log-normal with this median.

    rewards  distinct (drawn), or binary (0 and 1 by turns), as those of a checked answer are
    dtype    of parameters and activations
    """

    model: str
    median: int
    groups: int
    group_size: int
    pack_tokens: int = 4096
    seed: int = 0
    rewards: str = "distinct"
    dtype: str = "float32"

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(d_in, d_out) of every linear layer of the model."""
        hidden, layers, ffn, heads, vocabulary = SHAPES[self.model]
        inner = 64 * heads
        layer = [(hidden, 3 * inner), (inner, hidden), (hidden, 2 * ffn), (ffn, hidden)]
        return [*(layer * layers), (hidden, vocabulary)]


@dataclass(frozen=True)
class StepCost:
    """seconds of every round; transient: bytes of storages alive at the peak of a step beyond those at its start;
    persistent: gradient-sized buffers that the mode keeps, in bytes."""

    name: str
    seconds: tuple[float, ...]
    transient: int
    persistent: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class StepComparison:
    """lengths: tokens of every trajectory that go through the model; rates: of the machine, between the rounds."""

    work: Workload
    parameters: int
    lengths: tuple[int, ...]
    outcomes: tuple[StepCost, ...]
    rates: roofline.MachineRates

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def ratio(self, name: str, over: str = "plain") -> float:
        """Median over rounds of the ratio of seconds inside one round."""
        by_name = {outcome.name: outcome.seconds for outcome in self.outcomes}
        return statistics.median(a / b for a, b in zip(by_name[name], by_name[over], strict=True))

    def roofline(self, name: str) -> float:
        """Seconds that ``name`` takes at least beyond a plain step, by the formulas at the rates measured."""
        if name in ("plain", "proxy"):
            return 0.0
        shared = name == "accumulate" and self.work.rewards == "binary"
        mode = "accumulate_shared" if shared else name
        return roofline.extra_seconds(mode, self.lengths, self.work.linears, self.parameters, self.rates)

    def as_json(self) -> dict[str, object]:
        rows = [
            {**asdict(o), "median": o.median, "ratio_to_plain": self.ratio(o.name), "roofline": self.roofline(o.name)}
            for o in self.outcomes
        ]
        return {
            "work": asdict(self.work),
            "parameters": self.parameters,
            "tokens": self.tokens,
            "rates": asdict(self.rates),
            "outcomes": rows,
        }


def make_config(folder: Path, work: Workload, keys: dict[str, str]) -> RunConfig:
    """A run on a random model of the shape ``work.model``; ``folder`` gets its config.json."""
    hidden, layers, ffn, heads, vocabulary = SHAPES[work.model]
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "head_dim": 64,
        "num_key_value_heads": heads,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(_NO_TENSORS)
    return RunConfig.model_validate(
        {
            "model": {"path": folder, "dtype": work.dtype},
            "algorithm": keys,
            "environment": {"name": "none"},
            "train": {
                "steps": 1000,
                "groups_per_step": work.groups,
                "group_size": work.group_size,
                "max_pack_tokens": work.pack_tokens,
            },
        }
    )


def make_batch(work: Workload) -> Batch:
    """Random tokens and rewards; behaviour log-probs near those of an untrained model."""
    draw = np.random.default_rng(work.seed)
    vocabulary = SHAPES[work.model][4]
    version = PolicyVersion(1, 0)
    groups, spread = [], 0.1 if work.rewards == "distinct" else 0.0
    for g in range(work.groups):
        members = []
        for s in range(work.group_size):
            answer = int(np.clip(work.median * math.exp(SIGMA * draw.normal()), 16, 8 * work.median))
            length = PROMPT + answer
            behavior = np.where(np.arange(length) >= PROMPT, -math.log(vocabulary), 0.0).astype(np.float32)
            turn = Turn(PROMPT, length, "length", (VersionSpan(PROMPT, length, version),))
            members.append(
                Trajectory(
                    g,
                    s,
                    f"p{g}",
                    PROMPT,
                    draw.integers(0, vocabulary, length).astype(np.int32),
                    np.arange(length) >= PROMPT,
                    behavior,
                    (turn,),
                    s % 2 + spread * draw.normal(),
                )
            )
        groups.append(Group(g, f"p{g}", tuple(members)))
    return Batch(0, tuple(groups))


def join_world_of_one() -> None:
    """What a launcher would set; the learner's groups need a world."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def prepare() -> None:
    """Once a process, before the first ``Bench``."""
    from vcpo_megatron.learner.megatron import platform

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler that counts bytes talks on stderr
    platform.prepare()


class Bench:
    """One model; a function a contender that takes one step on the batch."""

    def __init__(self, folder: Path, work: Workload, contenders: Sequence[str]) -> None:
        from vcpo_megatron.learner.megatron.parallel import initialize
        from vcpo_megatron.learner.megatron.training import build_trainable
        from vcpo_megatron.learner.step.vcpo_step import VcpoStep

        from .reference_step import ReferenceStep

        configs = {name: make_config(folder, work, MODES.get(name, {})) for name in contenders}
        any_config = configs[contenders[0]]
        self.parallel = initialize(any_config)
        self.trainable = build_trainable(any_config, self.parallel, load=False)
        torch.manual_seed(0)
        parameters = [p for chunk in self.trainable.chunks for p in chunk.parameters()]
        for parameter in parameters:
            parameter.data.fill_(1.0) if parameter.dim() == 1 else parameter.data.normal_(0.0, 0.02)
        self.trainable.optimizer.reload_model_params()  # its fp32 copies of parameters in bfloat16
        self.parameters = sum(parameter.numel() for parameter in parameters)
        self.work, self.batch = work, make_batch(work)
        self._steps: dict[str, ReferenceStep | VcpoStep] = {
            name: ReferenceStep(configs[name], self.parallel, self.trainable)
            if name == "reference"
            else VcpoStep(configs[name], self.parallel, self.trainable)
            for name in contenders
        }

    def close(self) -> None:
        """Leave the world, so that another model can be measured."""
        from vcpo_megatron.learner.megatron.parallel import destroy

        destroy()

    def step(self, name: str) -> float:
        """Seconds of one step: of the device on GPUs, of this process's processor time on CPUs."""
        started = roofline.clock()
        result = self._steps[name].run(self.batch, PolicyVersion(1, 1))
        assert result is not None  # nobody asks to abort it
        if result.skipped:
            raise RuntimeError(f"the step of {name} was skipped: {result.skipped}")
        return roofline.clock() - started

    def compare(self, rounds: int, say: Callable[[str], None] = lambda line: None) -> StepComparison:
        """A B C, A B C, ... after one step of each, in which memory is measured."""
        self.step(next(iter(self._steps)))  # the optimizer's state belongs to no contender
        seconds: dict[str, list[float]] = {name: [] for name in self._steps}
        lengths = tuple(len(t.tokens) - 1 for group in self.batch.groups for t in group.trajectories)
        typical, found, transient = int(statistics.median(lengths)), [], {}
        for name in self._steps:
            transient[name] = peak_bytes(name, self.step)
            give_back()
        for number in range(rounds):
            for name in self._steps:
                seconds[name].append(self.step(name))
            found.append(roofline.measure(*self.work.linears[2], typical))
            say(f"  round {number + 1}: " + "  ".join(f"{n} {s[-1]:.2f} s" for n, s in seconds.items()))
        outcomes = tuple(
            StepCost(name, tuple(seconds[name]), transient[name], step.accumulators * 4 * self.parameters)
            for name, step in self._steps.items()
        )
        rates = roofline.MachineRates(
            *(statistics.median(getattr(r, f.name) for r in found) for f in fields(roofline.MachineRates))
        )
        return StepComparison(self.work, self.parameters, lengths, outcomes, rates)


def peak_bytes(name: str, step: Callable[[str], float]) -> int:
    """Bytes of torch storages alive at the peak of a step of ``name`` beyond those at its start.

    On CPUs from the allocator's own record of every allocation (not RSS, which holds what was freed).
    """
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(name)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(name)
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def give_back() -> None:
    """Return freed memory to the system: glibc keeps it, and a profile of a long step is several GB."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def table(comparison: StepComparison) -> str:
    """What is printed for people."""
    work, rates, mib = comparison.work, comparison.rates, 2.0**20
    lines = [
        f"{work.model} model ({comparison.parameters:,} parameters), {work.groups} groups of {work.group_size}, "
        f"median answer {work.median}, {work.rewards} rewards, {comparison.tokens:,} tokens a step",
        f"  {rates.product / 1e9:.0f} GFLOP/s in products, {rates.far / 1e9:.0f} GB/s in memory, "
        f"{rates.near / 1e9:.0f} GB/s in cache: linear layers of a plain step take "
        f"{roofline.plain_seconds(comparison.lengths, work.linears, rates):.2f} s",
        "mode          seconds  x plain  beyond plain s  roofline s  x faster than reference  buffers MiB  peak MiB",
    ]
    plain = next((o.median for o in comparison.outcomes if o.name == "plain"), math.nan)
    names = {outcome.name for outcome in comparison.outcomes}
    for o in comparison.outcomes:
        faster = f"{1 / comparison.ratio(o.name, 'reference'):.2f}" if "reference" in names else "-"
        lines.append(
            f"{o.name:<12} {o.median:>8.2f} {comparison.ratio(o.name):>8.3f} {o.median - plain:>15.2f} "
            f"{comparison.roofline(o.name):>11.2f} {faster:>24} "
            f"{o.persistent / mib:>12.1f} {o.transient / mib:>9.1f}"
        )
    return "\n".join(lines)


def curves(comparisons: Sequence[StepComparison]) -> str:
    """Of every model measured at several lengths: time over plain, and peak memory, by median length; "" without."""
    lines = []
    for model in dict.fromkeys(comparison.work.model for comparison in comparisons):
        found = [comparison for comparison in comparisons if comparison.work.model == model]
        if len({comparison.work.median for comparison in found}) < 2:
            continue
        ratios = [{outcome.name: c.ratio(outcome.name) for outcome in c.outcomes} for c in found]
        peaks = [{outcome.name: outcome.transient / 2**20 for outcome in c.outcomes} for c in found]
        for what, form, columns in (("time over plain", ".3f", ratios), ("peak MiB of a step", ".1f", peaks)):
            lines.append(f"{model}: {what}, by median answer length")
            lines.append(" " * 12 + "".join(f"{c.work.median:>10}" for c in found))
            lines += [f"{name:<12}" + "".join(f"{column[name]:>10{form}}" for column in columns) for name in columns[0]]
    return "".join(f"{line}\n" for line in lines)
