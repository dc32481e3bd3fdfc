"""The registry of engine kinds."""

from __future__ import annotations

import pytest

from servoscope.exporters.engines import ENGINES, UnknownEngineError, parser_for


@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_has_a_parser_of_its_own(engine: str) -> None:
    parser = parser_for(engine, "1.2.3")
    sample = parser.parse("")
    assert sample.engine == engine
    assert sample.version == "1.2.3"
    assert parser_for(engine, None) is not parser


def test_kinds_are_sure_to_hold_those_that_are_read() -> None:
    assert {"vllm", "sglang", "llamacpp"} <= set(ENGINES)


def test_an_unknown_kind_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UnknownEngineError, match=r"engine: 'ollama' cannot be read; known: .*vllm"):
        parser_for("ollama", None)
