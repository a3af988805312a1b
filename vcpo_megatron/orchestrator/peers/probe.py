"""Before the first request: do learner and servers compute the same function?

Both load ``model.path`` and the learner's weights were published once. Their log-probs of a fixed token sequence are
compared, since checksums of parameters cannot be: each side stores them in its own layout.
"""

from __future__ import annotations

import numpy as np

from ...rollout.client.http import ServerError, ServerUnavailable
from ...rollout.client.protocol import ProtocolError
from ...rollout.fleet.fleet import Fleet
from ...rollout.fleet.server import Server
from ...run.tasks import RunError
from .learner import LearnerLink
from .servers import back_in_service

_LENGTH = 16
#: Largest difference of a log-prob that the arithmetic of a dtype explains.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


def probe_tokens(vocab_size: int) -> np.ndarray:
    """int32 [16], the same for every run of one vocabulary."""
    return (np.arange(_LENGTH, dtype=np.int64) * 7919 % vocab_size).astype(np.int32)


async def compare(link: LearnerLink, fleet: Fleet, vocab_size: int, dtype: str) -> None:
    """RunError when a server's log-probs of the probe differ from the learner's by more than the tolerance."""
    tokens = probe_tokens(vocab_size)
    expected = await link.probe(tokens)
    for server in fleet.servers:
        found = await _score(fleet, server, tokens)
        if found.shape != expected.shape:
            raise RunError(f"{server.name} scored {found.size} tokens of the probe, the learner {expected.size}")
        difference = float(np.max(np.abs(found - expected)))
        if not difference <= _TOLERANCE[dtype]:
            raise RunError(
                f"{server.name} and the learner differ by {difference:.3g} in a log-prob of the probe (at most "
                f"{_TOLERANCE[dtype]:g} is rounding): they do not compute the same model; see {server.log}"
            )


async def _score(fleet: Fleet, server: Server, tokens: np.ndarray) -> np.ndarray:
    """float64 [L-1]; asked again when the server died and may be restarted."""
    while True:
        incarnation = server.incarnation
        try:
            return np.asarray(await server.client.score(tokens.tolist()), dtype=np.float64)
        except (ServerError, ServerUnavailable, ProtocolError) as error:
            if not isinstance(error, ServerUnavailable) or fleet.check(server, incarnation):
                raise RunError(f"{server.name} could not score the probe: {error}, see {server.log}") from error
        await back_in_service(fleet, server)
