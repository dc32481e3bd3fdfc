from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from servoscope.sidecar.tap.reassembly import GAP, Piece, Stream

BASE = 2**32 - 40  # wraps within the data


def started() -> Stream:
    stream = Stream()
    stream.start(BASE)
    return stream


def at(offset: int) -> int:
    return (BASE + offset) % 2**32


def joined(pieces: Sequence[Piece]) -> bytes:
    assert GAP not in pieces
    return b"".join(piece for piece in pieces if piece is not None)


def test_in_order() -> None:
    stream = started()
    assert stream.push(at(0), b"abc") == (b"abc",)
    assert stream.push(at(3), b"def") == (b"def",)
    assert stream.next == at(6)


def test_reordered_is_held_until_its_turn() -> None:
    stream = started()
    assert list(stream.push(at(3), b"def")) == []
    assert list(stream.push(at(6), b"ghi")) == []
    assert joined(stream.push(at(0), b"abc")) == b"abcdefghi"


def test_retransmissions_and_overlaps_are_delivered_once() -> None:
    stream = started()
    stream.push(at(0), b"abcdef")
    assert list(stream.push(at(0), b"abc")) == []
    assert joined(stream.push(at(4), b"efgh")) == b"gh"
    assert list(stream.push(at(7), b"")) == []


def test_acknowledged_bytes_that_we_lack_are_a_gap() -> None:
    stream = started()
    stream.push(at(0), b"abc")
    stream.push(at(6), b"ghi")
    assert list(stream.acknowledged(at(3))) == []
    assert list(stream.acknowledged(at(6))) == [GAP, b"ghi"]
    assert stream.next == at(9)
    assert list(stream.acknowledged(at(12))) == [GAP]
    assert stream.next == at(12)


def test_hole_is_given_up_at_the_bound() -> None:
    stream = started()
    out: list[Piece] = []
    for n in range(600):
        out += stream.push(at(10 + 2 * n), b"xy")
    assert out[0] is GAP
    assert sum(len(piece) for piece in out if piece) == 1200


def test_bytes_held_are_bounded() -> None:
    stream = started()
    out: list[Piece] = []
    for n in range(100):
        out += stream.push(at(10 + 65_000 * n), b"x" * 65_000)
    assert out[0] is GAP
    assert stream._held_bytes <= 4 * 1024 * 1024


def test_end_is_reached_when_all_before_it_came() -> None:
    stream = started()
    stream.fin(at(6))
    stream.push(at(3), b"def")
    assert not stream.ended
    stream.push(at(0), b"abc")
    assert stream.ended
    assert list(stream.acknowledged(at(7))) == []  # the FIN itself is no missing byte
    assert stream.ended


def test_end_with_missing_bytes_is_a_gap() -> None:
    stream = started()
    stream.push(at(0), b"abc")
    stream.fin(at(6))
    assert list(stream.acknowledged(at(7))) == [GAP]
    assert stream.ended


def test_unknown_start_takes_the_first_segment() -> None:
    stream = Stream()
    assert list(stream.acknowledged(at(3))) == []
    assert stream.push(at(5), b"abc") == (b"abc",)


@settings(deadline=None)
@given(
    data=st.binary(min_size=1, max_size=200),
    parts=st.lists(st.tuples(st.integers(0, 199), st.integers(1, 60)), max_size=30),
    seed=st.randoms(use_true_random=False),
)
def test_any_order_with_duplicates_gives_the_bytes_once(
    data: bytes, parts: list[tuple[int, int]], seed: object
) -> None:
    """Whatever overlapping segments come in whatever order, all bytes come out, once."""
    segments = [(start, data[start : start + size]) for start, size in parts]
    segments += [(start, data[start : start + 50]) for start in range(0, len(data), 50)]
    getattr(seed, "shuffle")(segments)  # noqa: B009
    stream = started()
    out = b"".join(joined(stream.push(at(start), part)) for start, part in segments if part)
    assert out == data
    assert stream._held_bytes == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "ack", "fin", "start"]),
            st.integers(0, 2**32 - 1) | st.integers(0, 300),
            st.binary(max_size=30),
        ),
        max_size=60,
    )
)
def test_any_numbers_never_raise_and_stay_bounded(steps: list[tuple[str, int, bytes]]) -> None:
    stream = Stream()
    for kind, number, data in steps:
        match kind:
            case "push":
                stream.push(number, data)
            case "ack":
                stream.acknowledged(number)
            case "fin":
                stream.fin(number)
            case _:
                stream.start(number)
        assert stream._held_bytes == sum(map(len, stream._held.values()))
