"""Every request in flight is a connection, and every connection an open file of the process."""

from __future__ import annotations

import resource

#: Files of a process beside its connections.
_OTHERS = 256


def allow_connections(count: int) -> str | None:
    """Let this process have ``count`` connections, as far as its hard limit goes. What is wrong where that is too low,
    in words; None where it is not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most >= wanted:
        return None
    return (
        f"{count} requests in flight need {wanted} open files, the hard limit of this process is {hard}; raise it "
        "(ulimit -Hn, LimitNOFILE of a service)"
    )
