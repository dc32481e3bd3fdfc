"""vLLM before 0.12: the ways in, on classes shaped as each of those releases has them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from exporters.vllm import fakes
from servoscope.exporters.plugin.sockets import connect
from servoscope.exporters.vllm import early_releases, plugin
from servoscope.exporters.vllm.hooks import Hooks, install
from servoscope.exporters.vllm.lifecycle import Lifecycle


class Stats092:
    """0.9.2's RequestStateStats: no first_token_latency, no num_preemptions."""

    def __init__(self, arrival_time: float) -> None:
        self.arrival_time = arrival_time
        self.num_generation_tokens = 0
        self.queued_ts = self.scheduled_ts = self.first_token_ts = self.last_token_ts = 0.0


class IterationStats092:
    """Takes prompt_len; leaves TTFT in a list of the iteration's."""

    def __init__(self, at: float) -> None:
        self.iteration_timestamp = at
        self.time_to_first_tokens_iter: list[float] = []

    def update_from_output(
        self,
        output: Any,
        engine_core_timestamp: float,
        is_prefilling: bool,
        prompt_len: int,
        req_stats: Any,
        lora_stats: Any,
    ) -> None:
        assert prompt_len > 0
        if is_prefilling:
            self.time_to_first_tokens_iter.append(self.iteration_timestamp - req_stats.arrival_time)
            req_stats.first_token_ts = engine_core_timestamp
        req_stats.num_generation_tokens += len(output.new_token_ids)
        if output.events is not None:
            req_stats.queued_ts, req_stats.scheduled_ts = output.events
        req_stats.last_token_ts = engine_core_timestamp


