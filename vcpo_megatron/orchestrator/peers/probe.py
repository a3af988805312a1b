"""Do learner and servers compute the same function? By their log-probs of the probe (``weight_sync.probe``).

Before the first request, when both have loaded ``model.path`` and the learner's weights were published once, they are
compared with each other; after every later load of a server, with what it and the learner computed before.
"""

from __future__ import annotations

import numpy as np

from ...rollout.client.http import ServerError, ServerUnavailable
from ...rollout.client.protocol import ProtocolError
from ...rollout.fleet.fleet import Fleet
from ...rollout.fleet.server import Server
from ...rollout.fleet.trust import Doubt, Question
from ...run.tasks import RunError
from ...transport.messages import WeightsReady
from ...weight_sync.probe import TOLERANCE, Movement, probe_tokens
from .learner import LearnerLink
from .servers import back_in_service


class Prober:
    """Asks servers for the probe after every load. ``vocab_size`` and ``dtype`` are the model's."""

    def __init__(self, vocab_size: int, dtype: str) -> None:
        self._tokens = probe_tokens(vocab_size).tolist()
        self._dtype = dtype
        self._movements: dict[Server, Movement] = {}

    def question(self, server: Server, weights: WeightsReady) -> Question | None:
        """Whether ``server`` computes with ``weights``, which it has taken; None where the learner did not say what
        those compute."""
        if not weights.probe:
            return None
        movement = self._movements.setdefault(server, Movement(self._dtype))

        def holds() -> bool:
            return server.version == weights.version and not server.updating

        async def ask() -> Doubt | None:
            if not holds():
                return None  # what it computes now may be the next version, whose load asks anew
            try:
                scored = await server.client.score(self._tokens)
            except ProtocolError as error:
                return Doubt(f"cannot score the probe ({error})")
            if not holds():
                return None
            problem = movement.problem(np.asarray(scored), np.asarray(weights.probe))
            return None if problem is None else Doubt(f"took weights {weights.version} and {problem}")

        return ask


async def compare(link: LearnerLink, fleet: Fleet, vocab_size: int, dtype: str) -> None:
    """RunError when a server's log-probs of the probe differ from the learner's by more than the tolerance."""
    tokens = probe_tokens(vocab_size)
    expected = await link.probe(tokens)
    for server in fleet.servers:
        found = await _score(fleet, server, tokens)
        if found.shape != expected.shape:
            raise RunError(f"{server.name} scored {found.size} tokens of the probe, the learner {expected.size}")
        difference = float(np.max(np.abs(found - expected)))
        if not difference <= TOLERANCE[dtype]:
            raise RunError(
                f"{server.name} and the learner differ by {difference:.3g} in a log-prob of the probe (at most "
                f"{TOLERANCE[dtype]:g} is rounding): they do not compute the same model; {server.where}"
            )


async def _score(fleet: Fleet, server: Server, tokens: np.ndarray) -> np.ndarray:
    """float64 [L-1]; asked again when the server died and may be restarted, or was lost and found."""
    while True:
        incarnation = server.incarnation
        try:
            return np.asarray(await server.client.score(tokens.tolist()), dtype=np.float64)
        except (ServerError, ServerUnavailable, ProtocolError) as error:
            if fleet.check(server, incarnation):
                raise RunError(f"{server.name} could not score the probe: {error}, {server.where}") from error
        await back_in_service(fleet, server)
