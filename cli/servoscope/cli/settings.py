"""``servoscope.yaml``: sections sidecar, collector, slos, labels, control, notify.

Order, last wins: defaults, file, environment ``SERVOSCOPE_SECTION__KEY``, flags. An empty file
equals the defaults. Each section is a frozen dataclass owned by the part that reads it; here they
are only put together. Errors name the key and, for an unknown one, the nearest known.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import reprlib
from collections.abc import Mapping
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
        found: list[Objective] = []
        for name in self.slos:
            path = Path(name).expanduser()
            try:
                with path.open(encoding="utf-8") as file:
                    text = file.read(MAX_FILE_BYTES + 1)  # load_spec refuses what is too long
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"slos: cannot read {name}: {error}") from error
            try:
                found.extend(load_spec(text, str(path)).objectives)
            except SpecError as error:
                raise SettingsError(f"slos: {name}: {error}") from error
        seen: set[tuple[str, str]] = set()
        for objective in found:
            key = (objective.service, objective.name)
            if key in seen:
                raise SettingsError(f"slos: objective {key[0]}/{key[1]} is defined twice")
            seen.add(key)
        return tuple(found)


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


def _environment(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """``SERVOSCOPE_SIDECAR__PORT=9999`` → {"sidecar": {"port": 9999}}. Values are YAML scalars."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in environ.items():
        section, sep, key = name.removeprefix(PREFIX).partition("__")
        if not name.startswith(PREFIX) or not sep:
            continue
        try:
            value = yaml.load(text, Loader=_Loader)  # noqa: S506 - it is a SafeLoader
        except yaml.YAMLError as error:
            raise SettingsError(f"{name}: {error}") from error
        found.setdefault(section.lower(), {})[key.lower()] = value
    return found


def parse_settings(text: str, environ: Mapping[str, str], origin: str = "<text>") -> Settings:
    """Settings from YAML text and environment. Raises SettingsError with every problem found."""
    tree = _tree(text, origin)
    problems = _overlay(tree, environ)
    built: dict[str, Any] = {}
    slos = tree.get("slos") or []
    if isinstance(slos, list) and all(isinstance(s, str) for s in slos):
        built["slos"] = tuple(slos)
    else:
        problems.append("slos: expected a list of files")
    for name in SECTIONS:
        section, wrong = _section(name, tree.get(name))
        problems += wrong
        built[name] = section
    try:
        built["notify"] = parse_notify(tree.get("notify"))
        built["notify_section"] = tree.get("notify") or {}
    except SpecError as error:
        problems.append(str(error))
    if problems:
        raise SettingsError("\n  ".join([f"{origin}:", *problems]))
    built["sidecar"] = dataclasses.replace(
        built["sidecar"], labels=built.pop("labels"), control=built.pop("control")
    )
    return Settings(**built, origin=origin)


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


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Put the environment over ``tree``; return what is wrong with the names of either."""
    sections = ("slos", "notify", *SECTIONS)
    problems = [unknown_key("", str(key), sections) for key in tree if key not in sections]
    for section, values in _environment(environ).items():
        if section not in SECTIONS:
            problems.append(unknown_key(f"{PREFIX}*", section, tuple(SECTIONS)))
            continue
        below = tree.get(section) or {}
        if isinstance(below, dict):
            tree[section] = {**below, **values}
    return problems


def _section(name: str, values: Any) -> tuple[Any, list[str]]:
    """One section built and checked, and what is wrong with it."""
    values = {} if values is None else values
    if not isinstance(values, dict):
        return None, [f"{name}: expected a mapping, found {type(values).__name__}"]
    cls = SECTIONS[name]
    keys = tuple(f.name for f in dataclasses.fields(cls) if f.name not in SECTIONS)
    hidden = [k for k in values if k in SECTIONS]
    problems = [f"{name}.{k}: is a section of its own" for k in hidden]
    built = None
    try:
        built = CONVERTER.structure({k: v for k, v in values.items() if k not in hidden}, cls)
        built.validate()
    except ClassValidationError as error:
        problems += _explain(error, name, keys)
    except (ValueError, TypeError) as error:
        text = str(error)[:MAX_PROBLEM_CHARACTERS]
        problems.append(text if text.startswith(f"{name}.") else f"{name}.{text}")
    return built, problems


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
    return parse_settings(text, env, str(path))


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
