from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.wire.answer import clean
from servoscope.sidecar.wire.asked import Asked, read_request
from servoscope.sidecar.wire.limits import Budget, Buffer


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({}, Asked(streaming=False)),
        ({"stream": True, "model": "m"}, Asked(streaming=True, model_name="m")),
        ({"stream": None, "model": 5}, Asked(streaming=False)),
        (
            {"max_tokens": 5, "max_completion_tokens": 7},
            Asked(streaming=False, max_output_tokens=7),
        ),
        ({"n_predict": -1, "max_tokens": 3}, Asked(streaming=False, max_output_tokens=3)),
        ({"n_predict": -1}, Asked(streaming=False)),
        ({"max_output_tokens": 9}, Asked(streaming=False, max_output_tokens=9)),
    ],
)
def test_what_is_kept_of_a_request(body: dict[str, Any], asked: Asked) -> None:
    assert read_request(json.dumps(body).encode()) == asked


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"{", b"\xff\xfe", b'{"a":' * 2000])
def test_no_json_object_is_none(body: bytes) -> None:
    assert read_request(body) is None


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_garbage_never_raises(body: bytes) -> None:
    read_request(body)


@given(st.text(max_size=400) | st.binary(max_size=400) | st.none() | st.integers())
def test_clean_text_is_bounded_and_printable(value: Any) -> None:
    text = clean(value, 20)
    assert text is None or (0 < len(text) <= 20 and text.isprintable())


def test_buffer_is_bounded_by_itself_and_by_the_budget_of_all() -> None:
    budget = Budget(10)
    one, two = Buffer(6, budget), Buffer(100, budget)
    assert one.append(b"12345")
    assert not one.append(b"67")
    assert len(one) == 5
    assert not two.append(b"123456")
    assert two.append(b"12345")
    assert budget.used == 10
    assert one.take(2) == b"12"
    assert one.take() == b"345"
    two.clear()
    assert budget.used == 0
