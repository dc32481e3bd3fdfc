from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from servoscope.alerts.duration import format_duration, parse_duration, prometheus_duration
from servoscope.alerts.spec import (
    MAX_OBJECTIVES,
    MAX_SPEC_CHARACTERS,
    Disconnects,
    Sli,
    SpecError,
    default_spec,
    load_spec,
    parse_spec,
)

GOOD = """
service: chat
objectives:
  - name: ttft
    sli: time_to_first_token
    threshold: 2s
    target: 99%
    window: 28d
    where: {request_type: [chat, rag], streaming: true}
    disconnects: bad
    description: |
      First token
      within two seconds.
  - name: errors
    sli: error_ratio
    target: 0.999
"""


def objective(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"name": "a", "sli": "e2e", "threshold": "2s", "target": "99%"}
    base.update(changes)
    return {"service": "s", "objectives": [{k: v for k, v in base.items() if v is not ...}]}


def test_a_spec_becomes_values_with_units() -> None:
    spec = load_spec(GOOD, "chat.yaml")
    ttft, errors = spec.objectives
    assert (spec.service, spec.origin) == ("chat", "chat.yaml")
    assert (ttft.sli, ttft.threshold_seconds, ttft.target_ratio) == (
        Sli.TIME_TO_FIRST_TOKEN,
        2.0,
        0.99,
    )
    assert ttft.window_seconds == 28 * 86_400
    assert dict(ttft.where) == {"request_type": ("chat", "rag"), "streaming": ("true",)}
    assert ttft.disconnects is Disconnects.BAD
    assert ttft.description == "First token within two seconds."
    assert ttft.id == "chat-ttft"
    assert ttft.budget_ratio == 0.01
    assert (errors.threshold_seconds, errors.target_ratio) == (None, 0.999)
    assert errors.window_seconds == 30 * 86_400
    assert errors.budget_ratio == 0.001
    assert hash(ttft) != hash(errors)
    with pytest.raises(AttributeError):
        ttft.target_ratio = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        ttft.where["tenant"] = ("x",)  # type: ignore[index]


def test_the_shipped_default_is_valid_and_covers_the_four_slis() -> None:
    spec = default_spec()
    assert {o.sli for o in spec.objectives} == set(Sli)
    assert all(o.description for o in spec.objectives)


def test_token_milestones_are_of_streamed_answers_unless_the_spec_says_else() -> None:
    for sli in ("time_to_first_token", "time_per_output_token"):
        assert parse_spec(objective(sli=sli)).objectives[0].where["streaming"] == ("true",)
        whole = parse_spec(objective(sli=sli, where={"streaming": False})).objectives[0]
        assert whole.where["streaming"] == ("false",)
    assert "streaming" not in parse_spec(objective()).objectives[0].where


