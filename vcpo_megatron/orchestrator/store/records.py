"""What the store keeps as blobs: trajectories, their routed experts, the learner's own log-probs of them, and the
answers that unfinished ones have.

Each is a row of a table of its own: columns that queries need, one blob of ``types.codec``, and a CRC-32 of both. So
are the answers to held-out prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...rollout.client.protocol import GenerateResult, Span
from ...run.text import encodable
from ...types import LearnerRecord, PolicyVersion, Trajectory
from ...types.codec import from_blob, pack_array, pack_trajectories, to_blob, unpack_array, unpack_trajectories
from .schema import StoreError


@dataclass(frozen=True)
class Answer:
    """One answer of a server to an unfinished trajectory; ``prompt``: CRC-32 of the tokens that it was given."""

    prompt: int
    result: GenerateResult

    def versions(self) -> list[int]:
        return [PolicyVersion.parse(span.version).number for span in self.result.spans]


@dataclass(frozen=True)
class HeldOutSample:
    """What an evaluation got for held-out prompt number ``position``: a trajectory, or the ``reason`` why there is
    none."""

    position: int
    prompt_id: str
    trajectory: Trajectory | None = None
    reason: str = ""


@dataclass(frozen=True)
class EpisodeTimes:
    """When an episode ``began`` and ``ended``, in seconds since 1970, and ``answers``: start and end of each wait for a
    server's answer, its queue included. What lies between is the environment's."""

    began: float
    ended: float
    answers: tuple[tuple[float, float], ...]


def times_row(group_id: int, sample_index: int, times: EpisodeTimes) -> tuple[Any, ...]:
    """Row of ``episode_times``."""
    spans = np.array(times.answers, dtype="<f8").reshape(-1, 2) - times.began
    return (group_id, sample_index, times.began, times.ended, spans.astype("<f4").tobytes())


def times_of(row: Any) -> EpisodeTimes:
    """Inverse of ``times_row``; what is no pair of numbers at the end of a damaged one is left out."""
    whole = len(row["spans"]) // 8 * 8
    spans = np.frombuffer(row["spans"][:whole], dtype="<f4").astype(np.float64).reshape(-1, 2) + row["began"]
    return EpisodeTimes(row["began"], row["ended"], tuple((float(start), float(end)) for start, end in spans))


def sample_row(trajectory: Trajectory) -> tuple[Any, ...]:
    """Row of ``samples``; the experts go to a row of their own, since they are forgotten sooner, and the learner's
    log-probs, since they come later."""
    buffers: list[Any] = []
    header = pack_trajectories([trajectory], buffers, extras=False)
    columns = (trajectory.group_id, trajectory.sample_index, trajectory.prompt_length, len(trajectory.tokens))
    return _row(columns, to_blob(header, buffers))


def trajectory_of(
    row: Any, where: str, *, experts: np.ndarray | None = None, recorded: LearnerRecord | None = None
) -> Trajectory:
    """Inverse of ``sample_row``, with the ``experts`` and the ``recorded`` log-probs that were kept beside it;
    StoreError naming the trajectory and ``where`` when a bit has changed."""
    if not _is_whole(row, ("group_id", "sample_index", "prompt_length", "length")):
        raise StoreError(
            f"trajectory {_uid(row)} in {where} is damaged: its checksum does not match; "
            "restore the file from a copy or start a new run"
        )
    (trajectory,) = unpack_trajectories(*from_blob(row["content"]))
    return replace(trajectory, routed_experts=experts, recorded=recorded)


def routing_row(trajectory: Trajectory) -> tuple[Any, ...] | None:
    """Row of ``routing``; None where no experts were recorded."""
    if trajectory.routed_experts is None:
        return None
    buffers: list[Any] = []
    header = pack_array(trajectory.routed_experts, buffers)
    return _row((trajectory.group_id, trajectory.sample_index), to_blob(header, buffers))


def experts_of(row: Any, where: str) -> np.ndarray:
    """Inverse of ``routing_row``; StoreError naming the trajectory and ``where`` when a bit has changed."""
    if not _is_whole(row, ("group_id", "sample_index")):
        raise StoreError(
            f"routed experts of trajectory {_uid(row)} in {where} are damaged: their checksum does not match; "
            "restore the file from a copy or start a new run"
        )
    return unpack_array(*from_blob(row["content"]))


def recorded_row(trajectory: Trajectory) -> tuple[Any, ...] | None:
    """Row of ``recorded``; None where the learner has not scored the trajectory."""
    if (recorded := trajectory.recorded) is None:
        return None
    buffers: list[Any] = []
    header = [list(recorded.version), pack_array(recorded.logprobs, buffers)]
    columns = (trajectory.group_id, trajectory.sample_index, recorded.version.number)
    return _row(columns, to_blob(header, buffers))


def recorded_of(row: Any, where: str) -> LearnerRecord:
    """Inverse of ``recorded_row``; StoreError naming the trajectory and ``where`` when a bit has changed."""
    if not _is_whole(row, ("group_id", "sample_index", "version")):
        raise StoreError(
            f"the learner's log-probs of trajectory {_uid(row)} in {where} are damaged: their checksum does not match; "
            "restore the file from a copy or start a new run"
        )
    (version, logprobs), buffers = from_blob(row["content"])
    return LearnerRecord(PolicyVersion(*version), unpack_array(logprobs, buffers))


def answers_row(group_id: int, sample_index: int, answers: Sequence[Answer]) -> tuple[Any, ...]:
    """Row of ``partial_rollouts``; log-probs are kept as float64, so that every bit comes back."""
    buffers: list[Any] = []
    header = []
    for answer in answers:
        result, routed = answer.result, answer.result.routed_experts
        ids, logprobs = np.array(result.output_ids, np.int32), np.array(result.logprobs, np.float64)
        header.append(
            [
                answer.prompt,
                pack_array(ids, buffers),
                pack_array(logprobs, buffers),
                result.spans,
                result.finish_reason,
                None if routed is None else pack_array(routed, buffers),
            ]
        )
    newest = max(version for answer in answers for version in answer.versions())
    return _row((group_id, sample_index, newest), to_blob(header, buffers))


def answers_of(row: Any, where: str) -> tuple[Answer, ...]:
    """Inverse of ``answers_row``; StoreError naming the trajectory and ``where`` when a bit has changed."""
    if not _is_whole(row, ("group_id", "sample_index", "newest_version")):
        raise StoreError(
            f"answers of trajectory {_uid(row)} in {where} are damaged: resume with checkpoint.resume_partial = false"
        )
    header, buffers = from_blob(row["content"])
    found = []
    for prompt, packed_ids, packed_logprobs, spans, reason, routed in header:
        ids, logprobs = unpack_array(packed_ids, buffers).tolist(), unpack_array(packed_logprobs, buffers).tolist()
        experts = None if routed is None else unpack_array(routed, buffers)
        found.append(
            Answer(prompt, GenerateResult(tuple(ids), tuple(logprobs), tuple(Span(*s) for s in spans), reason, experts))
        )
    return tuple(found)


def heldout_row(version: int, sample: HeldOutSample) -> tuple[Any, ...]:
    """Row of ``evaluations``."""
    known = (version, sample.position, encodable(sample.prompt_id))
    if sample.trajectory is None:
        return (*known, None, encodable(sample.reason) or "unknown", None, None)
    buffers: list[Any] = []
    blob = to_blob(pack_trajectories([sample.trajectory], buffers, extras=False), buffers)
    return (*known, float(sample.trajectory.reward), "", _checksum((version, sample.position), blob), blob)


def heldout_trajectory_of(row: Any, where: str) -> Trajectory | None:
    """The trajectory of a row of ``evaluations``, None where it has none (any more); StoreError as above."""
    if row["content"] is None:
        return None
    if not _is_whole(row, ("version", "position")):
        raise StoreError(
            f"the answer to held-out prompt {row['prompt_id']} by version {row['version']} in {where} is damaged: its "
            "checksum does not match; restore the file from a copy"
        )
    (trajectory,) = unpack_trajectories(*from_blob(row["content"]))
    return trajectory


def _uid(row: Any) -> str:
    return f"{row['group_id']}/{row['sample_index']}"


def _row(columns: tuple[int, ...], blob: bytes) -> tuple[Any, ...]:
    return (*columns, blob, _checksum(columns, blob))


def _is_whole(row: Any, columns: Sequence[str]) -> bool:
    return bool(row["checksum"] == _checksum(tuple(row[name] for name in columns), row["content"]))


def _checksum(columns: tuple[Any, ...], blob: bytes) -> int:
    return zlib.crc32(blob, zlib.crc32(repr(columns).encode()))
