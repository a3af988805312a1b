"""Who trains what: assignment, packs, and the tensors of a pack against literal answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vcpo_megatron.learner.batch.packing import (
    AttentionPlan,
    PackLayout,
    Sample,
    Share,
    assign_groups,
    batch_samples,
    make_pack,
    plan_steps,
    split_into_packs,
)
from vcpo_megatron.types import Batch, Group, PolicyVersion, Trajectory, Turn, VersionSpan


def trajectory(tokens: list[int], prompt: int, group: int = 0, sample: int = 0) -> Trajectory:
    length = len(tokens)
    mask = np.arange(length) >= prompt
    turn = Turn(prompt, length, "length", (VersionSpan(prompt, length, PolicyVersion(1, 0)),))
    behavior = np.where(mask, -np.arange(length, dtype=np.float32), 0).astype(np.float32)
    return Trajectory(group, sample, "p", prompt, np.array(tokens, np.int32), mask, behavior, (turn,), 0.0)


def samples_of(*lengths: int) -> list[Sample]:
    return [Sample(i, 0, trajectory(list(range(n)), 1, sample=i)) for i, n in enumerate(lengths)]


def test_a_pack_lays_trajectories_end_to_end_without_their_last_token() -> None:
    samples = [Sample(4, 1, trajectory([5, 6, 7], 1)), Sample(5, 1, trajectory([8, 9], 1))]
    pack = make_pack(samples, Share(multiple=4), torch.device("cpu"))
    assert pack.tokens.tolist() == [5, 6, 8, 0]
    assert pack.labels.tolist() == [6, 7, 9, 0]
    assert pack.positions.tolist() == [0, 1, 0, 0]
    assert pack.mask.tolist() == [True, True, True, False]
    assert pack.behavior_logprobs.tolist() == [-1.0, -2.0, -1.0, 0.0]
    assert pack.segments.tolist() == [0, 0, 1, 2]
    assert pack.boundaries == (0, 2, 3)
    assert (pack.group, pack.length, pack.padded) == (1, 4, 1)


def test_what_the_learner_recorded_is_packed_where_every_trajectory_has_it() -> None:
    bare = [trajectory([5, 6, 7], 1), trajectory([8, 9], 1)]
    group = Group(0, "p", tuple(bare)).with_recorded(PolicyVersion(1, 3), np.array([0, -1, -2, 0, -3], np.float32))
    samples = [Sample(i, 0, t) for i, t in enumerate(group.trajectories)]
    pack = make_pack(samples, Share(multiple=4), torch.device("cpu"))
    assert pack.recorded_logprobs is not None and pack.recorded_logprobs.tolist() == [-1.0, -2.0, -3.0, 0.0]
    mixed = [samples[0], Sample(1, 0, bare[1])]
    assert make_pack(mixed, Share(), torch.device("cpu")).recorded_logprobs is None
    empty = make_pack([], Share(), torch.device("cpu"), group=0).recorded_logprobs
    assert empty is not None and empty.tolist() == [0.0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_places_of_labels_among_all_tokens_of_the_batch(ranks: int) -> None:
    """Trajectories 1 and 2 of a batch, from tokens 10 and 20 on: over all ranks every label has its place, once."""
    samples = [Sample(1, 0, trajectory([5, 6, 7], 1)), Sample(2, 0, trajectory([7, 8, 9, 4], 1))]
    found = {}
    for rank in range(ranks):
        pack = make_pack(samples, Share(rank, ranks), torch.device("cpu"))
        places = pack.label_places([0, 10, 20]).tolist()
        pairs = [pair for pair in zip(places, pack.labels.tolist(), strict=True) if pair[0] >= 0]
        assert not found.keys() & dict(pairs).keys()
        found |= dict(pairs)
    assert found == {11: 6, 12: 7, 21: 8, 22: 9, 23: 4}


def test_tokens_of_the_learners_own_version_are_marked() -> None:
    spans = (VersionSpan(1, 3, PolicyVersion(1, 4)), VersionSpan(3, 5, PolicyVersion(2, 5)))
    mixed = replace(trajectory([5, 6, 7, 8, 9], 1), turns=(Turn(1, 5, "stop", spans),))
    mixed.loss_mask[4] = False
    samples = [Sample(0, 0, mixed), Sample(1, 0, trajectory([1, 2], 1))]
    found = {v: make_pack(samples, Share(), torch.device("cpu"), version=v).current.tolist() for v in (0, 4, 5)}
    # labels 6 7 | 8 (9 is an observation) | 2 of version 0
    assert found[0] == [False, False, False, False, True]
    assert found[4] == [True, True, False, False, False]
    assert found[5] == [False, False, True, False, False]


def with_turns(one: Trajectory, *ends: int) -> Trajectory:
    """Turns that end there, each begun by the end of the one before, the first by that of the prompt."""
    starts = (one.prompt_length, *ends)
    spans = one.turns[0].spans
    return replace(one, turns=tuple(Turn(a, b, "stop", spans) for a, b in zip(starts, ends, strict=False)))


def test_turns_are_numbered_over_the_pack() -> None:
    first = with_turns(trajectory([5, 6, 7, 8, 9, 10], 2), 3, 6)  # tokens 7 | 8 9 10
    first.loss_mask[3] = False
    samples = [Sample(0, 0, first), Sample(1, 0, trajectory([1, 2, 3], 1, sample=1))]
    pack = make_pack(samples, Share(multiple=10), torch.device("cpu"))
    # labels 6 7 8 9 10 | 2 3 and padding; the first is of the prompt
    assert pack.turns.tolist() == [3, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert pack.turn_tokens.tolist() == [1, 2, 2]
    empty = make_pack([], Share(multiple=2), torch.device("cpu"), group=0)
    assert empty.turns.tolist() == [0, 0] and empty.turn_tokens.tolist() == []


def test_a_turn_that_context_ranks_share_has_one_number() -> None:
    one = with_turns(trajectory([5, 6, 7, 8, 9, 10, 11], 1), 5, 7)  # tokens 6 7 8 9 | 10 11, and two of padding
    ranks = [make_pack([Sample(0, 0, one)], Share(rank, 2), torch.device("cpu")) for rank in (0, 1)]
    assert [pack.labels.tolist() for pack in ranks] == [[6, 7, 0, 0], [8, 9, 10, 11]]
    assert [pack.turns.tolist() for pack in ranks] == [[0, 0, 2, 2], [0, 0, 1, 1]]
    assert [pack.turn_tokens.tolist() for pack in ranks] == [[4, 2], [4, 2]]


def test_context_ranks_hold_the_first_and_the_last_chunks() -> None:
    samples = [Sample(4, 1, trajectory([5, 6, 7, 8, 9, 10], 1)), Sample(5, 1, trajectory([11, 12], 1))]  # costs 5 and 1
    first, second = (make_pack(samples, Share(rank, 2, 2), torch.device("cpu")) for rank in (0, 1))
    # padded to 8 and 4 tokens, chunks of 2 and 1: rank 0 holds chunks 0 and 3 of each, rank 1 chunks 1 and 2
    assert first.tokens.tolist() == [5, 6, 0, 0, 11, 0]
    assert second.tokens.tolist() == [7, 8, 9, 0, 0, 0]
    assert first.positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert second.positions.tolist() == [2, 3, 4, 5, 1, 2]
    assert second.labels.tolist() == [8, 9, 10, 0, 0, 0]
    assert second.mask.tolist() == [True, True, True, False, False, False]
    assert first.segments.tolist() == second.segments.tolist() == [0, 0, 0, 0, 1, 1]
    assert first.boundaries == second.boundaries == (0, 4, 6)
    assert first.all_tokens.tolist() == second.all_tokens.tolist() == [5, 6, 0, 0, 11, 0, 7, 8, 9, 0, 0, 0]
    assert (first.length, first.padded) == (second.length, second.padded) == (12, 6)


def test_what_sequence_parallelism_must_divide_is_a_sequence_of_its_own() -> None:
    assert PackLayout.of([8, 4], Share(0, 2, 4)).lengths == (8, 4, 4)  # 16 tokens: 8 a context rank, 4 a tensor rank
    assert PackLayout.of([5], Share(multiple=2)).lengths == (5, 1)
    assert PackLayout.of([5], Share(), at_least=9).lengths == (5, 4)
    assert PackLayout.of([], Share(1, 2, 1)).lengths == (4,)
    assert PackLayout.of([], Share()).lengths == (1,)


def test_a_sequence_attends_to_itself_alone() -> None:
    plan = AttentionPlan.of(PackLayout.of([5, 2], Share(multiple=4)), torch.device("cpu"))
    assert plan.spans == ((5, 5), (2, 2), (1, 1)) and plan.rows is None
    assert plan.queries.tolist() == plan.keys.tolist() == plan.sequences.tolist() == [0, 5, 7, 8]
    assert (plan.longest_queries, plan.longest_keys, plan.longest) == (5, 5, 5)
    assert plan.queries.dtype == plan.keys.dtype == torch.int32


def test_a_chunk_attends_to_the_prefix_that_ends_with_it() -> None:
    """Two context ranks; 8 and 4 tokens in chunks of 2 and 1. Rows 0 to 5 are rank 0's tokens, 6 to 11 rank 1's."""
    first, second = (AttentionPlan.of(PackLayout.of([8, 4], Share(r, 2)), torch.device("cpu")) for r in (0, 1))
    assert first.spans == ((2, 2), (2, 8), (1, 1), (1, 4))
    assert second.spans == ((2, 4), (2, 6), (1, 2), (1, 3))
    assert first.queries.tolist() == second.queries.tolist() == [0, 2, 4, 5, 6]
    assert (first.keys.tolist(), second.keys.tolist()) == ([0, 2, 10, 11, 15], [0, 4, 10, 12, 15])
    # tokens 0 to 7 of the first sequence are rows 0, 1 (rank 0), 6 to 9 (rank 1), 2, 3 (rank 0)
    assert first.rows is not None and second.rows is not None
    assert first.rows.tolist() == [0, 1, *(0, 1, 6, 7, 8, 9, 2, 3), 4, *(4, 10, 11, 5)]
    assert second.rows.tolist() == [0, 1, 6, 7, *(0, 1, 6, 7, 8, 9), 4, 10, *(4, 10, 11)]
    assert first.sequences.tolist() == second.sequences.tolist() == [0, 8, 12]
    assert (second.longest_queries, second.longest_keys, second.longest) == (2, 6, 8)


def test_an_empty_pack_is_padding_alone() -> None:
    pack = make_pack([], Share(multiple=2), torch.device("cpu"), group=7, step_samples=samples_of(5), offset=1)
    assert (pack.group, pack.boundaries, pack.segments.tolist(), pack.padded) == (7, (0,), [0, 0], 2)
    assert not bool(pack.mask.any()) and pack.step_index == [0]


def test_ranks_that_share_experts_run_equal_numbers_of_steps() -> None:
    samples = samples_of(31, 11, 11, 6, 51)  # costs 30, 10, 10, 5, 50; 50 + 5 and 30 + 10 + 10
    steps = plan_steps(samples, 2, 40)
    assert [[[sample.index for sample in part] for part in step] for step in steps] == [[[3], [0, 1]], [[4], [2]]]
    assert [[[sample.index for sample in part] for part in step] for step in plan_steps(samples_of(3), 2, 40)] == [
        [[0], []]
    ]


#: layout -> (data-parallel replicas, ranks that share experts, how packs are cut).
SPLITS = {
    "dp1": (1, 1, Share()),
    "dp2": (2, 1, Share()),
    "dp4": (4, 1, Share()),
    "tp8 sp cp2 dp4": (4, 1, Share(0, 2, 8)),
    "tp8 sp cp4": (1, 1, Share(0, 4, 8)),
    "ep2": (1, 2, Share()),
    "ep2 dp2": (2, 2, Share()),
    "tp2 sp ep4": (1, 4, Share(0, 1, 2)),
}


@pytest.mark.parametrize("median", [64, 256, 512])
@pytest.mark.parametrize("split", SPLITS)
def test_log_normal_lengths_are_packed_and_divided_evenly(split: str, median: int) -> None:
    """16 groups of 8, 16 to 2,048 tokens, eight draws: less than a tenth of padding, no replica a fifth above the mean.

    A replica's time is that of the fullest rank of every micro-step, empty packs included.
    """
    replicas, ranks, share = SPLITS[split]
    for seed in range(8):
        drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, (16, 8))
        groups = [samples_of(*(int(n) + 1 for n in group)) for group in np.clip(drawn, 16, 2048)]
        costs = [sum(sample.cost for sample in group) for group in groups]
        total, seen, loads = 0, [], []
        for mine in assign_groups(costs, replicas):
            steps = [step for g in mine for step in plan_steps(groups[g], ranks, 4096)]
            lengths = [
                [PackLayout.of([sample.cost for sample in part], share).total for part in step] for step in steps
            ]
            total += sum(map(sum, lengths))
            loads.append(sum(map(max, lengths)))
            seen += [id(sample) for step in steps for part in step for sample in part]
        assert sorted(seen) == sorted(id(sample) for group in groups for sample in group)
        assert (total - sum(costs)) / total < 0.1, seed
        assert max(loads) < 1.2 * sum(loads) / replicas, seed


def test_packs_hold_every_row_once_and_respect_the_bound() -> None:
    samples = samples_of(31, 11, 11, 6, 51)  # costs 30, 10, 10, 5, 50
    packs = split_into_packs(samples, 40)
    assert [[sample.index for sample in pack] for pack in packs] == [[0, 1], [2, 3], [4]]
    assert all(sum(sample.cost for sample in pack) <= 40 or len(pack) == 1 for pack in packs)


def test_groups_are_divided_by_cost_and_every_rank_finds_the_same_plan() -> None:
    assert assign_groups([9, 1, 5, 5], 2) == [[0, 1], [2, 3]]
    assert assign_groups([4, 4, 4], 2) == [[0, 2], [1]]
    assert assign_groups([3], 2) == [[0], []]


def test_rows_are_numbered_over_the_batch() -> None:
    groups = tuple(
        Group(g, "p", tuple(trajectory([1, 2], 1, g, s) for s in range(size))) for g, size in ((7, 2), (9, 1))
    )
    assert [[(sample.index, sample.group) for sample in group] for group in batch_samples(Batch(0, groups))] == [
        [(0, 0), (1, 0)],
        [(2, 1)],
    ]
