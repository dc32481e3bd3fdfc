"""Sections of ``servoscope.yaml`` from plain values: every wrong key is told, with its name."""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError

from servoscope.collector.config import CollectorConfig
from servoscope.sidecar.config import (
    ConfigError,
    ControlConfig,
    LabelsConfig,
    SidecarConfig,
    TypeRule,
)

__all__ = [
    "BRIEFLY",
    "CONVERTER",
    "MAX_PROBLEM_CHARACTERS",
    "SECTIONS",
    "build_section",
    "unknown_key",
]

MAX_PROBLEM_CHARACTERS = 500
BRIEFLY = reprlib.Repr()  # a value in a message, whatever its size
BRIEFLY.maxlevel = 2
ANY_TYPE = "any"  # a good request type, to look at the other keys of a rule by themselves

SECTIONS: dict[str, Any] = {
    "sidecar": SidecarConfig,
    "collector": CollectorConfig,
    "labels": LabelsConfig,
    "control": ControlConfig,
}


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)

    def strict(kind: type) -> Any:
        def structure(value: Any, _: Any) -> Any:
            # YAML already typed the value: 5 may be a float, but "5s" or true may not be a number.
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                return float(value)
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise ValueError(f"{BRIEFLY.repr(value)} is not {NAMES[kind]}")
            return value

        return structure

    for kind in (int, float, bool, str):
        converter.register_structure_hook(kind, strict(kind))
    text = strict(str)
    texts = _list_of(text)
    converter.register_structure_hook_func(
        lambda kind: kind == tuple[str, ...], lambda value, _: texts(value)
    )
    converter.register_structure_hook(Path, lambda value, _: Path(text(value, str)).expanduser())
    converter.register_unstructure_hook(Path, str)
    return converter


def _list_of(item: Callable[[Any, Any], str]) -> Callable[[Any], tuple[str, ...]]:
    """A structure hook: one text is not the list of its characters."""

    def structure(values: Any) -> tuple[str, ...]:
        if not isinstance(values, list):
            raise TypeError(f"{BRIEFLY.repr(values)} is not a list of texts")
        return tuple(item(value, str) for value in values)

    return structure


NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


CONVERTER = _converter()


def _explain(error: BaseException, where: str, keys: tuple[str, ...]) -> list[str]:
    """Flatten cattrs' error tree into ``section.key: what`` lines."""
    if isinstance(error, ForbiddenExtraKeysError):
        return [unknown_key(where, key, keys) for key in sorted(map(str, error.extra_fields))]
    if isinstance(error, BaseExceptionGroup):
        lines = []
        for inner in error.exceptions:
            place = where
            for note in getattr(inner, "__notes__", []):
                name = getattr(note, "name", None)
                index = getattr(note, "index", None)
                if name is not None:
                    place = f"{where}.{name}"
                elif isinstance(index, int):  # a note may be a str, whose index is a method
                    place = f"{where}[{index}]"
            nested = keys
            if isinstance(inner, ClassValidationError) and dataclasses.is_dataclass(inner.cl):
                nested = tuple(f.name for f in dataclasses.fields(inner.cl))
            lines += _explain(inner, place, nested)
        return lines
    return [f"{where}: {str(error)[:MAX_PROBLEM_CHARACTERS]}"]


def unknown_key(where: str, key: str, keys: tuple[str, ...]) -> str:
    """The message for a key that does not exist."""
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(keys))}"
    return f"{where + '.' if where else ''}{key}: unknown key{hint}"


