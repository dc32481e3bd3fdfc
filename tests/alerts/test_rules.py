from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from servoscope.alerts.promql import matchers, number, quoted, selector
from servoscope.alerts.recordings import series_labels
from servoscope.alerts.rules import ALERT_NAMES, compile_engine_rules, compile_rules, notes
from servoscope.alerts.settings import RuleSettings
from servoscope.alerts.spec import WHERE_LABELS, Spec, default_spec, parse_spec
from servoscope.exporters.catalog import CATALOG

ANNOTATIONS = {"summary", "description", "runbook_url", "dashboard_url"}
SELECTOR = re.compile(r"\b(servoscope_[a-z_0-9]+)\b(?:\{([^}]*)\})?")


def spec(**changes: Any) -> Spec:
    entry = {"name": "ttft", "sli": "time_to_first_token", "threshold": "500ms", "target": "99%"}
    return parse_spec({"service": "chat", "objectives": [{**entry, **changes}]}, "chat.yaml")


def rules_of(text: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def the_alert(text: str, name: str) -> dict[str, Any]:
    (found,) = [rule for rule in rules_of(text) if rule.get("alert") == name]
    return found


def test_compiling_twice_gives_the_same_text() -> None:
    assert compile_rules(default_spec()) == compile_rules(default_spec())
    assert compile_engine_rules() == compile_engine_rules()


def test_every_alert_carries_what_routing_and_people_need() -> None:
    rules = rules_of(compile_rules(default_spec())) + rules_of(compile_engine_rules())
    alerts = [rule for rule in rules if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == set(ALERT_NAMES)
    for rule in alerts:
        assert rule["labels"]["tier"] in ("page", "ticket", "capacity")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert (rule["labels"]["tier"] == "page") == (rule["labels"]["severity"] == "critical")
        assert set(rule["annotations"]) == {
            "summary",
            "description",
            "runbook_url",
            "dashboard_url",
        }
        assert rule["annotations"]["runbook_url"].endswith(f"/{rule['alert']}.md")
        assert rule["keep_firing_for"] == "2m"


def test_thresholds_come_from_the_spec() -> None:
    text = compile_rules(spec(target="99.9%", window="28d"))
    burn = the_alert(text, "ServoscopeErrorBudgetFastBurn")
    assert 'ratio_rate1h{sloth_id="chat-ttft"} > 0.01344)' in burn["expr"]
    assert 'ratio_rate6h{sloth_id="chat-ttft"} > 0.0056)' in burn["expr"]
    assert "13.44 x over 1h and 5m or 5.6 x over 6h and 30m" in burn["annotations"]["description"]
    over = the_alert(text, "ServoscopeLatencyFarOverSlo")
    assert "is above 750ms for" in over["annotations"]["summary"]
    assert "promises 500ms for 99.9 % of requests" in over["annotations"]["description"]
    assert "slo:sli_error:ratio_rate28d" in text
    assert "ratio_rate30d" not in text


def test_settings_reach_the_rules() -> None:
    chosen = RuleSettings(
        over_share=0.02,
        over_minimum_events=50,
        over_window_seconds=600,
        confirm_window_seconds=180,
        sidecar_job='a"b',
        runbook_base_url="https://wiki/x",
        keep_firing_seconds=60,
    )
    over = the_alert(compile_rules(spec(), chosen), "ServoscopeLatencyFarOverSlo")
    assert "slo_over:ratio_rate10m" in over["expr"]
    assert "slo_over:ratio_rate3m" in over["expr"]
    assert "> 0.02" in over["expr"]
    assert "* 600 >= 50" in over["expr"]
    assert over["keep_firing_for"] == "1m"
    assert over["annotations"]["runbook_url"].startswith("https://wiki/x/")
    sidecar = the_alert(compile_engine_rules(chosen), "ServoscopeSidecarGone")
    assert sidecar["expr"] == r'up{job=~"a\"b"} == 0'


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"over_share": 0.0}, "over_share"),
        ({"over_window_seconds": 0}, "over_window_seconds"),
        ({"confirm_window_seconds": 300}, "confirm_window_seconds"),
        ({"burn_minimum_bad": 0}, "burn_minimum_bad"),
        ({"pending_seconds": 0.5}, "pending_seconds"),
    ],
)
def test_wrong_settings_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        compile_rules(spec(), RuleSettings(**changes))


def test_what_was_adapted_is_said_in_the_file() -> None:
    low = spec(target="90%")
    assert len(notes(low)) == 2
    header = [line for line in compile_rules(low).splitlines() if line.startswith("# Note:")]
    assert [line.removeprefix("# Note: ") for line in header] == notes(low)
    assert notes(default_spec()) == []


