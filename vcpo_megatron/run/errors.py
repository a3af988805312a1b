"""The error that a user's configuration causes, for everyone who reads or checks one."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration cannot be used. ``problems`` holds one line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))
