# ruff: noqa: PLC0415 - nothing may be imported before vLLM asks: this module loads in every process
"""Entry points that vLLM loads: ``register`` (general plug-in) and ``StatLogger``.

Import-light: only the standard library until vLLM calls us. Settings (environment):

    SERVOSCOPE_DISABLE=1       nothing is hooked, wrapped or opened
    SERVOSCOPE_KNOBS=1         wrap the scheduler, so that knobs can be turned (off by default)
    SERVOSCOPE_RUN_DIR=...     directory of the sockets (see servoscope.exporters.paths)
    SERVOSCOPE_SOCKET_GROUP=.. group whose members may connect too (default: own user and root)
    SERVOSCOPE_BENCH=1         the stats socket takes ``bypass`` (benchmarks only)

Observation lives in ``StatLogger`` alone: vLLM makes one only for AsyncLLM (API servers and
asynchronous programs), so an offline ``LLM()`` job is not touched at all. vLLM before 0.12 makes
none; there ``register`` sees to it (early_releases.py). Where VLLM_PLUGINS is set it must name
``servoscope``.
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
    if _set(DISABLE_VARIABLE):
        return
    plugins = sys.modules.get("vllm.plugins")  # it calls us
    if plugins is not None and not hasattr(plugins, "STAT_LOGGER_PLUGINS_GROUP"):
        _logs()
        try:
            _observe_early()
        except Exception as error:
            log.warning("servoscope: request observation is off: %r", error)
    if _set(KNOBS_VARIABLE):
        _logs()
        try:
            why = _steer()
        except Exception as error:
            why = repr(error)
        if why:
            log.warning("servoscope: knobs are off: %s", why)


def _steer() -> str:
    """Wrap whatever scheduler this process may make. Returns why not, or ''."""
    from servoscope.exporters.knobs.server import serve_knobs
    from servoscope.exporters.paths import run_dir
    from servoscope.exporters.plugin.sockets import GROUP_VARIABLE
    from servoscope.exporters.vllm.scheduler import Pilot, wrap_scheduler_config

    config_class = _vllm("vllm.config").SchedulerConfig
    directory, group_name = run_dir(), os.environ.get(GROUP_VARIABLE) or None

    def serve(pilot: Pilot) -> None:
        serve_knobs(pilot, directory, group_name)

    if hasattr(config_class, "get_scheduler_cls"):
        return wrap_scheduler_config(config_class, serve)
    from servoscope.exporters.vllm.early_releases import wrap_lookup

    _vllm("vllm.utils")
    return wrap_lookup(sys.modules, serve)


def _observe_early() -> None:
    """In vLLM before 0.12: add our StatLogger to every AsyncLLM of this process."""
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is None:
        return  # an engine core or a worker: nobody makes an AsyncLLM here
    from servoscope.exporters.vllm import early_releases

    def made(engine: Any) -> None:
        if why := early_releases.add_stat_logger(engine, _stat_logger):
            _feed(engine.vllm_config, 0, off=why)

    def before() -> None:
        early_releases.when_made(_vllm("vllm.v1.engine.async_llm").AsyncLLM, made)

    def after(vllm_config: Any) -> None:
        if not getattr(_vllm("vllm.envs"), "VLLM_USE_V1", True):
            _feed(vllm_config, 0, off=early_releases.ENGINE_V0)

    arguments_class: Any = arguments.AsyncEngineArgs
    if why := early_releases.on_start(arguments_class, before, after):
        log.warning("servoscope: request observation is off: %s", why)


def _stat_logger(vllm_config: Any, rank: int) -> Any:
    logger_class: Any = getattr(sys.modules[__name__], "StatLogger")  # noqa: B009 - made by need
    return logger_class(vllm_config, rank)


def _feed(vllm_config: Any, rank: int, off: str = "") -> StatsFeed | None:
    """The feed of this process, made on first use; None when it could not be made.

    ``off``: why there is nothing to observe; the feed's socket then says only that.
    """
    pid = os.getpid()
    if pid in _FEEDS:
        return _FEEDS[pid]
    _FEEDS[pid] = None
    _logs()
    try:
        from servoscope.exporters.paths import run_dir
        from servoscope.exporters.plugin.sockets import GROUP_VARIABLE
        from servoscope.exporters.vllm.stats_feed import observe

        feed = observe(
            vllm_config,
            rank,
            run_dir(),
            os.environ.get(GROUP_VARIABLE) or None,
            None if off else _observed_classes(),
            off=off,
            may_bypass=_set(BENCH_VARIABLE),
        )
    except Exception as error:
        log.warning("servoscope: request observation is off: %r", error)
        return None
    if feed.hooks.off:
        log.warning("servoscope: request observation is off: %s", feed.hooks.off)
    _FEEDS[pid] = feed
    return feed


def _observed_classes() -> tuple[type, type, type]:
    return (
        _vllm("vllm.v1.engine.output_processor").OutputProcessor,
        _vllm("vllm.v1.metrics.stats").IterationStats,
        _vllm("vllm.v1.engine.async_llm").AsyncLLM,
    )


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
