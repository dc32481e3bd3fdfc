from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from servoscope.alerts.alertmanager import (
    Notify,
    PagerDuty,
    Webhook,
    compile_alertmanager,
    parse_notify,
)
from servoscope.alerts.data import data_directory
from servoscope.alerts.rules import compile_engine_rules, compile_rules
from servoscope.alerts.spec import SpecError, default_spec

EXAMPLE = data_directory("slos").parent / "alertmanager.yaml"


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("amtool")
    assert program, "amtool is missing: apt-get install prometheus-alertmanager"
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def checked(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "alertmanager.yaml"
    path.write_text(text, encoding="utf-8")
    done = amtool("check-config", path)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_committed_example_is_accepted() -> None:
    done = amtool("check-config", EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 receivers" in done.stdout


def labels_of(name: str) -> str:
    text = compile_rules(default_spec()) + compile_engine_rules().split("groups:\n", 1)[1]
    rules = [r for g in yaml.safe_load(text)["groups"] for r in g["rules"]]
    found = next(r for r in rules if r.get("alert") == name)
    return " ".join([f"alertname={name}", *(f"{k}={v}" for k, v in found["labels"].items())])


ROUTES = [
    # What our rules send.
    (labels_of("ServoscopeLatencyFarOverSlo"), "page"),
    (labels_of("ServoscopeErrorBudgetFastBurn"), "page"),
    (labels_of("ServoscopeEngineGone") + " engine=vllm server=h:8000", "page"),
    (labels_of("ServoscopeEngineStalled") + " engine=sglang server=h:8000", "page"),
    (labels_of("ServoscopeAllSidecarsGone") + " job=servoscope-sidecar", "page"),
    (labels_of("ServoscopeSidecarGone") + " instance=h:9790", "ticket"),
    (labels_of("ServoscopeObjectiveAbsent"), "ticket"),
    # What later rules, and other people's, may send.
    ("tier=page", "page"),
    ("tier=page severity=info", "page"),
    ("tier=ticket", "ticket"),
    ("tier=ticket severity=critical", "ticket"),
    ("tier=ticket service=llm objective=ttft", "ticket"),
    ("tier=capacity", "capacity"),
    ("tier=capacity service=llm", "capacity"),
    ("tier=capacity severity=critical", "capacity"),
    ("tier=Page", "ticket"),
    ("tier=pager", "ticket"),
    ("severity=critical", "ticket"),
    ("alertname=SomebodyElses job=node", "ticket"),
    ("sloth_severity=page", "ticket"),
]


@pytest.mark.parametrize(("labels", "receiver"), ROUTES)
def test_each_label_set_reaches_its_receiver(labels: str, receiver: str) -> None:
    done = amtool(
        "config", "routes", "test", f"--config.file={EXAMPLE}",
        f"--verify.receivers={receiver}", *labels.split(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == receiver


def test_receivers_are_the_operators_own(tmp_path: Path) -> None:
    notify = parse_notify(
        {
            "page": [
                {"pagerduty": {"routing_key_file": "/s/key", "url": "http://127.0.0.1:1/v2"}},
                {"webhook": {"url": "https://h/x", "token_file": "/s/token"}},
            ],
            "ticket": [{"webhook": {"url": "http://127.0.0.1:2/"}}],
        }
    )
    assert notify.page[0] == PagerDuty(routing_key_file="/s/key", url="http://127.0.0.1:1/v2")
    loaded = checked(tmp_path, compile_alertmanager(notify))
    page, ticket, capacity = loaded["receivers"]
    assert page["pagerduty_configs"][0]["url"] == "http://127.0.0.1:1/v2"
    assert page["webhook_configs"][0]["http_config"] == {
        "authorization": {"type": "Bearer", "credentials_file": "/s/token"}
    }
    assert ticket["webhook_configs"] == [{"url": "http://127.0.0.1:2/", "send_resolved": True}]
    assert capacity == {"name": "capacity"}


def test_nobody_to_tell_is_still_a_configuration(tmp_path: Path) -> None:
    assert parse_notify(None) == Notify()
    loaded = checked(tmp_path, compile_alertmanager(Notify()))
    assert [r["name"] for r in loaded["receivers"]] == ["page", "ticket", "capacity"]


def test_the_page_route_is_fast_and_tells_the_end_within_a_minute() -> None:
    routes = {r["receiver"]: r for r in yaml.safe_load(compile_alertmanager())["route"]["routes"]}
    assert routes["page"]["group_wait"] == "10s"
    assert routes["page"]["group_interval"] == "1m"
    assert routes["page"]["group_by"] == ["service", "objective", "server"]
    assert routes["capacity"]["repeat_interval"] == "7d"


def test_inhibition_demands_the_labels_it_compares() -> None:
    for rule in yaml.safe_load(compile_alertmanager())["inhibit_rules"]:
        for side in ("source_matchers", "target_matchers"):
            named = {m.split("=")[0] for m in rule[side] if m.endswith('=~".+"')}
            assert named & set(rule["equal"]), rule


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ([], "notify"),
        ({"pages": []}, "notify.pages"),
        ({"page": {}}, "notify.page"),
        ({"page": [{}] * 21}, "notify.page"),
        ({"page": ["x"]}, "notify.page[0]"),
        ({"page": [{}]}, "notify.page[0]"),
        ({"page": [{"sms": {}}]}, "notify.page[0].sms"),
        ({"page": [{"webhook": {}}]}, "notify.page[0].webhook.url"),
        ({"page": [{"webhook": {"url": "ftp://h"}}]}, "notify.page[0].webhook.url"),
        ({"page": [{"webhook": {"url": 5}}]}, "notify.page[0].webhook.url"),
        ({"page": [{"webhook": {"url": "http://u:p@h/"}}]}, "notify.page[0].webhook.url"),
        ({"page": [{"webhook": {"url": "http://h", "tok": 1}}]}, "notify.page[0].webhook.tok"),
        (
            {"ticket": [{"webhook": {"url": "http://h", "token_file": "abc"}}]},
            "notify.ticket[0].webhook.token_file",
        ),
        ({"page": [{"pagerduty": {}}]}, "notify.page[0].pagerduty.routing_key_file"),
        (
            {"page": [{"pagerduty": {"routing_key_file": "R0123456789"}}]},
            "notify.page[0].pagerduty.routing_key_file",
        ),
    ],
)
def test_a_wrong_receiver_is_refused_by_key(document: object, key: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_notify(document)
    assert caught.value.key == key


def test_compiling_checks_receivers_made_in_code() -> None:
    with pytest.raises(SpecError, match=r"notify\.page\[0\]\.url"):
        compile_alertmanager(Notify(page=(Webhook(url="no"),)))
