"""Pieces of PromQL that several rules share, and how rule files are written. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["dump", "first_value", "matchers", "number", "quoted", "selector"]


def quoted(value: str) -> str:
    """``value`` as a PromQL string."""
    return '"' + value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") + '"'


def number(value: float) -> str:
    """A threshold, without binary dust: 0.144, not 0.14400000000000002."""
    return f"{value:.10g}"


def selector(name: str, labels: Mapping[str, str]) -> str:
    """``name{label="value",…}``."""
    inner = ",".join(f"{label}={quoted(value)}" for label, value in labels.items())
    return f"{name}{{{inner}}}" if inner else name


def matchers(where: Mapping[str, tuple[str, ...]]) -> str:
    """A spec's ``where`` as matchers, joined by commas; several values become one regex."""
    return ",".join(_matcher(label, values) for label, values in where.items())


def _matcher(label: str, values: tuple[str, ...]) -> str:
    if len(values) == 1:
        return f"{label}={quoted(values[0])}"
    return f"{label}=~{quoted('|'.join(_literal(v) for v in values))}"


def _literal(value: str) -> str:
    """``value`` as an RE2 pattern for itself; re.escape escapes more than RE2 takes."""
    return "".join("\\" + c if c in r"\.+*?()|[]{}^$" else c for c in value)


def first_value(expr: str, form: str, otherwise: str) -> str:
    """An annotation template: the first result of ``expr`` through ``form``, else ``otherwise``.

    ``expr`` must not contain backquotes; ``form`` is a Go template pipeline on the sample ``.``.
    """
    if "`" in expr:
        raise ValueError("a query in a template is quoted by backquotes and cannot contain them")
    found = f"{{{{ with first . }}}}{form}{{{{ end }}}}"
    return f"{{{{ with query `{expr}` }}}}{found}{{{{ else }}}}{otherwise}{{{{ end }}}}"


class _Dumper(yaml.SafeDumper):
    """Block style, long expressions as literal blocks, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class' signature
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: _Dumper, value: str) -> yaml.nodes.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(document: Mapping[str, Any], header: str) -> str:
    """``document`` as YAML under ``header``, each line of which becomes a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    body: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return comment + body
