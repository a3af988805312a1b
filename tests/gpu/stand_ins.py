"""Checks that end as the tests of a run want them to, and ranks that need nothing for them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .checklist import Found, Place, Skipped, require


def ready() -> dict[str, str]:
    return {"date": "today"}


def good(place: Place, word: str) -> Found:
    return Found(f"{word} in {place.folder.name}", {"pid": os.getpid(), "seconds": place.seconds})


def hangs(place: Place, note: Path) -> Found:
    note.write_text(str(os.getpid()))
    time.sleep(600)
    return Found("")


def misses(place: Place) -> Found:
    return Found(require(0.5, 0.25, "half"))


def skips(place: Place) -> Found:
    raise Skipped("needs the moon")


def raises(place: Place) -> Found:
    raise ValueError("7 is no prime of this kind")
