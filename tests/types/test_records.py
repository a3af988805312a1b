"""Records refuse arrays that do not fit, and versions name policies without confusion."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo_megatron.types import Group, LearnerRecord, PolicyVersion, Trajectory, Turn, VersionSpan, routing_dtype

# --- versions ---------------------------------------------------------------------------------


def test_version_text() -> None:
    assert str(PolicyVersion(2, 17, "3f9a21c0")) == "3f9a21c0.2.17"
    assert PolicyVersion.parse("3f9a21c0.2.17") == PolicyVersion(attempt=2, number=17, run="3f9a21c0")
    assert PolicyVersion.parse("2.17") == PolicyVersion(attempt=2, number=17, run="")
    assert PolicyVersion(2, 17, "3f9a21c0").next() == PolicyVersion(2, 18, "3f9a21c0")


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from(["", "00000000", "3f9a21c0", "12345678"]))
def test_version_round_trip(attempt: int, number: int, run: str) -> None:
    assert PolicyVersion.parse(str(PolicyVersion(attempt, number, run))) == (attempt, number, run)


@pytest.mark.parametrize(
    "text",
    [
        *("", "17", "1.", ".1", "1.2.3", "a.1", "1.-1", "-1.1", "1. 2", "default"),
        *("3f9a21c0.1", ".1.2", "3F9A21C0.1.2", "3f9a21c0.1.2.3", "3f9a21c.1.2", "3f9a21c0.1.", "3f9a21c0.1.\u0663"),
    ],
)
def test_text_that_is_no_version_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="ATTEMPT.NUMBER") as error:
        PolicyVersion.parse(text)
    assert repr(text) in str(error.value)


def test_two_attempts_share_no_name() -> None:
    assert PolicyVersion(1, 17) != PolicyVersion(2, 17)
    assert str(PolicyVersion(1, 17, "3f9a21c0")) != str(PolicyVersion(1, 17, "00c12a9f"))
    assert str(PolicyVersion(1, 117)) != str(PolicyVersion(11, 17))


# --- trajectories -----------------------------------------------------------------------------


def fields(**changes: Any) -> dict[str, Any]:
    """Prompt of 2, three sampled tokens by versions 1.4, 1.4, 2.3, an observation, one by 2.5."""
    values: dict[str, Any] = {
        "group_id": 7,
        "sample_index": 3,
        "prompt_id": "p",
        "prompt_length": 2,
        "tokens": np.arange(7, dtype=np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 1, 0, 1], np.bool_),
        "behavior_logprobs": np.array([0, 0, -1, -2, -3, 0, -4], np.float32),
        "turns": (
            Turn(2, 5, "stop", (VersionSpan(2, 4, PolicyVersion(1, 4)), VersionSpan(4, 5, PolicyVersion(2, 3)))),
            Turn(6, 7, "length", (VersionSpan(6, 7, PolicyVersion(2, 5)),)),
        ),
        "reward": 1.0,
    }
    return values | changes


def test_trajectory_derives_its_numbers_from_mask_and_spans() -> None:
    trajectory = Trajectory(**fields())
    assert trajectory.uid == "7/3"
    assert trajectory.num_sampled == 4
    assert trajectory.versions == (PolicyVersion(1, 4), PolicyVersion(2, 3), PolicyVersion(2, 5))
    assert (trajectory.oldest_version, trajectory.newest_version) == (3, 5)  # numbers, whatever the attempt
    sampled = {version: trajectory.sampled_by(version).nonzero()[0].tolist() for version in (3, 4, 5, 6)}
    assert sampled == {3: [4], 4: [2, 3], 5: [6], 6: []}
    assert trajectory.info == {}


def test_every_sampled_token_is_in_a_turn() -> None:
    assert Trajectory(**fields()).turn_of_token.tolist() == [-1, -1, 0, 0, 0, -1, 1]
    first, second = fields()["turns"]
    with pytest.raises(ValueError, match="7/3.*position 6"):
        _ = Trajectory(**fields(turns=(first,))).turn_of_token
    # an observation need not be in one, and may be
    longer = dataclasses.replace(first, end=6)
    assert Trajectory(**fields(turns=(longer, second))).turn_of_token.tolist() == [-1, -1, 0, 0, 0, 0, 1]


def test_group_spans_its_members() -> None:
    one = (Turn(2, 7, "stop", (VersionSpan(2, 7, PolicyVersion(1, 9)),)),)
    group = Group(7, "p", (Trajectory(**fields()), Trajectory(**fields(turns=one))))
    assert (group.oldest_version, group.newest_version) == (3, 9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": np.arange(7, dtype=np.int64)}, r"tokens is int64\[7\], expected int32\[7\]"),
        ({"loss_mask": np.zeros(7, np.int8)}, r"loss_mask is int8\[7\], expected bool\[7\]"),
        ({"loss_mask": np.zeros(6, np.bool_)}, r"loss_mask is bool\[6\], expected bool\[7\]"),
        ({"behavior_logprobs": np.zeros(7)}, r"behavior_logprobs is float64\[7\], expected float32\[7\]"),
        ({"behavior_logprobs": np.zeros((7, 1), np.float32)}, r"behavior_logprobs is float32\[7, 1\]"),
        (
            {"recorded": LearnerRecord(PolicyVersion(1, 4), np.zeros(6, np.float32))},
            r"recorded.logprobs is float32\[6\]",
        ),
        ({"prompt_length": 0}, "prompt_length 0 does not fit 7 tokens"),
        ({"prompt_length": 8}, "prompt_length 8 does not fit 7 tokens"),
        ({"prompt_length": 3}, "a prompt token is marked as sampled"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        Trajectory(**fields(**changes))
    assert str(error.value).startswith("trajectory 7/3: ")


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Trajectory(**fields()).reward = 2.0  # type: ignore[misc]


# --- routed experts ---------------------------------------------------------------------------


def test_experts_fit_their_dtype_beside_the_mark_of_no_record() -> None:
    assert [routing_dtype(count) for count in (8, 255, 256, 65535)] == [np.uint8, np.uint8, np.uint16, np.uint16]


@pytest.mark.parametrize("experts", [np.zeros((6, 2, 2), np.uint8), np.zeros((7, 2), np.uint8), np.zeros((7, 2, 2))])
def test_experts_that_do_not_fit_are_refused(experts: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"7/3: routed_experts is .*uint8 or uint16\[7, layers, k\]"):
        Trajectory(**fields(), routed_experts=experts)
    assert Trajectory(**fields(), routed_experts=np.zeros((7, 2, 2), np.uint16)).routed_experts is not None
