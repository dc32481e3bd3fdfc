"""llama.cpp's /props: captured, of old builds, hostile; the chat template is never kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.llamacpp.props import build_of, read_props

CAPTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "llamacpp" / "b11549"


def test_the_captured_one() -> None:
    told = json.loads((CAPTURES / "props.json").read_text())
    props = read_props(told)
    assert (props.slots, props.slot_context_tokens) == (4, 2048)
    assert (props.model_alias, props.model_path) == ("embedded-tiny", told["model_path"])
    assert (props.sleeping, props.slots_endpoint, props.metrics_endpoint) == (False, True, True)
    assert props.build is None  # the wheel was built outside git: "b0-unknown"
    assert props.refused == ()


def test_the_chat_template_is_not_kept() -> None:
    told = json.loads((CAPTURES / "props.json").read_text())
    assert "{% for m in messages %}" in told["chat_template"]
    kept = repr(read_props(told))
    assert "messages" not in kept
    assert "endoftext" not in kept


def test_a_build_of_2024_says_less() -> None:
    props = read_props({"total_slots": 1, "default_generation_settings": {"n_ctx": 512}})
    assert (props.slots, props.slot_context_tokens) == (1, 512)
    assert (props.build, props.sleeping, props.slots_endpoint) == (None, None, None)


@pytest.mark.parametrize(
    ("told", "build"),
    [
        ("b11549-1a2b3c4", "b11549-1a2b3c4"), ("b4000", "b4000"), ("b0-unknown", None),
        ("unknown", None), ("", None), (5, None), (None, None), ("b1" + "x" * 500, None),
    ],
)  # fmt: skip
def test_builds(told: Any, build: str | None) -> None:
    assert build_of(told) == build


@pytest.mark.parametrize("bad", [0, -1, 10**9, "4", 1.5, True, [], {}])
def test_a_bad_number_is_refused_by_name_and_the_rest_kept(bad: Any) -> None:
    props = read_props({"total_slots": bad, "default_generation_settings": {"n_ctx": 9}})
    assert [r.name for r in props.refused] == ["total_slots"]
    assert (props.slots, props.slot_context_tokens) == (None, 9)
    props = read_props({"total_slots": 2, "default_generation_settings": {"n_ctx": bad}})
    assert [r.name for r in props.refused] == ["n_ctx"]
    assert props.slots == 2


@pytest.mark.parametrize("told", [None, [], "x", 5])
def test_what_is_no_object_is_an_error(told: object) -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        read_props(told)


@pytest.mark.parametrize("told", [{}, {"role": "router", "models_max": 4}])
def test_what_lacks_its_mark_is_an_error_that_names_it(told: object) -> None:
    with pytest.raises(ValueError, match="total_slots: missing"):
        read_props(told)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none())


@given(
    told=st.dictionaries(
        st.sampled_from([
            "total_slots", "build_info", "model_path", "model_alias", "is_sleeping",
            "endpoint_slots", "default_generation_settings",
        ]),
        VALUES | st.dictionaries(st.just("n_ctx"), VALUES),
    )
)  # fmt: skip
def test_any_object_with_the_mark_is_read(told: dict[str, Any]) -> None:
    props = read_props({"total_slots": 4, **told})
    assert props.slots is None or 1 <= props.slots <= 4096
    assert props.model_path is None or len(props.model_path) <= 4096
