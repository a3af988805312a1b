"""Whether a server holds the bytes that were sent to it (``rollout.verify_sync``).

A server names its parameters its own way, and the learner computes what it must answer. That is what is compared, but
where servers are on GPUs, which hash in another way, or have several ranks, which hold parts. There it is known which
parameters the learner has changed, so those of a server must have changed, too; and the servers of one version must
agree. Where they do not, the majority is right; of two nobody knows which, and both get the weights again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..config.process import NOTE_PREFIX
from ..rollout.client.http import ServerClient

#: Versions whose answers are remembered.
_REMEMBERED = 8

#: Checksums by parameter, one mapping a rank of a server.
Ranks = Sequence[Mapping[str, str]]


class ChecksumError(RuntimeError):
    """A server holds other weights than were sent to it; the message names the first parameter."""


class _Taken(NamedTuple):
    """What a server held when an update of it was verified, and what the learner had sent."""

    sent: Mapping[str, str]
    ranks: Ranks


class ChecksumVerifier:
    """Remembers what the servers answered, of each version and of each server's last."""

    def __init__(self) -> None:
        self._of_version: dict[str, dict[str, Ranks]] = {}
        self._taken: dict[str, _Taken] = {}
        self._suspects: set[str] = set()
        #: Servers' parameters compared so far, with the learner's or with another server's.
        self.compared = 0
        #: Updates of a server, since somebody set this to 0, after which something was compared and all was equal.
        self.verified = 0

    async def check(self, name: str, client: ServerClient, version: str, expected: Mapping[str, str]) -> None:
        """ChecksumError when the server ``name`` holds something else than ``expected``, or than most servers of the
        version, or than the one other."""
        ranks: Ranks = await client.weights_checksums()
        before = self.compared
        taken = _Taken(expected, ranks)
        if expected and len(ranks) == 1 and not client.info.on_gpus:
            known = {key: ranks[0][key] for key in expected if key in ranks[0]}
            self._compare(name, version, "what the learner sent", [expected], [known])
            ranks = [{key: checksum for key, checksum in ranks[0].items() if key not in expected}]
        else:
            self._refuse_kept(name, version, taken)
        self._compare_with_others(name, version, ranks)
        self._taken[name] = taken
        if self.compared > before:
            self.verified += 1
            if before == 0:
                print(
                    f"{NOTE_PREFIX}{name}: {self.compared} checksums of weights {version} agree "
                    "(rollout.verify_sync); sync/verified counts the updates that follow",
                    flush=True,
                )

    def take_suspects(self) -> set[str]:
        """Names of servers, since the last call, that another one of the same version showed to be wrong, or maybe
        wrong: they need the weights again."""
        found, self._suspects = self._suspects, set()
        return found

    def _refuse_kept(self, name: str, version: str, taken: _Taken) -> None:
        """Of what the learner has changed since the server's last update, nothing may be as it was there."""
        before = self._taken.get(name)
        if before is None or len(before.ranks) != len(taken.ranks):
            return
        changed = [key for key, checksum in taken.sent.items() if before.sent.get(key, checksum) != checksum]
        pairs = list(zip(before.ranks, taken.ranks, strict=True))
        kept = [key for key in changed if all(key in now and now[key] == then.get(key) for then, now in pairs)]
        if kept:
            raise ChecksumError(
                f"{name} does not hold weights {version}: {len(kept)} of the {len(changed)} parameters that the "
                f"learner has changed are as they were before, first {kept[0]} (checksum {taken.ranks[0][kept[0]]})"
            )

    def _compare_with_others(self, name: str, version: str, ranks: Ranks) -> None:
        if version not in self._of_version:
            while len(self._of_version) >= _REMEMBERED:
                del self._of_version[next(iter(self._of_version))]
        others = self._of_version.setdefault(version, {})
        others.pop(name, None)
        alike = [other for other, held in others.items() if held == ranks]
        against = _largest({other: held for other, held in others.items() if held != ranks})
        if len(against) > len(alike):  # this one is wrong, or one of two
            (first, held), undecided = (against[0], others[against[0]]), len(against) == len(alike) + 1
            if undecided:
                self._suspect(others, against)
            unknown = "; which of the two is wrong is not known: both get the weights again" if undecided else ""
            self._compare(name, version, f"what {first} holds", held, ranks, unknown)
        self._suspect(others, [other for other in others if other not in alike])
        if alike:
            self.compared += sum(map(len, ranks))
        others[name] = ranks

    def _suspect(self, holders: dict[str, Ranks], names: Sequence[str]) -> None:
        for name in names:
            del holders[name]
            self._suspects.add(name)

    def _compare(
        self,
        name: str,
        version: str,
        what: str,
        wanted: Ranks,
        found: Ranks,
        more: str = "",
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
                    f"{wanted_rank.get(wrong[0])}){more}"
                )
            self.compared += len(wanted_rank)


def _largest(holders: Mapping[str, Ranks]) -> list[str]:
    """The most servers that hold the same, in the order in which they were asked."""
    found: list[list[str]] = []
    for name, held in holders.items():
        for group in found:
            if holders[group[0]] == held:
                group.append(name)
                break
        else:
            found.append([name])
    return max(found, key=len, default=[])
