"""``servoscope.yaml``: sections sidecar, collector, slos, labels, control, notify.

Order, last wins: defaults, file, environment ``SERVOSCOPE_SECTION__KEY``, flags. An empty file
equals the defaults. Each section is a frozen dataclass owned by the part that reads it; here they
are only put together. Errors name the key and, for an unknown one, the nearest known.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cattrs
import yaml
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError

from servoscope.alerts.alertmanager import Notify, parse_notify
from servoscope.alerts.spec import Objective, SpecError, default_spec, load_spec
from servoscope.collector.config import CollectorConfig
from servoscope.sidecar.config import ControlConfig, LabelsConfig, SidecarConfig

__all__ = [
    "Settings",
    "SettingsError",
    "as_yaml",
    "load_settings",
    "parse_settings",
]

MAX_FILE_BYTES = 1 << 20
MAX_PROBLEM_CHARACTERS = 500
BRIEFLY = reprlib.Repr()  # a value in a message, whatever its size
BRIEFLY.maxlevel = 2
PREFIX = "SERVOSCOPE_"


class _Loader(yaml.SafeLoader):
    """Without aliases: with them a small file holds a tree of any size (as in alerts.spec)."""

    def compose_node(self, parent: yaml.nodes.Node | None, index: int) -> yaml.nodes.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not accepted", mark)
        return super().compose_node(parent, index)


class SettingsError(Exception):
    """The configuration is wrong; the text names the key."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration. ``slos`` lists spec files; empty means the built-in objectives.

    Relative names are taken from the directory of the configuration file.

    ``sidecar`` carries the sections ``labels`` and ``control`` too: a sidecar takes all three.
    """

    sidecar: SidecarConfig = field(default_factory=SidecarConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    slos: tuple[str, ...] = ()
    notify: Notify = field(default_factory=Notify)
    notify_section: Mapping[str, Any] = field(default_factory=dict)  # as written, for `show`
    origin: str = "defaults"

    def objectives(self) -> tuple[Objective, ...]:
        """Objectives of all spec files, or the built-in ones. Raises SettingsError."""
        if not self.slos:
            return tuple(default_spec().objectives)
        found, problems = _read_objectives(self.slos)
        if problems:
            raise SettingsError("\n  ".join(problems))
        return tuple(found)


def _read_objectives(names: Iterable[str]) -> tuple[list[Objective], list[str]]:
    """The objectives of all spec files, and what is wrong with any of them."""
    found: dict[tuple[str, str], Objective] = {}
    problems: list[str] = []
    for name in names:
        path = Path(name).expanduser()
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MAX_FILE_BYTES + 1)  # load_spec refuses what is too long
            objectives = load_spec(text, str(path)).objectives
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"slos: cannot read {name}: {error}")
            continue
        except SpecError as error:
            problems.append(f"slos: {name}: {error}")
            continue
        for objective in objectives:
            key = (objective.service, objective.name)
            if key in found:
                problems.append(f"slos: objective {key[0]}/{key[1]} is defined twice")
            found[key] = objective
    return list(found.values()), problems


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
    converter.register_structure_hook(Path, lambda value, _: Path(text(value, str)).expanduser())
    converter.register_unstructure_hook(Path, str)
    return converter


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


@dataclass(frozen=True, slots=True)
class _Variable:
    """One ``SERVOSCOPE_SECTION__KEY`` of the environment."""

    name: str
    section: str
    key: str
    value: Any


def _environment(environ: Mapping[str, str]) -> tuple[list[_Variable], list[str]]:
    """``SERVOSCOPE_SIDECAR__PORT=9999`` → sidecar, port, 9999; and what is wrong with any.

    Values are YAML scalars.
    """
    found: list[_Variable] = []
    problems: list[str] = []
    for name, text in environ.items():
        section, sep, key = name.removeprefix(PREFIX).partition("__")
        if not name.startswith(PREFIX) or not sep:
            continue
        try:
            value = yaml.load(text, Loader=_Loader)  # noqa: S506 - it is a SafeLoader
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            problems.append(f"{name}: not YAML: {str(error)[:MAX_PROBLEM_CHARACTERS]}")
            continue
        found.append(_Variable(name, section.lower(), key.lower(), value))
    return found, problems


def parse_settings(text: str, environ: Mapping[str, str], origin: str = "<text>") -> Settings:
    """Settings from YAML text and environment. Raises SettingsError with every problem found."""
    settings, problems = _parse(text, environ, origin)
    if problems:
        raise _wrong(origin, problems)
    return settings


def _wrong(origin: str, problems: Iterable[str]) -> SettingsError:
    return SettingsError("\n  ".join([f"{origin}:", *problems]))


def _parse(text: str, environ: Mapping[str, str], origin: str) -> tuple[Settings, list[str]]:
    """Settings and what is wrong with them; a section with a problem has its defaults."""
    tree = _tree(text, origin)
    variables, problems = _environment(environ)
    problems += _overlay(tree, variables)
    built: dict[str, Any] = {}
    slos = tree.get("slos") or []
    if isinstance(slos, list) and all(isinstance(s, str) for s in slos):
        built["slos"] = tuple(slos)
    else:
        problems.append("slos: expected a list of files")
    for name in SECTIONS:
        section, wrong = _section(name, tree.get(name))
        problems += [_blamed(line, variables) for line in wrong]
        built[name] = section
    try:
        built["notify"] = parse_notify(tree.get("notify"))
        built["notify_section"] = tree.get("notify") or {}
    except SpecError as error:
        problems.append(str(error))
    built["sidecar"] = dataclasses.replace(
        built["sidecar"], labels=built.pop("labels"), control=built.pop("control")
    )
    return Settings(**built, origin=origin), problems


def _blamed(line: str, variables: Iterable[_Variable]) -> str:
    """``line`` with the variable in front that set the key it begins with, if one did."""
    for variable in variables:
        key = f"{variable.section}.{variable.key}"
        if line.startswith(key) and line[len(key) : len(key) + 1] in (":", ".", "["):
            return f"{variable.name}: {line}"
    return line


def _tree(text: str, origin: str) -> dict[str, Any]:
    """The YAML as a mapping of sections."""
    if len(text) > MAX_FILE_BYTES:
        raise SettingsError(f"{origin}: larger than {MAX_FILE_BYTES} bytes")
    try:
        tree = yaml.load(text, Loader=_Loader)  # noqa: S506 - it is a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # ValueError: PyYAML lets some through, e.g. for a date such as 2026-99-99
        raise SettingsError(f"{origin}: not YAML: {error}") from error
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise SettingsError(f"{origin}: expected a mapping of sections, found {BRIEFLY.repr(tree)}")
    return tree


def _overlay(tree: dict[str, Any], variables: Iterable[_Variable]) -> list[str]:
    """Put the environment over ``tree``; return what is wrong with the names of either."""
    sections = ("slos", "notify", *SECTIONS)
    problems = [unknown_key("", str(key), sections) for key in tree if key not in sections]
    for variable in variables:
        section = variable.section
        if section not in SECTIONS:
            problems.append(f"{variable.name}: {unknown_key('', section, tuple(SECTIONS))}")
            continue
        below = tree.get(section) or {}
        if isinstance(below, dict):
            tree[section] = {**below, variable.key: variable.value}
    return problems


def _section(name: str, values: Any) -> tuple[Any, list[str]]:
    """One section built and checked, and everything that is wrong with it."""
    cls = SECTIONS[name]
    values = {} if values is None else values
    if not isinstance(values, dict):
        return cls(), [f"{name}: expected a mapping, found {type(values).__name__}"]
    keys = tuple(f.name for f in dataclasses.fields(cls) if f.name not in SECTIONS)
    problems: list[str] = []
    typed: dict[str, Any] = {}
    for key, value in values.items():
        if key in SECTIONS:
            problems.append(f"{name}.{key}: is a section of its own")
            continue
        try:
            typed[key] = getattr(CONVERTER.structure({key: value}, cls), key)
        except ClassValidationError as error:
            problems += _explain(error, name, keys)
        except (ValueError, TypeError) as error:
            problems.append(f"{name}.{key}: {str(error)[:MAX_PROBLEM_CHARACTERS]}")
    return _checked(name, cls(**typed), typed, problems)


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


SECTIONS: dict[str, Any] = {
    "sidecar": SidecarConfig,
    "collector": CollectorConfig,
    "labels": LabelsConfig,
    "control": ControlConfig,
}


def find_file(named: str | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The file in force: flag, $SERVOSCOPE_CONFIG, ./servoscope.yaml, /etc/servoscope/… or none."""
    if named or (named := environ.get("SERVOSCOPE_CONFIG")):
        return Path(named).expanduser()
    for path in (cwd / "servoscope.yaml", Path("/etc/servoscope/servoscope.yaml")):
        if path.is_file():
            return path
    return None


def load_settings(named: str | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the file in force and build Settings. Raises SettingsError."""
    env = os.environ if environ is None else environ
    path = find_file(named, env, Path.cwd())
    if path is None:
        return parse_settings("", env, "defaults")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
    settings, problems = _parse(text, env, str(path))
    here = path.absolute().parent
    slos = tuple(str(here / Path(name).expanduser()) for name in settings.slos)
    if problems:
        raise _wrong(str(path), [*problems, *_read_objectives(slos)[1]])
    return dataclasses.replace(settings, slos=slos)


def as_yaml(settings: Settings) -> str:
    """The configuration in force as a file that gives exactly it."""
    parts = {
        "sidecar": settings.sidecar,
        "labels": settings.sidecar.labels,
        "control": settings.sidecar.control,
        "collector": settings.collector,
    }
    tree = {name: CONVERTER.unstructure(part) for name, part in parts.items()}
    for section in ("labels", "control"):
        tree["sidecar"].pop(section)
    tree["notify"] = dict(settings.notify_section)
    tree["slos"] = list(settings.slos)
    return yaml.safe_dump(_plain(tree), sort_keys=False, default_flow_style=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
