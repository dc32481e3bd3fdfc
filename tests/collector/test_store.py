"""The store on real DuckDB files: exactly once, restart, damage, one owner, retention."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servoscope.alerts.spec import default_spec
from servoscope.collector.clock import Span
from servoscope.collector.database import StoreError, StoreLockedError, open_database
from servoscope.collector.migrations import MIGRATIONS, Migration
from servoscope.collector.slo import judge
from servoscope.collector.store import Arrival, Inserted, Retention, Store
from servoscope.exporters.records import WIRE_FIELDS, Outcome, RequestRecord, Source
from servoscope.exporters.wire import decode_batch, encode_batch

NOW = 1_800_000_000.0
OBJECTIVES = tuple(default_spec().objectives)


def at(now: float) -> Span:
    """A clock that is believed."""
    return Span(now, now)


KEEP = Retention(records_seconds=1000, verdicts_seconds=1000, keys_seconds=1000, max_bytes=1 << 40)


def request(number: int, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": f"req-{number}",
        "source": Source.PLUGIN,
        "outcome": Outcome.COMPLETED,
        "engine": "vllm",
        "server": "127.0.0.1:8000",
        "streaming": True,
        "finished_unix_seconds": NOW - 1,
        "time_to_first_token_seconds": 0.5,
        "prompt_tokens": 100,
        "output_tokens": 20,
    }
    return RequestRecord(**(values | changes))


def put(
    store: Store, records: list[RequestRecord], seq: int = 0, *, now: float = NOW, **key: Any
) -> Inserted:
    named: dict[str, Any] = {"sidecar_id": "side", "epoch": 1} | key
    batch = decode_batch(json.loads(json.dumps(encode_batch(records, seq=seq, **named))))
    return store.insert([Arrival(batch, judge(OBJECTIVES, batch.records, now))], now)[0]


def count(store: Store, table: str = "requests") -> int:
    return int(store.read(f"SELECT count(*) FROM {table}")[0][0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "collector.duckdb"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[[], Store]]:
    stores: list[Store] = []

    def open_() -> Store:
        stores.append(Store(path, now=NOW))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[[], Store]) -> Store:
    return opened()


def test_every_wire_field_has_a_column(store: Store) -> None:
    columns = {row[0] for row in store.read("DESCRIBE requests")}
    assert columns == {
        *WIRE_FIELDS,
        "at_unix_seconds",
        "sidecar_id",
        "meets_all",
        "input_bucket",
        "output_bucket",
    }


def test_a_record_is_kept_as_it_was(store: Store) -> None:
    full = request(
        1,
        status_code=200,
        rank=3,
        tenant="a",
        finish_reason="stop",
        request_type_hint="chat",
        endpoint="/v1/completions",
        received_unix_seconds=NOW - 9.5,
        queue_seconds=0.0,
        max_output_tokens=64,
        cached_tokens=0,
        preemptions=2,
    )
    bare = RequestRecord(request_id="bare", source=Source.TAP, outcome=Outcome.UNKNOWN)
    put(store, [full, bare])
    rows = store.read(f"SELECT {', '.join(WIRE_FIELDS)} FROM requests ORDER BY request_id DESC")
    for row, record in zip(rows, (full, bare), strict=True):
        assert dict(zip(WIRE_FIELDS, row, strict=True)) == {
            name: getattr(record, name) for name in WIRE_FIELDS
        }
    own = store.read(
        "SELECT at_unix_seconds, sidecar_id, meets_all, input_bucket, output_bucket "
        "FROM requests ORDER BY request_id DESC"
    )
    assert own == [(NOW - 1, "side", True, 26, 17), (NOW, "side", None, None, None)]


def test_a_key_is_stored_once(store: Store) -> None:
    records = [request(n) for n in range(5)]
    assert put(store, records) == Inserted(5, duplicate=False)
    assert put(store, records) == Inserted(5, duplicate=True)
    assert put(store, records[:2]) == Inserted(5, duplicate=True)  # the key decides
    for other in ({"seq": 1}, {"epoch": 2}, {"sidecar_id": "other"}):
        assert not put(store, [request(9)], **other).duplicate
    assert count(store) == 8
    assert store.read("SELECT sum(total) FROM verdicts WHERE objective = 'ttft'") == [(8,)]
    assert store.read("SELECT sidecar_id, records FROM sidecars ORDER BY sidecar_id") == [
        ("other", 1),
        ("side", 7),
    ]


def test_an_empty_batch_is_a_sign_of_life(store: Store) -> None:
    put(store, [request(1)])
    assert put(store, [], seq=1, now=NOW + 50) == Inserted(0, duplicate=False)
    assert store.read("SELECT server, engine, last_seen_unix_seconds, records FROM sidecars") == [
        ("127.0.0.1:8000", "vllm", NOW + 50, 1)
    ]


def test_many_batches_are_one_transaction_and_each_key_counts_once(store: Store) -> None:
    put(store, [request(0)], seq=3)

    def arrival(seq: int, rows: int) -> Arrival:
        sent = encode_batch([request(n) for n in range(rows)], sidecar_id="side", epoch=1, seq=seq)
        batch = decode_batch(sent)
        return Arrival(batch, judge(OBJECTIVES, batch.records, NOW))

    found = store.insert(
        [arrival(1, 10), arrival(2, 20), arrival(3, 5), arrival(1, 10), arrival(4, 0)], NOW
    )
    assert found == [
        Inserted(10, duplicate=False),
        Inserted(20, duplicate=False),
        Inserted(1, duplicate=True),  # stored before this call
        Inserted(10, duplicate=True),  # its twin came first
        Inserted(0, duplicate=False),
    ]
    assert count(store) == 31
    assert store.read("SELECT sum(total) FROM verdicts WHERE objective = 'ttft'") == [(31,)]
    assert store.read("SELECT records FROM sidecars") == [(31,)]
    assert store.insert([], NOW) == []


def test_a_batch_may_spread_over_ten_thousand_minutes(store: Store) -> None:
    put(store, [request(n, finished_unix_seconds=60.0 * n + 1) for n in range(10_000)])
    assert store.read("SELECT count(*), sum(total) FROM verdicts WHERE objective = 'ttft'") == [
        (10_000, 10_000)
    ]


@pytest.mark.parametrize("part", ["add_verdicts", "see_sidecars", "rows"])
def test_a_failed_batch_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    put(store, [request(0)])
    failing = "SELECT error('disk on fire')"
    with monkeypatch.context() as patch:
        # real SQL that fails inside the transaction, with or after the rows
        if part == "rows":
            patch.setattr(store, "_insert_sql", store._insert_sql + " WHERE error('disk on fire')")
        else:
            patch.setattr(f"servoscope.collector.store.{part}", lambda db, *_: db.execute(failing))
        with pytest.raises(StoreError, match="disk on fire"):
            put(store, [request(1)], seq=1)
    assert (count(store), count(store, "batches"), count(store, "sidecars")) == (1, 1, 1)
    assert put(store, [request(1)], seq=1) == Inserted(1, duplicate=False)
    assert store.read("SELECT total FROM verdicts WHERE objective = 'ttft'") == [(2,)]


def test_the_store_opens_again_when_the_database_gave_up(store: Store) -> None:
    put(store, [request(0)])
    answers: list[int] = []
    reader = threading.Thread(target=lambda: answers.append(count(store)))
    reader.start()
    reader.join()
    store._db.close()  # the connection is dead, as after a fatal error
    with pytest.raises(StoreError):
        put(store, [request(1)], seq=1)
    assert put(store, [request(1)], seq=1) == Inserted(1, duplicate=False)
    assert count(store) == 2
    assert answers == [1]


def test_a_restart_keeps_everything(opened: Callable[[], Store], path: Path) -> None:
    first = opened()
    put(first, [request(n) for n in range(3)])
    first.close()
    second = opened()
    assert put(second, [request(n) for n in range(3)]).duplicate
    assert count(second) == 3
    assert [row[0] for row in second.read("SELECT version FROM migrations")] == [
        step.version for step in MIGRATIONS
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


hostile_text = st.text(max_size=40).filter(lambda t: not any(0xD800 <= ord(c) < 0xE000 for c in t))
numbers = st.none() | st.integers(-5, 10**20) | st.floats()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(st.tuples(hostile_text, hostile_text, numbers, numbers, numbers), max_size=5),
    st.integers(0, 2**62),
)
def test_whatever_decodes_can_be_stored(
    store: Store, rows: list[tuple[Any, ...]], seq: int
) -> None:
    names = ("model_name", "tenant", "e2e_seconds", "prompt_tokens", "finished_unix_seconds")
    columns: dict[str, list[Any]] = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    columns |= {
        "request_id": [f"r{i}" for i in range(len(rows))],
        "source": ["tap"] * len(rows),
        "outcome": ["completed"] * len(rows),
    }
    batch = decode_batch(
        {
            "schema": "servoscope.records.v1",
            "sidecar_id": "hypothesis",
            "epoch": count(store, "batches"),
            "seq": seq,
            "columns": columns,
        }
    )
    before = count(store)
    inserted = store.insert([Arrival(batch, judge(OBJECTIVES, batch.records, NOW))], NOW)[0]
    assert inserted == Inserted(len(batch), duplicate=False)
    assert count(store) == before + len(batch)


# ---- reading -----------------------------------------------------------------------------------


def test_a_question_that_takes_too_long_is_ended(store: Store) -> None:
    with pytest.raises(StoreError, match=r"more than 0\.2 s"):
        store.read(
            "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range + b.range = -1",
            timeout_seconds=0.2,
        )
    assert count(store) == 0


def test_a_wrong_question_is_an_error_of_the_store(store: Store) -> None:
    with pytest.raises(StoreError, match="cannot read"):
        store.read("SELECT nothing FROM nowhere")


def test_readers_see_whole_batches_while_one_is_written(store: Store) -> None:
    seen: set[int] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.add(count(store))

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for seq in range(10):
        put(store, [request(n) for n in range(100)], seq)
    done.set()
    for reader in readers:
        reader.join()
    assert {n % 100 for n in seen} == {0}
    assert count(store) == 1000


def test_the_database_cannot_reach_files(store: Store, tmp_path: Path) -> None:
    for sql in (f"COPY requests TO '{tmp_path}/out.csv'", "SET enable_external_access = true"):
        with pytest.raises(StoreError):
            store.read(sql)
    assert not (tmp_path / "out.csv").exists()


# ---- retention ---------------------------------------------------------------------------------


def test_what_is_too_old_goes(store: Store) -> None:
    put(store, [request(1, finished_unix_seconds=NOW - 5000)], seq=1, now=NOW - 5000)
    put(store, [request(2)], seq=2)
    removed = store.retain(KEEP, at(NOW))
    assert (removed.by_age, removed.by_size) == (1, 0)
    assert store.read("SELECT request_id FROM requests") == [("req-2",)]
    assert store.read("SELECT seq FROM batches") == [(2,)]
    assert store.read("SELECT DISTINCT minute_unix_seconds FROM verdicts") == [(int(NOW) - 60,)]
    # a key that is forgotten is new again; one that is kept is not
    assert not put(store, [request(1)], seq=1).duplicate
    assert put(store, [request(2)], seq=2).duplicate
    # keys and minutes can be deleted and written again, many times over
    for step in range(1, 20):
        store.retain(KEEP, at(NOW + 2000 * step))
        assert not put(store, [request(1)], seq=1, now=NOW + 2000 * step).duplicate


def test_what_lies_ahead_goes_and_takes_nothing_with_it(store: Store) -> None:
    ahead = NOW + 10 * 365 * 86_400
    put(store, [request(1, finished_unix_seconds=ahead)], seq=1, sidecar_id="jumped", now=ahead)
    put(store, [request(2)], seq=2)
    assert store.newest_unix_seconds() == ahead
    # while the clock is doubted nothing of it goes
    removed = store.retain(KEEP, Span(NOW, ahead))
    assert (removed.by_age, removed.by_future, removed.by_size) == (0, 0, 0)
    removed = store.retain(KEEP, at(NOW))
    assert (removed.by_age, removed.by_future, removed.by_size) == (0, 1, 0)
    assert store.read("SELECT request_id FROM requests") == [("req-2",)]
    assert store.read("SELECT seq FROM batches") == [(2,)]
    assert store.read("SELECT DISTINCT minute_unix_seconds FROM verdicts") == [(int(NOW) - 60,)]
    assert store.newest_unix_seconds() == NOW


def test_above_its_size_the_oldest_tenth_goes(store: Store) -> None:
    put(store, [request(n, finished_unix_seconds=NOW - 900 + n) for n in range(100)])
    store._db.execute("CHECKPOINT")
    assert store.used_bytes() > 0
    small = Retention(records_seconds=1e6, verdicts_seconds=1e6, keys_seconds=1e6, max_bytes=1)
    removed = store.retain(small, at(NOW))
    assert removed.by_age == 0
    assert 1 <= removed.by_size <= 20
    (oldest, newest) = store.read(
        "SELECT min(at_unix_seconds), max(at_unix_seconds) FROM requests"
    )[0]
    assert oldest == NOW - 900 + removed.by_size
    assert newest == NOW - 801


# ---- opening -----------------------------------------------------------------------------------


def test_a_second_process_is_told_who_owns_the_file(store: Store, path: Path) -> None:
    put(store, [request(1)])
    script = (
        "import sys; from pathlib import Path; from servoscope.collector.store import Store, "
        "StoreLockedError\n"
        "try: Store(Path(sys.argv[1]), now=0)\n"
        "except StoreLockedError as error: print(error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"in use by process {os.getpid()}" in found.stdout
    assert "--database" in found.stdout
    assert count(store) == 1


@pytest.fixture
def filled(path: Path) -> Path:
    """A closed store with two rows in the main file."""
    store = Store(path, now=NOW)
    put(store, [request(1), request(2)])
    store.close()
    return path


def _text(raw: bytes) -> bytes:
    return b"this is no database\n" * 1000


def _cut(raw: bytes) -> bytes:
    return raw[:9000]


def _empty(raw: bytes) -> bytes:
    return b""


def _overwritten(raw: bytes) -> bytes:
    return raw[:12] + b"\xff" * (len(raw) - 12)


def _second_half_overwritten(raw: bytes) -> bytes:
    return raw[: len(raw) // 2] + b"\xff" * (len(raw) // 2)


@pytest.mark.parametrize("damage", [_text, _cut, _empty, _overwritten])
def test_a_damaged_file_is_moved_aside_and_said(
    filled: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    damaged = damage(filled.read_bytes())
    filled.write_bytes(damaged)
    with caplog.at_level(logging.ERROR):
        store = Store(filled, now=NOW)
    aside = filled.with_name(f"collector.duckdb.damaged-{int(NOW)}")
    try:
        assert aside.read_bytes() == damaged
        assert str(aside) in caplog.text
        assert count(store) == 0
        assert not put(store, [request(1)]).duplicate
    finally:
        store.close()


@pytest.mark.parametrize("finder", ["reader", "retention"])
def test_a_block_found_bad_later_moves_the_file_aside(
    filled: Path, finder: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = _second_half_overwritten(filled.read_bytes())
    filled.write_bytes(damaged)
    store = Store(filled, now=NOW)  # blocks are read when they are needed: this one opens
    try:
        with caplog.at_level(logging.ERROR):
            if finder == "reader":
                with pytest.raises(StoreError, match="cannot read"):
                    store.read("SELECT * FROM requests")
                assert list(filled.parent.glob("*.damaged-*")) == []  # that is the writer's to do
            else:
                with pytest.raises(StoreError, match="cannot delete"):
                    store.retain(KEEP, at(NOW + 1e6))
            assert not put(store, [request(1)], seq=5).duplicate
        assert count(store) == 1
        (aside,) = filled.parent.glob("*.damaged-*")
        assert aside.stat().st_size >= len(damaged)
        assert str(aside) in caplog.text
    finally:
        store.close()


def test_a_damaged_log_costs_only_what_was_in_it(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(path, now=NOW)
    put(store, [request(1)])
    store._db.execute("CHECKPOINT")
    put(store, [request(n) for n in range(2, 500)], seq=1)
    copy = tmp_path / "copy.duckdb"
    shutil.copy(path, copy)
    log = path.with_name(path.name + ".wal").read_bytes()
    store.close()
    wal = copy.with_name("copy.duckdb.wal")
    wal.write_bytes(log[:20] + b"\xff" * (len(log) - 20))
    with caplog.at_level(logging.ERROR):
        again = Store(copy, now=NOW)
    try:
        assert count(again) == 1
        assert put(again, [request(1)]).duplicate
        assert copy.with_name(f"copy.duckdb.wal.damaged-{int(NOW)}").exists()
        assert "copy.duckdb.wal is damaged" in caplog.text
    finally:
        again.close()


def test_damage_twice_in_a_second_overwrites_nothing(filled: Path) -> None:
    for _ in range(2):
        filled.write_bytes(b"no database")
        Store(filled, now=NOW).close()
    assert len(list(filled.parent.glob("*.damaged-*"))) == 2


def test_a_newer_schema_is_refused_and_left_alone(filled: Path) -> None:
    connection = duckdb.connect(str(filled))
    connection.execute("INSERT INTO migrations VALUES (99, 'from the future', 0)")
    connection.close()
    before = filled.read_bytes()
    with pytest.raises(StoreError, match="schema 99, this version knows 1"):
        Store(filled, now=NOW)
    assert filled.read_bytes() == before
    assert [p.name for p in filled.parent.iterdir()] == [filled.name]


def test_migrations_are_applied_once_and_a_broken_one_not_at_all(filled: Path) -> None:
    more = Migration(2, "add a column", ("ALTER TABLE requests ADD COLUMN extra VARCHAR",))
    broken = Migration(3, "broken", ("ALTER TABLE requests DROP COLUMN extra", "SELECT nonsense"))
    for _ in range(2):
        open_database(filled, now=NOW, migrations=(*MIGRATIONS, more)).close()
    with pytest.raises(StoreError, match="nonsense"):
        open_database(filled, now=NOW, migrations=(*MIGRATIONS, more, broken))
    connection = duckdb.connect(str(filled))
    assert connection.execute("SELECT max(version) FROM migrations").fetchone() == (2,)
    assert connection.execute("SELECT count(extra), count(*) FROM requests").fetchone() == (0, 2)
    connection.close()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="database: cannot make"):
        Store(tmp_path / "file" / "collector.duckdb", now=NOW)
    with pytest.raises(StoreError, match="database: cannot open"):
        Store(tmp_path, now=NOW)


def test_locked_is_a_kind_of_store_error() -> None:
    assert issubclass(StoreLockedError, StoreError)
