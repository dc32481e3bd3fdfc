from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.plugin.lines import LineDecoder, encode_line

OBJECTS = st.lists(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20)))


@given(OBJECTS, st.integers(1, 7))
def test_objects_survive_any_fragmentation(messages: list[dict[str, Any]], size: int) -> None:
    data = b"".join(encode_line(m) for m in messages)
    decoder = LineDecoder()
    found = []
    for start in range(0, len(data), size):
        found += decoder.feed(data[start : start + size])
    assert found == messages
    assert (decoder.garbage, decoder.oversize) == (0, 0)


@given(st.binary(max_size=400), st.integers(1, 50))
def test_any_bytes_never_raise_and_stay_bounded(data: bytes, limit: int) -> None:
    decoder = LineDecoder(limit)
    for start in range(0, len(data), 7):
        decoder.feed(data[start : start + 7])
        assert len(decoder._rest) <= limit


def test_garbage_is_counted_and_what_follows_is_read() -> None:
    decoder = LineDecoder()
    found = decoder.feed(b'nonsense\n[1,2]\n\xff\xfe\n\n{"a":1}\n')
    assert found == [{"a": 1}]
    assert decoder.garbage == 3


def test_oversize_line_costs_only_itself() -> None:
    decoder = LineDecoder(100)
    assert decoder.feed(b"x" * 60) == []
    assert decoder.feed(b"x" * 60) == []
    assert decoder.feed(b"x" * 5000 + b'\n{"a":1}\n') == [{"a": 1}]
    assert (decoder.oversize, decoder.garbage) == (1, 0)


def test_oversize_line_in_one_piece() -> None:
    decoder = LineDecoder(100)
    line = b'{"a":"' + b"x" * 200 + b'"}'
    assert decoder.feed(line + b'\n{"b":2}\n') == [{"b": 2}]
    assert decoder.oversize == 1


def test_a_bomb_of_brackets_is_garbage() -> None:
    decoder = LineDecoder()
    assert decoder.feed(b"[" * 200_000 + b"\n") == []
    assert decoder.garbage == 1


def test_not_a_number_is_not_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_line({"a": float("nan")})
    assert json.loads(encode_line({"a": 1.5})) == {"a": 1.5}
