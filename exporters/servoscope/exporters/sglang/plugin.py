# ruff: noqa: PLC0415 - nothing may be imported before SGLang asks: this loads in every process
"""Entry point that SGLang loads (group ``sglang.srt.plugins``, 0.5.11 and later): ``register``.

Import-light: only the standard library until SGLang calls us. Settings (environment):

    SERVOSCOPE_DISABLE=1       nothing is hooked or opened
    SERVOSCOPE_KNOBS=1         hook the scheduler, so that knobs can be turned (off by default)
    SERVOSCOPE_RUN_DIR=...     directory of the sockets (see servoscope.exporters.paths)
    SERVOSCOPE_SOCKET_GROUP=.. group whose members may connect too (default: own user and root)

Where SGLANG_PLUGINS is set it must name ``servoscope``. Hooks go through SGLang's own registry,
in scheduler processes only. A version without what the hooks need gets none of them: then its
sockets say why, and the engine is as it was.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from servoscope.exporters.sglang import scheduler_access as access
from servoscope.exporters.sglang.steering import Pilot

__all__ = ["DISABLE_VARIABLE", "KNOBS_VARIABLE", "register"]

DISABLE_VARIABLE = "SERVOSCOPE_DISABLE"
KNOBS_VARIABLE = "SERVOSCOPE_KNOBS"

log = logging.getLogger("servoscope.plugin")

#: The Pilot of this process, by pid, so a fork has none.
_PILOTS: dict[int, Pilot] = {}


def _set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def register() -> None:
    """Called in every process of SGLang; hooks only where the scheduler is."""
    if _set(DISABLE_VARIABLE) or not _set(KNOBS_VARIABLE):
        return
    if access.SCHEDULER not in sys.modules:
        return  # no scheduler process: those load it before they load plug-ins
    log.setLevel(logging.INFO)
    try:
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        missing = access.missing_parts(_modules())
        for target, hook, kind in _hooks(missing):
            registry.HookRegistry.register(target, hook, registry.HookType(kind))
    except Exception as error:
        log.warning("servoscope: knobs are off: %r", error)


def _modules() -> dict[str, Any]:
    """The modules that hooks are for; those of another version may not be there."""
    found: dict[str, Any] = {}
    for name in (access.SCHEDULER, access.RECEIVER, access.CONTROLLER):
        try:
            found[name] = importlib.import_module(name)
        except ImportError:
            found[name] = None
    return found


def _hooks(missing: list[str]) -> list[tuple[str, Callable[..., Any], str]]:
    """(target, hook, kind) for SGLang's registry."""
    scheduler = f"{access.SCHEDULER}.Scheduler"

    def made(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        _attach(scheduler, missing)

    attach = [(f"{scheduler}.__init__", made, "after")]
    if missing:
        return attach
    receiver = f"{access.RECEIVER}.SchedulerRequestReceiver"
    controller = f"{access.CONTROLLER}.SchedulerInternalStateController"
    return [
        *attach,
        (f"{receiver}._pull_raw_reqs", _pulled, "after"),
        (f"{receiver}.recv_requests", _received, "after"),
        (f"{scheduler}.get_new_batch_prefill", _prefill, "around"),
        (f"{scheduler}.get_next_batch_to_run", _chosen, "around"),
        (f"{controller}.get_internal_state", _told, "after"),
    ]


def _attach(scheduler: Any, missing: list[str]) -> None:
    """A scheduler was made: steer it, and open its socket. Failures leave SGLang alone."""
    try:
        from servoscope.exporters.knobs.server import serve_knobs
        from servoscope.exporters.paths import run_dir
        from servoscope.exporters.plugin.sockets import GROUP_VARIABLE

        version = getattr(sys.modules.get("sglang"), "__version__", "")
        more = f" and {len(missing) - 1} more that the hooks need" if missing[1:] else ""
        off = f"SGLang {version} lacks {missing[0]}{more}" if missing else ""
        parts = access.Parts(lambda: scheduler, None, None) if missing else _parts()
        pilot = Pilot(scheduler, parts, off=off)
        if pilot.off:
            log.warning("servoscope: knobs are off: %s", pilot.off)
        else:
            _PILOTS[os.getpid()] = pilot
        serve_knobs(pilot, run_dir(), os.environ.get(GROUP_VARIABLE) or None)
    except Exception as error:
        log.warning("servoscope: knobs are off: %r", error)


def _parts() -> access.Parts:
    module = sys.modules[access.SCHEDULER]
    context = importlib.import_module("sglang.srt.runtime_context")
    structs = importlib.import_module("sglang.srt.managers.io_struct")
    return access.Parts(
        get_parallel=context.get_parallel,
        NextBatchPlan=getattr(module, "NextBatchPlan"),  # noqa: B009 - Any, checked at run time
        SetInternalStateReq=structs.SetInternalStateReq,
    )


def _pilot() -> Pilot | None:
    return _PILOTS.get(os.getpid())


def _pulled(result: Any, *_args: Any, **_kwargs: Any) -> Any:
    pilot = _pilot()
    if pilot is not None and pilot.place.leads and isinstance(result, list):
        pilot.outgoing(result)
    return result


def _received(result: Any, *_args: Any, **_kwargs: Any) -> Any:
    pilot = _pilot()
    return result if pilot is None else pilot.incoming(result)


def _prefill(
    original: Callable[..., Any], scheduler: Any, running_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    pilot = _pilot()
    if pilot is not None and pilot.holds_prefill():
        return pilot.nothing(running_batch)
    return original(scheduler, running_batch, *args, **kwargs)


def _chosen(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    pilot = _pilot()
    if pilot is None:
        return original(scheduler, *args, **kwargs)
    began = time.thread_time_ns()
    plan = original(scheduler, *args, **kwargs)
    batch = getattr(plan, "batch_to_run", None)
    if batch is not None:
        pilot.chosen(batch, time.thread_time_ns() - began)
    return plan


def _told(result: Any, *_args: Any, **_kwargs: Any) -> Any:
    """/server_info shows the values in force, for people; it answers for first ranks only."""
    pilot = _pilot()
    try:
        if pilot is not None and not pilot.off:
            result.internal_state["servoscope_knobs"] = pilot.values().as_json()
    except Exception as error:
        log.debug("servoscope: /server_info: %r", error)
    return result
