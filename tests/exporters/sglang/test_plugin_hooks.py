from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from exporters.sglang import engine_fakes as fakes
from servoscope.exporters.plugin.line_server import LineServer
from servoscope.exporters.sglang import plugin
from servoscope.exporters.sglang import scheduler_access as access


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    """SGLang's registry: what is registered wraps its target when ``apply`` is called."""

    hooks: ClassVar[list[tuple[str, Callable[..., Any], HookType]]] = []

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply(cls) -> None:
        for target, hook, kind in cls.hooks:
            place, _, name = target.rpartition(".")
            module, _, owner = place.rpartition(".")
            found = getattr(sys.modules[module], owner)
            setattr(found, name, _wrapped(getattr(found, name), hook, kind))


def _wrapped(original: Any, hook: Callable[..., Any], kind: HookType) -> Any:
    @functools.wraps(original)
    def after(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    @functools.wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return after if kind is HookType.AFTER else around


class Sglang:
    """The modules of one scheduler process, made anew for each test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.parallel = fakes.parallel_of()
        parallel = self.parallel

        class Scheduler(fakes.Scheduler):
            def __init__(self) -> None:
                super().__init__(parallel)
                self.inbox: list[Any] = []

            def get_new_batch_prefill(self, running_batch: Any) -> Any:
                batch = SimpleNamespace(
                    forward_mode=fakes.ForwardMode("extend"), extend_num_tokens=100
                )
                return fakes.NextBatchPlan(batch, running_batch)

            def get_next_batch_to_run(self, running_batch: Any) -> Any:
                return self.get_new_batch_prefill(running_batch)

        class SchedulerRequestReceiver:
            def __init__(self, scheduler: Any) -> None:
                self.scheduler = scheduler

            def _pull_raw_reqs(self) -> Any:
                pulled, self.scheduler.inbox = self.scheduler.inbox, []
                return pulled

            def recv_requests(self) -> Any:
                return self._pull_raw_reqs()

        class SchedulerInternalStateController(fakes.Controller):
            def get_internal_state(self, _request: Any) -> Any:
                return SimpleNamespace(internal_state={"version": "0.5.23"})

        self.scheduler = Scheduler
        self.receiver = SchedulerRequestReceiver
        self.controller = SchedulerInternalStateController
        HookRegistry.hooks.clear()
        modules: dict[str, dict[str, Any]] = {
            "sglang": {"__version__": "0.5.23"},
            "sglang.srt": {},
            "sglang.srt.plugins": {},
            "sglang.srt.plugins.hook_registry": {
                "HookRegistry": HookRegistry, "HookType": HookType,
            },
            "sglang.srt.runtime_context": {"get_parallel": lambda: self.parallel},
            "sglang.srt.managers": {},
            "sglang.srt.managers.io_struct": {"SetInternalStateReq": fakes.SetInternalStateReq},
            "sglang.srt.managers.scheduler_components": {},
            access.SCHEDULER: {"Scheduler": Scheduler, "NextBatchPlan": fakes.NextBatchPlan},
            access.RECEIVER: {"SchedulerRequestReceiver": SchedulerRequestReceiver},
            access.CONTROLLER: {
                "SchedulerInternalStateController": SchedulerInternalStateController
            },
        }  # fmt: skip
        for name, contents in modules.items():
            module = ModuleType(name)
            module.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        for name in (plugin.KNOBS_VARIABLE, plugin.DISABLE_VARIABLE, "SERVOSCOPE_SOCKET_GROUP"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(run_dir))
        monkeypatch.setattr(plugin, "_PILOTS", {})

    def boot(self) -> Any:
        """What SGLang does: plug-ins register, hooks are applied, the scheduler is made."""
        plugin.register()
        HookRegistry.apply()
        return self.scheduler()


@pytest.fixture
def sglang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line_servers: list[LineServer]
) -> Sglang:
    return Sglang(monkeypatch, tmp_path)


def test_installed_alone_it_hooks_nothing(sglang: Sglang, tmp_path: Path) -> None:
    sglang.boot()
    assert HookRegistry.hooks == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("why", ["disabled", "no scheduler here"])
def test_asked_for_in_the_wrong_place_it_hooks_nothing(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setenv(plugin.KNOBS_VARIABLE, "1")
    if why == "disabled":
        monkeypatch.setenv(plugin.DISABLE_VARIABLE, "1")
    else:
        monkeypatch.delitem(sys.modules, access.SCHEDULER)
    plugin.register()
    assert HookRegistry.hooks == []
    assert sglang.parallel.tp_rank == 0


def test_a_setting_reaches_the_scheduler_through_its_requests(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(plugin.KNOBS_VARIABLE, "1")
    scheduler = sglang.boot()
    assert [path.name.partition("-dp")[2] for path in tmp_path.iterdir()] == ["0.sock"]
    pilot = plugin._pilot()
    assert pilot is not None
    pilot.law.lease("me", 30, pilot._clock())
    pilot.law.set("me", {"chunk_tokens": 256, "batch_window_seconds": 0.5}, pilot._clock(), 0)
    request = fakes.TokenizedGenerateReqInput()
    scheduler.inbox.append(request)
    receiver = sglang.receiver(scheduler)
    assert receiver.recv_requests() == [request]
    assert scheduler.chunked_prefill_size == 256
    running = object()
    plan = scheduler.get_next_batch_to_run(running)
    assert (plan.batch_to_run, plan.running_batch) == (None, running)  # the window holds
    scheduler.waiting_queue.append(1)
    pilot._clock = fakes.Clock(pilot._clock() + 0.6)
    assert receiver.recv_requests() == []
    assert scheduler.get_next_batch_to_run(running).batch_to_run is not None
    assert (pilot.counters.steps, pilot.counters.scheduled_tokens) == (1, 100)
    told = sglang.controller(scheduler, sglang.parallel, ()).get_internal_state(None)
    assert told.internal_state["servoscope_knobs"]["chunk_tokens"] == 256
    assert pilot.faults == 0


def test_further_ranks_add_nothing_to_what_they_receive(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(plugin.KNOBS_VARIABLE, "1")
    sglang.parallel.tp_rank, sglang.parallel.tp_size = 1, 2
    scheduler = sglang.boot()
    assert [path.name.partition("-dp")[2] for path in tmp_path.iterdir()] == ["0-tp1.sock"]
    pilot = plugin._pilot()
    assert pilot is not None
    pilot.law.lease("me", 30, pilot._clock())
    pilot.law.set("me", {"chunk_tokens": 256}, pilot._clock(), 0)
    assert sglang.receiver(scheduler).recv_requests() == []
    assert scheduler.chunked_prefill_size == 2048


@pytest.mark.parametrize(
    ("break_it", "lacks"),
    [
        (lambda s: delattr(s.receiver, "_pull_raw_reqs"), "SchedulerRequestReceiver._pull_raw"),
        (lambda s: delattr(s.scheduler, "get_new_batch_prefill"), "Scheduler.get_new_batch_pref"),
        (
            lambda s: setattr(s.scheduler, "get_new_batch_prefill", lambda self: None),
            "get_new_batch_prefill(running_batch)",
        ),
        (
            lambda s: delattr(sys.modules[access.CONTROLLER], "SchedulerInternalStateController"),
            "SchedulerInternalStateController._update_handlers and 2 more that the hooks need",
        ),
    ],
)
def test_another_version_is_not_hooked_and_says_what_it_lacks(
    sglang: Sglang,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    line_servers: list[LineServer],
    break_it: Callable[[Sglang], Any],
    lacks: str,
) -> None:
    monkeypatch.setenv(plugin.KNOBS_VARIABLE, "1")
    break_it(sglang)
    sglang.boot()
    assert [target for target, _, _ in HookRegistry.hooks] == [
        f"{access.SCHEDULER}.Scheduler.__init__"
    ]
    off = line_servers[0]._handler.hello()["off"]
    assert off.startswith("SGLang 0.5.23 lacks ")
    assert lacks in off
    assert plugin._pilot() is None
    assert len(list(tmp_path.iterdir())) == 1


def test_a_runtime_directory_that_cannot_be_made_leaves_the_engine_alone(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(plugin.KNOBS_VARIABLE, "1")
    monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(tmp_path / "file"))
    scheduler = sglang.boot()
    assert sglang.receiver(scheduler).recv_requests() == []
