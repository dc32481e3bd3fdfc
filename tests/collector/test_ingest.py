"""Bodies: garbage, huge, cut off, hostile; each refusal has a status and names its field."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.collector.ingest import IngestError, check_headers, decode_body
from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.exporters.wire import encode_batch

LIMIT = 1 << 16
RECORD = RequestRecord(request_id="r", source=Source.TAP, outcome=Outcome.LENGTH, prompt_tokens=5)
BODY = json.dumps(encode_batch([RECORD], sidecar_id="s", epoch=1, seq=1)).encode()


def refusal(body: bytes, encoding: str = "", limit: int = LIMIT) -> IngestError:
    with pytest.raises(IngestError) as caught:
        decode_body(body, encoding, max_decoded_bytes=limit)
    return caught.value


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (BODY, ""),
        (BODY, "identity"),
        (gzip.compress(BODY), "gzip"),
        (gzip.compress(BODY[:50]) + gzip.compress(BODY[50:]), "gzip"),
    ],
)
def test_a_good_body_is_its_batch(body: bytes, encoding: str) -> None:
    assert decode_body(body, encoding, max_decoded_bytes=LIMIT).records == [RECORD]


@pytest.mark.parametrize(
    ("body", "encoding", "status", "field"),
    [
        (b"", "", 400, "body"),
        (b"\xff\xfe", "", 400, "body"),
        (b"[" * 5000, "", 400, "body"),
        (b"NaN", "", 400, "body"),
        (BODY[:-5], "", 400, "body"),
        (b"[]", "", 400, "body"),
        (b"{}", "", 400, "schema"),
        (BODY.replace(b'"seq": 1', b'"seq": 1e999'), "", 400, "body"),
        (BODY.replace(b'"seq": 1', b'"seq": "1"'), "", 400, "seq"),
        (BODY.replace(b"outcome", b"outcomes"), "", 400, "columns.outcome"),
        (b" " * (LIMIT + 1), "", 413, "body"),
        (BODY, "gzip", 400, "body"),
        (gzip.compress(BODY)[:-9], "gzip", 400, "body"),
        (gzip.compress(BODY)[:-1], "gzip", 400, "body"),
        (gzip.compress(BODY) + b"tail", "gzip", 400, "body"),
        (b"".join(gzip.compress(b"") for _ in range(50)), "gzip", 400, "body"),
        (gzip.compress(b" " * (LIMIT + 1)), "gzip", 413, "body"),
        (gzip.compress(b" " * LIMIT) + gzip.compress(BODY), "gzip", 413, "body"),
    ],
)
def test_a_bad_body_is_refused_by_name(body: bytes, encoding: str, status: int, field: str) -> None:
    error = refusal(body, encoding)
    assert (error.status, error.field) == (status, field)
    assert error.why


def test_a_bomb_of_a_hundred_times_the_bound_costs_the_bound() -> None:
    bomb = gzip.compress(b"\0" * (100 * (1 << 20)))
    assert len(bomb) < 1 << 18
    tracemalloc.start()
    try:
        assert refusal(bomb, "gzip", 1 << 20).status == 413
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_the_answer_holds_no_piece_of_the_body() -> None:
    assert "CANARY" not in str(refusal(b'{"schema": CANARY}'))


@given(st.binary(max_size=300), st.sampled_from(["", "gzip"]))
def test_any_bytes_are_refused_and_never_more(body: bytes, encoding: str) -> None:
    assert refusal(body, encoding).status in (400, 413)


@given(st.integers(0, len(BODY) - 1), st.binary(min_size=1, max_size=4))
def test_a_damaged_body_is_refused_or_taken_never_an_accident(at: int, noise: bytes) -> None:
    damaged = BODY[:at] + noise + BODY[at + len(noise) :]
    try:
        batch = decode_body(damaged, max_decoded_bytes=LIMIT)
    except IngestError as error:
        assert error.status == 400  # noqa: PT017 - both ends are right
    else:
        assert len(batch) + batch.refused_rows == 1


@pytest.mark.parametrize(
    ("headers", "status", "field"),
    [
        ((None, None, None), 415, "content-type"),
        (("text/plain", None, None), 415, "content-type"),
        (("application/x-www-form-urlencoded", None, None), 415, "content-type"),
        (("application/json", "br", None), 415, "content-encoding"),
        (("application/json", "gzip, gzip", None), 415, "content-encoding"),
        (("application/json", None, "-1"), 400, "content-length"),
        (("application/json", None, "9" * 500), 413, "body"),
        (("application/json", None, str(LIMIT + 1)), 413, "body"),
    ],
)
def test_headers_alone_can_refuse(headers: tuple[Any, Any, Any], status: int, field: str) -> None:
    with pytest.raises(IngestError) as caught:
        check_headers(*headers, LIMIT)
    assert (caught.value.status, caught.value.field) == (status, field)


def test_good_headers_give_the_encoding() -> None:
    assert check_headers("application/json; charset=utf-8", "GZIP", "5", LIMIT) == "gzip"
    assert check_headers("Application/JSON", None, None, LIMIT) == ""