def test_rules_name_only_metrics_and_labels_of_the_catalogue() -> None:
    """Every selector on a servoscope_ metric exists, with labels that it has."""
    known = {m.full_name: {*m.labels, "job", "instance"} for m in CATALOG}
    known |= {
        f"{m.full_name}_bucket": {*m.labels, "le"} for m in CATALOG if m.kind.value == "histogram"
    }
    seen = set()
    for rule in rules_of(compile_rules(default_spec())) + rules_of(compile_engine_rules()):
        expressions = [rule["expr"]]
        for text in rule.get("annotations", {}).values():
            expressions += re.findall(r"query `([^`]*)`", text)
        for expression in expressions:
            promql_parser.parse(expression)
            for name, inner in re.findall(
                r"\b(servoscope_[a-z_0-9]+)\b(?:\{([^}]*)\})?", expression
            ):
                assert name in known, name
                labels = set(re.findall(r'(\w+)(?:=~|!=|!~|=)"', inner))
                assert labels <= known[name], (name, labels)
                seen.add(name)
    assert {
        "servoscope_slo_total",
        "servoscope_slo_good_total",
        "servoscope_slo_over_total",
    } <= seen


def test_every_recorded_series_that_a_rule_reads_is_recorded() -> None:
    rules = rules_of(compile_rules(default_spec()))
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        texts = [rule["expr"], *rule.get("annotations", {}).values()]
        for text in texts:
            for name in re.findall(r"\b(?:servoscope|slo):[a-z_]+:[a-z0-9_]+", text):
                assert name in recorded, name


def test_an_alert_reads_series_recorded_before_it_in_its_own_group() -> None:
    for group in yaml.safe_load(compile_rules(default_spec()))["groups"]:
        before: set[str] = set()
        for rule in group["rules"]:
            if "alert" in rule:
                needed = set(re.findall(r"\b(?:servoscope|slo):[a-z_]+:[a-z0-9_]+", rule["expr"]))
                assert needed <= before
            else:
                before.add(rule["record"])


def test_labels_are_sloths_and_ours() -> None:
    labels = series_labels(spec().objectives[0])
    assert labels == {
        "sloth_id": "chat-ttft",
        "sloth_service": "chat",
        "sloth_slo": "ttft",
        "service": "chat",
        "objective": "ttft",
        "sli": "time_to_first_token",
    }


@pytest.mark.parametrize(
    ("value", "written"), [(0.144, "0.144"), (0.1 + 0.2, "0.3"), (1.5, "1.5"), (2, "2")]
)
def test_numbers_have_no_dust(value: float, written: str) -> None:
    assert number(value) == written


values = st.text(
    st.characters(blacklist_categories=["Cc", "Cs", "Cn", "Zl", "Zp"]), min_size=1, max_size=15
)


@given(st.dictionaries(st.sampled_from(["a", "b"]), st.lists(values, min_size=1, max_size=3)))
def test_any_label_value_makes_a_selector_that_parses(where: dict[str, list[str]]) -> None:
    chosen = {k: tuple(v) for k, v in where.items()}
    promql_parser.parse(f"x{{{matchers(chosen)}}}")
    promql_parser.parse(selector("x", {k: v[0] for k, v in chosen.items()}))
    assert quoted('a"\\\n') == r'"a\"\\\n"'


label_values = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, blacklist_categories=["Cc"]),
    min_size=1,
    max_size=12,
).filter(lambda value: value != "probe" and value.isprintable())
wheres = st.dictionaries(
    st.sampled_from([w for w in WHERE_LABELS if w != "streaming"]),
    st.lists(
        label_values.filter(lambda v: v != "probe" and v.isprintable()), min_size=1, max_size=3
    ),
    max_size=3,
)


@settings(max_examples=8, deadline=None)
@given(where=wheres)
def test_hostile_label_values_still_give_rules_that_load(
    tmp_path_factory: pytest.TempPathFactory, where: dict[str, list[str]]
) -> None:
    file = tmp_path_factory.mktemp("hostile") / "rules.yaml"
    file.write_text(compile_rules(spec(where=where)), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("value", ["{{ $value }}", "`", '"', "\\", "a|b", "{{`{{`}}", "}}", "ü✓"])
def test_braces_and_quotes_in_a_label_value_still_load(tmp_path: Path, value: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(compile_rules(spec(where={"tenant": value, "model_name": value})), "utf-8")
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
