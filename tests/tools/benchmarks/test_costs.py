"""The cost formulas against FLOPs that torch counts and bytes that are really kept; and the projection's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import costs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.learner.scenarios import make_batch, make_config, make_model_folder
from tests.learner.world import run_world
from vcpo_megatron.learner.gradients import weight_gradients
from vcpo_megatron.learner.gradients.pack_scores import Coefficients, PackScores, TokenRows, TokenShards
from vcpo_megatron.learner.gradients.weight_gradients import Accumulate, Accumulator, Deferred, NormsOnly

CPU = costs.Machine(1.0, 1.0, weight_gradients.CPU.pass_flops, weight_gradients.CPU.block)
LAYERS = [(96, 160), (640, 512)]
LENGTHS = (5, 30, 90, 600)


def test_constants_are_those_of_the_learner() -> None:
    found = (costs.H100.pass_flops, costs.H100.gram_block)
    assert found == (weight_gradients.GPU.pass_flops, weight_gradients.GPU.block)


MODES = {"accumulate": Accumulate, "deferred": Deferred, "two_pass": NormsOnly}


class Layer:
    """One linear layer and a pack of ``n`` trajectories of one reward."""

    def __init__(self, mode: str, tokens: int, d_in: int, d_out: int, n: int = 1) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(d_out, d_in))
        self.weight.main_grad = torch.zeros(d_out, d_in)
        ids = torch.arange(n).repeat_interleave(tokens)
        pack = SimpleNamespace(step_samples=range(n), samples=range(n), offset=0, tokens=ids)
        self.scores = PackScores(pack, SimpleNamespace())
        self.scores.coefficients = Coefficients(
            torch.full((n,), 0.5).double(), torch.full((n,), 0.25).double(), (tuple(range(n)),), torch.tensor([2.0])
        )
        self.scores.accumulator = Accumulator.zeros({"w": self.weight}, torch.float32)
        self._rows = TokenShards(TokenRows(((i, tokens) for i in range(n)), n, ids), None)
        self._mode, self._n = MODES[mode](), n

    def backward(self, inputs: torch.Tensor, grads: torch.Tensor) -> None:
        self._mode.matrix(self.scores, self._rows, "w", self.weight, inputs, grads)

    def finish(self) -> None:
        for apply in self.scores.kept:
            apply(torch.ones(1, self._n + 1))


def counted(mode: str, tokens: int, d_in: int, d_out: int, n: int = 1) -> int:
    """FLOPs of the weight gradient and its norm."""
    layer = Layer(mode, tokens, d_in, d_out, n)
    # torch counts addmm, not its in-place form
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, *rest, **options: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        layer.backward(torch.ones(n * tokens, d_in), torch.ones(n * tokens, d_out))
        layer.finish()
    return counter.get_total_flops()


class Traffic(TorchDispatchMode):
    """Bytes of matrices of ``columns`` columns that operations read and write; those of ``but`` do not count."""

    def __init__(self, columns: int, but: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self._columns, self._but = columns, {tensor.untyped_storage().data_ptr() for tensor in but}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        written = [argument.is_write for argument in func._schema.arguments]
        self.bytes += sum(map(self._size, args)) + sum(self._size(a) for a, w in zip(args, written, strict=False) if w)
        self.bytes += 0 if any(written) else self._size(result)
        return result

    def _size(self, value: Any) -> int:
        if not torch.is_tensor(value) or value.dim() != 2 or value.shape[1] != self._columns:
            return 0
        return 0 if value.untyped_storage().data_ptr() in self._but else value.numel() * value.element_size()


def live_bytes(make: Callable[[], Any]) -> int:
    """Bytes of storages that ``make`` leaves alive: every allocation and release while it runs, and its result held."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        held = make()
    events = profile.profiler.kineto_results.events()
    del held
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_flops_are_those_counted(mode: str, layer: tuple[int, int], tokens: int) -> None:
    flops, product = counted(mode, tokens, *layer), 2 * tokens * layer[0] * layer[1]
    extra = costs.extra_flops(mode, tokens, *layer, CPU)
    # the plain weight gradient is one product; the first of two passes has none, but a forward and an input gradient
    assert flops == (extra - 2 * product if mode == "two_pass" else extra + product)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_traffic_is_that_of_the_operations(mode: str, layer: tuple[int, int]) -> None:
    """Of a trajectory whose W_i is formed; the cache's part in it is not seen here."""
    tokens, (d_in, d_out) = 600, layer
    a, g = torch.ones(tokens, d_in), torch.ones(tokens, d_out)
    one = Layer(mode, tokens, d_in, d_out)
    with Traffic(d_in, (a, g)) as traffic:
        one.backward(a, g)
        one.finish()
    expected = {"accumulate": 8, "deferred": 5, "two_pass": 2}[mode] * 4 * d_in * d_out
    assert traffic.bytes == expected == costs.extra_traffic(mode, tokens, d_in, d_out, CPU)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_what_deferred_keeps_is_what_stays_alive(layer: tuple[int, int], tokens: int) -> None:
    """Of three trajectories, once inputs and output gradients are let go of: scalars beside it."""
    one = Layer("deferred", tokens, *layer, n=3)

    def backward() -> None:
        one.backward(*(torch.ones(3 * tokens, size) for size in layer))

    kept = costs.kept_bytes([tokens] * 3, *layer)
    assert kept <= live_bytes(backward) <= kept + 64 * 3 * tokens


