"""Each alert has a runbook that says what it must; its queries parse and name what exists."""

from __future__ import annotations

import re

import promql_parser
import pytest
import yaml

from servoscope.alerts.data import data_directory
from servoscope.alerts.rules import ALERT_NAMES
from servoscope.exporters.catalog import CATALOG

RUNBOOKS = data_directory("runbooks")
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation", "Escalation"]
RECORDED = {
    rule["record"]
    for path in data_directory("rules").glob("*.yaml")
    for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
    for rule in group["rules"]
    if "record" in rule
}


def text_of(name: str) -> str:
    return (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")


def queries(text: str) -> list[str]:
    blocks = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_alerts_and_runbooks_are_the_same_set() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(ALERT_NAMES)


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_a_runbook_has_its_sections_in_order(name: str) -> None:
    text = text_of(name)
    assert text.startswith(f"# {name}\n\nTier: ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    for section in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert len(section.split()) > 10


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_its_tier_is_the_rules_tier(name: str) -> None:
    tiers = {
        rule["labels"]["tier"]
        for path in data_directory("rules").glob("*.yaml")
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
        for rule in group["rules"]
        if rule.get("alert") == name
    }
    assert tiers == {re.search(r"^Tier: (\w+)\.", text_of(name), re.MULTILINE)[1]}  # type: ignore[index]


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_its_queries_parse_and_name_what_exists(name: str) -> None:
    found = queries(text_of(name))
    assert found
    known = {m.full_name for m in CATALOG} | {
        f"{m.full_name}_bucket" for m in CATALOG if m.kind.value == "histogram"
    }
    for query in found:
        promql_parser.parse(query)
        for metric in re.findall(r"\bservoscope_[a-z0-9_]+", query):
            assert metric in known, (name, metric)
        for series in re.findall(r"\b(?:servoscope|slo):[a-z_]+:[a-z0-9_]+", query):
            assert series in RECORDED, (name, series)


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_metrics_in_the_prose_exist_and_alerts_it_points_to_have_a_runbook(name: str) -> None:
    text = text_of(name)
    known = {m.full_name for m in CATALOG}
    for metric in re.findall(r"\bservoscope_[a-z0-9_]+", text):
        assert metric.removesuffix("_bucket") in known, metric
    for other in re.findall(r"\bServoscope[A-Z]\w+", text):
        assert other in ALERT_NAMES


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_mitigation_says_which_knob_on_which_engine_and_when_not(name: str) -> None:
    mitigation = text_of(name).split("## Mitigation")[1].split("## Escalation")[0]
    assert re.search(r"servoscope knobs URL set \w+=", mitigation)
    engines = ["vLLM", "llama.cpp"]
    if name != "ServoscopeSidecarGone":  # that one names what a sidecar attaches to, no more
        engines += ["SGLang", "TGI", "TensorRT-LLM"]
    for engine in engines:
        assert engine in mitigation, engine
    assert re.search(r"[Ww]hen not|not during|Do not|No knob is needed", mitigation)
