"""YAML read strictly: what a person did not mean is refused, and every key has its line."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from servoscope.alerts.document import DocumentError, load_document

TEXT = """\
# a comment
service: chat
objectives:
  - name: a
    where: {tenant: [x,
                     y]}

  - name: b
"""


def test_every_key_and_item_has_its_line() -> None:
    document = load_document(TEXT, 1000)
    assert document.value == yaml.safe_load(TEXT)
    for path, line in [
        ("service", 2), ("objectives", 3), ("objectives[0]", 4), ("objectives[0].name", 4),
        ("objectives[0].where", 5), ("objectives[0].where.tenant", 5),
        ("objectives[0].where.tenant[1]", 6), ("objectives[1].name", 8),
    ]:  # fmt: skip
        assert document.line_of(path) == line, path


def test_a_key_that_is_not_there_has_the_line_of_what_it_would_be_in() -> None:
    document = load_document(TEXT, 1000)
    assert document.line_of("objectives[1].target") == 8
    assert document.line_of("objectives[1].where.tenant[3]") == 8
    assert document.line_of("objectives[7].name") == 3
    assert document.line_of("nothing") is None
    assert document.line_of("") is None


@pytest.mark.parametrize(
    ("text", "why", "line"),
    [
        ("a: 1\nb: [", "expected", 2),
        ("a: 1\na: 2\n", "'a' is given twice", 2),
        ("x: {b: 1,\n b: 2}", "'b' is given twice", 2),
        ("a: &x [1]\nb: *x\n", "aliases", 2),
        ("b:\n  <<: {a: 1}", "constructor", 2),
        ("{[a]: 1}", "unhashable", 1),
        ("!!python/object:os.system {}", "constructor", 1),
        ("--- a\n--- b\n", "single document", 2),
        ("\x07", "special characters", None),
        ("[" * 5000, "recursion", None),
        ("d: 2026-13-45\n", "month", None),
        ("x" * 1001, "longer than 1000 characters", None),
    ],
)
def test_what_is_refused_and_where(text: str, why: str, line: int | None) -> None:
    with pytest.raises(DocumentError) as caught:
        load_document(text, 1000 if text.startswith("x" * 9) else 10_000)
    assert why in caught.value.why
    assert caught.value.line == line
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null"])
def test_nothing_is_none(text: str) -> None:
    assert load_document(text, 100).value is None


KEYS = st.text(st.characters(codec="ascii"), max_size=6) | st.integers() | st.booleans()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(VALUES)
def test_what_yaml_writes_is_read_back_and_every_line_is_one_of_the_text(value: Any) -> None:
    text = yaml.safe_dump(value)
    document = load_document(text, 100_000)
    assert document.value == value
    assert all(1 <= line <= text.count("\n") + 1 for line in document.lines.values())


@given(st.text(max_size=200))
def test_any_text_is_a_document_or_a_document_error(text: str) -> None:
    with contextlib.suppress(DocumentError):
        load_document(text, 100)
