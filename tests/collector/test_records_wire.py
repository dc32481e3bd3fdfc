"""The wire form of records: what goes in comes out, and what is wrong is named and counted."""

from __future__ import annotations

import json
import math
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.records import (
    COUNT_FIELDS,
    DURATION_FIELDS,
    MAX_TOKENS,
    WIRE_FIELDS,
    Outcome,
    Phase,
    RequestRecord,
    Source,
)
from servoscope.exporters.wire import (
    MAX_COLUMNS,
    MAX_ROWS,
    MAX_TEXT,
    SCHEMA,
    Batch,
    WireError,
    decode_batch,
    encode_batch,
)
from servoscope.exporters.wire_cells import (
    _ENUMS,
    _LABELS,
    _MEASURED,
    _OPTIONAL_TEXT,
    _SMALL_INTEGERS,
    MAX_REPORTED,
)

NOW = 1_800_000_000.0


def record(number: int = 0, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": f"req-{number}",
        "source": Source.TAP,
        "outcome": Outcome.COMPLETED,
    }
    return RequestRecord(**(values | changes))


def over_the_wire(batch: dict[str, Any], now: float = NOW) -> Batch:
    return decode_batch(json.loads(json.dumps(batch, allow_nan=False)), now=now)


def envelope(**columns: Any) -> dict[str, Any]:
    rows = max((len(c) for c in columns.values() if isinstance(c, list)), default=1)
    required = {
        "request_id": [f"r{i}" for i in range(rows)],
        "source": ["tap"] * rows,
        "outcome": ["completed"] * rows,
    }
    return {
        "schema": SCHEMA,
        "sidecar_id": "s",
        "epoch": 1,
        "seq": 2,
        "columns": required | columns,
    }


texts = st.text(max_size=MAX_TEXT).filter(
    lambda t: "\0" not in t and not any(0xD800 <= ord(c) < 0xE000 for c in t)
)
seconds = st.none() | st.floats(0, 86_400, allow_nan=False)
counts = st.none() | st.integers(0, MAX_TOKENS)
TIMES = ("received_unix_seconds", "first_token_unix_seconds", "finished_unix_seconds")


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    drawn: dict[str, Any] = {
        name: draw(strategy)
        for names, strategy in (
            (("engine", "server", "model_name", "tenant"), texts),
            (("endpoint", "finish_reason"), st.none() | texts),
            (DURATION_FIELDS, seconds),
            (COUNT_FIELDS, counts),
            (TIMES, st.none() | st.floats(0, NOW)),
        )
        for name in names
    }
    made = RequestRecord(
        request_id=draw(texts.filter(bool)),
        source=draw(st.sampled_from(Source)),
        outcome=draw(st.sampled_from(Outcome)),
        phase=draw(st.sampled_from(Phase)),
        status_code=draw(st.none() | st.integers(0, 999)),
        rank=draw(st.none() | st.integers(0, 65_535)),
        streaming=draw(st.none() | st.booleans()),
        **drawn,
    )
    made.refuse_impossible(NOW)  # contradictions between fields are refused by the same rules
    return made


@given(st.lists(records(), max_size=8))
def test_what_goes_in_comes_out(given_records: list[RequestRecord]) -> None:
    sent = encode_batch(given_records, sidecar_id="host:1", epoch=7, seq=9)
    batch = over_the_wire(sent)
    assert batch.records == given_records
    assert batch.key == ("host:1", 7, 9)
    assert (batch.refused, batch.refused_rows, batch.refused_values) == ([], 0, 0)
    assert batch.unknown_columns == ()
    for one in batch.records:
        assert isinstance(one.source, Source)
        assert isinstance(one.outcome, Outcome)
        assert isinstance(one.phase, Phase)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=300)
    | st.sampled_from(["tap", "completed", "decode", "\0", "\ud800", -1, 1e300, 10**400]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=3,
)


@given(st.data(), st.integers(0, 5))
def test_hostile_cells_never_lose_more_than_themselves(data: st.DataObject, rows: int) -> None:
    column = st.lists(json_values, min_size=rows, max_size=rows)
    some = data.draw(st.dictionaries(st.sampled_from(WIRE_FIELDS), column, max_size=12))
    sent = envelope(**({"tenant": [""] * rows} | some))
    batch = decode_batch(sent, now=NOW)
    assert len(batch) + batch.refused_rows == rows
    assert {len(values) for values in batch.columns.values()} == {len(batch)}
    assert tuple(sorted(batch.columns)) == tuple(sorted(WIRE_FIELDS))
    assert len(batch.refused) == min(MAX_REPORTED, batch.refused_rows + batch.refused_values)
    for one in batch.records:
        assert one.request_id
        assert one.refuse_impossible(NOW) == []  # nothing impossible is left
        for name in DURATION_FIELDS:
            value = getattr(one, name)
            assert value is None or (math.isfinite(value) and 0 <= value <= 86_400)
        for name in (*_LABELS, *_OPTIONAL_TEXT):
            value = getattr(one, name)
            assert value is None or len(value.encode()) <= 4 * MAX_TEXT


