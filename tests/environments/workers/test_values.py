"""What a user's environment gives back: numbers of any kind become Python floats, anything else is named."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vcpo_megatron.environments.base import EnvironmentSetupError, Example, Observation, Outcome
from vcpo_megatron.environments.workers import values


class Scalar:
    """A tensor without dimensions, as torch has them."""

    shape = ()

    def item(self) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.uint8(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.5), 2.5),
        (Scalar(), 0.25),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_of_any_kind_become_floats(given: Any, expected: float) -> None:
    reward, info = values.outcome(Outcome(given, {"a": given}))
    assert (reward, info) == (expected, {"a": expected})
    assert type(reward) is float and type(info["a"]) is float


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "None; give a finite number"),
        (float("nan"), "nan; give a finite number"),
        (np.float32("inf"), "inf; give a finite number"),
        (Decimal("nan"), "nan; give a finite number"),
        (Decimal("snan"), "Decimal('sNaN') (cannot convert signaling NaN to float); give a finite number"),
        ("0.5", "'0.5' (a str); give a finite number"),
        (np.str_("0.5"), "np.str_('0.5') (a str_); give a finite number"),
        ([1.0], "[1.0] (a list); give a finite number"),
        ({"b": 1.0}, "{'b': 1.0} (a dict); give a finite number"),
        (np.array([1.0, 2.0]), "array([1., 2.]) (of shape (2,)); give one finite number"),
        (np.array(None), "array(None, dtype=object) (a ndarray); give a finite number"),
        (1j, "1j (a complex); give a finite number"),
        (10**400, "(int too large to convert to float); give a finite number"),
    ],
)
def test_what_is_no_finite_number_is_named(given: Any, shown: str) -> None:
    with pytest.raises(values.BadValue) as of_reward:
        values.outcome(Outcome(given))
    assert str(of_reward.value).startswith("returned reward ") and str(of_reward.value).endswith(shown)
    with pytest.raises(values.BadValue) as of_info:
        values.outcome(Outcome(1.0, {"good": 1.0, "a": given}))
    assert str(of_info.value).startswith("returned info a = ") and str(of_info.value).endswith(shown)


@pytest.mark.parametrize(
    ("info", "shown"),
    [
        (None, "returned info None; give a mapping"),
        ([1], r"returned info \[1\]; give a mapping"),
        ({3: 1.0}, "returned info with the key 3; give names"),
    ],
)
def test_info_is_a_mapping_of_names(info: Any, shown: str) -> None:
    with pytest.raises(values.BadValue, match=shown):
        values.outcome(Outcome(1.0, info))


@pytest.mark.parametrize("token_ids", [(1, 2), [1, 2], np.array([1, 2]), (np.int32(1), np.int64(2))])
def test_tokens_become_integers(token_ids: Any) -> None:
    found = values.prompt(Observation(token_ids))
    assert found == [1, 2] and {type(token) for token in found} == {int}


@pytest.mark.parametrize(
    ("token_ids", "shown"),
    [
        ((), "not an Observation with tokens"),
        ("12", "returned token_ids = '12'; give a tuple of integers"),
        (None, "returned token_ids = None; give a tuple of integers"),
        ((1, 2.0), r"returned token_ids\[1\] = 2.0; give integers"),
        ((1, True), r"returned token_ids\[1\] = True; give integers"),
        ((1, -1), "returned token_ids from -1 to 1; give ids of the tokenizer"),
        ((1, 2**31), "returned token_ids from 1 to 2147483648"),
    ],
)
def test_what_is_no_token_is_named(token_ids: Any, shown: str) -> None:
    with pytest.raises(values.BadValue, match=shown):
        values.prompt(Observation(token_ids))


@pytest.mark.parametrize(
    ("heldout", "shown"),
    [
        (None, "returned None; give a list of Examples"),
        (["a prompt"], "returned 'a prompt', not an Example"),
        ([Example(7, {})], "returned prompt_id = 7; give a text"),  # type: ignore[arg-type]
    ],
)
def test_held_out_prompts_are_examples(heldout: Any, shown: str) -> None:
    environment: Any = SimpleNamespace(heldout=lambda: heldout)
    with pytest.raises(values.BadValue, match=shown):
        values.heldout(environment)


def described(**changes: Any) -> Mapping[str, Any]:
    members = {"name": "n", "fingerprint": "f", "sampling": {}, "max_prompt_tokens": 3, **changes}
    environment: Any = SimpleNamespace(**members)
    return values.description(environment, [Example("h", {})])


def test_a_description_is_plain() -> None:
    sampling = {"stop_token_ids": (np.int64(3), 4), "top_k": np.int32(5), "ignore_eos": True}
    assert described(sampling=sampling, max_prompt_tokens=np.int64(7)) == {
        "name": "n",
        "fingerprint": "f",
        "sampling": {"stop_token_ids": [3, 4], "top_k": 5, "ignore_eos": True},
        "max_prompt_tokens": 7,
        "heldout": ["h"],
        "notes": [],
    }


def test_all_that_is_wrong_with_a_description_is_named_together() -> None:
    with pytest.raises(EnvironmentSetupError) as caught:
        described(fingerprint=None, sampling=None, max_prompt_tokens="3")
    assert len(caught.value.problems) == 3
    for shown in (
        "fingerprint = None: give a text",
        "sampling = None: give a mapping",
        "max_prompt_tokens = '3': give",
    ):
        assert any(shown in problem for problem in caught.value.problems)
    with pytest.raises(EnvironmentSetupError, match=r"sampling\['stop'\] = <object .*: give a number"):
        described(sampling={"stop": object()})


class _Raises:
    name, fingerprint, sampling = "n", "f", {}

    @property
    def max_prompt_tokens(self) -> int:
        raise KeyError("data")


_ITSELF: list[Any] = []
_ITSELF.append(_ITSELF)
_DEEP: list[Any] = []
for _ in range(5000):
    _DEEP = [_DEEP]


@pytest.mark.parametrize(
    ("member", "value", "said"),
    [
        ("max_prompt_tokens", 10**30, "max_prompt_tokens = 1" + "0" * 30 + ": give the length of the longest prompt"),
        ("max_prompt_tokens", -5, "max_prompt_tokens = -5: give the length"),
        ("max_prompt_tokens", 0, "max_prompt_tokens = 0: give the length"),
        pytest.param("max_prompt_tokens", 10**5000, "max_prompt_tokens = a int, whose repr raised ", id="digits"),
        ("max_prompt_tokens", 2.5, "max_prompt_tokens = 2.5: give the length"),
        ("notes", 5, "notes = 5: give a list of texts"),
        ("notes", "one text", "notes = 'one text': give a list of texts"),
        ("notes", ["a", None], "notes[1] = None: give texts"),
        ("sampling", {"stop": _ITSELF}, "sampling['stop'] = [[...]]: nested too deeply"),
        ("sampling", {"stop": _DEEP}, "sampling['stop'] = a list, whose repr raised RecursionError: nested too deeply"),
        ("sampling", {"top_k": 10**30}, "sampling['top_k'] = 1" + "0" * 30 + ": too large"),
        ("sampling", {"top_k": np.complex128(1)}, "sampling['top_k'] = "),
        ("sampling", 5, "sampling = 5: give a mapping"),
        ("name", 5, "name = 5: give a text"),
    ],
)
def test_a_member_of_no_use_is_named_with_its_value(member: str, value: Any, said: str) -> None:
    with pytest.raises(EnvironmentSetupError) as caught:
        described(**{member: value})
    (line,) = caught.value.problems
    assert line.startswith(f"environment {'of SimpleNamespace' if member == 'name' else repr('n')}: {said}")


def test_a_member_that_raises_is_named() -> None:
    environment: Any = _Raises()
    with pytest.raises(EnvironmentSetupError, match="environment 'n': max_prompt_tokens raised KeyError: 'data'"):
        values.description(environment, [])


def test_a_value_whose_repr_fails_is_named_by_its_type() -> None:
    class Secret:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(values.BadValue, match="a Secret, whose repr raised RuntimeError"):
        values.outcome(Outcome(Secret()))  # type: ignore[arg-type]
