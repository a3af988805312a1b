"""Built-in rewards by literals."""

from __future__ import annotations

import random
import re
import time
from fractions import Fraction
from typing import Any

import pytest

from vcpo_megatron.environments.base import EnvironmentSetupError
from vcpo_megatron.environments.dataset.scoring import BUILT_IN, Answered, final_number, last_boxed, references


def score(name: str, response: str, reference: Any = None, *, tokens: int = 1, **options: Any) -> float:
    reward = BUILT_IN[name]
    return reward.make(reward.options(**options))(Answered(response, (0,) * tokens, "stop", reference))


@pytest.mark.parametrize(
    ("response", "reference", "options", "reward"),
    [
        (" Paris\n", "Paris", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("Paris, France", "Paris", {}, 0.0),
        ("Lutetia", ["Paris", "Lutetia"], {}, 1.0),
        ("7", 7, {}, 1.0),
        ("", "Paris", {}, 0.0),
        ("<answer>no</answer> so\n<answer>\nyes </answer>", "yes", {"extract": "<answer>(.*?)</answer>"}, 1.0),
        ("yes", "yes", {"extract": "<answer>(.*?)</answer>"}, 0.0),
        ("I say B, then C", "C", {"extract": "[ABC]"}, 1.0),
    ],
)
def test_exact_match(response: str, reference: Any, options: dict[str, Any], reward: float) -> None:
    assert score("exact_match", response, reference, **options) == reward


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 x 34 = 408", 408),
        ("It costs $1,234.50.", Fraction(2469, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("\u22123 degrees", -3),
        ("5-3", 3),
        ("(5)-3", 3),
        ("about .5", Fraction(1, 2)),
        ("1/0", None),
        ("x2", None),
        ("", None),
        ("9" * 2000, None),
        (r"\boxed{7}, or 8", 7),
        (r"\boxed{none}, or 8", None),
        ("48/2=24\n#### 72 and 3 more", 72),
        ("#### Step 1\nso it is 5", 5),
        ("1, 2, 3", 3),
        ("1,000,00", 0),
    ],
)
def test_final_number(text: str, value: Fraction | None) -> None:
    assert final_number(text) == value


#: The rule of ``final_number`` for one number, written plainly; it takes quadratic time.
_PLAINLY = re.compile(
    r"(?<![\w.])(?:(?<![\w)\]}])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+|(?=\.\d))(?:\.\d+)?(?:/\d+)?"
)


def test_the_last_number_is_that_of_the_plain_rule() -> None:
    draw = random.Random(0)
    for _ in range(5_000):
        pieces = ["1", "12", "123", "000", "4567", ",", ",", ",", ",000", ",234", ".", "/", "-", " ", "x", ")"]
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 12)))
        found = _PLAINLY.findall(text)
        assert final_number(text) == (final_number(f"#### {found[-1]}") if found else None), text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1" + ",000" * 50_000 + "0", 0),
        ("7" + ",123" * 50_000 + ",", 123),
        ("-1" + ",234" * 50_000 + ",5 ", 5),
        ("#### 1" + ",000" * 50_000 + "0", 1),
        ("#### 1,000,00 " * 15_000, 1),
        ("1" * 200_000, None),
        ("1.1" * 70_000, None),
        ("1/1" * 70_000 + " 3", 3),
        ("####" * 50_000 + " 3", 3),
        ("#### " + " " * 200_000 + "$3", 3),
        ("\\boxed{" * 30_000 + "3" + "}" * 30_000, 3),
        ("{" * 200_000 + "3", 3),
    ],
)
def test_a_policy_in_a_loop_costs_linear_time(text: str, value: int | None) -> None:
    started = time.process_time()
    found = final_number(text)
    assert time.process_time() - started < 3.0  # quadratic: minutes
    assert value is None or found == value


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [("72", "48/2 = 24, 24 + 48\n#### 72", 1.0), ("0.50", "1/2", 1.0), ("0.3333", "1/3", 0.0), ("2", [1, 2.0], 1.0)],
)
def test_number(response: str, reference: Any, reward: float) -> None:
    assert score("number", response, reference) == reward


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"} { \boxed{5}", "5"),
        ("no box", None),
        (r"\boxed{" * 50_000, None),  # in time that grows with the length
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("response", "reward"), [("<think>\na\n</think> 5\n", 1.0), ("5", 0.0), ("x <think></think>", 0.0)]
)
def test_format(response: str, reward: float) -> None:
    assert score("format", response, pattern="<think>.*</think>.*") == reward


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0.0), (100, 0.0), (150, -0.5), (200, -1.0), (999, -1.0)])
def test_length(tokens: int, reward: float) -> None:
    assert score("length", "", tokens=tokens, free=100, limit=200) == reward


def test_length_needs_room_to_fall() -> None:
    with pytest.raises(EnvironmentSetupError, match="free = 5: .*limit = 5"):
        score("length", "", free=5, limit=5)


@pytest.mark.parametrize("reference", [None, True, {"target": 1}, [], ["a", None], b"a"])
def test_a_reference_that_is_no_answer_is_refused(reference: Any) -> None:
    with pytest.raises(ValueError, match="is no text, no number and no list"):
        references(reference)


def test_a_number_needs_one_in_the_reference() -> None:
    reads = BUILT_IN["number"].reads
    assert reads is not None
    with pytest.raises(ValueError, match="'none'. holds no number"):
        reads(["1", "none"])


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{3} and then 4", "4", 0.0),
        ("nothing", "4", 0.0),
    ],
)
def test_math(response: str, reference: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert score("math", response, reference) == reward


def test_math_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(EnvironmentSetupError, match="pip install"):
        score("math", "1", "1")
