"""Spans out of protobuf: what is wanted comes out, the rest is passed over, garbage is an error."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.otlp_bytes import captured_spans, encode, field, varint
from servoscope.exporters.otlp import OtlpError, Span, read_spans

SPAN: dict[str, Any] = {
    "name": "work", "trace": "0a" * 16, "span": "0b" * 8, "parent": "0c" * 8,
    "start_ns": 1_000_000_000, "dur_ms": 2.5, "attrs": {"n": -3, "text": "private"},
}  # fmt: skip


def read(body: bytes, *names: str, keys: tuple[str, ...] = ("n",)) -> list[Span]:
    found = frozenset(names)
    return read_spans(body, scope="sglang server", wanted=lambda n: n in found, attributes=keys)


def test_a_span_is_read_with_the_attributes_that_were_asked_for() -> None:
    (span,) = read(encode([SPAN]), "work")
    assert span == Span("0a" * 16, "0b" * 8, "0c" * 8, "work", 10**9, 1_002_500_000, {"n": -3})
    assert span.seconds == 0.0025


def test_what_is_not_wanted_and_other_scopes_are_passed_over() -> None:
    assert read(encode([SPAN]), "other") == []
    assert read(encode([SPAN], scope="fastapi"), "work") == []
    assert read(b"", "work") == []


def test_status_and_kinds_of_values() -> None:
    told = SPAN | {"failed": True, "attrs": {"b": True, "f": 0.25, "t": "x", "nan": math.nan}}
    (span,) = read(encode([told]), "work", keys=("b", "f", "t", "nan"))
    assert span.failed
    assert dict(span.attributes) == {"b": True, "f": 0.25, "t": "x"}
    assert span.attributes["b"] is True


def test_a_long_text_is_cut() -> None:
    (span,) = read(encode([SPAN | {"attrs": {"n": "é" * 9_000}}]), "work")
    assert span.attributes["n"] == "é" * 1_024


def test_ends_in_the_wrong_order_are_no_duration() -> None:
    (span,) = read(encode([SPAN | {"dur_ms": -1.0}]), "work")
    assert span.seconds is None


def test_fields_that_are_new_are_passed_over() -> None:
    (span,) = read(encode([SPAN]) + field(9, b"new") + field(77, 5), "work")
    assert span.name == "work"


def test_the_captured_spans_come_through_whole() -> None:
    told = captured_spans()
    names = {s["name"] for s in told}
    spans = read_spans(
        encode(told), scope="sglang server", wanted=names.__contains__, attributes=("rid",)
    )
    assert [(s.name, s.span_id, s.start_nanoseconds) for s in spans] == [
        (s["name"], s["span"], s["start_ns"]) for s in told
    ]


@pytest.mark.parametrize(
    "body",
    [
        encode([SPAN])[:-3],
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of more than 64 bits
        b"\x0a\x7f",  # cut off within a field
        b"\x80",  # cut off within a number
        b"\x0b",  # a group: not in this format
        varint(0) + b"\x00",
        b'{"resourceSpans": []}',
    ],
)
def test_garbage_is_an_error_that_quotes_nothing(body: bytes) -> None:
    with pytest.raises(OtlpError) as caught:
        read(body, "work")
    assert "private" not in str(caught.value)


def test_too_many_spans_are_refused() -> None:
    empty = field(2, b"")
    scoped = field(1, field(1, b"sglang server")) + empty * 20_001
    with pytest.raises(OtlpError, match="more than 20000"):
        read(field(1, field(2, scoped)), "work")


@given(st.binary(max_size=200))
def test_any_bytes_are_spans_or_an_error(body: bytes) -> None:
    with contextlib.suppress(OtlpError):
        read(body, "work")


@given(st.data())
def test_a_damaged_request_is_spans_or_an_error(data: st.DataObject) -> None:
    body = bytearray(encode([SPAN, SPAN]))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(OtlpError):
        for span in read(bytes(body), "work"):
            assert span.seconds is None or 0 <= span.seconds < 2**64 / 1e9