WRONG: list[tuple[str, object, str, str]] = [
    ("not a mapping", ["x"], "document", "mapping"),
    ("empty", None, "document", "service"),
    ("no service", {"objectives": []}, "service", "missing"),
    ("unknown root key", {"service": "s", "objectives": [], "slo": 1}, "slo", "objectives"),
    ("no objectives", {"service": "s", "objectives": []}, "objectives", "at least one"),
    ("service not text", {"service": 3, "objectives": [{}]}, "service", "not text"),
    (
        "service with capitals",
        {"service": "My Chat!", "objectives": [{}]},
        "service",
        "nearest: my-chat",
    ),
    (
        "too many",
        {"service": "s", "objectives": [{}] * (MAX_OBJECTIVES + 1)},
        "objectives",
        f"at most {MAX_OBJECTIVES}",
    ),
    ("objective not a mapping", {"service": "s", "objectives": [1]}, "objectives[0]", "mapping"),
    ("unknown key", objective(treshold="2s"), "objectives[0].treshold", "threshold?"),
    ("no name", objective(name=...), "objectives[0].name", "missing"),
    ("no sli", objective(sli=...), "objectives[0].sli", "missing"),
    ("no target", objective(target=...), "objectives[0].target", "missing"),
    ("unknown sli", objective(sli="ttft"), "objectives[0].sli", "time_to_first_token"),
    ("near sli", objective(sli="time_to_first_tokens"), "objectives[0].sli", "did you mean"),
    ("no threshold", objective(threshold=...), "objectives[0].threshold", "e2e needs one"),
    ("threshold 2", objective(threshold=2), "objectives[0].threshold", "nearest: 2s"),
    ("threshold text", objective(threshold="fast"), "objectives[0].threshold", "not a duration"),
    ("threshold list", objective(threshold=[2]), "objectives[0].threshold", "not a duration"),
    ("threshold negative", objective(threshold="-2s"), "objectives[0].threshold", "not a dura"),
    ("threshold zero", objective(threshold="0s"), "objectives[0].threshold", "nearest: 1ms"),
    ("threshold a day", objective(threshold="1d"), "objectives[0].threshold", "nearest: 1h"),
    (
        "threshold of an error ratio",
        objective(sli="error_ratio"),
        "objectives[0].threshold",
        "remove it",
    ),
    ("target 99", objective(target=99), "objectives[0].target", "nearest: 99%"),
    ("target 100%", objective(target="100%"), "objectives[0].target", "nearest: 99.999%"),
    ("target 1", objective(target=1), "objectives[0].target", "nearest: 99.999%"),
    ("target 10%", objective(target="10%"), "objectives[0].target", "nearest: 50%"),
    ("target NaN", objective(target=math.nan), "objectives[0].target", "finite"),
    ("target inf", objective(target=math.inf), "objectives[0].target", "finite"),
    ("target true", objective(target=True), "objectives[0].target", "99%"),
    ("target text", objective(target="most"), "objectives[0].target", "99%"),
    ("target huge int", objective(target=10**400), "objectives[0].target", "99%"),
    ("window 14d", objective(window="14d"), "objectives[0].window", "nearest: 7d"),
    ("window 90d", objective(window="90d"), "objectives[0].window", "nearest: 30d"),
    ("window 30", objective(window=30), "objectives[0].window", "7d, 28d, 30d"),
    ("window month", objective(window="month"), "objectives[0].window", "7d, 28d, 30d"),
    ("where list", objective(where=["a"]), "objectives[0].where", "mapping"),
    ("where model", objective(where={"model": "m"}), "objectives[0].where.model", "model_name"),
    ("where outcome", objective(where={"outcome": "x"}), "objectives[0].where.outcome", "known"),
    ("where number", objective(where={"tenant": 7}), "objectives[0].where.tenant", '"7"'),
    ("where empty", objective(where={"tenant": []}), "objectives[0].where.tenant", "0 values"),
    ("where many", objective(where={"tenant": ["x"] * 51}), "objectives[0].where.tenant", "51"),
    ("where long", objective(where={"tenant": "x" * 201}), "objectives[0].where.tenant", "200"),
    ("where NUL", objective(where={"tenant": "a\0"}), "objectives[0].where.tenant", "printable"),
    (
        "probe",
        objective(where={"request_type": "probe"}),
        "objectives[0].where.request_type",
        "probe",
    ),
    (
        "streaming maybe",
        objective(where={"streaming": "maybe"}),
        "objectives[0].where.streaming",
        "true or false",
    ),
    (
        "both kinds in one TTFT",
        objective(sli="time_to_first_token", where={"streaming": [True, False]}),
        "objectives[0].where.streaming",
        "separate",
    ),
    ("disconnects", objective(disconnects="good"), "objectives[0].disconnects", "standard, bad"),
    ("description", objective(description=5), "objectives[0].description", "text"),
    ("long description", objective(description="x" * 1001), "objectives[0].description", "1000"),
]


@pytest.mark.parametrize(
    ("document", "key", "part"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_a_wrong_spec_is_refused_by_key_with_the_nearest_valid_value(
    document: object, key: str, part: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    assert caught.value.key == key
    assert part in caught.value.message
    assert len(str(caught.value)) < 700


def test_a_name_used_twice_is_refused() -> None:
    document = objective()
    document["objectives"] *= 2
    with pytest.raises(SpecError, match=r"objectives\[1\]\.name: 'a' is used twice"):
        parse_spec(document)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("service: [", "line"),
        ("service: a\nservice: b\n", "'service' is given twice"),
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("{[a]: 1, [a]: 2}", "not valid YAML"),
        ("!!python/object:os.system {}", "not valid YAML"),
        ("\x07", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("x" * (MAX_SPEC_CHARACTERS + 1), "split it"),
        ("target: 2026-13-45\n", "not valid YAML"),
        ("--- a\n--- b\n", "not valid YAML"),
    ],
)
def test_text_that_is_no_spec_is_refused_with_the_file_named(text: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(text, "chat.yaml")
    assert caught.value.key == "chat.yaml"
    assert part in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["service", "objectives", "name", "sli", "threshold", "target", "window", "where"]
            )
            | st.text(max_size=5),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_any_document_is_a_spec_or_a_spec_error(document: object) -> None:
    try:
        assert parse_spec(document).objectives
    except SpecError as error:
        refused = error
    else:
        return
    assert refused.key
    assert refused.message


@given(st.text(max_size=80))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError):
        load_spec(text)


@given(
    target=st.integers(50_000, 99_999).map(lambda n: n / 1000),
    threshold=st.integers(1, 3_600_000),
    window=st.sampled_from(["7d", "28d", "30d", "1w", "4w"]),
)
def test_numbers_survive_yaml_as_written(target: float, threshold: int, window: str) -> None:
    written = objective(target=f"{target}%", threshold=f"{threshold}ms", window=window)
    found = load_spec(yaml.safe_dump(written)).objectives[0]
    assert found.target_ratio == pytest.approx(target / 100, abs=1e-9)
    assert found.threshold_seconds == pytest.approx(threshold / 1000, abs=1e-9)
    assert 0 < found.budget_ratio <= 0.5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2s", 2), ("1.5s", 1.5), ("5m", 300), ("6h", 21_600), ("30d", 2_592_000)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(1, 10**9).map(lambda n: n / 1000))
def test_a_duration_is_written_so_that_it_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


def test_prometheus_takes_whole_seconds() -> None:
    assert prometheus_duration(5400) == "90m"
    for wrong in (0.5, 0, 1.25):
        with pytest.raises(ValueError, match="whole number"):
            prometheus_duration(wrong)
