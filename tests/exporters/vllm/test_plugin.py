from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from exporters.vllm import fakes
from servoscope.exporters.plugin.sockets import connect
from servoscope.exporters.vllm import plugin

ROOT = Path(__file__).resolve().parents[3]

IN_ENGINE = (
    "paths",
    "plausibility",
    "records",
    "knobs.bounds",
    "knobs.law",
    "knobs.pilot",
    "knobs.server",
    "knobs.step_counters",
    "knobs.window",
    "plugin.facts",
    "plugin.line_server",
    "plugin.lines",
    "plugin.record_buffer",
    "plugin.sockets",
    "vllm.delivery",
    "vllm.early_releases",
    "vllm.facts",
    "vllm.hooks",
    "vllm.http_exchange",
    "vllm.knob_set",
    "vllm.lifecycle",
    "vllm.open_requests",
    "vllm.plugin",
    "vllm.request_parts",
    "vllm.scheduler",
    "vllm.scheduler_access",
    "vllm.socket_wait",
    "vllm.stats_feed",
)

ISOLATED = """
import sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [{root!r}]
import importlib
for name in {names!r}:
    importlib.import_module("servoscope.exporters." + name)
own = sys.stdlib_module_names | {{"servoscope", "__main__"}}
print(sorted({{name.split(".")[0] for name in sys.modules}} - own))
print(sorted(m for m in sys.modules if m.startswith("servoscope.")))
"""


def isolated(names: tuple[str, ...]) -> list[str]:
    """Output lines of a Python without site-packages that imports these modules."""
    code = ISOLATED.format(root=str(ROOT / "exporters"), names=names)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_what_is_loaded_in_the_engine_needs_the_standard_library_only() -> None:
    foreign, ours = isolated(IN_ENGINE)
    assert foreign == "[]"
    packages = {"knobs", "plugin", "vllm"}
    loaded = {m.removeprefix("servoscope.exporters.") for m in eval(ours)}
    assert loaded - packages == {"servoscope.exporters", *IN_ENGINE}


def test_the_entry_point_module_itself_imports_nothing_of_ours() -> None:
    _, ours = isolated(("vllm.plugin",))
    assert eval(ours) == [
        "servoscope.exporters",
        "servoscope.exporters.vllm",
        "servoscope.exporters.vllm.plugin",
    ]


class StatLoggerBase:
    """vLLM checks that a stat-logger plug-in is a subclass of this."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, run_directory: Path) -> dict[str, Any]:
    """A fake vllm package, a runtime directory, and a clean environment."""
    processor, stats, llm = fakes.fresh_classes()
    config: Any = type("SchedulerConfig", (fakes.SchedulerConfig,), {})
    config.get_scheduler_cls = fakes.SchedulerConfig.get_scheduler_cls
    classes: dict[str, Any] = {
        "vllm.config": {"SchedulerConfig": config},
        "vllm.v1.engine.output_processor": {"OutputProcessor": processor},
        "vllm.v1.metrics.stats": {"IterationStats": stats},
        "vllm.v1.engine.async_llm": {"AsyncLLM": llm},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": StatLoggerBase},
    }
    for name, content in classes.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return {"SchedulerConfig": config, "OutputProcessor": processor, "run": run_directory}


def stat_logger() -> Any:
    return plugin.StatLogger


def test_stat_logger_is_what_vllm_wants_and_opens_one_socket_for_all_ranks(
    vllm: dict[str, Any],
) -> None:
    logger_class = stat_logger()
    assert issubclass(logger_class, StatLoggerBase)
    assert stat_logger() is logger_class
    loggers = [logger_class(fakes.vllm_config(), engine_index=rank) for rank in (0, 1)]
    assert [p.name for p in vllm["run"].iterdir()] == [f"stats-{os.getpid()}.sock"]
    for one in loggers:
        one.log_engine_initialized()
        one.record(None, None, None, 0)
        one.record(scheduler_stats=None, iteration_stats=None, mm_cache_stats=None, engine_idx=1)
    assert getattr(vllm["OutputProcessor"].add_request, "servoscope", False)


def test_knobs_need_to_be_asked_for(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    assert vllm["SchedulerConfig"]().get_scheduler_cls() is fakes.Scheduler
    monkeypatch.setenv(plugin.KNOBS_VARIABLE, "1")
    plugin.register()
    plugin.register()
    scheduler = vllm["SchedulerConfig"]().get_scheduler_cls()(fakes.vllm_config())
    path = vllm["run"] / f"knobs-{os.getpid()}-dp0.sock"
    with connect(path) as peer:
        peer.settimeout(10)
        assert b'"chunk_tokens":2048' in peer.recv(65536)
    assert type(scheduler).__mro__[1] is fakes.Scheduler


def test_disabled_means_nothing_is_touched(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.DISABLE_VARIABLE, "1")
    monkeypatch.setenv(plugin.KNOBS_VARIABLE, "1")
    plugin.register()
    assert vllm["SchedulerConfig"]().get_scheduler_cls() is fakes.Scheduler
    logger = stat_logger()(fakes.vllm_config())
    logger.record(None, None)
    assert not vllm["run"].exists()
    assert not hasattr(vllm["OutputProcessor"].add_request, "servoscope")


def test_disabled_keeps_statistics_off_where_they_are_off(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.DISABLE_VARIABLE, "1")
    monkeypatch.setattr(sys, "argv", ["vllm", "--disable-log-stats"])
    with pytest.raises(AttributeError, match="not loaded"):
        stat_logger()


def test_a_directory_that_cannot_be_used_is_one_log_line(
    vllm: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(tmp_path / "file" / "run"))
    with caplog.at_level(logging.WARNING, "servoscope.plugin"):
        for rank in (0, 1):
            stat_logger()(fakes.vllm_config(), rank).record(None, None)
    assert [r.message.split(":")[1] for r in caplog.records] == [" request observation is off"]
    assert not hasattr(vllm["OutputProcessor"].add_request, "servoscope")


def test_an_unknown_layout_is_one_log_line_and_hello_says_it(
    vllm: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    del vllm["OutputProcessor"].abort_requests
    with caplog.at_level(logging.WARNING, "servoscope.plugin"):
        stat_logger()(fakes.vllm_config())
    assert len(caplog.records) == 1
    with connect(vllm["run"] / f"stats-{os.getpid()}.sock") as peer:
        peer.settimeout(10)
        hello = peer.recv(65536)
    assert b'"missing":["OutputProcessor.abort_requests"]' in hello
    assert b'"off":"unknown layout' in hello


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        plugin.nonsense  # noqa: B018
