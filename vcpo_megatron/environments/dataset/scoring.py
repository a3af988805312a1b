"""Built-in rewards: pure functions of what the policy answered and of the reference answer.

exact_match   the answer is the reference, as text                          1 or 0
number        its last number is that of the reference, exactly             1 or 0
math          it equals the reference as mathematics (math-verify)          1 or 0
format        it has a form, given as a regular expression                  1 or 0
length        it is not too long; DAPO's soft overlong punishment           0 to -1
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..base import EnvironmentSetupError


@dataclass(frozen=True)
class Answered:
    """What is scored: the policy's answer to one row. ``reference`` is the row's ``answer``, None where it has none."""

    response: str
    token_ids: tuple[int, ...]
    finish_reason: str
    reference: Any


Scoring = Callable[[Answered], float]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class ScoringOptions(BaseModel):
    """Options of a built-in reward: none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Extracting(ScoringOptions):
    """``extract``: a regular expression. Its last match in the response (its first group, where it has one) is looked
    at in place of the response; without a match the reward is 0."""

    extract: Pattern | None = None


class ExactMatchOptions(Extracting):
    """``ignore_case``: capital letters are as good as small ones."""

    ignore_case: bool = False


class FormatOptions(ScoringOptions):
    """``pattern``: what the whole response must match, without blanks around it; a dot stands for line breaks, too."""

    pattern: Pattern


class LengthOptions(ScoringOptions):
    """An answer of ``free`` tokens or fewer costs nothing, one of ``limit`` tokens 1."""

    free: int = Field(ge=0)
    limit: int = Field(ge=1)


def _extracted(response: str, pattern: str | None) -> str | None:
    """The part of ``response`` that counts; None when there is none."""
    if pattern is None:
        return response
    found = list(re.finditer(pattern, response, re.DOTALL))
    if not found:
        return None
    return found[-1].group(1) if found[-1].re.groups else found[-1].group()


def references(reference: Any) -> list[str]:
    """The texts that are right: that of a text or number, or those of a list of them; ValueError for anything else."""
    found = reference if isinstance(reference, Sequence) and not isinstance(reference, str | bytes) else [reference]
    if not found or any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in found):
        raise ValueError(f"the reference answer {reference!r} is no text, no number and no list of them")
    return [str(item).strip() for item in found]


def exact_match(options: ExactMatchOptions) -> Scoring:
    """The response, without blanks around it, is the reference or one of them."""

    def fold(text: str) -> str:
        return text.strip().casefold() if options.ignore_case else text.strip()

    def score(answered: Answered) -> float:
        said = _extracted(answered.response, options.extract)
        return float(said is not None and fold(said) in map(fold, references(answered.reference)))

    return score


_SIGN = r"(?<![\w.])(?P<sign>(?<![\w)\]}])[-\u2212])?"
_THOUSANDS = r"\d{1,3}+(?:,\d{3})++(?![\d,])"
_UNSIGNED = rf"(?P<whole>{_THOUSANDS}|\d++|(?=\.\d))(?P<part>\.\d++)?(?:/(?P<below>\d++))?"
_NUMBER = re.compile(_SIGN + _UNSIGNED)
#: Numbers, of which the last is that of a text. What looks like thousands up to where it is none ("1,000,000,00") is
#: passed over in one match but for its last number: looking for its end from each of its numbers would take a time that
#: grows with the square of its length, and a policy in a loop writes long ones.
_NUMBERS = re.compile(rf"{_SIGN}(?:(?!{_THOUSANDS})\d{{1,3}}+(?:,\d{{3}}(?=,\d{{3}}))*+,(?=\d{{3}})|{_UNSIGNED})")
_LONGEST_NUMBER = 1000  # digits: Python itself reads up to 4300


def final_number(text: str) -> Fraction | None:
    """The number that ``text`` comes to: the last one in its last \\boxed{}, where it has one; else the last that
    follows "####"; else the last one. None when there is none.

    Integers, decimals and fractions as 3/4; thousands may be separated by commas.
    """
    if (boxed := last_boxed(text)) is not None:
        return _last_number(boxed)
    marked = [match for mark in re.finditer(r"####\s*\$?", text) if (match := _NUMBER.match(text, mark.end()))]
    return _value(marked[-1]) if marked else _last_number(text)


def _last_number(text: str) -> Fraction | None:
    found = list(_NUMBERS.finditer(text))
    return _value(found[-1]) if found else None


