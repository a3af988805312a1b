"""What was asked and answered in a trajectory, as text: tokens of the rollout store, tokenizer of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config.load import load_resolved
from ..models.tokenizer import TokenizerError, load_tokenizer
from ..orchestrator.store.reader import StoreReader
from ..orchestrator.store.schema import StoreError
from ..run.directory import RunDirectory
from ..run.text import printable
from ..types import Trajectory


class Transcripts:
    """Texts of a run's trajectories. ConfigError, StoreError: the run's configuration or tokenizer cannot be read."""

    def __init__(self, store: StoreReader, directory: RunDirectory) -> None:
        self._store = store
        config = load_resolved(directory.resolved)
        self._keep = config.checkpoint.keep_rollouts
        try:
            self._tokenizer = load_tokenizer(config.model.path / "tokenizer.json")
        except TokenizerError as error:
            raise StoreError(f"--text needs the run's tokenizer: {error}") from None

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """``row`` of ``StoreReader.history`` -> {"text": its pieces in order}, or {"text": None, "no_text": why}.

        A piece is {"of": "prompt", "answer" or "observation", "text": ...}; an answer has its "finish_reason" too.
        Special tokens are shown.
        """
        trajectory = self._store.trajectory(row["group_id"], row["sample_index"])
        return self.of_trajectory(trajectory, sampled=row["oldest_version"] is not None)

    def of_trajectory(self, trajectory: Trajectory | None, *, sampled: bool) -> dict[str, Any]:
        """As ``of``; ``sampled``: whether it has had tokens, where there are none."""
        if trajectory is None:
            return {"text": None, "no_text": self._why_none(sampled)}
        ids = trajectory.tokens.tolist()

        def pieces() -> Iterator[dict[str, Any]]:
            at = trajectory.prompt_length
            yield {"of": "prompt", "text": self._decode(ids[:at])}
            for turn in trajectory.turns:
                if turn.start > at:
                    yield {"of": "observation", "text": self._decode(ids[at : turn.start])}
                at = turn.end
                yield {"of": "answer", "text": self._decode(ids[turn.start : at]), "finish_reason": turn.finish_reason}
            if at < len(ids):
                yield {"of": "observation", "text": self._decode(ids[at:])}

        return {"text": list(pieces())}

    def _why_none(self, sampled: bool) -> str:
        if not sampled:
            return "no tokens are stored: it was not sampled to its end"
        return f"its tokens are pruned: checkpoint.keep_rollouts = {self._keep} steps"

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def lines_of(transcript: Mapping[str, Any]) -> Iterator[str]:
    """What ``Transcripts.of`` gives, for a terminal: control characters are escaped, lines indented."""
    if transcript["text"] is None:
        yield f"    ({transcript['no_text']})"
        return
    for piece in transcript["text"]:
        reason = f" ({piece['finish_reason']})" if "finish_reason" in piece else ""
        first, *rest = (printable(line) for line in piece["text"].split("\n"))
        yield f"    {piece['of'] + reason + ':':<18}{first}"
        yield from (f"    {'':<18}{line}" for line in rest)