class OutputProcessor092:
    """Cached tokens pass through; a request's state does not keep them. Nested aborts."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.parent_requests: dict[str, Any] = {}

    def propagate_error(self, e: Exception) -> None:
        pass

    def add_request(
        self, request: Any, prompt: str | None, parent_req: Any = None, request_index: int = 0
    ) -> None:
        state = fakes.RequestState(request, parent_req)
        del state.external_req_id, state.num_cached_tokens
        state.stats = cast(Any, Stats092)(request.arrival_time)
        self.request_states[request.request_id] = state
        if parent_req is not None:
            self.parent_requests[parent_req.request_id] = parent_req
            parent_req.child_requests.add(request.request_id)

    def abort_requests(self, request_ids: Any) -> list[str]:
        aborted = []
        for ident in request_ids:
            if self.request_states.pop(ident, None) is not None:
                aborted.append(ident)
            elif parent := self.parent_requests.pop(ident, None):
                self.abort_requests(parent.child_requests)
                aborted.extend(parent.child_requests)
        return aborted

    def output(
        self,
        ident: str,
        at: float,
        stats: IterationStats092,
        *,
        cached: int = 0,
        finish: fakes.FinishReason | None = None,
    ) -> None:
        state = self.request_states[ident]
        first = state.is_prefilling
        stats.update_from_output(
            SimpleNamespace(
                new_token_ids=[7],
                events=(9.0, 9.5) if first else None,
                num_cached_tokens=cached,
            ),
            at,
            first,
            state.prompt_len,
            state.stats,
            None,
        )
        state.is_prefilling = False
        if finish is not None:
            del self.request_states[ident]
            self._update_stats_from_finished(state, finish, stats)

    def _update_stats_from_finished(self, req_state: Any, finish: Any, stats: Any) -> None:
        pass


class Engine092:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.hooks = Hooks()
        self.life = Lifecycle(self.messages.append, clock=fakes.Clock(200.0))
        processor: Any = type("OutputProcessor", (), dict(OutputProcessor092.__dict__))
        self.stats: Any = type("IterationStats", (), dict(IterationStats092.__dict__))
        llm = type("AsyncLLM", (), {})
        self.missing = install(self.hooks, self.life, processor, self.stats, llm)
        self.processor = processor()

    def add(self, ident: str, parent: Any = None) -> None:
        request = fakes.EngineCoreRequest(ident, ident, 100.0, prompt_len=40)
        self.processor.add_request(request, None, parent)


def test_092_lacks_admission_control_only() -> None:
    assert Engine092().missing == ["AsyncLLM.check_admission"]


def test_092_ttft_and_cached_tokens_are_noted_at_the_first_output() -> None:
    engine = Engine092()
    engine.add("cmpl-foo-0")
    for number in range(4):
        engine.processor.output(
            "cmpl-foo-0",
            10.0 + number,
            engine.stats(101.0 + number),
            cached=32 if number == 0 else 0,
            finish=fakes.FinishReason.LENGTH if number == 3 else None,
        )
    (message,) = engine.messages
    assert engine.hooks.faults == 0
    assert message["request_id"] == "cmpl-foo"
    assert message["time_to_first_token_seconds"] == 1.0
    assert message["queue_seconds"] == 0.5
    assert message["prefill_seconds"] == 0.5
    assert message["time_per_output_token_seconds"] == 1.0
    assert (message["prompt_tokens"], message["cached_tokens"]) == (40, 32)
    assert message["output_tokens"] == 4
    assert message["preemptions"] == 0
    assert list(message["inter_token_seconds"]) == [1.0, 1.0, 1.0]


def test_092_an_abort_before_the_first_token_is_a_record_without_it() -> None:
    engine = Engine092()
    engine.add("chatcmpl-foo")
    engine.processor.abort_requests(["chatcmpl-foo"])
    (message,) = engine.messages
    assert engine.hooks.faults == 0
    assert message["outcome"] == "cancelled"
    assert message["time_to_first_token_seconds"] is None
    assert message["cached_tokens"] is None


def test_092_samples_that_are_aborted_through_their_parent_are_one_record() -> None:
    engine = Engine092()
    parent = fakes.ParentRequest("chatcmpl-foo", "chatcmpl-foo")
    del parent.external_req_id
    for ident in ("0_chatcmpl-foo", "1_chatcmpl-foo"):
        engine.add(ident, parent)
    engine.processor.abort_requests(["chatcmpl-foo"])
    assert [m["request_id"] for m in engine.messages] == ["chatcmpl-foo"]
    assert len(engine.life) == 0


Made = list[tuple[Any, int]]


def made() -> tuple[Made, Callable[[Any, int], Any]]:
    """What was made, and the maker."""
    calls: Made = []

    def make(config: Any, rank: int) -> Any:
        calls.append((config, rank))
        return f"ours-{rank}"

    return calls, make


def test_a_stat_logger_is_added_where_each_release_keeps_them() -> None:
    calls, make = made()
    early = SimpleNamespace(vllm_config="c", stat_loggers=[["a"], ["b"]], log_stats=True)
    assert early_releases.add_stat_logger(early, make) == ""
    assert early.stat_loggers == [["a", "ours-0"], ["b", "ours-1"]]
    by_rank: dict[int, list[str]] = {2: ["a"], 3: []}
    middle = SimpleNamespace(
        vllm_config="c", logger_manager=SimpleNamespace(per_engine_logger_dict=by_rank)
    )
    assert early_releases.add_stat_logger(middle, make) == ""
    assert by_rank == {2: ["a", "ours-2"], 3: ["ours-3"]}
    late = SimpleNamespace(vllm_config="c", logger_manager=SimpleNamespace(stat_loggers=["a"]))
    assert early_releases.add_stat_logger(late, make) == ""
    assert late.logger_manager.stat_loggers == ["a", "ours-0"]
    assert [rank for _, rank in calls] == [0, 1, 2, 3, 0]


def test_without_statistics_or_in_another_layout_nothing_is_added() -> None:
    calls, make = made()
    off = SimpleNamespace(vllm_config="c", stat_loggers=[], log_stats=False)
    assert early_releases.add_stat_logger(off, make) == early_releases.NO_STATISTICS
    off = SimpleNamespace(vllm_config="c", logger_manager=None, log_stats=False)
    assert early_releases.add_stat_logger(off, make) == early_releases.NO_STATISTICS
    odd = SimpleNamespace(vllm_config="c", stat_loggers=("a",), log_stats=True)
    assert early_releases.add_stat_logger(odd, make).startswith("unknown layout")
    assert calls == []


def test_settings_are_made_whatever_our_part_of_it_does(caplog: pytest.LogCaptureFixture) -> None:
    class Arguments:
        def create_engine_config(self, context: str) -> str:
            return f"config of {context}"

    seen: list[str] = []

    def fails() -> None:
        seen.append("before")
        raise RuntimeError("ours")

    original = Arguments.create_engine_config
    for _ in range(2):  # plug-ins may be loaded twice
        assert early_releases.on_start(Arguments, fails, seen.append) == ""
    with caplog.at_level(logging.WARNING, "servoscope.plugin"):
        assert Arguments().create_engine_config(context="x") == "config of x"
    assert seen == ["before", "config of x"]
    assert ["ours" in r.message for r in caplog.records] == [True]
    assert Arguments.create_engine_config.__wrapped__ is original  # type: ignore[attr-defined]
    assert "is not there" in early_releases.on_start(object, fails, seen.append)


def test_only_schedulers_are_steered_of_all_that_is_looked_up() -> None:
    class SchedulerInterface:
        pass

    class Scheduler(fakes.OldScheduler, SchedulerInterface):
        pass

    known: dict[str, Any] = {"s": Scheduler, "other": dict, "function": len}
    utils, core, interface = (ModuleType(name) for name in ("u", "c", "i"))
    for module in (utils, core):  # core has taken the function over by its name
        vars(module)[early_releases.LOOKUP] = known.__getitem__
    modules = {"vllm.utils": utils, "vllm.v1.engine.core": core}
    served: list[Any] = []
    for _ in range(2):
        assert early_releases.wrap_lookup(modules, served.append) == ""
    assert core.resolve_obj_by_qualname("s") is Scheduler  # the interface is not loaded: engine V0
    vars(interface)["SchedulerInterface"] = SchedulerInterface
    modules["vllm.v1.core.sched.interface"] = interface
    for module in (utils, core):
        assert module.resolve_obj_by_qualname("other") is dict
        assert module.resolve_obj_by_qualname("function") is len
        found = module.resolve_obj_by_qualname("s")
        assert found.__mro__[1] is Scheduler
        scheduler = found(fakes.vllm_config())
        scheduler.add_request(fakes.SchedulerRequest("r", 3000, 2))
        assert scheduler.schedule().total_num_scheduled_tokens == 2048
    assert len(served) == 2
    assert early_releases.wrap_lookup({}, served.append).startswith("resolve_obj_by_qualname is")


class StatLoggerBase:
    """As in the releases that load no stat-logger plug-ins."""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch, run_directory: Path) -> dict[str, Any]:
    """A fake vllm 0.9.2: arguments, engine, and the look-up of schedulers by name."""

    class SchedulerInterface:
        pass

    class Scheduler(fakes.OldScheduler, SchedulerInterface):
        pass

    class AsyncEngineArgs:
        def create_engine_config(self) -> Any:
            return fakes.vllm_config()

    class AsyncLLM:
        def __init__(self, vllm_config: Any, log_stats: bool = True) -> None:
            self.vllm_config = vllm_config
            self.log_stats = log_stats
            self.stat_loggers: list[list[Any]] = [[]] if log_stats else []

    processor: Any = type("OutputProcessor", (), dict(OutputProcessor092.__dict__))
    content: dict[str, dict[str, Any]] = {
        "vllm.plugins": {},
        "vllm.envs": {"VLLM_USE_V1": True},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
        "vllm.config": {"SchedulerConfig": type("SchedulerConfig", (), {})},
        "vllm.utils": {early_releases.LOOKUP: {"s": Scheduler}.__getitem__},
        "vllm.v1.core.sched.interface": {"SchedulerInterface": SchedulerInterface},
        "vllm.v1.engine.output_processor": {"OutputProcessor": processor},
        "vllm.v1.metrics.stats": {
            "IterationStats": type("IterationStats", (), dict(IterationStats092.__dict__))
        },
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": StatLoggerBase},
    }
    modules = {}
    for name, names in content.items():
        modules[name] = module = ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return {"modules": modules, "run": run_directory}


def start(early: dict[str, Any], **options: Any) -> Any:
    """As an API server does: plug-ins, settings, engine."""
    plugin.register()
    plugin.register()
    modules = early["modules"]
    config = modules["vllm.engine.arg_utils"].AsyncEngineArgs().create_engine_config()
    return modules["vllm.v1.engine.async_llm"].AsyncLLM(config, **options)


def hello(early: dict[str, Any]) -> bytes:
    with connect(early["run"] / f"stats-{os.getpid()}.sock") as peer:
        peer.settimeout(10)
        return peer.recv(65536)


def test_an_early_engine_gets_our_stat_logger_and_its_requests_are_observed(
    early: dict[str, Any],
) -> None:
    engine = start(early)
    ((logger,),) = engine.stat_loggers
    assert issubclass(type(logger), StatLoggerBase)
    logger.record(scheduler_stats=None, iteration_stats=None)
    said = hello(early)
    assert b'"missing":["AsyncLLM.check_admission"]' in said
    assert b'"off":""' in said


def test_an_early_engine_without_statistics_says_so(
    early: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "servoscope.plugin"):
        start(early, log_stats=False)
    assert ["--disable-log-stats" in r.message for r in caplog.records] == [True]
    assert b'"off":"--disable-log-stats' in hello(early)
    processor = early["modules"]["vllm.v1.engine.output_processor"].OutputProcessor
    assert not hasattr(processor.add_request, "servoscope")


def test_engine_v0_is_left_alone_and_says_so(
    early: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    early["modules"]["vllm.envs"].VLLM_USE_V1 = False
    plugin.register()
    with caplog.at_level(logging.WARNING, "servoscope.plugin"):
        early["modules"]["vllm.engine.arg_utils"].AsyncEngineArgs().create_engine_config()
    assert ["engine V0" in r.message for r in caplog.records] == [True]
    assert b'"off":"engine V0' in hello(early)


def test_engine_cores_and_later_releases_are_not_touched(
    early: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = early["modules"]["vllm.engine.arg_utils"].AsyncEngineArgs
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "vllm.engine.arg_utils")
        plugin.register()
    monkeypatch.setattr(
        early["modules"]["vllm.plugins"], "STAT_LOGGER_PLUGINS_GROUP", "g", raising=False
    )
    plugin.register()
    assert not hasattr(arguments.create_engine_config, "servoscope")
    assert not early["run"].exists()


def test_knobs_reach_a_scheduler_that_is_looked_up_by_name(
    early: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.KNOBS_VARIABLE, "1")
    plugin.register()
    found = early["modules"]["vllm.utils"].resolve_obj_by_qualname("s")
    found(fakes.vllm_config())
    with connect(early["run"] / f"knobs-{os.getpid()}-dp0.sock") as peer:
        peer.settimeout(10)
        assert b'"chunk_tokens":2048' in peer.recv(65536)