def _value(match: re.Match[str]) -> Fraction | None:
    digits = (match["whole"] or "").replace(",", "") + (match["part"] or "")
    below = match["below"] or "1"
    if len(digits) + len(below) > _LONGEST_NUMBER or not int(below):
        return None
    return Fraction(digits) / int(below) * (-1 if match["sign"] else 1)


def number(options: Extracting) -> Scoring:
    """The last number of the response is that of the reference, read the same way: 0.50 is 1/2, and 1,000 is 1000."""

    def score(answered: Answered) -> float:
        said = final_number(_extracted(answered.response, options.extract) or "")
        return float(said is not None and said in numbers(answered.reference))

    return score


def numbers(reference: Any) -> list[Fraction]:
    """``final_number`` of every text that is right; ValueError where one has none."""
    found = [final_number(text) for text in references(reference)]
    if None in found:
        raise ValueError(f"the reference answer {reference!r} holds no number")
    return [value for value in found if value is not None]


def last_boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{...} of ``text``; None when there is none."""
    open_, last = list[int | None](), None  # of every brace that is open: where the box begins that it is of
    for match in re.finditer(r"\\boxed\{|[{}]", text):
        if match.group() != "}":
            open_.append(match.end() if match.group() != "{" else None)
        elif open_ and (start := open_.pop()) is not None and (last is None or start > last[0]):
            last = start, match.start()
    return text[slice(*last)] if last else None


def math(options: Extracting) -> Scoring:
    """The response is equal to the reference: what its last \\boxed{} holds, else the last expression in it."""
    equal = _math_verify()

    def score(answered: Answered) -> float:
        said = _extracted(answered.response, options.extract)
        if said is None:
            return 0.0
        return float(any(equal(text, said) for text in references(answered.reference)))

    return score


def _math_verify() -> Callable[[str, str], bool]:
    """(reference, response) -> whether they are equal; EnvironmentSetupError where math-verify does not work.

    Its own deadlines are signals, which only a main thread gets. They are turned off: the episode has a deadline.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that they are off
    try:
        from math_verify import parse, verify

        if not verify(parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None), parse("$0.5$", parsing_timeout=None)):
            raise ImportError("it finds that 1/2 is not 0.5")
    except (ImportError, TypeError) as error:
        raise EnvironmentSetupError(
            f'the reward "math" needs math-verify 0.8 or newer ({error}); pip install "math-verify[antlr4_13_2]>=0.8", '
            'or take "number"'
        ) from None

    def equal(reference: str, response: str) -> bool:
        right = parse(reference if "\\boxed" in reference else f"\\boxed{{{reference}}}", parsing_timeout=None)
        if not right:
            raise ValueError(f"the reference answer {reference!r} is no mathematics that math-verify can read")
        boxed = last_boxed(response)
        said = parse(response if boxed is None else f"\\boxed{{{boxed}}}", parsing_timeout=None)
        return bool(verify(right, said, timeout_seconds=None))

    return equal


def form(options: FormatOptions) -> Scoring:
    """The whole response matches ``pattern``."""
    whole = re.compile(options.pattern, re.DOTALL)
    return lambda answered: float(whole.fullmatch(answered.response.strip()) is not None)


def length(options: LengthOptions) -> Scoring:
    """0 up to ``free`` tokens, falling in a straight line to -1 at ``limit`` (DAPO, arXiv 2503.14476, equation 13)."""
    if options.free >= options.limit:
        raise EnvironmentSetupError(f"free = {options.free}: must be below limit = {options.limit}")

    def score(answered: Answered) -> float:
        over = len(answered.token_ids) - options.free
        return -min(1.0, max(0.0, over / (options.limit - options.free)))

    return score


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward: the model of its options, what makes it, and how it reads the reference answer (ValueError for
    one that it cannot compare with; None: it does not look at it)."""

    options: type[ScoringOptions]
    make: Callable[[Any], Scoring]
    reads: Callable[[Any], object] | None = None


BUILT_IN: dict[str, BuiltIn] = {
    "exact_match": BuiltIn(ExactMatchOptions, exact_match, references),
    "number": BuiltIn(Extracting, number, numbers),
    "math": BuiltIn(Extracting, math, references),
    "format": BuiltIn(FormatOptions, form),
    "length": BuiltIn(LengthOptions, length),
}
