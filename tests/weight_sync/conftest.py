"""Servers are started here as they are for tests of rollouts."""

from tests.rollout.conftest import (  # noqa: F401
    server,
    start_lasting_server,
    start_server,
    start_sglang,
    use,
    versions,
)
