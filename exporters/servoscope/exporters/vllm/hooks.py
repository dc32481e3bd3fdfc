"""Wraps methods of vLLM's classes so that a fault of ours can never reach the engine.

Every hook runs after (never instead of) the original, catches everything, and counts; after
MAX_FAULTS the original methods are put back.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from servoscope.exporters.records import Outcome
from servoscope.exporters.vllm.lifecycle import Lifecycle
from servoscope.exporters.vllm.request_parts import Gaps

__all__ = ["Hooks", "install"]

MAX_FAULTS = 20
_ADMISSION_ERRORS = ("QueueOverflowError", "MaxQueuedTokensError")

log = logging.getLogger("servoscope.plugin")


class Hooks:
    """The wrapped methods: faults, bypass, and the way back."""

    def __init__(self) -> None:
        self.faults = 0
        self.off = ""
        self.bypass = False  # for measuring: hooks return at once
        self._wrapped: list[tuple[type, str, Any, Any]] = []

    def wrap(self, owner: type, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace ``owner.name`` by ``make(original)``. False when it is not there."""
        original = owner.__dict__.get(name)
        if original is None or not callable(original):
            return False
        if getattr(original, "servoscope", False):
            return True
        replacement = make(original)
        replacement.servoscope = True
        replacement.__name__ = name
        replacement.__wrapped__ = original
        setattr(owner, name, replacement)
        self._wrapped.append((owner, name, original, replacement))
        return True

    def run(self, hook: Callable[..., None], *args: Any) -> None:
        """Call a hook; whatever it raises stays here."""
        if self.off or self.bypass:
            return
        try:
            hook(*args)
        except Exception as error:
            self.fault(error)

    def fault(self, error: Exception) -> None:
        """Count an error of ours; after MAX_FAULTS unhook."""
        self.faults += 1
        if self.faults == 1:
            log.warning("servoscope: request observation: %r", error)
        if self.faults >= MAX_FAULTS and not self.off:
            self.off = f"{self.faults} errors, the last {error!r}"
            log.warning("servoscope: request observation is off after %s", self.off)
            self.unwrap()

    @property
    def installed(self) -> bool:
        """Whether anything is hooked."""
        return bool(self._wrapped)

    def unwrap(self) -> None:
        """Put the original methods back, where they are still ours."""
        for owner, name, original, replacement in self._wrapped:
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
        self._wrapped.clear()


def install(hooks: Hooks, life: Lifecycle, processor: type, stats: type, llm: type) -> list[str]:
    """Hook OutputProcessor, IterationStats and AsyncLLM. Returns what this version lacks.

    Without the first two nothing is hooked at all: requests would be counted without their ends.
    """
    needed = [
        f"OutputProcessor.{name}"
        for name in ("add_request", "_update_stats_from_finished", "abort_requests")
        if not callable(processor.__dict__.get(name))
    ]
    if needed:
        return needed
    hooks.wrap(processor, "add_request", lambda original: _add_request(original, hooks, life))
    hooks.wrap(
        processor, "_update_stats_from_finished", lambda original: _finished(original, hooks, life)
    )
    hooks.wrap(processor, "abort_requests", lambda original: _abort(original, hooks, life))
    missing = []
    if not hooks.wrap(
        processor, "propagate_error", lambda original: _propagate(original, hooks, life)
    ):
        missing.append("OutputProcessor.propagate_error")
    place = _place_of_stats(stats)
    if place is None:
        missing.append("IterationStats.update_from_output")
    else:
        hooks.wrap(stats, "update_from_output", lambda original: _gaps(original, hooks, *place))
    if not hooks.wrap(llm, "check_admission", lambda original: _admission(original, hooks, life)):
        missing.append("AsyncLLM.check_admission")
    return missing


def _place_of_stats(stats: type) -> tuple[int, int] | None:
    """Where ``is_prefilling`` and ``req_stats`` stand in update_from_output (0.12 differs)."""
    method = stats.__dict__.get("update_from_output")
    if method is None:
        return None
    names = list(inspect.signature(method).parameters)
    if names[1:4] != ["output", "engine_core_timestamp", "is_prefilling"]:
        return None
    return (3, names.index("req_stats")) if "req_stats" in names else None


def _add_request(original: Any, hooks: Hooks, life: Lifecycle) -> Any:
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        hooks.run(life.registered, self, request)
        return result

    return add_request


def _finished(original: Any, hooks: Hooks, life: Lifecycle) -> Any:
    def _update_stats_from_finished(
        self: Any, req_state: Any, finish_reason: Any, iteration_stats: Any, *args: Any, **kw: Any
    ) -> Any:
        result = original(self, req_state, finish_reason, iteration_stats, *args, **kw)
        hooks.run(life.finished, req_state, finish_reason, iteration_stats)
        return result

    return _update_stats_from_finished


def _abort(original: Any, hooks: Hooks, life: Lifecycle) -> Any:
    def abort_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        hooks.run(_record_aborts, life, result)
        return result

    return abort_requests


def _record_aborts(life: Lifecycle, idents: Any) -> None:
    """Who aborted: vLLM calls us inside the ``except`` of the request's own coroutine."""
    cause = sys.exc_info()[1]
    if cause is None:
        outcome = Outcome.CANCELLED  # an abort call, not a disconnect
    elif isinstance(cause, GeneratorExit) or type(cause).__name__ == "CancelledError":
        outcome = Outcome.CLIENT_DISCONNECT
    else:
        outcome = Outcome.ERROR  # the server could not go on with this request
    life.aborted(idents or (), outcome)


def _propagate(original: Any, hooks: Hooks, life: Lifecycle) -> Any:
    def propagate_error(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.run(life.failed, self)  # before: the tasks that this wakes abort their requests
        return original(self, *args, **kwargs)

    return propagate_error


def _gaps(original: Any, hooks: Hooks, prefilling_at: int, stats_at: int) -> Any:
    """The one hook on the path of every token of every request: as little as possible."""
    prefilling, place = prefilling_at - 1, stats_at - 1  # positions without self

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hooks.bypass or len(args) <= place:
            return original(self, *args, **kwargs)
        stats = args[place]
        if args[prefilling]:
            result = original(self, *args, **kwargs)
            hooks.run(_first_output, self, args[0], stats)
            return result
        before = stats.last_token_ts
        result = original(self, *args, **kwargs)
        try:
            if before > 0.0:
                gaps = getattr(stats, "servoscope_gaps", None)
                if gaps is None:
                    gaps = stats.servoscope_gaps = Gaps()
                gaps.add(args[1] - before)
        except Exception as error:
            hooks.fault(error)
        return result

    return update_from_output


def _first_output(iteration: Any, output: Any, stats: Any) -> None:
    """What later releases note themselves: TTFT since 0.10.1, cached tokens since 0.10.2."""
    if not hasattr(stats, "first_token_latency"):
        stats.first_token_latency = iteration.iteration_timestamp - stats.arrival_time
    stats.servoscope_cached_tokens = getattr(output, "num_cached_tokens", None)


def _admission(original: Any, hooks: Hooks, life: Lifecycle) -> Any:
    def check_admission(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            if type(error).__name__ in _ADMISSION_ERRORS:
                ident = kwargs.get("request_id", args[1] if len(args) > 1 else None)
                hooks.run(life.refused, ident)
            raise

    return check_admission
