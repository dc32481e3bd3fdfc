# ruff: noqa: PLC0415 - nothing may be imported before vLLM asks: this module loads in every process
"""Entry points that vLLM loads: ``register`` (general plug-in) and ``StatLogger``.

Import-light: only the standard library until vLLM calls us. Settings (environment):

    SERVOSCOPE_DISABLE=1       nothing is hooked, wrapped or opened
    SERVOSCOPE_KNOBS=1         wrap the scheduler, so that knobs can be turned (off by default)
    SERVOSCOPE_RUN_DIR=...     directory of the sockets (see servoscope.exporters.paths)
    SERVOSCOPE_SOCKET_GROUP=.. group whose members may connect too (default: own user and root)
    SERVOSCOPE_BENCH=1         the stats socket takes ``bypass`` (benchmarks only)

Observation lives in ``StatLogger`` alone: vLLM makes one only for AsyncLLM (API servers and
asynchronous programs), so an offline ``LLM()`` job is not touched at all. Where VLLM_PLUGINS is
set it must name ``servoscope``.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servoscope.exporters.vllm.stats_feed import StatsFeed

__all__ = ["DISABLE_VARIABLE", "KNOBS_VARIABLE", "register"]  # and StatLogger, see __getattr__

DISABLE_VARIABLE = "SERVOSCOPE_DISABLE"
KNOBS_VARIABLE = "SERVOSCOPE_KNOBS"
BENCH_VARIABLE = "SERVOSCOPE_BENCH"

log = logging.getLogger("servoscope.plugin")

#: One feed a process, whatever number of ranks it talks to; by pid, so a fork has none.
_FEEDS: dict[int, StatsFeed | None] = {}


def _set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def _vllm(module: str) -> Any:
    """A module of vLLM, which is there because vLLM called us."""
    return importlib.import_module(module)


def _logs() -> None:
    """Our lines go where vLLM's go; vLLM configures only its own logger."""
    if not log.handlers and (handlers := logging.getLogger("vllm").handlers):
        log.handlers[:] = handlers
        log.propagate = False
        log.setLevel(logging.INFO)


def register() -> None:
    """``vllm.general_plugins``: called in every vLLM process, perhaps more than once."""
    if _set(DISABLE_VARIABLE) or not _set(KNOBS_VARIABLE):
        return
    _logs()
    try:
        from servoscope.exporters.paths import run_dir
        from servoscope.exporters.vllm.knob_server import serve_knobs
        from servoscope.exporters.vllm.scheduler import wrap_scheduler_config
        from servoscope.exporters.vllm.sockets import GROUP_VARIABLE

        config_class = _vllm("vllm.config").SchedulerConfig
        serve = serve_knobs(run_dir(), os.environ.get(GROUP_VARIABLE) or None)
        if why := wrap_scheduler_config(config_class, serve):
            log.warning("servoscope: knobs are off: %s", why)
    except Exception as error:
        log.warning("servoscope: knobs are off: %r", error)


def _feed(vllm_config: Any, rank: int) -> StatsFeed | None:
    """The feed of this process, made on first use; None when it could not be made."""
    pid = os.getpid()
    if pid in _FEEDS:
        return _FEEDS[pid]
    _FEEDS[pid] = None
    _logs()
    try:
        from servoscope.exporters.paths import run_dir
        from servoscope.exporters.vllm.sockets import GROUP_VARIABLE
        from servoscope.exporters.vllm.stats_feed import observe

        feed = observe(
            vllm_config,
            rank,
            run_dir(),
            os.environ.get(GROUP_VARIABLE) or None,
            (
                _vllm("vllm.v1.engine.output_processor").OutputProcessor,
                _vllm("vllm.v1.metrics.stats").IterationStats,
                _vllm("vllm.v1.engine.async_llm").AsyncLLM,
            ),
            may_bypass=_set(BENCH_VARIABLE),
        )
    except Exception as error:
        log.warning("servoscope: request observation is off: %r", error)
        return None
    if feed.hooks.off:
        log.warning("servoscope: request observation is off: %s", feed.hooks.off)
    _FEEDS[pid] = feed
    return feed


def _stat_logger_class() -> type:
    """StatLogger as a subclass of this vLLM's StatLoggerBase (anything else stops its boot)."""
    disabled = _set(DISABLE_VARIABLE)
    if disabled and "--disable-log-stats" in sys.argv:
        # A stat logger, even an idle one, makes vLLM gather statistics that were switched off.
        raise AttributeError(f"{DISABLE_VARIABLE} is set and so is --disable-log-stats: not loaded")
    base: Any = _vllm("vllm.v1.metrics.loggers").StatLoggerBase

    class StatLogger(base):  # type: ignore[misc]
        """One a rank. Records come from the hooks; this tells them rank and queue length."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index
            self._feed = None if disabled else _feed(vllm_config, engine_index)

        def record(
            self,
            scheduler_stats: Any = None,
            iteration_stats: Any = None,
            *_args: Any,
            engine_idx: int | None = None,
            **_more: Any,
        ) -> None:
            if (feed := self._feed) is not None:
                rank = self._rank if engine_idx is None else engine_idx
                feed.stepped(rank, scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Part of vLLM's interface; nothing to say."""

    return StatLogger


def __getattr__(name: str) -> Any:
    """``StatLogger`` is made when vLLM asks for it: importing this module must not load vLLM."""
    if name == "StatLogger":
        found = globals()["StatLogger"] = _stat_logger_class()
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
