"""What a user's environment gives back, checked where it comes from: plain values, or one line that says why not.

Numbers may be of any kind: Python's (bool, Decimal, Fraction), numpy's, arrays and tensors without dimensions.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from ...run.text import one_line
from ..base import Environment, EnvironmentSetupError, Example, Observation, Outcome

_MOST_TOKEN = 2**31 - 1
_MOST_PROMPT = 2**31 - 1  # tokens
_MOST_INTEGER = 2**63 - 1  # of a message
_MESSAGE_LENGTH = 1000
#: Levels of lists in a sampling parameter.
_DEEPEST = 8


class BadValue(ValueError):
    """A value that cannot be used; the message names it and what to give."""


def shown(value: object) -> str:
    """``value`` as short text, whatever its ``repr`` does."""
    try:
        return one_line(repr(value), 120)
    except Exception as error:  # fault boundary: a user's __repr__; the value is named by its type
        return f"a {type(value).__name__}, whose repr raised {type(error).__name__}"


def raised(phase: str, error: BaseException) -> str:
    """ "PHASE raised TYPE: what it says", in one line that any encoding takes."""
    try:
        text = str(error)
    except Exception as second:  # fault boundary: a user's __str__
        text = f"(its message cannot be shown: {type(second).__name__})"
    return one_line(f"{phase} raised {type(error).__name__}: {text}".removesuffix(": "), _MESSAGE_LENGTH)


def number(value: object) -> float:
    """``value`` as a finite float; BadValue names the value, its type where that says more, and what to give."""
    found = value
    if not isinstance(found, Real | Decimal) and hasattr(found, "item") and (shape := _shape(found)) is not None:
        if shape:
            raise BadValue(f"{shown(value)} (of shape {shape}); give one finite number")
        found = found.item()  # of numpy, torch and those like them
    if not isinstance(found, Real | Decimal):
        kind = "" if value is None else f" (a {type(value).__name__})"
        raise BadValue(f"{shown(value)}{kind}; give a finite number")
    try:
        plain = float(found)
    except (ValueError, OverflowError) as error:
        raise BadValue(f"{shown(value)} ({one_line(error)}); give a finite number") from None
    if not math.isfinite(plain):
        raise BadValue(f"{plain}; give a finite number")
    return plain


def _shape(value: Any) -> tuple[int, ...] | None:
    """Of an array or a tensor."""
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def outcome(result: Outcome) -> tuple[float, dict[str, float]]:
    """Reward and info of an episode's end as Python floats; BadValue names the key and the value."""
    try:
        reward = number(result.reward)
    except BadValue as error:
        raise BadValue(f"returned reward {error}") from None
    if not isinstance(result.info, Mapping):
        raise BadValue(f"returned info {shown(result.info)}; give a mapping of names to numbers")
    info: dict[str, float] = {}
    for key, value in result.info.items():
        if not isinstance(key, str):
            raise BadValue(f"returned info with the key {shown(key)}; give names as text")
        try:
            info[key] = number(value)
        except BadValue as error:
            raise BadValue(f"returned info {key} = {error}") from None
    return reward, info


def tokens(token_ids: object) -> list[int]:
    """Token ids as Python integers; BadValue names the first that is none."""
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise BadValue(f"returned token_ids = {shown(token_ids)}; give a tuple of integers")
    found = []
    for position, token in enumerate(token_ids):
        try:
            if isinstance(token, bool):
                raise TypeError
            found.append(operator.index(token))
        except TypeError:
            raise BadValue(f"returned token_ids[{position}] = {shown(token)}; give integers") from None
    if found and not 0 <= min(found) <= max(found) <= _MOST_TOKEN:
        raise BadValue(f"returned token_ids from {min(found)} to {max(found)}; give ids of the tokenizer")
    return found


def awaitable(result: Any) -> Awaitable[Any]:
    """What a method returned that is awaited."""
    if not inspect.isawaitable(result):
        raise BadValue(f"returned {shown(result)} and is no coroutine; declare it with `async def`")
    return result


def prompt(result: object) -> list[int]:
    """Token ids of what ``reset`` returned."""
    if not isinstance(result, Observation):
        raise BadValue(f"returned {shown(result)}, not an Observation with tokens")
    found = tokens(result.token_ids)
    if not found:
        raise BadValue(f"returned {shown(result)}, not an Observation with tokens")
    return found


