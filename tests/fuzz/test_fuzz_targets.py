"""Every fuzz target over its corpus and what grows out of it in a moment; atheris is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.parse_text import check

CORPUS = sorted((Path(__file__).parent / "corpus" / "parse_text").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name)
def test_corpus(path: Path) -> None:
    check(path.read_bytes())


def test_the_corpus_has_every_kind() -> None:
    assert len(CORPUS) >= 15


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_texts_put_together_from_the_corpus(data: st.DataObject) -> None:
    texts = st.sampled_from([path.read_bytes() for path in CORPUS])
    one, other = data.draw(texts), data.draw(texts)
    at, to = data.draw(st.integers(0, len(one))), data.draw(st.integers(0, len(other)))
    check(one[:at] + data.draw(st.binary(max_size=4)) + other[to:])
