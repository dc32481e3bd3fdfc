from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.plugin.record_buffer import RecordBuffer


def test_at_100_times_the_cap_without_a_reader() -> None:
    buffer = RecordBuffer(50)
    for number in range(5000):
        buffer.put({"n": number})
        if number % 10 == 0:
            buffer.settle()
    buffer.settle()
    assert len(buffer) == 50
    assert buffer.dropped == 4950
    assert buffer.last == 5000
    assert [m["n"] for _, m in buffer.after(0, 100)] == list(range(4950, 5000))


def test_at_100_times_the_cap_with_a_stuck_thread() -> None:
    buffer = RecordBuffer(50)
    for number in range(5000):
        buffer.put({"n": number})
    assert len(buffer) == 50
    assert buffer.dropped_inbox == 4950
    buffer.settle()
    assert [m["n"] for _, m in buffer.after(0, 100)] == list(range(50))


def test_unacknowledged_records_come_again() -> None:
    buffer = RecordBuffer(10)
    for number in range(5):
        buffer.put({"n": number})
    buffer.settle()
    assert [seq for seq, _ in buffer.after(0, 3)] == [1, 2, 3]
    buffer.acknowledge(2)
    assert [(seq, m["n"]) for seq, m in buffer.after(buffer.acknowledged, 10)] == [
        (3, 2),
        (4, 3),
        (5, 4),
    ]
    buffer.acknowledge(99)
    assert len(buffer) == 0
    buffer.put({"n": 5})
    buffer.settle()
    assert buffer.after(0, 10) == [(6, {"n": 5})]


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 5)),
        st.tuples(st.just("settle"), st.just(0)),
        st.tuples(st.just("ack"), st.integers(0, 60)),
    ),
    max_size=60,
)


@given(OPS, st.integers(1, 6))
def test_numbers_are_the_order_of_arrival(ops: list[tuple[str, int]], capacity: int) -> None:
    buffer = RecordBuffer(capacity)
    made = 0
    for op, argument in ops:
        if op == "put":
            for _ in range(argument):
                buffer.put({"n": made})
                made += 1
        elif op == "settle":
            buffer.settle()
        else:
            buffer.acknowledge(min(argument, buffer.last))
        assert len(buffer) <= 2 * capacity
    buffer.settle()
    kept = buffer.after(0, 1000)
    assert len(kept) <= capacity
    assert [seq for seq, _ in kept] == list(range(buffer.acknowledged + 1, buffer.last + 1))
    assert [m["n"] for _, m in kept] == sorted(m["n"] for _, m in kept)
    assert buffer.last + buffer.dropped_inbox == made
