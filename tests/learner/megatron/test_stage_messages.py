"""Every stage knows the shape of what comes next; what is sent must be what the plan says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication

from vcpo_megatron.learner.megatron.stage_messages import StageMessages

HIDDEN = 4
TOKENS = [3, 5, 7, 9]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Messages of stage ``rank`` of two, for micro-batches of ``TOKENS``."""
    monkeypatch.setattr(p2p_communication.dist, "get_global_rank", lambda group, rank: rank)

    def make(rank: int, chunks: int) -> StageMessages:
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
        config = ModelParallelConfig(pipeline_dtype=torch.float32, microbatch_group_size_per_vp_stage=2)
        return StageMessages(group, config, chunks, TOKENS, HIDDEN)

    return make


def received(messages: StageMessages, side: str) -> list[int]:
    """Tokens of all that comes from the previous or the next stage."""
    found = []
    while True:
        try:
            shapes = messages._communicate_shapes(None, None, side == "previous", side == "next")
        except RuntimeError as error:
            assert str(error).startswith("Megatron's schedule has more ") and "than the plan has micro-b" in str(error)
            return found
        ((tokens, one, hidden),) = [shape for shape in shapes if shape is not None]
        assert (one, hidden) == (1, HIDDEN)
        found.append(tokens)


#: Of the interleaved schedule: two micro-batches through a chunk, then through the next one.
INTERLEAVED = [3, 5, 3, 5, 7, 9, 7, 9]


@pytest.mark.parametrize(
    ("rank", "chunks", "previous", "following"),
    [(0, 1, [], TOKENS), (1, 1, TOKENS, []), (0, 2, TOKENS, INTERLEAVED), (1, 2, INTERLEAVED, TOKENS)],
)
def test_shapes_come_in_the_schedule_s_order(
    rank: int, chunks: int, previous: list[int], following: list[int], stage: Any
) -> None:
    assert received(stage(rank, chunks), "previous") == previous
    assert received(stage(rank, chunks), "next") == following


def test_a_tensor_of_another_shape_is_refused_before_it_is_sent(stage: Any) -> None:
    first, last = stage(0, 1), stage(1, 1)
    assert first._communicate_shapes(torch.zeros(3, 1, HIDDEN), None, False, False) == (None, None)
    with pytest.raises(RuntimeError, match=r"activations .*\[7, 1, 4\] .*\[5, 1, 4\]"):
        first._communicate_shapes(torch.zeros(7, 1, HIDDEN), None, False, False)
    with pytest.raises(RuntimeError, match=r"gradients .*\[4, 1, 4\] .*\[3, 1, 4"):
        last._communicate_shapes(None, torch.zeros(4, 1, HIDDEN), False, False)