@given(json_values)
def test_any_json_is_refused_by_name_or_taken(value: Any) -> None:
    with pytest.raises(WireError) as caught:
        decode_batch(value)
    assert caught.value.field in ("body", "schema")


def test_every_wire_field_is_checked() -> None:
    checked = {*_ENUMS, *_LABELS, *_OPTIONAL_TEXT, *_SMALL_INTEGERS, *_MEASURED, "streaming"}
    assert checked == set(WIRE_FIELDS)


def test_columns_of_defaults_are_not_sent() -> None:
    sent = encode_batch([record(1), record(2, tenant="a")], sidecar_id="s", epoch=0, seq=0)
    assert set(sent["columns"]) == {"request_id", "source", "outcome", "tenant"}
    assert over_the_wire(sent).records == [record(1), record(2, tenant="a")]


def test_an_empty_batch_is_a_batch() -> None:
    batch = over_the_wire(encode_batch([], sidecar_id="s", epoch=0, seq=0))
    assert len(batch) == 0
    assert batch.records == []


def test_encode_makes_values_fit_the_wire() -> None:
    odd = record(tenant="x" * 1000, model_name="a\0b\ud800", e2e_seconds=math.nan)
    (one,) = over_the_wire(encode_batch([odd], sidecar_id="s", epoch=0, seq=0)).records
    assert one.tenant == "x" * MAX_TEXT
    assert one.model_name == "ab?"
    assert one.e2e_seconds is None


@pytest.mark.parametrize(
    ("change", "field", "why"),
    [
        ({"schema": "servoscope.records.v0"}, "schema", "v0"),
        ({"schema": None}, "schema", "None"),
        ({"sidecar_id": ""}, "sidecar_id", "1..128"),
        ({"sidecar_id": "x" * 129}, "sidecar_id", "1..128"),
        ({"sidecar_id": "a\nb"}, "sidecar_id", "printed"),
        ({"sidecar_id": 5}, "sidecar_id", "text"),
        ({"epoch": -1}, "epoch", "-1"),
        ({"epoch": True}, "epoch", "True"),
        ({"epoch": 1.0}, "epoch", "1.0"),
        ({"seq": None}, "seq", "None"),
        ({"seq": 2**63}, "seq", "2^63"),
        ({"columns": []}, "columns", "list"),
        ({"columns": {"request_id": ["a"], "source": ["tap"]}}, "columns.outcome", "missing"),
        ({"columns": {f"c{i}": [] for i in range(MAX_COLUMNS + 1)}}, "columns", "at most"),
    ],
)
def test_a_broken_envelope_is_refused_by_name(change: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_batch(envelope() | change)
    assert caught.value.field == field
    assert why in caught.value.why
    assert str(caught.value).startswith(field + ": ")


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"tenant": ["a", "b"], "request_id": ["1"]}, "columns.source"),
        ({"tenant": ["a"], "request_id": ["1", "2"]}, "columns.tenant"),
        ({"tenant": "ab"}, "columns.tenant"),
        ({"request_id": {"0": "a"}}, "columns.request_id"),
        ({"request_id": ["x"] * (MAX_ROWS + 1)}, "columns.request_id"),
        ({"request_id": ["x"] * (MAX_ROWS * 100)}, "columns.request_id"),
    ],
)
def test_columns_of_the_wrong_shape_are_refused_by_name(
    columns: dict[str, Any], field: str
) -> None:
    with pytest.raises(WireError) as caught:
        decode_batch(envelope(**columns))
    assert caught.value.field == field


