"""SGLang's request file as a source: what is read, what is refused, who else writes there."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.background import background
from servoscope.exporters.records import Outcome, RequestRecord, Source, SourceState
from servoscope.exporters.sglang.settings import Settings
from servoscope.sidecar.attach.sglang import EngineFiles
from servoscope.sidecar.sources.request_file import LEFT_UNSEEN, RequestFileSource

NOW = 1_800_000_000.0
CANARY = "CANARY the prompt of somebody"
TOLD = Settings(metrics=True, file=True, file_dir="/told", writes_text=False)


def line(ident: str = "r", ended: float = NOW, **parameters: Any) -> str:
    told = {
        "request_parameters": json.dumps({"stream": True, **parameters}), "id": ident,
        "finish_reason": {"type": "stop"}, "prompt_tokens": 10, "completion_tokens": 5,
        "request_received_ts": ended - 1.0, "request_finished_ts": ended, "e2e_latency": 1.0,
        "queue_time": 0.1, "decode_throughput": 100.0,
        "response_sent_to_client_ts": ended - 0.5,
    }  # fmt: skip
    return json.dumps(told)


class Bench:
    """One engine's directory and a source on it; clocks stand until they are moved."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "requests"
        self.directory.mkdir()
        self.positions = tmp_path / "positions"
        self.files = EngineFiles(
            TOLD, Path("/told"), self.directory, others=lambda: list(self.others)
        )
        self.others: list[int] = []
        self.now = 0.0
        self.with_spans = False
        self.found: list[RequestRecord] = []
        self.source = self.make()

    def make(self, *, allow_text: bool = False) -> RequestFileSource:
        self.source = RequestFileSource(
            lambda: self.files,
            server="127.0.0.1:30000",
            positions=self.positions,
            allow_text=allow_text,
            clock=lambda: NOW,
            steady=self._steady,
            poll_seconds=0.005,
            spans=lambda: self.with_spans,
        )
        return self.source

    def _steady(self) -> float:
        self.now += 0.25  # each look at the clock is later, so every round looks for new files
        return self.now

    def write(self, *lines: str) -> None:
        with (self.directory / "sglang-request-metrics-20270115_08.log").open("a") as file:
            file.writelines(f"{one}\n" for one in lines)

    def running(self) -> Any:
        return background(self.source.run(self.found.append))

    def states(self) -> tuple[SourceState, str]:
        status = self.source.status(self.now)
        return status.state, status.detail

    def ids(self) -> list[str]:
        return [record.request_id for record in self.found]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def until(what: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110 - whatever the test waits for
            await asyncio.sleep(0.005)


async def test_requests_are_handed_over_as_they_are_written(bench: Bench) -> None:
    assert bench.source.missing() == "not looked at yet"
    async with bench.running():
        await until(lambda: bench.source.settled)
        assert bench.source.missing() is None
        assert bench.states()[0] is SourceState.IDLE
        bench.write(line("a"), line("b"))
        await until(lambda: len(bench.found) == 2)
        assert bench.ids() == ["a", "b"]
        assert bench.found[0].source is Source.FILE
        assert bench.states() == (SourceState.OK, "reading /told")
        status = bench.source.status(bench.now + 100)
        assert (status.state, status.last_success_unix_seconds) == (SourceState.IDLE, NOW)
    assert bench.source.drops() == {}
    assert list(bench.source.open_requests()) == []


async def test_a_sidecar_that_comes_back_reads_what_it_missed_once(bench: Bench) -> None:
    async with bench.running():
        await until(lambda: bench.source.settled)
        bench.write(line("seen"))
        await until(lambda: bench.found)
    bench.write(line("missed"), line("long ago", ended=NOW - 3_601))
    bench.make()
    async with bench.running():
        await until(lambda: len(bench.found) == 2)
        bench.write(line("new"))
        await until(lambda: len(bench.found) == 3)
    assert bench.ids() == ["seen", "missed", "new"]
    assert bench.source.drops() == {"too_old": 1}


async def test_lines_that_are_no_records_are_counted_and_nothing_else_is_lost(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    warming = json.loads(line("n", sampling_params={"n": 2})) | {
        "finish_reason": {"type": "length", "length": 0}, "completion_tokens": 0,
    }  # fmt: skip
    strange = json.loads(line("odd")) | {"queue_time": CANARY}
    async with bench.running():
        await until(lambda: bench.source.settled)
        bench.write(
            f'garbage "{CANARY}"', '{"id": 5}', json.dumps(warming), json.dumps(strange), line("a")
        )
        await until(lambda: len(bench.found) == 2)
        assert bench.ids() == ["odd", "a"]
        assert bench.found[0].queue_seconds is None
        assert bench.source.drops() == {
            "garbage_line": 1, "refused_record": 1, "warming_pass": 1, "refused_value": 1,
        }  # fmt: skip
    assert "CANARY" not in caplog.text


def test_an_engine_that_writes_prompts_is_not_read_unless_told_to(bench: Bench) -> None:
    bench.files = replace(bench.files, settings=replace(TOLD, writes_text=True))
    missing = bench.source.missing()
    assert missing is not None
    assert "--log-requests --log-requests-level 0" in missing
    assert "sglang_allow_prompt_text" in missing
    assert bench.states()[0] is SourceState.FAILED
    assert bench.make(allow_text=True).missing() == "not looked at yet"


async def test_a_prompt_where_none_was_expected_stops_it(bench: Bench) -> None:
    async with bench.running():
        await until(lambda: bench.source.settled)
        bench.write(line("a"), line("b", text=CANARY))
        await until(lambda: bench.source.drops().get("prompt_text"))
        assert "prompts" in (bench.source.missing() or "")
        assert bench.states()[0] is SourceState.FAILED
        assert bench.ids() == ["a"]
        bench.now += 61
        assert bench.source.missing() is None
    bench.make(allow_text=True)
    async with bench.running():
        await until(lambda: bench.source.settled)
        bench.write(line("c", text=CANARY, input_ids=[1, 2]))
        await until(lambda: len(bench.found) == 2)
        assert bench.source.missing() is None
    assert "CANARY" not in repr(bench.found)


async def test_two_engines_in_one_directory_are_refused_while_both_are_there(bench: Bench) -> None:
    async with bench.running():
        await until(lambda: bench.source.settled)
        bench.others = [4711]
        await until(bench.source.missing)
        missing = bench.source.missing() or ""
        assert "4711" in missing
        assert "its own --export-metrics-to-file-dir" in missing
        bench.write(line("whose?"))
        bench.others = []
        await until(lambda: bench.source.missing() is None)
        bench.write(line("ours"))
        await until(lambda: "ours" in bench.ids())


@pytest.mark.parametrize(
    ("settings", "words", "state"),
    [
        (Settings(), "does not say", SourceState.OFF),
        (Settings(file=False), "does not write", SourceState.OFF),
        (Settings(file=True), "start it with --enable-metrics", SourceState.FAILED),
    ],
)
def test_an_engine_without_a_file_says_how_to_start_it(
    bench: Bench, settings: Settings, words: str, state: SourceState
) -> None:
    bench.files = EngineFiles(settings)
    assert words in (bench.source.missing() or "")
    assert "--export-metrics-to-file-dir DIR" in (bench.source.missing() or "")
    assert bench.states()[0] is state


async def test_a_directory_that_cannot_be_found_or_read_is_said(bench: Bench) -> None:
    shutil.rmtree(bench.directory)
    async with bench.running():
        await until(lambda: bench.source.settled)
        assert "No such file" in bench.states()[1]
        bench.directory.mkdir()
        await until(lambda: bench.source.missing() is None)
        bench.files = EngineFiles(TOLD)
        await until(bench.source.missing)
        assert "cannot be found from here" in bench.states()[1]


async def test_without_metrics_it_says_that_times_are_missing(bench: Bench) -> None:
    bench.files = replace(bench.files, settings=replace(TOLD, metrics=False))
    assert "--enable-metrics" in bench.states()[1]


async def test_a_client_that_left_is_told_by_its_spans_once(bench: Bench) -> None:
    assert LEFT_UNSEEN in bench.source.status(0.0).blind_to
    bench.with_spans = True
    assert LEFT_UNSEEN not in bench.source.status(0.0).blind_to

    def spans_of(ident: str, outcome: Outcome = Outcome.CANCELLED) -> RequestRecord:
        return RequestRecord(request_id=ident, source=Source.OTLP, outcome=outcome)

    async with bench.running():
        await until(lambda: bench.source.settled)
        bench.source.left(spans_of("left"))
        bench.source.left(spans_of("stopped"))
        bench.source.left(spans_of("answered", Outcome.COMPLETED))
        bench.write(line("3_stopped"))  # by /abort_request: it has a line, from worker 3
        await until(lambda: len(bench.found) == 2)
        bench.write(line("last"))
        await until(lambda: "last" in bench.ids())
    assert sorted(bench.ids()) == ["3_stopped", "last", "left"]


def test_what_left_is_bounded(bench: Bench) -> None:
    record = RequestRecord(request_id="r", source=Source.OTLP, outcome=Outcome.CANCELLED)
    for _ in range(10_050):
        bench.source.left(record)
    assert bench.source.drops() == {"left_table_full": 50}