@pytest.mark.parametrize(("dtype", "element"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_accumulators_are_what_stays_alive(dtype: torch.dtype, element: int) -> None:
    """In bfloat16 the first row of a matrix is kept in fp32, too: its error is measured there."""
    matrix, norm = torch.nn.Parameter(torch.zeros(640, 512)), torch.nn.Parameter(torch.zeros(512))
    probes = 0 if element == 4 else 4 * 512
    found = live_bytes(lambda: Accumulator.zeros({"w": matrix, "norm": norm}, dtype))
    assert found == costs.accumulator_bytes(640 * 512 + 512, 1, element) + probes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_state_of_a_plain_step_is_what_stays_alive(tmp_path: Path) -> None:
    """Of eight layers: what ten hold beyond two, alone and on two data-parallel ranks."""
    models = [make_model_folder(tmp_path / f"layers{count}", layers=count) for count in (2, 10)]
    plain = {"algorithm": {"method": "grpo"}}
    low = {**plain, "model": {"dtype": "bfloat16"}}
    shared = {"optimizer": {"distributed": True}}
    asked = [(plain, 1, 4), (low, 1, 2), ({**plain, **shared}, 2, 4), ({**low, **shared}, 2, 2)]
    cases = [
        (make_config(model, 2, **changes), [make_batch(model, step) for step in (0, 1)])
        for changes, _, _ in asked
        for model in models
    ]
    found = run_world(2, "learner.run_layouts:bytes_held", {"cases": cases}, alone=True)
    for (_, data, element), small, large in zip(asked, found[::2], found[1::2], strict=True):
        parameters, held = large[0] - small[0], large[1] - small[1]
        assert held == pytest.approx(costs.state_bytes(parameters, data, element), rel=0.02)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_shared_rewards_need_no_second_product(layer: tuple[int, int], tokens: int) -> None:
    flops = counted("accumulate", tokens, *layer, n=4)
    product = 2 * tokens * layer[0] * layer[1]
    assert flops == 4 * (costs.extra_flops("accumulate_shared", tokens, *layer, CPU) + product)


def test_the_projection_to_70b() -> None:
    """What docs/per_trajectory_gradients.md prints."""
    assert costs.SEVENTY_B.parameters == pytest.approx(70.55e9, rel=1e-3)
    short = {p.mode: p for p in costs.project(costs.SEVENTY_B, 8, 4, [512] * 16, accumulators=2)}
    long = {p.mode: p for p in costs.project(costs.SEVENTY_B, 8, 4, [4096] * 16, accumulators=2)}
    gb = 1e9
    assert short["accumulate"].extra_bytes / gb == pytest.approx(17.6, abs=0.05)
    assert short["reference"].extra_bytes / gb == pytest.approx(17.6, abs=0.05)
    assert short["deferred"].extra_bytes / gb == pytest.approx(15.0, abs=0.1)
    assert long["deferred"].extra_bytes / gb == pytest.approx(68.5, abs=0.1)
    assert short["two_pass"].extra_bytes == short["proxy"].extra_bytes == 0
    state = [costs.state_bytes(costs.SEVENTY_B.parameters / 32, data) / gb for data in (1, 2, 8)]
    assert state == pytest.approx([39.7, 26.5, 16.5], abs=0.05)


def test_parameters_of_a_counted_model() -> None:
    shape = costs.Shape(256, 8, 1024, 4, 4, 64, 4096)
    assert shape.parameters == 8 * (4 * 256 * 256 + 3 * 256 * 1024) + 2 * 4096 * 256
