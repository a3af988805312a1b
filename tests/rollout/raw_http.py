"""A request as a client of any kind may send it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def post(url: str, endpoint: str, body: Any) -> tuple[int, Any]:
    """Status and answer of a raw request, for bodies that the client would never send; bytes go as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + endpoint, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
            return response.status, json.loads(text) if text[:1] in (b"{", b"[") else text.decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
