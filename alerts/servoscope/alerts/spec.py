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
an error tells all that is wrong: line, path of the key, the nearest value that would be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from servoscope.alerts.data import data_text
from servoscope.alerts.document import DocumentError, load_document
from servoscope.alerts.objective import (
    OVER_FACTOR,
    WHERE_LABELS,
    WINDOWS_SECONDS,
    Disconnects,
    Objective,
    Sli,
    Spec,
)
from servoscope.alerts.problems import Problems, SpecError
from servoscope.alerts.spec_fields import (
    parse_choice,
    parse_mapping,
    parse_name,
    parse_target,
    parse_threshold,
    parse_where,
    parse_window,
)

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

MAX_SPEC_CHARACTERS = 262_144
MAX_OBJECTIVES = 100
MAX_DESCRIPTION_CHARACTERS = 1000
_ROOT_KEYS = ("service", "objectives")


def load_spec(text: str, origin: str = "spec") -> Spec:
    """The spec in ``text``; ``origin`` names the file. Raises SpecError with all that is wrong."""
    try:
        document = load_document(text, MAX_SPEC_CHARACTERS)
    except DocumentError as error:
        raise SpecError(origin, str(error)) from error
    return _spec(document.value, origin, document.line_of)


def parse_spec(document: object, origin: str = "spec") -> Spec:
    """The spec in an already loaded mapping. Raises SpecError with all that is wrong."""
    return _spec(document, origin, lambda _: None)


def default_spec() -> Spec:
    """The objectives in force when nobody wrote any: ``alerts/slos/default.yaml``."""
    return load_spec(data_text("slos", "default.yaml"), "default.yaml")


def _spec(document: object, origin: str, line_of: Callable[[str], int | None]) -> Spec:
    problems = Problems()
    root = problems.take(parse_mapping, document, "", _ROOT_KEYS, _ROOT_KEYS, problems) or {}
    service = problems.take(parse_name, root["service"], "service") if "service" in root else None
    objectives: list[Objective] = []
    if "objectives" in root:
        objectives = _objectives(service or "service", root["objectives"], problems)
    problems.end(line_of)
    return Spec(service=service or "", objectives=tuple(objectives), origin=origin)


def _objectives(service: str, entries: object, problems: Problems) -> list[Objective]:
    if not isinstance(entries, list) or not entries:
        problems.add("objectives", "must be a list with at least one objective")
        return []
    if len(entries) > MAX_OBJECTIVES:
        problems.add("objectives", f"{len(entries)} objectives; at most {MAX_OBJECTIVES}")
        return []
    names: set[str] = set()
    found: list[Objective] = []
    for index, entry in enumerate(entries):
        path = f"objectives[{index}]"
        raw = problems.take(parse_mapping, entry, path, _KEYS, _REQUIRED, problems)
        objective = None if raw is None else _objective(service, raw, path, problems)
        name = None if raw is None else raw.get("name")
        if isinstance(name, str):
            if name in names:
                problems.add(f"{path}.name", f"{name[:63]!r} is used twice; names must be unique")
            names.add(name)
        if objective is not None:
            found.append(objective)
    return found


_KEYS = ("name", "sli", "threshold", "target", "window", "where", "disconnects", "description")
_REQUIRED = ("name", "sli", "target")


def _objective(
    service: str, raw: Mapping[str, Any], path: str, problems: Problems
) -> Objective | None:
    """The objective, or ``None`` when one of its fields is a problem."""
    before = problems.count
    name = problems.take(parse_name, raw["name"], f"{path}.name") if "name" in raw else None
    word = (
        problems.take(parse_choice, raw["sli"], f"{path}.sli", tuple(Sli)) if "sli" in raw else None
    )
    sli = Sli(word or Sli.E2E)
    target = (
        problems.take(parse_target, raw["target"], f"{path}.target") if "target" in raw else None
    )
    threshold = None
    if word or raw.get("threshold") is not None:  # without an SLI: is it a duration at all?
        threshold = problems.take(parse_threshold, raw, sli, f"{path}.threshold")
    window = problems.take(parse_window, raw.get("window", "30d"), f"{path}.window")
    where = problems.take(parse_where, raw.get("where", {}), sli, f"{path}.where")
    disconnects = problems.take(
        parse_choice, raw.get("disconnects", "standard"), f"{path}.disconnects", tuple(Disconnects)
    )
    description = problems.take(_description, raw.get("description", ""), f"{path}.description")
    if (
        problems.count > before or name is None or target is None or window is None
        or where is None or disconnects is None or description is None
    ):  # fmt: skip
        return None
    return Objective(
        service=service,
        name=name,
        sli=sli,
        threshold_seconds=threshold,
        target_ratio=target,
        window_seconds=window,
        where=where,
        disconnects=Disconnects(disconnects),
        description=description,
    )


def _description(value: object, path: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_DESCRIPTION_CHARACTERS:
        limit = f"must be text of at most {MAX_DESCRIPTION_CHARACTERS} characters"
        raise SpecError(path, limit)
    return " ".join(value.split())
