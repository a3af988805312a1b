"""Who trains what: assignment, packs, and the tensors of a pack against literal answers."""

from __future__ import annotations

import numpy as np
import torch

from vcpo_megatron.learner.packing import Row, Share, assign_groups, batch_rows, make_pack, split_into_packs
from vcpo_megatron.types import Batch, Group, PolicyVersion, Trajectory, Turn, VersionSpan


def trajectory(tokens: list[int], prompt: int, group: int = 0, sample: int = 0) -> Trajectory:
    length = len(tokens)
    mask = np.arange(length) >= prompt
    turn = Turn(prompt, length, "length", (VersionSpan(prompt, length, PolicyVersion(1, 0)),))
    behavior = np.where(mask, -np.arange(length, dtype=np.float32), 0).astype(np.float32)
    return Trajectory(group, sample, "p", prompt, np.array(tokens, np.int32), mask, behavior, (turn,), 0.0)


def rows_of(*lengths: int) -> list[Row]:
    return [Row(i, 0, trajectory(list(range(n)), 1, sample=i)) for i, n in enumerate(lengths)]


def test_a_pack_lays_trajectories_end_to_end_without_their_last_token() -> None:
    rows = [Row(4, 1, trajectory([5, 6, 7], 1)), Row(5, 1, trajectory([8, 9], 1))]
    pack = make_pack(rows, Share(multiple=4), torch.device("cpu"))
    assert pack.tokens.tolist() == [5, 6, 8, 0]
    assert pack.labels.tolist() == [6, 7, 9, 0]
    assert pack.positions.tolist() == [0, 1, 0, 0]
    assert pack.mask.tolist() == [True, True, True, False]
    assert pack.behavior_logprobs.tolist() == [-1.0, -2.0, -1.0, 0.0]
    assert pack.segments.tolist() == [0, 0, 1, 2]
    assert pack.boundaries == (0, 2, 3)
    assert (pack.group, pack.length, pack.padded) == (1, 4, 1)


def test_packs_hold_every_row_once_and_respect_the_bound() -> None:
    rows = rows_of(31, 11, 11, 6, 51)  # costs 30, 10, 10, 5, 50
    packs = split_into_packs(rows, 40)
    assert [[row.index for row in pack] for pack in packs] == [[0, 1], [2, 3], [4]]
    assert all(sum(row.cost for row in pack) <= 40 or len(pack) == 1 for pack in packs)


def test_groups_are_spread_by_cost_and_every_rank_finds_the_same_plan() -> None:
    assert assign_groups([9, 1, 5, 5], 2) == [[0, 1], [2, 3]]
    assert assign_groups([4, 4, 4], 2) == [[0, 2], [1]]
    assert assign_groups([3], 2) == [[0], []]


def test_rows_are_numbered_over_the_batch() -> None:
    groups = tuple(
        Group(g, "p", tuple(trajectory([1, 2], 1, g, s) for s in range(size))) for g, size in ((7, 2), (9, 1))
    )
    assert [[(row.index, row.group) for row in group] for group in batch_rows(Batch(0, groups))] == [
        [(0, 0), (1, 0)],
        [(2, 1)],
    ]
