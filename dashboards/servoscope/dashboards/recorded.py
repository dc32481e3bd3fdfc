"""The series that the alerts part records, read from the rules it compiles: never typed again."""

from __future__ import annotations

import yaml

from servoscope.alerts.rules import compile_rules
from servoscope.alerts.spec import default_spec
from servoscope.dashboards.promql import QueryError, Recorded

__all__ = ["recorded_from", "recorded_series"]


def recorded_series() -> Recorded:
    """Series of the built-in objectives' rules. Other specs record the same names."""
    return recorded_from(compile_rules(default_spec()))


def recorded_from(rules: str) -> Recorded:
    """Series that a rule file records; labels are those that every rule of the name sets.

    Raises ``QueryError`` for text that is no rule file.
    """
    try:
        groups = yaml.safe_load(rules)["groups"]
        written = [
            (str(rule["record"]), set(rule.get("labels") or {}))
            for group in groups
            for rule in group["rules"]
            if "record" in rule
        ]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise QueryError(f"recording rules: not a rule file: {error}") from error
    labels: dict[str, set[str]] = {}
    for name, own in written:
        labels[name] = labels[name] & own if name in labels else own
    return Recorded(labels)