def test_encode_refuses_more_rows_than_the_wire_carries() -> None:
    with pytest.raises(WireError, match=r"columns: 10001 rows"):
        encode_batch([record()] * (MAX_ROWS + 1), sidecar_id="s", epoch=0, seq=0)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("outcome", "exploded"),
        ("outcome", None),
        ("source", "gossip"),
        ("source", ["tap"]),
        ("phase", 5),
        ("request_id", ""),
        ("request_id", None),
        ("request_id", 5),
        ("request_id", "x" * (MAX_TEXT + 1)),
        ("model_name", {"a": 1}),
        ("model_name", "a\0b"),
        ("tenant", "\ud800"),
        ("endpoint", 1.5),
    ],
)
def test_a_bad_identity_loses_its_row_and_no_other(name: str, bad: Any) -> None:
    good = {"request_id": "r", "source": "tap", "outcome": "length"}.get(name, "decode")
    batch = decode_batch(envelope(**{name: [good, bad, good], "prompt_tokens": [1, 2, 3]}))
    assert batch.columns["prompt_tokens"] == [1, 3]
    assert batch.refused_rows == 1
    (cell,) = batch.refused
    assert (cell.row, cell.field, cell.row_lost) == (1, name, True)
    assert len(cell.why) < 200


@pytest.mark.parametrize(
    ("name", "bad", "why"),
    [
        ("e2e_seconds", -0.5, "negative"),
        ("e2e_seconds", math.nan, "not a finite number"),
        ("e2e_seconds", math.inf, "not a finite number"),
        ("e2e_seconds", 90_000, "longer than 86400 s"),
        ("e2e_seconds", "fast", "expected a number"),
        ("e2e_seconds", True, "expected a number"),
        ("queue_seconds", [1], "expected a number"),
        ("prompt_tokens", 1.5, "not a whole number"),
        ("prompt_tokens", -1, "outside 0..100000000"),
        ("prompt_tokens", 10**400, "above 2^63"),
        ("finished_unix_seconds", NOW + 3600, "in the future"),
        ("finished_unix_seconds", -5.0, "before 1970"),
        ("status_code", 5000, "0..999"),
        ("rank", -1, "0..65535"),
        ("rank", False, "0..65535"),
        ("streaming", "yes", "expected true or false"),
    ],
)
def test_an_impossible_value_is_blanked_and_its_row_kept(name: str, bad: Any, why: str) -> None:
    good = True if name == "streaming" else 7
    # A lost row before it: the index in the answer is the sender's.
    batch = decode_batch(
        envelope(**{name: [good, good, bad], "source": ["tap", "gossip", "tap"]}), now=NOW
    )
    assert batch.columns[name] == [good, None]
    assert (batch.refused_rows, batch.refused_values) == (1, 1)
    assert batch.refused[1].row == 2
    assert batch.refused[1].field == name
    assert why in batch.refused[1].why
    assert not batch.refused[1].row_lost


@pytest.mark.parametrize(
    ("columns", "field", "why"),
    [
        ({"cached_tokens": [9], "prompt_tokens": [8]}, "cached_tokens", "more than prompt_tokens"),
        (
            {"received_unix_seconds": [9.0], "finished_unix_seconds": [8.0]},
            "finished_unix_seconds",
            "before received",
        ),
        (
            {"time_to_first_token_seconds": [2.0], "e2e_seconds": [1.0]},
            "time_to_first_token_seconds",
            "longer than e2e",
        ),
    ],
)
def test_contradictions_are_refused(columns: dict[str, Any], field: str, why: str) -> None:
    batch = decode_batch(envelope(**columns), now=NOW)
    assert batch.columns[field] == [None]
    assert why in batch.refused[0].why


def test_nan_columns_of_a_whole_batch_are_counted_all_and_described_in_part() -> None:
    batch = decode_batch(envelope(e2e_seconds=[math.nan] * 500), now=NOW)
    assert batch.columns["e2e_seconds"] == [None] * 500
    assert batch.refused_values == 500
    assert len(batch.refused) == MAX_REPORTED


def test_unknown_columns_are_listed_and_not_kept() -> None:
    more = {f"x{c}": ["secret"] for c in string.ascii_letters}
    batch = decode_batch(envelope(**more, prompt=["also", "of", "another", "length"]))
    assert len(batch) == 4
    assert len(batch.unknown_columns) == MAX_REPORTED
    assert set(batch.columns) == set(WIRE_FIELDS)
    assert decode_batch(envelope(prompt=["x"])).unknown_columns == ("prompt",)


def test_null_labels_read_as_their_default() -> None:
    batch = decode_batch(envelope(model_name=[None, "m"], phase=[None, "decode"]))
    assert batch.columns["model_name"] == ["unknown", "m"]
    assert batch.columns["phase"] == [Phase.UNKNOWN, Phase.DECODE]
    assert batch.refused == []


def test_the_senders_object_is_not_changed() -> None:
    sent = envelope(e2e_seconds=[-1.0], model_name=[None])
    before = json.dumps(sent)
    decode_batch(sent)
    assert json.dumps(sent) == before