def observed(result: object) -> list[int]:
    """Token ids of what ``step`` returned when it goes on; there may be none."""
    if not isinstance(result, Observation):
        raise BadValue(f"returned {shown(result)}, neither an Observation nor an Outcome")
    return tokens(result.token_ids)


def example(result: object) -> Example:
    """What ``train_example`` returned, or one of ``heldout``."""
    if not isinstance(result, Example):
        raise BadValue(f"returned {shown(result)}, not an Example")
    if not isinstance(result.prompt_id, str) or not result.prompt_id:
        raise BadValue(f"returned prompt_id = {shown(result.prompt_id)}; give a text that names the prompt")
    return result


def heldout(environment: Environment) -> list[Example]:
    """The held-out examples of ``environment``; BadValue."""
    found = environment.heldout()
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise BadValue(f"returned {shown(found)}; give a list of Examples, an empty one for none")
    return [example(held) for held in found]


def text(result: object) -> str:
    """What ``decode`` returned."""
    if not isinstance(result, str):
        raise BadValue(f"returned {shown(result)}, not text")
    return result


def description(environment: Environment, heldout: Sequence[Example], notes: Sequence[str] = ()) -> dict[str, Any]:
    """What the run asks about ``environment``; EnvironmentSetupError names the members that are of no use.

    ``notes``: what there is to say beside the environment's own, which it need not have.
    """
    found, problems = dict[str, Any](notes=[]), list[str]()
    cause: Exception | None = None
    for name, check in _MEMBERS.items():
        try:
            if name != "notes" or hasattr(environment, name):
                found[name] = check(getattr(environment, name))
        except BadValue as error:
            problems.append(f"{name}{error}")
        except Exception as error:  # fault boundary: a user's property
            problems.append(raised(name, error))
            cause = error
    if problems:
        who = shown(found["name"]) if "name" in found else f"of {type(environment).__name__}"
        raise EnvironmentSetupError(*(f"environment {who}: {problem}" for problem in problems)) from cause
    found["notes"] = [one_line(note, _MESSAGE_LENGTH) for note in (*notes, *found["notes"])]
    return {**found, "heldout": [held.prompt_id for held in heldout]}


# Checks of members: BadValue with what is to follow the member's name.


def _text_member(value: object) -> str:
    if not isinstance(value, str):
        raise BadValue(f" = {shown(value)}: give a text")
    return value


def _longest_prompt(value: Any) -> int:
    try:
        longest = operator.index(value)
    except TypeError:
        longest = 0
    if not 1 <= longest <= _MOST_PROMPT:
        raise BadValue(f" = {shown(value)}: give the length of the longest prompt in tokens")
    return longest


def _sampling(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadValue(f" = {shown(value)}: give a mapping of sampling parameters, {{}} for none")
    plain = {}
    for key, item in value.items():
        try:
            plain[str(key)] = _plain(item)
        except BadValue as error:
            raise BadValue(f"[{shown(key)}] = {shown(item)}: {error}") from None
    return plain


def _notes(value: object) -> list[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise BadValue(f" = {shown(value)}: give a list of texts")
    found = list(value)
    for position, note in enumerate(found):
        if not isinstance(note, str):
            raise BadValue(f"[{position}] = {shown(note)}: give texts")
    return found


_MEMBERS: Mapping[str, Callable[[Any], Any]] = {
    "name": _text_member,
    "fingerprint": _text_member,
    "sampling": _sampling,
    "max_prompt_tokens": _longest_prompt,
    "notes": _notes,
}


def _plain(value: object, depth: int = 0) -> Any:
    """A sampling parameter: nothing, a number, a text, or several; BadValue says what to give."""
    if depth > _DEEPEST:
        raise BadValue("nested too deeply; give a number, a text or several of them")
    if isinstance(value, int) and abs(value) > _MOST_INTEGER:
        raise BadValue("too large; give a number of 64 bits")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _plain(value.item(), depth + 1)
    if isinstance(value, Sequence | set | frozenset) or hasattr(value, "tolist"):
        items: Any = value
        return [_plain(item, depth + 1) for item in (items.tolist() if hasattr(value, "tolist") else items)]
    raise BadValue("give a number, a text or several of them")
