"""From counters to a page and back, through a real Prometheus and Alertmanager.

The windows are those of the product divided by about ten, so that the suite does not wait for
minutes; ``python -m stack.page_timing`` measures the committed ones.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from servoscope.alerts.alertmanager import compile_alertmanager
from servoscope.alerts.rules import compile_engine_rules, compile_rules
from servoscope.alerts.settings import RuleSettings
from servoscope.alerts.spec import default_spec
from stack import processes
from stack.exporter import Exporter
from stack.harness import Stack, speed_up
from stack.page_timing import time_a_page

FAST = RuleSettings(
    over_window_seconds=30,
    confirm_window_seconds=10,
    pending_seconds=3,
    sidecar_pending_seconds=5,
    keep_firing_seconds=6,
)


@pytest.mark.stack
@pytest.mark.timeout(280)
def test_a_breach_pages_once_and_resolves_and_a_lost_sidecar_pages(
    tmp_path: Path, exporter: Exporter
) -> None:
    rules = [tmp_path / "objectives.yaml", tmp_path / "engines.yaml"]
    rules[0].write_text(compile_rules(default_spec(), FAST), encoding="utf-8")
    rules[1].write_text(compile_engine_rules(FAST), encoding="utf-8")
    with Stack(
        tmp_path,
        rule_files=rules,
        alertmanager_yaml=speed_up(compile_alertmanager()),
        scrape_seconds=1,
    ) as stack:
        timing = time_a_page(stack, exporter, settle=8, breach=15, patience=90)
        print(
            f"windows of 30 s and 10 s: page after {timing.page_seconds:.1f} s, resolved "
            f"{timing.resolve_seconds:.1f} s after the end"
        )
        assert len({page.group_key for page in timing.pages}) == 1
        assert timing.pages[0].status == "firing"
        assert "ServoscopeLatencyFarOverSlo" in timing.pages[0].alert_names()
        assert timing.pages[-1].status == "resolved"
        alert = timing.pages[0].body["alerts"][0]
        assert alert["labels"]["objective"] == "ttft"
        assert "model_version v1" in alert["annotations"]["description"]
        assert stack.rule_errors() == []
        assert stack.receiver.notifications("ticket") == []

        before = len(timing.pages)
        exporter.end()
        pages = stack.wait(
            lambda: stack.receiver.notifications("page")[before:], 60, "the page on the sidecars"
        )
        assert pages[0].alert_names() == {"ServoscopeAllSidecarsGone"}
        # The single sidecar's ticket is held back by it.
        stack.wait(lambda: "ServoscopeSidecarGone" in stack.firing(), 30, "the sidecar's alert")
        assert stack.receiver.notifications("ticket") == []
        assert stack.receiver.refused == 0
    for process in ("prometheus", "prometheus-alertmanager"):
        assert (tmp_path / f"{process}.log").is_file()


def test_missing_programs_are_a_failure_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(RuntimeError, match=r"apt-get install -y .*prometheus-alertmanager"):
        processes.ensure_installed()


@pytest.mark.stack
def test_what_was_started_is_ended_even_when_the_test_fails(tmp_path: Path) -> None:
    children: list[subprocess.Popen[bytes] | None] = []

    def failing() -> None:
        with Stack(tmp_path) as stack:
            children.extend(process.child for process in stack._processes)
            assert all(process.running for process in stack._processes)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert len(children) == 2
    assert all(child is not None and child.poll() is not None for child in children)


@pytest.mark.stack
def test_a_program_that_cannot_start_says_why(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("groups: [{name: a, rules: [{record: x, expr: '1 +'}]}]", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"wrong\.yaml"), Stack(tmp_path, rule_files=[wrong]):
        pass
