"""The service over real HTTP: what it takes, what it refuses and how, and what it never keeps."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import duckdb
import pytest
from prometheus_client.parser import text_string_to_metric_families

from servoscope.alerts.digest import digest
from servoscope.collector.app import create_app, run_collector
from servoscope.collector.config import CollectorConfig
from servoscope.collector.store import Inserted, Store, StoreError
from servoscope.exporters.records import Outcome, RequestRecord, Source
from servoscope.exporters.wire import MAX_ROWS, encode_batch

Serve = Callable[..., Any]


def fresh(number: int = 0, **changes: Any) -> RequestRecord:
    """A request that finished just now, by this machine's clock."""
    now = time.time()
    values: dict[str, Any] = {
        "request_id": f"req-{number}",
        "source": Source.PLUGIN,
        "outcome": Outcome.COMPLETED,
        "engine": "vllm",
        "server": "127.0.0.1:8000",
        "request_type": "chat",
        "streaming": True,
        "received_unix_seconds": now - 3,
        "finished_unix_seconds": now,
        "time_to_first_token_seconds": 0.5,
        "time_per_output_token_seconds": 0.05,
        "e2e_seconds": 3.0,
        "prompt_tokens": 100,
        "cached_tokens": 50,
        "output_tokens": 51,
    }
    return RequestRecord(**(values | changes))


def batch(records: list[RequestRecord], seq: int = 0) -> dict[str, Any]:
    return encode_batch(records, sidecar_id="side", epoch=1, seq=seq)


