"""What people promise: a service's objectives, read from YAML and checked key by key.

A spec is one YAML document::

    service: chat
    objectives:
      - name: ttft
        sli: time_to_first_token   # or time_per_output_token, e2e, error_ratio
        threshold: 2s              # latency SLIs only
        target: 99%                # or 0.99: this share of the counted requests must be good
        window: 30d                # 7d, 28d or 30d, rolling
        where: {request_type: [chat, rag]}
        disconnects: standard      # or bad: a client that leaves counts as a failure
        description: First token within two seconds.

Pure: text in, frozen values out. Everything is bounded, unknown and repeated keys are refused, and
an error names the path of the key and the nearest value that would be accepted.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import yaml

from servoscope.alerts.data import data_text
from servoscope.alerts.duration import format_duration, parse_duration

__all__ = [
    "MAX_OBJECTIVES",
    "MAX_SPEC_CHARACTERS",
    "OVER_FACTOR",
    "WHERE_LABELS",
    "WINDOWS_SECONDS",
    "Disconnects",
    "Objective",
    "Sli",
    "Spec",
    "SpecError",
    "default_spec",
    "load_spec",
    "parse_spec",
]

#: "p99 above 1.5 x SLO" is a share of requests above this factor times the threshold (contracts).
OVER_FACTOR = 1.5
WINDOWS_SECONDS: tuple[int, ...] = (7 * 86_400, 28 * 86_400, 30 * 86_400)
MIN_TARGET, MAX_TARGET = 0.5, 0.99999
MIN_THRESHOLD_SECONDS, MAX_THRESHOLD_SECONDS = 0.001, 3600.0
MAX_SPEC_CHARACTERS = 262_144
MAX_OBJECTIVES = 100
MAX_WHERE_VALUES = 50
MAX_VALUE_CHARACTERS = 200
MAX_DESCRIPTION_CHARACTERS = 1000
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")

#: Labels an objective may select on: facts of one request that are known when it is observed.
WHERE_LABELS: tuple[str, ...] = (
    "engine",
    "server",
    "model_name",
    "model_version",
    "gpu_model",
    "request_type",
    "tenant",
    "streaming",
)


class Sli(StrEnum):
    """What an objective measures."""

    TIME_TO_FIRST_TOKEN = "time_to_first_token"  # noqa: S105 - a token of text
    TIME_PER_OUTPUT_TOKEN = "time_per_output_token"  # noqa: S105
    E2E = "e2e"
    ERROR_RATIO = "error_ratio"

    @property
    def is_latency(self) -> bool:
        """True when the SLI compares a duration with a threshold."""
        return self is not Sli.ERROR_RATIO

    @property
    def is_token_milestone(self) -> bool:
        """True for TTFT and TPOT: SLIs that only generated tokens can have."""
        return self in (Sli.TIME_TO_FIRST_TOKEN, Sli.TIME_PER_OUTPUT_TOKEN)


class Disconnects(StrEnum):
    """What a client that leaves (client_disconnect, cancelled) counts for."""

    STANDARD = "standard"  # by what had been reached when it left
    BAD = "bad"  # as a failure of the service


class SpecError(ValueError):
    """A spec that cannot be accepted: ``key`` is the YAML path, ``message`` says what would be."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One promise of one service. ``threshold_seconds`` is None for ``error_ratio`` only."""

    service: str
    name: str
    sli: Sli
    threshold_seconds: float | None
    target_ratio: float
    window_seconds: int
    where: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    disconnects: Disconnects = Disconnects.STANDARD
    description: str = ""

    @property
    def id(self) -> str:
        """``service-name``: unique in a spec, the ``sloth_id`` of its series."""
        return f"{self.service}-{self.name}"

    @property
    def budget_ratio(self) -> float:
        """Share of requests that may be bad: 1 - target, without binary dust."""
        return round(1.0 - self.target_ratio, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The objectives of one service. ``origin`` is the file, for messages and headers."""

    service: str
    objectives: tuple[Objective, ...]
    origin: str = ""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses what a person did not mean: repeated keys and aliases."""

    def compose_node(self, parent: yaml.nodes.Node | None, index: int) -> yaml.nodes.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not accepted", mark)
        return super().compose_node(parent, index)

    def construct_mapping(
        self, node: yaml.nodes.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


def load_spec(text: str, origin: str = "spec") -> Spec:
    """The spec in ``text``. Raises SpecError; ``origin`` names the file in the text."""
    if len(text) > MAX_SPEC_CHARACTERS:
        raise SpecError(origin, f"longer than {MAX_SPEC_CHARACTERS} characters; split it")
    try:
        document = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader with less, not more
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}" if mark is not None else ""
        raise SpecError(origin, f"not valid YAML{line}: {error.problem or error}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SpecError(origin, f"not valid YAML: {str(error)[:200]}") from error
    return parse_spec(document, origin)


def parse_spec(document: object, origin: str = "spec") -> Spec:
    """The spec in an already loaded mapping, such as a section of a larger file."""
    root = _mapping(document, origin, ("service", "objectives"), required=("service", "objectives"))
    service = _name(root["service"], "service")
    entries = root["objectives"]
    if not isinstance(entries, list) or not entries:
        raise SpecError("objectives", "must be a list with at least one objective")
    if len(entries) > MAX_OBJECTIVES:
        raise SpecError("objectives", f"{len(entries)} objectives; at most {MAX_OBJECTIVES}")
    objectives: list[Objective] = []
    for index, entry in enumerate(entries):
        objective = _objective(service, entry, f"objectives[{index}]")
        if any(objective.name == earlier.name for earlier in objectives):
            key = f"objectives[{index}].name"
            raise SpecError(key, f"{objective.name!r} is used twice; names must be unique")
        objectives.append(objective)
    return Spec(service=service, objectives=tuple(objectives), origin=origin)


def default_spec() -> Spec:
    """The objectives in force when nobody wrote any: ``alerts/slos/default.yaml``."""
    return load_spec(data_text("slos", "default.yaml"), "default.yaml")


_KEYS = ("name", "sli", "threshold", "target", "window", "where", "disconnects", "description")


def _objective(service: str, entry: object, path: str) -> Objective:
    raw = _mapping(entry, path, _KEYS, required=("name", "sli", "target"))
    sli = Sli(_choice(raw["sli"], f"{path}.sli", tuple(Sli)))
    description = raw.get("description", "")
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARACTERS:
        limit = f"must be text of at most {MAX_DESCRIPTION_CHARACTERS} characters"
        raise SpecError(f"{path}.description", limit)
    return Objective(
        service=service,
        name=_name(raw["name"], f"{path}.name"),
        sli=sli,
        threshold_seconds=_threshold(raw, sli, f"{path}.threshold"),
        target_ratio=_target(raw["target"], f"{path}.target"),
        window_seconds=_window(raw.get("window", "30d"), f"{path}.window"),
        where=_where(raw.get("where", {}), sli, f"{path}.where"),
        disconnects=Disconnects(
            _choice(raw.get("disconnects", "standard"), f"{path}.disconnects", tuple(Disconnects))
        ),
        description=" ".join(description.split()),
    )


def _mapping(
    value: object, path: str, allowed: tuple[str, ...], required: tuple[str, ...]
) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(path, f"must be a mapping with the keys {', '.join(allowed)}")
    for key in value:
        if key not in allowed:
            here = f"{path}.{str(key)[:60]}" if path.startswith("objectives") else str(key)[:60]
            raise SpecError(here, f"is not a known key; {_nearest(str(key), allowed)}")
    for key in required:
        if key not in value:
            here = f"{path}.{key}" if path.startswith("objectives") else key
            raise SpecError(here, "is missing")
    return value


def _nearest(value: str, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(value[:60], allowed, n=1, cutoff=0.5)
    listed = ", ".join(allowed)
    return f"did you mean {close[0]}? (known: {listed})" if close else f"known: {listed}"


def _choice(value: object, path: str, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise SpecError(path, f"{_show(value)} is not accepted; {_nearest(str(value), allowed)}")
    return value


def _name(value: object, path: str) -> str:
    rule = "lower-case letters, digits and hyphens, 1 to 63 characters"
    if not isinstance(value, str):
        raise SpecError(path, f"{_show(value)} is not text; {rule}")
    if _NAME.match(value) is None:
        proposal = re.sub(r"[^a-z0-9]+", "-", value.lower())[:63].strip("-") or "objective"
        raise SpecError(path, f"{_show(value)} is not a name ({rule}); nearest: {proposal}")
    return value


def _threshold(raw: Mapping[str, Any], sli: Sli, path: str) -> float | None:
    value = raw.get("threshold")
    if not sli.is_latency:
        if value is not None:
            raise SpecError(path, f"{sli.value} has no threshold; remove it")
        return None
    if value is None:
        raise SpecError(path, f"is missing: {sli.value} needs one, for example 2s or 500ms")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise SpecError(path, f"{_show(value)} has no unit; nearest: {value:g}s")
    if not isinstance(value, str):
        raise SpecError(path, f"{_show(value)} is not a duration such as 2s or 500ms")
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise SpecError(path, str(error)) from error
    if not MIN_THRESHOLD_SECONDS <= seconds <= MAX_THRESHOLD_SECONDS:
        nearest = min(max(seconds, MIN_THRESHOLD_SECONDS), MAX_THRESHOLD_SECONDS)
        raise SpecError(path, f"{value} is outside 1ms..1h; nearest: {format_duration(nearest)}")
    return seconds


def _target(value: object, path: str) -> float:
    text = value.strip() if isinstance(value, str) else value
    try:
        if isinstance(text, str) and text.endswith("%"):
            ratio = round(float(text[:-1]) / 100.0, 9)
        elif isinstance(text, (str, int, float)) and not isinstance(text, bool):
            ratio = round(float(text), 9)
        else:
            raise SpecError(path, f"{_show(value)} is not a share such as 99% or 0.99")
    except (ValueError, OverflowError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(path, f"{_show(value)} is not a share such as 99% or 0.99") from error
    if not math.isfinite(ratio):
        raise SpecError(path, f"{_show(value)} is not a finite share; write 99% or 0.99")
    if isinstance(text, (int, float)) and 1 < ratio < 100:
        raise SpecError(path, f"{_show(value)} is more than everything; nearest: {ratio:g}%")
    if not MIN_TARGET <= ratio <= MAX_TARGET:
        nearest = min(max(ratio, MIN_TARGET), MAX_TARGET)
        why = "leaves no budget" if ratio > MAX_TARGET else "is no promise to page on"
        raise SpecError(
            path, f"{_show(value)} {why}; accepted: 50%..99.999%, nearest: {100 * nearest:g}%"
        )
    return ratio


def _window(value: object, path: str) -> int:
    allowed = ", ".join(format_duration(w) for w in WINDOWS_SECONDS)
    if not isinstance(value, str):
        raise SpecError(path, f"{_show(value)} is not a window; accepted: {allowed}")
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise SpecError(path, f"{error}; accepted: {allowed}") from error
    if seconds not in WINDOWS_SECONDS:
        nearest = min(WINDOWS_SECONDS, key=lambda w: abs(w - seconds))
        raise SpecError(
            path, f"{value} is not accepted ({allowed}); nearest: {format_duration(nearest)}"
        )
    return int(seconds)


def _where(value: object, sli: Sli, path: str) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise SpecError(path, "must be a mapping of label to value or list of values")
    where: dict[str, tuple[str, ...]] = {}
    for label, given in value.items():
        here = f"{path}.{str(label)[:60]}"
        if label not in WHERE_LABELS:
            raise SpecError(
                here, f"is not a label to select on; {_nearest(str(label), WHERE_LABELS)}"
            )
        values = given if isinstance(given, list) else [given]
        if not 1 <= len(values) <= MAX_WHERE_VALUES:
            raise SpecError(here, f"has {len(values)} values; accepted: 1 to {MAX_WHERE_VALUES}")
        where[label] = tuple(dict.fromkeys(_where_value(v, here) for v in values))
    if "request_type" in where and "probe" in where["request_type"]:
        raise SpecError(f"{path}.request_type", "probe is in no objective; remove it")
    streaming = where.get("streaming")
    if streaming is not None and not set(streaming) <= {"true", "false"}:
        raise SpecError(f"{path}.streaming", "accepted: true or false")
    if sli.is_token_milestone:
        # Without streaming the first token is the whole answer: one SLI must not hold both.
        if streaming is not None and len(streaming) > 1:
            raise SpecError(
                f"{path}.streaming",
                f"{sli.value} of streamed and whole answers are separate SLIs; "
                "nearest: streaming: true, and a second objective for false",
            )
        where.setdefault("streaming", ("true",))
    return MappingProxyType(where)


def _where_value(value: object, path: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        raise SpecError(path, f'{_show(value)} is not text; write it in quotes: "{value}"'[:300])
    if len(value) > MAX_VALUE_CHARACTERS or not value.isprintable():
        raise SpecError(path, f"must be printable, of at most {MAX_VALUE_CHARACTERS} characters")
    return value


def _show(value: object) -> str:
    return repr(value)[:60]
