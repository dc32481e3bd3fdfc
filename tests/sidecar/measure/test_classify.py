"""Request types: header, rules, length quadrants, probes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.records import RequestRecord
from servoscope.sidecar.config import TypeRule
from servoscope.sidecar.measure.classify import Classifier, sanitise

Make = Callable[..., RequestRecord]


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (10, 10, "chat"),
        (1023, 255, "chat"),
        (1024, 255, "summarise"),
        (1023, 256, "generate"),
        (1024, 256, "rag"),
        (None, 10, "unknown"),
    ],
)
def test_length_quadrants(make_record: Make, prompt: Any, output: Any, expected: str) -> None:
    record = make_record(prompt_tokens=prompt, output_tokens=output)
    assert Classifier().classify(record) == expected


def test_thresholds_can_be_set(make_record: Make) -> None:
    classifier = Classifier(long_prompt_tokens=50, long_output_tokens=5)
    assert classifier.classify(make_record(prompt_tokens=50, output_tokens=5)) == "rag"


def test_output_falls_back_to_what_was_asked_for(make_record: Make) -> None:
    record = make_record(prompt_tokens=10, output_tokens=None, max_output_tokens=4000)
    assert Classifier().classify(record) == "generate"


def test_the_header_wins_over_rules_and_lengths(make_record: Make) -> None:
    classifier = Classifier([TypeRule(request_type="ruled")])
    assert classifier.classify(make_record(request_type_hint=" My Type/1 ")) == "my_type_1"
    assert classifier.classify(make_record(request_type_hint="///")) == "ruled"


@pytest.mark.parametrize(
    ("rule", "changes", "matches"),
    [
        ({"endpoint": "/v1/chat*"}, {"endpoint": "/v1/chat/completions"}, True),
        ({"endpoint": "/v1/chat*"}, {"endpoint": "/v1/completions"}, False),
        ({"endpoint": "/v1/chat*"}, {"endpoint": None}, False),
        ({"model_name": "m-?"}, {"model_name": "m-1"}, True),
        ({"tenant": "acme"}, {"tenant": "acme"}, True),
        ({"tenant": "acme"}, {"tenant": ""}, False),
        ({"streaming": False}, {"streaming": False}, True),
        ({"streaming": False}, {"streaming": None}, False),
        ({"prompt_tokens": (100, None)}, {"prompt_tokens": 100}, True),
        ({"prompt_tokens": (101, None)}, {"prompt_tokens": 100}, False),
        ({"output_tokens": (None, 5)}, {"output_tokens": 6}, False),
        ({"max_output_tokens": (1, 1)}, {"max_output_tokens": 1}, True),
        ({"max_output_tokens": (1, 1)}, {"max_output_tokens": None}, False),
        ({"streaming": True, "tenant": "x"}, {"streaming": True, "tenant": "y"}, False),
    ],
)
def test_rules(
    make_record: Make, rule: dict[str, Any], changes: dict[str, Any], matches: bool
) -> None:
    classifier = Classifier([TypeRule(request_type="special", **rule)])
    found = classifier.classify(make_record(**changes))
    assert (found == "special") is matches


def test_the_first_rule_that_matches_names_the_type(make_record: Make) -> None:
    rules = [
        TypeRule(request_type="a", streaming=False),
        TypeRule(request_type="b", streaming=True),
        TypeRule(request_type="c"),
    ]
    assert Classifier(rules).classify(make_record(streaming=True)) == "b"


def test_health_checks_are_probes(make_record: Make) -> None:
    record = make_record(endpoint="/health", request_type_hint="chat")
    assert Classifier().classify(record) == "probe"


@pytest.mark.parametrize("hint", ["probe", " Probe ", "_probe/", "PROBE"])
def test_a_client_cannot_leave_the_slis_by_a_header(make_record: Make, hint: str) -> None:
    record = make_record(request_type_hint=hint, prompt_tokens=10, output_tokens=10)
    assert Classifier().classify(record) == "chat"
    assert Classifier().claims_probe(record)
    ruled = Classifier([TypeRule(request_type="ruled")])
    assert ruled.classify(record) == "ruled"
    believed = Classifier(trust_probe_header=True)
    assert believed.classify(record) == "probe"
    assert not believed.claims_probe(record)


def test_a_rule_of_the_operator_may_say_probe(make_record: Make) -> None:
    classifier = Classifier([TypeRule(request_type="probe", tenant="monitoring")])
    record = make_record(request_type_hint="probe", tenant="monitoring")
    assert classifier.classify(record) == "probe"


def test_only_a_header_that_says_probe_is_a_claim(make_record: Make) -> None:
    for hint in (None, "", "chat", "probes", "///"):
        assert not Classifier().claims_probe(make_record(request_type_hint=hint))


def test_the_first_minute_of_an_engine_is_probe_and_no_more(make_record: Make) -> None:
    start: list[float | None] = [None]
    classifier = Classifier(engine_start=lambda: start[0])
    record = make_record(request_type_hint="chat", received_unix_seconds=1_000.0)
    assert classifier.classify(record) == "chat"  # nobody knows when it started
    start[0] = 950.0
    assert classifier.classify(record) == "probe"
    start[0] = 940.0
    assert classifier.classify(record) == "chat"  # sixty seconds old: warm
    start[0] = 1_001.0
    assert classifier.classify(record) == "chat"  # a request before the start is of another life


def test_warm_up_can_be_off(make_record: Make) -> None:
    classifier = Classifier(warmup_seconds=0.0, engine_start=lambda: 999.5)
    assert classifier.classify(make_record(received_unix_seconds=1_000.0)) == "chat"


@given(st.text(max_size=300))
def test_whatever_a_client_sends_becomes_a_short_plain_word(text: str) -> None:
    assert re.fullmatch(r"[a-z0-9_.-]{0,64}", sanitise(text))


def test_a_clean_name_stays_as_it_is() -> None:
    assert sanitise("rag-v2.1_x") == "rag-v2.1_x"
    assert sanitise(None) == ""