def metrics(client: Any) -> dict[str, float]:
    """Samples of /metrics by name and first label value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").raw.decode()):
        for sample in family.samples:
            label = next(iter(sample.labels.values()), "")
            found[f"{sample.name}:{label}" if label else sample.name] = sample.value
    return found


def test_a_batch_is_taken_once_and_seen_in_the_overview(serve: Serve, objectives: Any) -> None:
    client = serve()
    sent = batch([fresh(n) for n in range(7)])
    first, second = client.post(sent), client.post(sent)
    assert first.status == second.status == 200
    assert first.json == {
        "accepted": 7,
        "duplicate": False,
        "refused": [],
        "refused_rows": 0,
        "refused_values": 0,
        "unknown_columns": [],
    }
    assert second.json == first.json | {"duplicate": True}
    answer = client.get("/api/v1/overview?window_seconds=60").json
    (row,) = answer["rows"]
    assert set(answer) >= {
        "generated_unix_seconds", "window_seconds", "rows", "budgets", "sidecars",
    }  # fmt: skip
    assert answer["window_seconds"] == 60
    assert row["requests"] == 7
    assert row["outcomes"] == {"completed": 7}
    assert row["time_to_first_token_seconds"] == {"p50": 0.5, "p99": 0.5}
    assert (row["kv_hit_ratio"], row["goodput_ratio"]) == (0.5, 1.0)
    assert (row["prompt_tokens"], row["output_tokens"]) == (700, 357)
    (sidecar,) = answer["sidecars"]
    assert (sidecar["sidecar_id"], sidecar["engine"], sidecar["records"]) == ("side", "vllm", 7)
    ttft = next(b for b in answer["budgets"] if b["objective"] == "ttft")
    assert (ttft["total"], ttft["bad"], ttft["remaining_ratio"], ttft["burn_1h"]) == (7, 0, 1, 0)
    assert client.get("/api/v1/policy").json == {
        "control_mode": "observe",
        "slo_digest": digest(objectives),
        "drift_freeze": False,
    }
    lengths = client.get("/api/v1/lengths").json
    assert [(s["side"], s["total"]) for s in lengths["streams"]] == [("input", 7), ("output", 7)]
    assert client.get("/api/v1/records/recent?limit=2").json["records"][0]["request_type"] == "chat"
    counts = metrics(client)
    assert counts["servoscope_collector_records_total:stored"] == 7
    assert counts["servoscope_collector_batches_total:duplicate"] == 1
    assert counts["servoscope_collector_store_bytes"] > 0
    assert counts["servoscope_collector_pending_batches"] == 0


def test_gzip_and_partly_bad_batches(serve: Serve) -> None:
    client = serve()
    sent = batch([fresh(n) for n in range(4)])
    sent["columns"]["outcome"][1] = "exploded"
    sent["columns"]["e2e_seconds"][2] = -5
    answer = client.post(gzip.compress(json.dumps(sent).encode()), content_encoding="gzip")
    assert answer.status == 200
    assert (answer.json["accepted"], answer.json["refused_rows"]) == (3, 1)
    assert answer.json["refused_values"] == 1
    assert [(r["row"], r["field"], r["row_lost"]) for r in answer.json["refused"]] == [
        (1, "outcome", True),
        (2, "e2e_seconds", False),
    ]
    counts = metrics(client)
    assert counts["servoscope_collector_records_total:refused"] == 1
    assert counts["servoscope_collector_refused_values_total"] == 1


def test_refusals_name_the_field_and_lose_nothing_else(serve: Serve) -> None:
    client = serve(max_body_bytes=1 << 16, max_decoded_bytes=1 << 16)
    good = batch([fresh()])
    plenty = {"request_id": ["r"] * (MAX_ROWS + 1), "source": [], "outcome": []}
    for body, headers, status, field in (
        (b"garbage", {}, 400, "body"),
        (b"", {}, 400, "body"),
        (json.dumps(good).encode()[:-9], {}, 400, "body"),
        (good | {"epoch": -1}, {}, 400, "epoch"),
        (good | {"columns": {}}, {}, 400, "columns.request_id"),
        (good | {"columns": plenty}, {}, 400, "columns.request_id"),
        (good, {"content_type": "text/plain"}, 415, "content-type"),
        (good, {"content_encoding": "zstd"}, 415, "content-encoding"),
        (good, {"content_encoding": "gzip"}, 400, "body"),
        (b" " * ((1 << 16) + 1), {}, 413, "body"),
        (gzip.compress(b" " * (100 << 16)), {"content_encoding": "gzip"}, 413, "body"),
    ):
        answer = client.post(body, **headers)
        assert (answer.status, answer.json["field"]) == (status, field), answer.raw
        assert answer.json["why"]
    assert client.post(good).json["accepted"] == 1
    counts = metrics(client)
    assert counts["servoscope_collector_batches_total:stored"] == 1
    assert client.get("/readyz").status == 200


def test_a_body_without_a_length_is_bounded_too(serve: Serve) -> None:
    client = serve(max_body_bytes=1 << 16, max_decoded_bytes=1 << 16)
    sent = 0
    with socket.create_connection((urlsplit(client.url).hostname, urlsplit(client.url).port)) as s:
        s.settimeout(10)
        s.sendall(
            b"POST /api/v1/records HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        try:
            while sent < 100 << 16:
                s.sendall(chunk)
                sent += 4096
        except OSError:
            pass  # it hung up: that is the point
        try:
            status = s.recv(4096).split(b"\r\n")[0]
        except OSError:
            status = b""
    assert sent < 100 << 16 or b"413" in status
    assert client.post(batch([fresh()])).status == 200


def test_a_slow_body_is_given_up(serve: Serve) -> None:
    client = serve(read_timeout_seconds=0.3, max_pending_batches=1)
    connection = http.client.HTTPConnection(
        urlsplit(client.url).hostname or "", urlsplit(client.url).port, timeout=10
    )
    connection.putrequest("POST", "/api/v1/records")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "1000")
    connection.endheaders(b"{")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["field"]) == (408, "body")
    connection.close()
    assert client.post(batch([fresh()])).status == 200


def test_when_full_it_says_come_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(max_pending_batches=2)
    release, inside = threading.Event(), threading.Semaphore(0)
    real = Store.insert

    def slow(self: Store, *args: Any) -> list[Inserted]:
        inside.release()
        assert release.wait(30)
        return real(self, *args)

    monkeypatch.setattr(Store, "insert", slow)
    answers: list[Any] = []
    senders = [
        threading.Thread(target=lambda n=n: answers.append(client.post(batch([fresh(n)], n))))
        for n in range(2)
    ]
    for sender in senders:
        sender.start()
    assert inside.acquire(timeout=30)
    deadline = time.monotonic() + 30
    while metrics(client)["servoscope_collector_pending_batches"] < 2:
        assert time.monotonic() < deadline
    refused = [client.post(batch([fresh()], 99)) for _ in range(200)]  # a hundred times the cap
    release.set()
    for sender in senders:
        sender.join()
    assert {a.status for a in refused} == {503}
    assert refused[0].headers["retry-after"] == "1"
    assert [a.status for a in answers] == [200, 200]
    assert metrics(client)["servoscope_collector_batches_total:busy"] == 200
    assert client.post(batch([fresh()], 99)).json == answers[0].json


def test_what_waits_is_stored_together_and_a_bad_one_fails_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve()
    release, inside = threading.Event(), threading.Event()
    real, groups = Store.insert, []

    def slow(self: Store, arrivals: Any, now: float) -> list[Inserted]:
        groups.append(sorted(arrival.batch.seq for arrival in arrivals))
        inside.set()
        assert release.wait(30)
        if 3 in groups[-1]:
            raise StoreError("this one never")
        return real(self, arrivals, now)

    monkeypatch.setattr(Store, "insert", slow)
    answers: dict[int, Any] = {}

    def send(seq: int) -> None:
        answers[seq] = client.post(batch([fresh(n) for n in range(5)], seq))

    senders = [threading.Thread(target=send, args=(seq,)) for seq in range(6)]
    senders[0].start()
    assert inside.wait(30)
    for sender in senders[1:]:
        sender.start()
    deadline = time.monotonic() + 30
    while metrics(client)["servoscope_collector_decode_seconds_count"] < 6:
        assert time.monotonic() < deadline
    release.set()
    for sender in senders:
        sender.join()
    # first the one that came alone; then all that waited, together; then, that failed, each alone
    assert groups[:2] == [[0], [1, 2, 3, 4, 5]]
    assert sorted(groups[2:]) == [[1], [2], [3], [4], [5]]
    assert {seq: a.status for seq, a in answers.items()} == {
        seq: 503 if seq == 3 else 200 for seq in range(6)
    }
    counts = metrics(client)
    assert counts["servoscope_collector_records_total:stored"] == 25
    assert counts["servoscope_collector_batches_total:failed"] == 1


def test_a_store_that_fails_is_said_and_recovers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve()
    with monkeypatch.context() as patch:
        patch.setattr(
            "servoscope.collector.store.see_sidecars",
            lambda db, _batch, _now: db.execute("SELECT error('no space left')"),
        )
        answer = client.post(batch([fresh()]))
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert answer.json["field"] == "store"
        assert "no space left" in answer.json["why"]
        assert client.get("/readyz").status == 503
        assert client.get("/healthz").status == 200
        assert metrics(client)["servoscope_collector_store_up"] == 0
    assert client.post(batch([fresh()])).json["duplicate"] is False
    assert client.get("/readyz").json == {"status": "ok", "why": ""}
    assert metrics(client)["servoscope_collector_store_up"] == 1


def test_hostile_labels_are_only_labels(serve: Serve) -> None:
    client = serve()
    hostile = [
        "'; DROP TABLE requests; --",
        '" OR 1=1 --',
        "<script>alert(1)</script>",
        "{{7*7}}",
        "a\nb",
        "\u202e\U0001f4a9",
        "$1 ? :name",
        "",
    ]
    sent = batch([fresh(n, model_name=text, tenant=text) for n, text in enumerate(hostile)])
    assert client.post(sent).json["accepted"] == len(hostile)
    rows = client.get("/api/v1/overview").json["rows"]
    assert sorted(row["model_name"] for row in rows) == sorted(hostile)


def test_text_is_never_kept(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    canary = "CANARY-7f3a"
    with caplog.at_level(logging.DEBUG):
        client = serve()
        sent = batch([fresh(1), fresh(2)])
        sent["columns"] |= {
            "prompt": [canary, canary],
            "messages": [{"content": canary}, [canary]],
            "completion": [canary],
            "e2e_seconds": [canary, 1.0],
        }
        sent["prompt"] = canary
        answer = client.post(sent)
        assert answer.json["accepted"] == 2
        assert answer.json["unknown_columns"] == ["prompt", "messages", "completion"]
        client.post({"schema": canary, "columns": {"prompt": [canary]}})
        client.post(json.dumps(canary).encode()[:-1])
        texts = [
            client.get(path).raw.decode()
            for path in (
                "/api/v1/overview",
                "/api/v1/records/recent",
                "/metrics",
                "/api/v1/lengths",
            )
        ]
        client.stop()
    assert not any(canary in text for text in (*texts, caplog.text))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert canary.encode() not in path.read_bytes(), path
    with duckdb.connect(str(tmp_path / "collector.duckdb")) as connection:
        tables = [row[0] for row in connection.execute("SHOW TABLES").fetchall()]
        assert set(tables) == {"requests", "batches", "verdicts", "sidecars", "migrations"}
        for table in tables:
            assert canary not in repr(connection.execute(f"FROM {table}").fetchall())


def test_questions_are_bounded_and_refused_by_name(serve: Serve) -> None:
    client = serve()
    for path, field in (
        ("overview?window_seconds=0", "window_seconds"),
        ("overview?window_seconds=-5", "window_seconds"),
        ("overview?window_seconds=nan", "window_seconds"),
        ("overview?window_seconds=inf", "window_seconds"),
        ("overview?window_seconds=1e12", "window_seconds"),
        ("overview?window_seconds=x", "window_seconds"),
        ("overview?since=5", "since"),
        ("overview?since=20&until=10", "since"),
        ("lengths?until=-1", "until"),
        ("records/recent?limit=0", "limit"),
        ("records/recent?limit=1000000", "limit"),
    ):
        answer = client.get(f"/api/v1/{path}")
        assert (answer.status, answer.json["field"]) == (422, field), path


def test_since_and_until_choose_the_interval(serve: Serve) -> None:
    client, now = serve(), time.time()
    ages = (100.0, 200.0, 300.0)
    client.post(
        batch(
            [
                fresh(n, received_unix_seconds=None, finished_unix_seconds=now - age)
                for n, age in enumerate(ages)
            ]
        )
    )
    for query, requests in (
        (f"since={now - 250}", 2),
        (f"until={now - 150}", 2),
        (f"since={now - 250}&until={now - 150}", 1),
        (f"window_seconds=60&until={now - 150}", 1),
        ("window_seconds=60", 0),
    ):
        answer = client.get(f"/api/v1/overview?{query}").json
        assert sum(row["requests"] for row in answer["rows"]) == requests, query
        lengths = client.get(f"/api/v1/lengths?{query}").json["streams"]
        assert sum(s["total"] for s in lengths) == 2 * requests, query


def test_a_token_is_asked_for_where_one_is_set(serve: Serve, tmp_path: Path) -> None:
    secret = "0123456789abcdef0123"
    (tmp_path / "token").write_text(secret + "\n")
    client = serve(token_file=str(tmp_path / "token"))
    for value in (None, "Bearer wrong", f"Basic {secret}", "Bearer ", f"Bearer {secret}x", secret):
        headers = {} if value is None else {"authorization": value}
        for method, path in (("GET", "/api/v1/overview"), ("GET", "/metrics")):
            answer = client.request(method, path, headers=headers)
            assert (answer.status, answer.json["field"]) == (401, "authorization")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.post(batch([fresh()]), **headers).status == 401
    assert client.get("/healthz").status == client.get("/readyz").status == 200
    client.headers = {"authorization": f"Bearer {secret}"}
    assert client.post(batch([fresh()])).status == 200
    assert client.get("/metrics").status == 200


def test_the_api_describes_itself(serve: Serve) -> None:
    client = serve()
    document = client.get("/openapi.json").json
    assert set(document["paths"]) == {
        "/api/v1/lengths", "/api/v1/overview", "/api/v1/policy", "/api/v1/records",
        "/api/v1/records/recent", "/healthz", "/readyz", "/runbooks/{page}",
    }  # fmt: skip
    post = document["paths"]["/api/v1/records"]["post"]
    assert {"200", "400", "401", "408", "413", "415", "503"} <= set(post["responses"])
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["columns"]["required"] == ["request_id", "source", "outcome"]
    assert client.get("/docs").status == 404  # that page would load scripts from another host


def test_a_restart_keeps_what_was_stored(serve: Serve) -> None:
    first = serve()
    assert first.post(batch([fresh(n) for n in range(5)])).json["accepted"] == 5
    first.stop()
    second = serve()
    assert second.post(batch([fresh(9)])).json == {
        **second.post(batch([fresh(9)])).json,
        "accepted": 5,
        "duplicate": True,
    }
    assert second.get("/api/v1/overview").json["rows"][0]["requests"] == 5


def test_retention_runs_while_it_serves(serve: Serve) -> None:
    client = serve(retention_days=0.01, retention_interval_seconds=1)
    old = time.time() - 3600
    client.post(batch([fresh(1, received_unix_seconds=old - 1, finished_unix_seconds=old)]))
    client.post(batch([fresh(2)], 1))
    deadline = time.monotonic() + 30
    while metrics(client)["servoscope_collector_expired_records_total:age"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    recent = client.get("/api/v1/records/recent").json["records"]
    assert [r["request_id"] for r in recent] == ["req-2"]


async def test_an_address_in_use_is_said(tmp_path: Path, objectives: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = CollectorConfig(port=taken.getsockname()[1], database=tmp_path / "c.duckdb")
        with pytest.raises(OSError, match=r"listen: cannot have 127\.0\.0\.1:\d+"):
            await run_collector(config, objectives)
    assert not config.database.exists()


async def test_a_wrong_setting_or_store_is_said_before_serving(
    tmp_path: Path, objectives: Any
) -> None:
    config = CollectorConfig(port=0, database=tmp_path / "c.duckdb")
    with pytest.raises(ValueError, match="threads: "):
        await run_collector(replace(config, threads=0), objectives)
    with pytest.raises(OSError, match="token_file: "):
        await run_collector(replace(config, token_file=str(tmp_path / "none")), objectives)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="database: "):
        await run_collector(replace(config, database=tmp_path / "file" / "x"), objectives)
    with pytest.raises(ValueError, match="listen: "):
        create_app(replace(config, listen="0.0.0.0"), objectives)
