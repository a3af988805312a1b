"""What may go wrong in the embedded engine, by who must be told."""

from __future__ import annotations


class RequestError(ValueError):
    """A request cannot be served (HTTP 400); the server is unharmed. ``args[0]`` is one line."""


class ModelError(ValueError):
    """A model folder cannot be served: missing file, missing tensors, unsupported architecture."""
