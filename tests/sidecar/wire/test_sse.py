from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.wire.limits import Budget, Buffer
from servoscope.sidecar.wire.sse import Event, EventSplitter
from sidecar.wire.talk import pieces

STREAM = (
    b': ping\n\ndata: one\n\nevent: delta\ndata: {"a":1}\n\ndata:no space\n\n'
    b"data: first\ndata: second\n\nid: 7\nretry: 3\n\nerror: broken\n\n\n\ndata: [DONE]\n\n"
)
EVENTS: list[Event] = [
    (b"", b"one"),
    (b"delta", b'{"a":1}'),
    (b"", b"no space"),
    (b"", b"first\nsecond"),
    (b"error", b"broken"),
    (b"", b"[DONE]"),
]


def splitter(limit: int = 10_000, budget: Budget | None = None) -> EventSplitter:
    return EventSplitter(Buffer(limit, budget or Budget()))


def test_whole_stream_at_once() -> None:
    assert splitter().feed(STREAM) == EVENTS


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@given(cuts=st.lists(st.integers(0, 500), max_size=12))
def test_any_split_and_line_end_gives_the_same_events(line_end: bytes, cuts: list[int]) -> None:
    subject = splitter()
    found: list[Event] = []
    for piece in pieces(STREAM.replace(b"\n", line_end), cuts):
        found += subject.feed(piece)
    assert found == EVENTS


def test_byte_by_byte_events_come_with_their_last_byte() -> None:
    subject = splitter()
    found = [subject.feed(STREAM[at : at + 1]) for at in range(len(STREAM))]
    assert [event for events in found for event in events] == EVENTS
    assert found[STREAM.index(b"one\n\n") + 4] == [(b"", b"one")]


def test_last_event_without_its_blank_line_is_read_at_the_end() -> None:
    subject = splitter()
    assert subject.feed(b"data: a\n\ndata: b\n") == [(b"", b"a")]
    assert subject.finish() == [(b"", b"b")]
    assert subject.finish() == []


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_oversize_event_is_dropped_alone_and_counted(step: int) -> None:
    budget = Budget()
    subject = splitter(50, budget)
    data = b"data: a\n\ndata: " + b"x" * 500 + b"\n\ndata: b\n\n"
    found: list[Event] = []
    for at in range(0, len(data), step):
        found += subject.feed(data[at : at + step])
    # Whole events that come in one read never wait in a buffer, so no bound applies to them.
    kept = [name for name in found if len(name[1]) < 50]
    assert kept == [(b"", b"a"), (b"", b"b")]
    assert subject.oversize == (1 if step < 500 else 0)
    assert budget.used == 0


def test_budget_shared_with_others_bounds_the_buffer() -> None:
    budget = Budget(100)
    assert budget.take(90)
    subject = splitter(1000, budget)
    assert subject.feed(b"data: 0123456789") == []
    assert subject.oversize == 1
    assert budget.used == 90
    assert subject.feed(b" more\n\ndata: b\n\n") == [(b"", b"b")]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_garbage_never_raises_and_gives_its_memory_back(parts: list[bytes]) -> None:
    budget = Budget()
    subject = splitter(64, budget)
    for part in parts:
        subject.feed(part)
        assert budget.used <= 64
    subject.finish()
    assert budget.used == 0
