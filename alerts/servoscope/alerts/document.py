"""YAML that people write: read strictly, and with the line of every key.

A SafeLoader with less: aliases are refused (with them a small file holds a tree of any size), and
so are repeated keys (the last one would win silently). Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

__all__ = ["Document", "DocumentError", "load_document"]

MAX_KEY_CHARACTERS = 60


class DocumentError(ValueError):
    """The text is no YAML of ours. ``line`` counts from 1; ``None``: not known."""

    def __init__(self, why: str, line: int | None = None) -> None:
        super().__init__(f"not valid YAML{'' if line is None else f' in line {line}'}: {why}")
        self.why = why
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """A loaded text: its value, and where its keys are."""

    value: Any
    lines: Mapping[str, int] = field(default_factory=dict)  # path of a key -> line, from 1

    def line_of(self, path: str) -> int | None:
        """The line of ``objectives[0].target``, or of the nearest key above that is there."""
        while path:
            if (line := self.lines.get(path)) is not None:
                return line
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None


def load_document(text: str, max_characters: int) -> Document:
    """The one document in ``text``; an empty text is ``None``. Raises DocumentError."""
    if len(text) > max_characters:
        raise DocumentError(f"longer than {max_characters} characters; split it")
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return Document(None)
        return Document(loader.construct_document(root), _lines(root))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(_brief(said or error), line) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # ValueError: PyYAML lets some through, e.g. for a date such as 2026-99-99
        raise DocumentError(_brief(error)) from error
    finally:
        if loader is not None:
            loader.dispose()


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses what a person did not mean."""

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


def _lines(root: yaml.nodes.Node) -> dict[str, int]:
    """Line of every key and list item by path. There are no aliases, so this is a tree."""
    found: dict[str, int] = {}
    waiting: list[tuple[str, yaml.nodes.Node]] = [("", root)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, yaml.nodes.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.nodes.ScalarNode):
                    name = str(key.value)[:MAX_KEY_CHARACTERS] or '""'
                    below = f"{path}.{name}" if path else name
                    found[below] = key.start_mark.line + 1
                    waiting.append((below, value))
        elif isinstance(node, yaml.nodes.SequenceNode):
            for index, item in enumerate(node.value):
                below = f"{path}[{index}]"
                found[below] = item.start_mark.line + 1
                waiting.append((below, item))
    return found


def _brief(error: object) -> str:
    return " ".join(str(error).split())[:200]
