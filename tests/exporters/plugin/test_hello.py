"""Values of a socket's messages: garbage in one field is None, and never an exception."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.plugin.hello import MAX_COUNT, count_of, number_of

HUGE = 10**400  # JSON may hold it, a float may not


@pytest.mark.parametrize("value", [HUGE, -HUGE, float("inf"), float("nan"), True, "1", None, [1]])
def test_no_number(value: object) -> None:
    assert number_of(value) is None


@pytest.mark.parametrize("value", [HUGE, -HUGE, MAX_COUNT + 1, 1.0, True, "1", None])
def test_no_count(value: object) -> None:
    assert count_of(value) is None


@given(st.integers(-MAX_COUNT, MAX_COUNT))
def test_counts_are_held_exactly_as_numbers_too(value: int) -> None:
    assert count_of(value) == value == number_of(value)
