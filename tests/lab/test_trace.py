"""Trace readers: real forms in, bad lines refused one by one."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.lab import trace as trace_module
from servoscope.lab.trace import Refusals, TraceError, TraceRequest, azure, mooncake, read_trace

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
"""


def read(reader: object, text: str) -> tuple[list[TraceRequest], Refusals]:
    refusals = Refusals()
    return list(reader(text.splitlines(keepends=True), refusals)), refusals  # type: ignore[operator]


def test_azure() -> None:
    requests, refusals = read(azure, AZURE)
    assert requests[0] == TraceRequest(0.0, 374, 44)
    assert requests[1].arrival_seconds == pytest.approx(4.314579, abs=1e-5)
    assert (requests[1].prompt_tokens, requests[1].output_tokens) == (396, 109)
    assert requests[1].prefix is None
    assert refusals.total == 0


def test_azure_of_2024_has_a_time_zone() -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 01:00:01.009930+01:00,2399,6\n"
    )
    requests, refusals = read(azure, text)
    assert [r.arrival_seconds for r in requests] == pytest.approx([0.0, 1.0])
    assert refusals.total == 0


def test_mooncake() -> None:
    text = (
        '{"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 30000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n'
        '{"timestamp": 30001, "input_length": 1, "output_length": 2}\n'
    )
    requests, refusals = read(mooncake, text)
    assert requests == [
        TraceRequest(0.0, 6758, 500, (0, 1, 2)),
        TraceRequest(3.0, 7322, 490, (0, 14)),
        TraceRequest(30.001 - 27.0, 1, 2, None),
    ]
    assert refusals.total == 0


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("2023-11-16 18:15:47,1", "2 fields"),
        ("yesterday,1,1", "TIMESTAMP"),
        ("2023-11-16 18:15:47,-1,1", "ContextTokens"),
        ("2023-11-16 18:15:47,1,nan", "GeneratedTokens"),
        ("2023-11-16 18:15:47,1,0", "GeneratedTokens"),
        ("2023-11-16 18:15:47,1.5,1", "ContextTokens"),
        ("2023-11-16 18:15:47,99999999999999999999,1", "ContextTokens"),
        ("2023-11-16 18:15:47,\u0663,1", "ContextTokens"),
        ("2023-11-16 18:00:00,1,1", "before the first"),
        ("x" * (trace_module.MAX_LINE_CHARACTERS + 1), "longer than"),
    ],
)
def test_a_bad_azure_line_costs_itself_only(line: str, why: str) -> None:
    requests, refusals = read(azure, AZURE + line + "\n2023-11-16 18:16:00,7,8\n")
    assert [r.prompt_tokens for r in requests] == [374, 396, 7]
    assert refusals.total == 1
    assert refusals.first[0].number == 4
    assert why in refusals.first[0].why


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "timestamp"),
        ('{"timestamp": "3"}', "timestamp"),
        ('{"timestamp": -1}', "timestamp"),
        ('{"timestamp": true}', "timestamp"),
        ('{"timestamp": 1e300, "input_length": 1, "output_length": 1}', "timestamp"),
        ('{"timestamp": 9, "output_length": 1}', "input_length"),
        ('{"timestamp": 9, "input_length": 1, "output_length": 2.5}', "output_length"),
        ('{"timestamp": 9, "input_length": 1, "output_length": true}', "output_length"),
        ('{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": "a"}', "hash_ids"),
        ('{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}', "hash_ids"),
        (
            '{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": ['
            + ",".join(["1"] * (trace_module.MAX_BLOCKS + 1))
            + "]}",
            "hash_ids",
        ),
    ],
)
def test_a_bad_mooncake_line_costs_itself_only(line: str, why: str) -> None:
    good = '{"timestamp": 5, "input_length": 1, "output_length": 2, "hash_ids": []}\n'
    requests, refusals = read(mooncake, good + line + "\n\n" + good)
    assert len(requests) == 2
    assert refusals.total == 1
    assert refusals.first[0].number == 2
    assert why in refusals.first[0].why


def test_many_bad_lines_are_all_counted_and_few_kept() -> None:
    requests, refusals = read(mooncake, "x\n" * 5000)
    assert requests == []
    assert refusals.total == 5000
    assert len(refusals.first) == refusals.keep


def test_readers_stream() -> None:
    """The first request is there before the second line was asked for."""

    def lines() -> object:
        yield '{"timestamp": 5, "input_length": 1, "output_length": 2}\n'
        raise AssertionError("read ahead")

    assert next(mooncake(lines(), Refusals())).output_tokens == 2  # type: ignore[arg-type]


def test_too_many_requests_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_REQUESTS", 3)
    good = '{"timestamp": 5, "input_length": 1, "output_length": 2}\n'
    with pytest.raises(TraceError, match="line 4: more than 3 requests"):
        read(mooncake, good * 4)


def test_files(tmp_path: Path) -> None:
    csv = tmp_path / "a.csv"
    csv.write_bytes(AZURE.encode())
    assert len(list(read_trace(csv))) == 2
    jsonl = tmp_path / "m.jsonl"
    long = b'{"x": "' + b"y" * (3 * trace_module.MAX_LINE_CHARACTERS) + b'"}\n'
    jsonl.write_bytes(long + b'{"timestamp": 5, "input_length": 1, "output_length": 2}\n\xff\n')
    refusals = Refusals()
    assert len(list(read_trace(jsonl, refusals))) == 1
    assert [bad.number for bad in refusals.first] == [1, 3]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [("a.txt", "", "neither"), ("a.csv", "a,b\n1,2\n", "header"), ("a.csv", "", "empty")],
)
def test_what_is_no_trace(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=why) as caught:
        list(read_trace(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


@given(st.lists(st.text(max_size=60) | st.binary(max_size=60).map(repr), max_size=8))
def test_garbage_never_raises(lines: list[str]) -> None:
    refusals = Refusals()
    found = list(mooncake(lines, refusals)) + list(
        azure(["TIMESTAMP,ContextTokens,GeneratedTokens\n", *lines], refusals)
    )
    assert all(r.prompt_tokens >= 1 and r.arrival_seconds >= 0 for r in found)
    assert refusals.total + len(found) == 2 * sum(bool(line.strip()) for line in lines)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**9),
            st.integers(1, 10**6),
            st.integers(1, 10**6),
            st.none() | st.lists(st.integers(0, 10**6), max_size=5),
        ),
        min_size=1,
        max_size=10,
    )
)
def test_mooncake_round_trip(rows: list[tuple[int, int, int, list[int] | None]]) -> None:
    rows.sort(key=lambda row: row[0])
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [orjson.dumps(dict(zip(keys, row, strict=True))).decode() for row in rows]
    found, refusals = list(mooncake(lines, Refusals())), Refusals()
    assert refusals.total == 0
    for row, request in zip(rows, found, strict=True):
        assert request.arrival_seconds == pytest.approx((row[0] - rows[0][0]) / 1000, abs=1e-6)
        assert (request.prompt_tokens, request.output_tokens) == row[1:3]
        assert request.prefix == (None if row[3] is None else tuple(row[3]))