def build_section(name: str, values: Any) -> tuple[Any, list[str]]:
    """One section built and checked, and everything that is wrong with it."""
    cls = SECTIONS[name]
    values = {} if values is None else values
    if not isinstance(values, dict):
        return cls(), [f"{name}: expected a mapping, found {type(values).__name__}"]
    keys = tuple(f.name for f in dataclasses.fields(cls) if f.name not in SECTIONS)
    problems: list[str] = []
    typed: dict[str, Any] = {}
    if isinstance(switch := values.get("tap"), bool) and name == "sidecar":
        values = {**values, "tap": "on" if switch else "off"}  # YAML reads a bare on or off so
    for key, value in values.items():
        if key in SECTIONS:
            problems.append(f"{name}.{key}: is a section of its own")
            continue
        if key == "types" and name == "sidecar":
            rules, wrong = _rules(f"{name}.{key}", value)
            problems += wrong
            if not wrong:
                typed[key] = rules
            continue
        try:
            typed[key] = getattr(CONVERTER.structure({key: value}, cls), key)
        except ClassValidationError as error:
            problems += _explain(error, name, keys)
        except (ValueError, TypeError) as error:
            problems.append(f"{name}.{key}: {str(error)[:MAX_PROBLEM_CHARACTERS]}")
    return _checked(name, cls(**typed), typed, problems)


def _rules(where: str, values: Any) -> tuple[tuple[TypeRule, ...], list[str]]:
    """Request-type rules, and everything that is wrong with any of them."""
    if not isinstance(values, list):
        return (), [f"{where}: expected a list of rules, found {BRIEFLY.repr(values)}"]
    rules: list[TypeRule] = []
    problems: list[str] = []
    for index, value in enumerate(values):
        rule, wrong = _rule(f"{where}[{index}]", value)
        problems += wrong
        if rule is not None:
            rules.append(rule)
    return tuple(rules), problems


def _rule(where: str, values: Any) -> tuple[TypeRule | None, list[str]]:
    if not isinstance(values, dict):
        return None, [f"{where}: expected a mapping, found {BRIEFLY.repr(values)}"]
    keys = tuple(f.name for f in dataclasses.fields(TypeRule))
    problems: list[str] = []
    typed: dict[str, Any] = {"request_type": ANY_TYPE}  # the one that has no default
    if "request_type" not in values:
        problems.append(f"{where}.request_type: is missing")
    for key, value in values.items():
        try:
            rule = CONVERTER.structure({"request_type": ANY_TYPE, key: value}, TypeRule)
        except ClassValidationError as error:
            problems += _explain(error, where, keys)
        else:
            typed[key] = getattr(rule, key)
    # `validate` stops at the first bad value: put a good one there and ask again.
    rule = TypeRule(**typed)
    while True:
        try:
            rule.validate(where)
        except ConfigError as error:
            problems.append(str(error)[:MAX_PROBLEM_CHARACTERS])
            key = re.split(r"[.\[]", error.key.removeprefix(f"{where}."), maxsplit=1)[0]
            if typed.pop(key, None) is None:
                break  # not one of the rule's own keys: nothing to put right
            rule = TypeRule(**{"request_type": ANY_TYPE, **typed})
        else:
            break
    return rule, problems


def _checked(
    name: str, built: Any, typed: Mapping[str, Any], problems: list[str]
) -> tuple[Any, list[str]]:
    """``validate`` stops at the first bad value: put its default there and ask again."""
    cls = type(built)
    defaults = cls()
    left = dict(typed)
    told: set[str] = set()
    while (wrong := _first_problem(name, cls(**left))) is not None:
        key = _key_of(name, wrong)
        if key not in told:
            problems.append(wrong)
            told.add(key)
        if key not in left:  # between two keys, the other one given: each for itself, then
            switches = {k: v for k, v in left.items() if isinstance(v, bool)}
            alone = (_first_problem(name, cls(**switches, **{k: v})) for k, v in left.items()
                     if k not in switches)  # fmt: skip
            problems += [p for p in alone if p and _key_of(name, p) in left.keys() - told]
            break
        del left[key]
    return (defaults if problems else built), problems


def _first_problem(name: str, section: Any) -> str | None:
    try:
        section.validate()
    except (ValueError, TypeError) as error:
        text = str(error)[:MAX_PROBLEM_CHARACTERS]
        return text if text.startswith(f"{name}.") else f"{name}.{text}"
    return None


def _key_of(name: str, problem: str) -> str:
    """``sidecar.types[0].request_type: …`` → types."""
    return re.split(r"[:.\[]", problem.removeprefix(f"{name}."), maxsplit=1)[0]
