"""Whether a server holds the bytes that were sent to it (``rollout.verify_sync``).

A server names its parameters its own way, and the learner computes what it must answer. That is what is compared, but
where servers are on GPUs, which hash in another way, or have several ranks, which hold parts: those are compared with
the server of the same version that was updated before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config.process import NOTE_PREFIX
from ..rollout.client.http import ServerClient

#: Versions whose answers are remembered.
_REMEMBERED = 8


class ChecksumError(RuntimeError):
    """A server holds other weights than were sent to it; the message names the first parameter."""


class ChecksumVerifier:
    """Remembers, for each version, what the last server answered."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, list[dict[str, str]]]] = {}
        #: Servers' parameters compared so far, with the learner's or with another server's.
        self.compared = 0
        #: Updates of a server, since somebody set this to 0, after which something was compared and all was equal.
        self.verified = 0

    async def check(self, name: str, client: ServerClient, version: str, expected: Mapping[str, str]) -> None:
        """ChecksumError when the server ``name`` holds something else than ``expected``, or than another server."""
        ranks = await client.weights_checksums()
        before = self.compared
        if expected and len(ranks) == 1 and not client.info.on_gpus:
            known = {key: ranks[0][key] for key in expected if key in ranks[0]}
            self._compare(name, version, "what the learner sent", [expected], [known])
            ranks = [{key: checksum for key, checksum in ranks[0].items() if key not in expected}]
        if version not in self._first:
            while len(self._first) >= _REMEMBERED:
                del self._first[next(iter(self._first))]
            self._first[version] = (name, ranks)
        other, first = self._first[version]
        if other != name:
            self._compare(name, version, f"what {other} holds", first, ranks)
        self._first[version] = (name, ranks)
        if self.compared > before:
            self.verified += 1
            if before == 0:
                print(
                    f"{NOTE_PREFIX}{name}: {self.compared} checksums of weights {version} agree "
                    "(rollout.verify_sync); sync/verified counts the updates that follow",
                    flush=True,
                )

    def _compare(
        self,
        name: str,
        version: str,
        what: str,
        wanted: Sequence[Mapping[str, str]],
        found: Sequence[Mapping[str, str]],
    ) -> None:
        if len(wanted) != len(found):
            raise ChecksumError(f"{name} has {len(found)} ranks, {len(wanted)} were expected")
        for wanted_rank, found_rank in zip(wanted, found, strict=True):
            wrong = sorted(
                key for key in wanted_rank.keys() | found_rank.keys() if wanted_rank.get(key) != found_rank.get(key)
            )
            if wrong:
                raise ChecksumError(
                    f"{name} does not hold weights {version}: {len(wrong)} of {len(wanted_rank)} parameters "
                    f"differ from {what}, first {wrong[0]} (checksum {found_rank.get(wrong[0])}, expected "
                    f"{wanted_rank.get(wrong[0])})"
                )
            self.compared += len(wanted_rank)
