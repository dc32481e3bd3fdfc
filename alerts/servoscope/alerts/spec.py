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

from collections.abc import Hashable
from typing import Any

import yaml

from servoscope.alerts.data import data_text
from servoscope.alerts.objective import (
    OVER_FACTOR,
    WHERE_LABELS,
    WINDOWS_SECONDS,
    Disconnects,
    Objective,
    Sli,
    Spec,
    SpecError,
)
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
    root = parse_mapping(
        document, "", ("service", "objectives"), required=("service", "objectives")
    )
    service = parse_name(root["service"], "service")
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
    raw = parse_mapping(entry, path, _KEYS, required=("name", "sli", "target"))
    sli = Sli(parse_choice(raw["sli"], f"{path}.sli", tuple(Sli)))
    description = raw.get("description", "")
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARACTERS:
        limit = f"must be text of at most {MAX_DESCRIPTION_CHARACTERS} characters"
        raise SpecError(f"{path}.description", limit)
    return Objective(
        service=service,
        name=parse_name(raw["name"], f"{path}.name"),
        sli=sli,
        threshold_seconds=parse_threshold(raw, sli, f"{path}.threshold"),
        target_ratio=parse_target(raw["target"], f"{path}.target"),
        window_seconds=parse_window(raw.get("window", "30d"), f"{path}.window"),
        where=parse_where(raw.get("where", {}), sli, f"{path}.where"),
        disconnects=Disconnects(
            parse_choice(
                raw.get("disconnects", "standard"), f"{path}.disconnects", tuple(Disconnects)
            )
        ),
        description=" ".join(description.split()),
    )
