"""What errors, warnings and notes say: the values that they name, and full sentences in ``golden/messages.json``.

Tests assert the type of an error and the values that it names, so that a better sentence changes one file at most.
``VCPO_WRITE_MESSAGES=1 pytest ...`` writes what is said now into it; read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden") / "messages.json"


def assert_names(message: object, *values: object) -> None:
    """One line of ``message`` holds each of ``values``, as whole words and in this order."""
    texts = [str(value) for value in values]
    edge = r"(?:(?<!\w)|(?!\w))"  # not within a word: 2 is not named by 12
    line = ".*".join(edge + re.escape(text) + edge for text in texts)
    assert re.search(line, str(message)), f"no line of {str(message)!r} names {texts}"


def assert_said(topic: str, case: str, message: str, **names: object) -> None:
    """``message`` is the sentence of ``case``; there ``<name>`` stands for each of ``names``, a folder for one."""
    for name, value in names.items():
        message = message.replace(str(value), f"<{name}>")
    if os.environ.get("VCPO_WRITE_MESSAGES"):
        _write(topic, case, message)
    held = json.loads(GOLDEN.read_text(encoding="utf-8"))[topic].get(case)
    assert message == held, f"{message!r}, where {GOLDEN.name} holds {held!r} for {topic}: {case}"


def topics() -> set[str]:
    """Those that the file holds."""
    return set(json.loads(GOLDEN.read_text(encoding="utf-8")))


def cases(topic: str) -> set[str]:
    """Those of ``topic`` that the file holds a sentence of."""
    return set(json.loads(GOLDEN.read_text(encoding="utf-8"))[topic])


def _write(topic: str, case: str, message: str) -> None:
    held = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    held.setdefault(topic, {})[case] = message
    GOLDEN.parent.mkdir(exist_ok=True)
    text = json.dumps({key: dict(sorted(held[key].items())) for key in sorted(held)}, indent=1, ensure_ascii=False)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
