"""The ways into vLLM before 0.12, which knows no stat-logger plug-ins.

The general plug-in is loaded there too, and early enough: in API servers before the engine's
settings are made. So it wraps ``AsyncEngineArgs.create_engine_config`` (asynchronous programs only:
an offline ``LLM()`` job stays untouched), and in that call ``AsyncLLM.__init__``, after which a
stat logger of ours is put among the engine's own:

    0.8, 0.9       AsyncLLM.stat_loggers, a list for each rank
    0.10 to 0.11.0 AsyncLLM.logger_manager.per_engine_logger_dict, likewise by rank
    0.11.1, 0.11.2 AsyncLLM.logger_manager.stat_loggers, one list for all ranks

Before 0.11.1 there is no ``SchedulerConfig.get_scheduler_cls`` either: schedulers are looked up by
name with ``resolve_obj_by_qualname``, which is wrapped instead.

Nothing is imported here: vLLM's modules come as arguments.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from servoscope.exporters.vllm.scheduler import Pilot, steered

__all__ = ["add_stat_logger", "knows_stat_loggers", "on_start", "when_made", "wrap_lookup"]

#: Modules that hold, or have taken over, the function that looks up a class by its name.
LOOKUP_MODULES = ("vllm.utils", "vllm.v1.engine.core")
LOOKUP = "resolve_obj_by_qualname"
NO_STATISTICS = "--disable-log-stats: this vLLM (before 0.12) then gathers nothing about requests"
ENGINE_V0 = "engine V0 (VLLM_USE_V1=0, or a setting that V1 of this release lacks)"

log = logging.getLogger("servoscope.plugin")


def knows_stat_loggers(plugins: Any) -> bool:
    """Whether vLLM loads stat-logger plug-ins by itself. ``plugins``: its module of that name."""
    return hasattr(plugins, "STAT_LOGGER_PLUGINS_GROUP")


def on_start(arguments: type, before: Callable[[], None], after: Callable[[Any], None]) -> str:
    """Call ``before()`` and ``after(vllm_config)`` around ``arguments.create_engine_config``.

    Whatever they raise is logged and stays here. Returns why it cannot be done, or ''.
    """
    original = getattr(arguments, "create_engine_config", None)
    if original is None:
        return "AsyncEngineArgs.create_engine_config is not there"
    if getattr(original, "servoscope", False):
        return ""  # plug-ins may be loaded more than once

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        _guarded(before)
        config = original(self, *args, **kwargs)
        _guarded(after, config)
        return config

    create_engine_config.servoscope = True  # type: ignore[attr-defined]
    arguments.create_engine_config = create_engine_config  # type: ignore[attr-defined]
    return ""


def when_made(llm: Any, then: Callable[[Any], None]) -> None:
    """Call ``then(engine)`` with every ``llm`` (AsyncLLM) that is made from now on."""
    original = llm.__init__
    if getattr(original, "servoscope", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _guarded(then, self)

    init.servoscope = True  # type: ignore[attr-defined]
    llm.__init__ = init


def add_stat_logger(engine: Any, make: Callable[[Any, int], Any]) -> str:
    """Put ``make(vllm_config, rank)`` among the stat loggers of an AsyncLLM.

    Returns why there is no place for it, or ''.
    """
    config = engine.vllm_config
    manager = getattr(engine, "logger_manager", None)
    by_rank = getattr(manager, "per_engine_logger_dict", None)
    if isinstance(by_rank, dict):
        for rank, loggers in by_rank.items():
            loggers.append(make(config, rank))
        return ""
    for_all = getattr(manager, "stat_loggers", None)
    if isinstance(for_all, list):
        for_all.append(make(config, 0))
        return ""
    lists = getattr(engine, "stat_loggers", None)
    if isinstance(lists, list) and lists and all(isinstance(one, list) for one in lists):
        for rank, loggers in enumerate(lists):
            loggers.append(make(config, rank))
        return ""
    if not getattr(engine, "log_stats", True):
        return NO_STATISTICS
    return "unknown layout: AsyncLLM has no list of stat loggers"


def wrap_lookup(modules: Mapping[str, ModuleType], serve: Callable[[Pilot], None]) -> str:
    """Make vLLM's look-up of classes by name answer steered schedulers. Returns why not, or ''.

    Of all that is looked up only schedulers of engine V1 are touched.
    """
    wrapped = False
    for name in LOOKUP_MODULES:
        module = modules.get(name)
        original = getattr(module, LOOKUP, None)
        if module is None or original is None:
            continue
        wrapped = True
        if not getattr(original, "servoscope", False):
            setattr(module, LOOKUP, _lookup(original, modules, serve))
    return "" if wrapped else f"{LOOKUP} is not in {' or '.join(LOOKUP_MODULES)}"


def _lookup(
    original: Callable[..., Any], modules: Mapping[str, ModuleType], serve: Callable[[Pilot], None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def resolve_obj_by_qualname(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        try:
            module = modules.get("vllm.v1.core.sched.interface")
            interface = getattr(module, "SchedulerInterface", None)
            if isinstance(interface, type) and isinstance(found, type):
                return steered(found, serve) if issubclass(found, interface) else found
        except Exception as error:
            log.warning("servoscope: knobs are off: %r", error)
        return found

    resolve_obj_by_qualname.servoscope = True  # type: ignore[attr-defined]
    return resolve_obj_by_qualname


def _guarded(work: Callable[..., None], *args: Any) -> None:
    try:
        work(*args)
    except Exception as error:
        log.warning("servoscope: request observation is off: %r", error)
