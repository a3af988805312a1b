"""Plans of dispatched tokens: by literals on one rank, against Megatron's own dispatchers on several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from vcpo_megatron.learner.megatron import platform
from vcpo_megatron.learner.megatron.dispatch import ExpertCounts, Labels, PlannedDispatch, count_by_label, places

from ..world import run_world

HIDDEN, EXPERTS = 3, 4
#: Experts of five tokens, two each, and whose they are: two trajectories, and padding.
CHOSEN = [[0, 2], [2, 3], [0, 3], [2, 0], [0, 2]]
LABELS = [0, 0, 1, 1, 2]
#: Expert 1 gets none.
TOKENS_OF = [[0, 2, 3, 4], [], [0, 1, 3, 4], [1, 2]]
#: Rows by expert and label, of one rank and one source.
COUNTS = [[[1, 2, 1]], [[0, 0, 0]], [[2, 1, 1]], [[1, 1, 0]]]


def routed(chosen: list[list[int]] = CHOSEN) -> tuple[torch.Tensor, torch.Tensor]:
    """bool and probabilities [t, experts]: of token t for expert e (10 t + e) / 100."""
    table = torch.zeros(len(chosen), EXPERTS, dtype=torch.bool)
    table[torch.arange(len(chosen))[:, None], torch.tensor(chosen)] = True
    tokens, experts = torch.arange(len(chosen))[:, None], torch.arange(EXPERTS)
    return table, torch.where(table, (10 * tokens + experts) / 100, 0.0)


class Layer:
    """A dispatcher of one rank that holds all experts, planned; what it hands on."""

    def __init__(self, kind: type, group: dist.ProcessGroup | None = None) -> None:
        self.dispatcher: Any = kind.__new__(kind)
        config = SimpleNamespace(moe_router_topk=2, moe_permute_fusion=False, moe_router_dtype=None)
        vars(self.dispatcher).update(config=config, ep_size=1, tp_size=1, tp_rank=0, tp_group=None, ep_group=None)
        vars(self.dispatcher).update(num_local_experts=EXPERTS, local_expert_indices=list(range(EXPERTS)))
        alone = torch.arange(EXPERTS)  # chunks are in their order already
        vars(self.dispatcher).update(shared_experts=None, drop_and_pad=False, restore_output_by_local_experts=alone)
        self.plan = PlannedDispatch(self.dispatcher)
        self.counted: list[ExpertCounts] = []
        self.plan.counted = self.counted.append
        if group is not None:
            self.plan.labels = lambda: Labels(torch.tensor(LABELS), 3, group)

    def rows(self, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[list[list[float]], list[int], list[float]]:
        """Rows for the experts, how many each has, and their probabilities; a token's numbers are its own."""
        hidden = torch.arange(len(routing_map)).float()[:, None, None].expand(-1, 1, HIDDEN)
        hidden, probs = self.dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        if isinstance(self.dispatcher, MoEAllGatherTokenDispatcher):
            hidden, counts, probs = self.dispatcher.dispatch_postprocess(hidden, probs)
        else:
            counts = self.dispatcher.tokens_per_expert
        return hidden.tolist(), counts.tolist(), probs.tolist()


KINDS = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)


@pytest.fixture(params=KINDS)
def layer(request: pytest.FixtureRequest, lone_group: dist.ProcessGroup) -> Layer:
    return Layer(request.param, lone_group)


def test_rows_go_to_their_experts_in_the_order_of_tokens(layer: Layer) -> None:
    rows, counts, probs = layer.rows(*routed())
    assert rows == [[float(t)] * HIDDEN for tokens in TOKENS_OF for t in tokens]
    assert counts == [4, 0, 4, 2]
    assert probs == pytest.approx([(10 * t + e) / 100 for e, tokens in enumerate(TOKENS_OF) for t in tokens])
    (counted,) = layer.counted
    assert counted.rank == 0 and counted.counts.tolist() == [COUNTS] and counted.own.tolist() == COUNTS
    back = layer.dispatcher.combine_postprocess(layer.dispatcher.combine_preprocess(torch.tensor(rows)))
    assert back[:, 0, 0].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]  # twice a token's own number


def test_tokens_are_counted_by_expert_alone_where_nobody_asks_for_labels(layer: Layer) -> None:
    layer.plan.labels = lambda: None
    assert layer.rows(*routed())[1] == [4, 0, 4, 2] and layer.counted == []
    assert count_by_label(routed()[0], None).tolist() == [[4, 0, 4, 2]]


def test_one_copy_a_call_which_nothing_blocks(layer: Layer) -> None:
    with platform.watched_reads(platform.DeviceReads()) as reads:
        layer.rows(*routed())
    assert not reads.blocking and not reads.asynchronous
    ((line, count),) = reads.awaited.items()
    assert line.startswith("megatron/dispatch.py:") and count == 1


class Order(TorchDispatchMode):
    """Names of operations, in their order."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_rows_are_put_in_order_while_the_counts_are_on_their_way(
    lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    wait = platform.HostCopy.wait

    def waits(copy: platform.HostCopy) -> torch.Tensor:
        order.append("wait")
        return wait(copy)

    monkeypatch.setattr(platform.HostCopy, "wait", waits)
    layer = Layer(MoEAlltoAllTokenDispatcher, lone_group)
    with Order(order):
        layer.rows(*routed())
    start, end = order.index("clone"), order.index("wait")  # the copy is a clone on CPUs
    queued = order[start:end]
    assert "nonzero_static" in queued and queued.count("index_select") == 2
    assert "nonzero_static" not in order[end:] and "index_select" not in order[end:]


def test_a_call_that_is_computed_once_more_goes_by_the_plan_of_the_first(layer: Layer) -> None:
    """Also where a router's last bit has sent a token elsewhere: no row is without a place."""
    plans: dict[Any, Any] = {}
    layer.plan.kept = lambda: plans
    with platform.watched_reads(platform.DeviceReads()) as reads:
        first = layer.rows(*routed())
        assert list(plans) == [layer.plan]
        again = layer.rows(*routed())
        assert sum(reads.awaited.values()) == 1 and plans == {}
        assert again == first and layer.counted[1].counts.equal(layer.counted[0].counts)
        layer.rows(*routed())
        flipped = layer.rows(*routed([[0, 2], [2, 1], *CHOSEN[2:]]))  # token 1: expert 1 for expert 3
    assert sum(reads.awaited.values()) == 2 and not reads.blocking
    assert flipped[:2] == first[:2]
    assert flipped[2] == pytest.approx([*first[2][:-2], 0.0, first[2][-1]])


def test_places_are_those_of_the_true_ones() -> None:
    table, _ = routed()
    assert places(table, 10).tolist() == [5 * e + t for e, tokens in enumerate(TOKENS_OF) for t in tokens]


def test_another_dispatcher_is_refused_by_its_kind() -> None:
    with pytest.raises(TypeError, match="SimpleNamespace"):
        PlannedDispatch(SimpleNamespace())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "expert", "expert_tensor"), [(2, 2, 1), (2, 1, 2), (4, 2, 2)])
@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_every_rank_hands_its_experts_what_megatron_s_own_dispatcher_does(
    kind: str, ranks: int, expert: int, expert_tensor: int
) -> None:
    """Rows, probabilities, counts and what comes back, bit for bit; and whose each row is."""
    arguments = {"kind": kind, "expert": expert, "expert_tensor": expert_tensor}
    run_world(ranks, "learner.run_dispatch:assert_alike", arguments)
