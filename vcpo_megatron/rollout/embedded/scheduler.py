"""Which sequences run: admission, abort, the three pauses, and the version that samples.

Everything here runs in the engine's thread, between two steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

from ..client.protocol import PauseMode
from .errors import RequestError
from .runner import Runner
from .sequence import SequenceState

#: Prompt tokens of one step; more would delay the running sequences and need more memory.
MAX_PREFILL_TOKENS = 8192
#: Logits of one step's scored prompts (float32, 512 MB).
MAX_PREFILL_LOGITS = 2**27


class Scheduler:
    """``ended`` collects finished sequences until somebody takes them.

    paused     None, or the mode in which generation is paused
    held       True keeps waiting sequences out: a weight update waits for the running ones to end
    version    name of the weights that sample now
    """

    def __init__(self, runner: Runner, version: str) -> None:
        self.runner = runner
        self.version = version
        self.paused: PauseMode | None = None
        self.held = False
        self.ended: list[SequenceState] = []
        self._waiting: deque[SequenceState] = deque()
        self._active: dict[str, SequenceState] = {}

    @property
    def num_running(self) -> int:
        return len(self.runner.running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def runnable(self) -> bool:
        """True when a step would do something."""
        return self.paused is None and bool(self.runner.running or (self._waiting and not self.held))

    @property
    def can_update(self) -> bool:
        """True when weights may change now: as in SGLang, while paused or when nothing runs."""
        return self.paused is not None or not self.runner.running

    def submit(self, sequences: Sequence[SequenceState]) -> None:
        """Adds all sequences of one request, or none: RequestError names an id that is in use."""
        seen: set[str] = set()
        for sequence in sequences:
            if sequence.rid in self._active or sequence.rid in seen:
                raise RequestError(f"request id {sequence.rid!r} is already in use")
            seen.add(sequence.rid)
        for sequence in sequences:
            self._active[sequence.rid] = sequence
            self._waiting.append(sequence)

    def step(self) -> None:
        """Admits what fits and samples one token for every running sequence."""
        self.runner.step(self._admissible())
        for sequence in self.runner.remove_done():
            self._end(sequence)

    def abort(self, rids: Set[str] | None, message: str) -> None:
        """Ends the sequences named (None: all) with what they have, in one pass; an unknown id is no error."""
        finish = {"type": "abort", "message": message}
        for sequence in self.runner.running:
            if rids is None or sequence.rid in rids:
                sequence.finish = dict(finish)
        for sequence in self.runner.remove_done():
            self._end(sequence)
        waiting, self._waiting = self._waiting, deque()
        for sequence in waiting:
            if rids is None or sequence.rid in rids:
                sequence.finish = dict(finish)
                self._end(sequence)
            else:
                self._waiting.append(sequence)

    def pause(self, mode: PauseMode) -> None:
        """abort ends everything; retract sends running sequences back to be prefilled again; in_place freezes them."""
        self.paused = mode
        if mode == "abort":
            self.abort(None, "aborted by /pause_generation")
        elif mode == "retract":
            released = self.runner.release()
            for sequence in released:
                sequence.close_span(self.version)
                sequence.retractions += 1
            self._waiting.extendleft(reversed(released))

    def resume(self) -> None:
        self.paused = None

    def set_version(self, version: str) -> None:
        """What is sampled from now on belongs to ``version``."""
        for sequence in self.runner.running:
            sequence.close_span(self.version)
        self.version = version

    def _admissible(self) -> list[SequenceState]:
        admitted: list[SequenceState] = []
        tokens = logits = 0
        vocabulary = self.runner.model.vocab_size
        while self._waiting and not self.held and self.num_running + len(admitted) < self.runner.max_rows:
            sequence = self._waiting[0]
            tokens += sequence.length
            logits += vocabulary * (1 if sequence.score_from is None else len(sequence.prompt))
            if admitted and (tokens > MAX_PREFILL_TOKENS or logits > MAX_PREFILL_LOGITS):
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _end(self, sequence: SequenceState) -> None:
        sequence.close_span(self.version)
        del self._active[sequence.rid]
        self.ended.append(sequence)
