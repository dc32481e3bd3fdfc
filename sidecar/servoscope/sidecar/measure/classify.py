"""What kind of request this was: by what it says, by the operator's rules, else by its lengths.

Pure. In order: a request to an engine younger than the warm-up time and a health check are
``probe``; then the ``x-request-type`` header; then the first rule that matches; then the length
quadrants. ``unknown`` when no length is known (a rejected request, a source that sees no tokens).

A header that says ``probe`` is not believed unless the operator says so: probes are in no SLI, so
any client could take its bad requests out of every objective.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from servoscope.exporters.records import RequestRecord
from servoscope.sidecar.config import TypeRule

__all__ = ["PROBE", "UNKNOWN", "Classifier", "sanitise"]

PROBE = "probe"
UNKNOWN = "unknown"
_MAX_CHARACTERS = 64
_NOT_ALLOWED = re.compile(r"[^a-z0-9_.-]+")
_HEALTH_ENDPOINTS = frozenset(
    {"/health", "/healthz", "/health_generate", "/livez", "/ping", "/ready", "/readyz", "/metrics"}
)


def sanitise(text: str | None) -> str:
    """A type name out of what a client sent: lower case, [a-z0-9_.-], 64 characters at most."""
    if not text:
        return ""
    cleaned = _NOT_ALLOWED.sub("_", text[: 4 * _MAX_CHARACTERS].strip().lower())
    return cleaned.strip("_")[:_MAX_CHARACTERS]


class Classifier:
    """Names the type of records.

    ``engine_start`` tells when the engine started by the wall clock of now (seconds since the
    epoch), ``None`` when that is not known: a clock that was set moves the start too.
    """

    def __init__(
        self,
        rules: Sequence[TypeRule] = (),
        *,
        long_prompt_tokens: int = 1_024,
        long_output_tokens: int = 256,
        warmup_seconds: float = 60.0,
        trust_probe_header: bool = False,
        engine_start: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._rules = tuple((r.request_type, _conditions(r)) for r in rules)
        self._long_prompt_tokens = long_prompt_tokens
        self._long_output_tokens = long_output_tokens
        self._warmup_seconds = warmup_seconds
        self._trust_probe_header = trust_probe_header
        self._engine_start = engine_start

    def classify(self, record: RequestRecord) -> str:
        """The type of ``record``; does not change it."""
        if self._warming_up(record.received_unix_seconds):
            return PROBE
        if record.endpoint in _HEALTH_ENDPOINTS:
            return PROBE
        said = sanitise(record.request_type_hint)
        if said and (said != PROBE or self._trust_probe_header):
            return said
        for request_type, conditions in self._rules:
            if all(holds(record) for holds in conditions):
                return request_type
        return self._by_length(record)

    def claims_probe(self, record: RequestRecord) -> bool:
        """Whether its client said ``probe`` and is not believed."""
        hint = record.request_type_hint
        return bool(hint) and not self._trust_probe_header and sanitise(hint) == PROBE

    def _warming_up(self, received: float | None) -> bool:
        if received is None or not self._warmup_seconds:
            return False
        start = self._engine_start()
        return start is not None and start <= received < start + self._warmup_seconds

    def _by_length(self, record: RequestRecord) -> str:
        prompt = record.prompt_tokens
        output = record.output_tokens
        if output is None:
            output = record.max_output_tokens
        if prompt is None or output is None:
            return UNKNOWN
        if prompt >= self._long_prompt_tokens:
            return "rag" if output >= self._long_output_tokens else "summarise"
        return "generate" if output >= self._long_output_tokens else "chat"


def _conditions(rule: TypeRule) -> tuple[Callable[[RequestRecord], bool], ...]:
    conditions = [
        _matches(name, pattern)
        for name in ("endpoint", "model_name", "tenant")
        if (pattern := getattr(rule, name)) is not None
    ]
    if rule.streaming is not None:
        conditions.append(lambda record: record.streaming is rule.streaming)
    conditions += [
        _within(name, *bounds)
        for name in ("prompt_tokens", "output_tokens", "max_output_tokens")
        if (bounds := getattr(rule, name)) is not None
    ]
    return tuple(conditions)


def _matches(name: str, pattern: str) -> Callable[[RequestRecord], bool]:
    def holds(record: RequestRecord) -> bool:
        value = getattr(record, name)
        return value is not None and fnmatchcase(value, pattern)

    return holds


def _within(name: str, least: int | None, most: int | None) -> Callable[[RequestRecord], bool]:
    def holds(record: RequestRecord) -> bool:
        value = getattr(record, name)
        if value is None:
            return False
        return (least is None or value >= least) and (most is None or value <= most)

    return holds
