"""A request as a client of any kind may send it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
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


def wait_until(url: str, look: Callable[[int, int], bool]) -> None:
    """Return when ``look`` is true of the numbers of running and waiting sequences of the embedded engine at ``url``;
    AssertionError after half a minute."""
    deadline = time.monotonic() + 30
    while True:
        with urllib.request.urlopen(url + "/server_info", timeout=30) as response:
            state = json.loads(response.read())
        if look(state["num_running_requests"], state["num_waiting_requests"]):
            return
        assert time.monotonic() < deadline, f"still: {state}"
        time.sleep(0.005)
