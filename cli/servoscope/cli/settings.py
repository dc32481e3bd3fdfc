"""``servoscope.yaml``: sections sidecar, collector, slos, labels, control, notify.

Order, last wins: defaults, file, environment ``SERVOSCOPE_SECTION__KEY``, flags. An empty file
equals the defaults. Each section is a frozen dataclass owned by the part that reads it; here they
are only put together. Errors name the key and, for an unknown one, the nearest known.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from servoscope.alerts.alertmanager import Notify, parse_notify
from servoscope.alerts.document import Document, DocumentError, load_document
from servoscope.alerts.problems import shown
from servoscope.alerts.spec import Objective, SpecError, default_spec, load_spec
from servoscope.cli.sections import (
    BRIEFLY,
    CONVERTER,
    SECTIONS,
    build_section,
    unknown_key,
)
from servoscope.collector.config import CollectorConfig
from servoscope.sidecar.config import SidecarConfig

__all__ = [
    "Settings",
    "SettingsError",
    "as_yaml",
    "load_settings",
    "parse_settings",
    "unreadable",
]

MAX_FILE_BYTES = 1 << 20
PREFIX = "SERVOSCOPE_"


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
            raise SettingsError("\n  ".join(shown(problems)))
        return tuple(found)


def unreadable(name: str | Path, error: OSError | UnicodeDecodeError) -> str:
    """That a file cannot be read, and why: its name once, no number."""
    return f"cannot read {name}: {getattr(error, 'strerror', None) or error}"


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
            problems.append(f"slos: {unreadable(name, error)}")
            continue
        except SpecError as error:
            problems += [f"slos: {line}" for line in error.lines(name)]
            continue
        for objective in objectives:
            key = (objective.service, objective.name)
            if key in found:
                problems.append(f"slos: objective {key[0]}/{key[1]} is defined twice")
            found[key] = objective
    return list(found.values()), problems


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
            value = load_document(text, MAX_FILE_BYTES).value
        except DocumentError as error:
            problems.append(f"{name}: {error}")
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
    return SettingsError("\n  ".join([f"{origin}:", *shown(list(problems))]))


def _parse(text: str, environ: Mapping[str, str], origin: str) -> tuple[Settings, list[str]]:
    """Settings and what is wrong with them; a section with a problem has its defaults."""
    document, tree = _tree(text, origin)
    variables, problems = _environment(environ)
    problems += _overlay(tree, variables)
    built: dict[str, Any] = {}
    slos = tree.get("slos") or []
    if isinstance(slos, list) and all(isinstance(s, str) for s in slos):
        built["slos"] = tuple(slos)
    else:
        problems.append("slos: expected a list of files")
    for name in SECTIONS:
        section, wrong = build_section(name, tree.get(name))
        problems += [_blamed(line, variables) for line in wrong]
        built[name] = section
    try:
        built["notify"] = parse_notify(tree.get("notify"))
        built["notify_section"] = tree.get("notify") or {}
    except SpecError as error:
        problems += error.lines()
    built["sidecar"] = dataclasses.replace(
        built["sidecar"], labels=built.pop("labels"), control=built.pop("control")
    )
    return Settings(**built, origin=origin), [_placed(line, document) for line in problems]


def _placed(line: str, document: Document) -> str:
    """``line`` with the line of the file in front where the key it begins with is there."""
    number = document.line_of(line.partition(": ")[0])
    return line if number is None else f"line {number}: {line}"


def _blamed(line: str, variables: Iterable[_Variable]) -> str:
    """``line`` with the variable in front that set the key it begins with, if one did."""
    for variable in variables:
        key = f"{variable.section}.{variable.key}"
        if line.startswith(key) and line[len(key) : len(key) + 1] in (":", ".", "["):
            return f"{variable.name}: {line}"
    return line


def _tree(text: str, origin: str) -> tuple[Document, dict[str, Any]]:
    """The YAML, and as a mapping of sections."""
    try:
        document = load_document(text, MAX_FILE_BYTES)
    except DocumentError as error:
        raise SettingsError(f"{origin}: {error}") from error
    tree = {} if document.value is None else document.value
    if not isinstance(tree, dict):
        raise SettingsError(f"{origin}: expected a mapping of sections, found {BRIEFLY.repr(tree)}")
    return document, dict(tree)


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
        settings, problems = _parse("", env, "defaults")
        if problems:
            raise _wrong("environment", problems)
        return settings
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(unreadable(path, error)) from error
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
