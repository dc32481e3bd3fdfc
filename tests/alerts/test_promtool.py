"""promtool's verdict on the committed rules: they load, and each alert does what its test says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from servoscope.alerts.data import data_directory
from servoscope.alerts.rules import ALERT_NAMES

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.test.yaml"))
RULES = data_directory("rules")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    assert program, "promtool is missing: apt-get install prometheus"
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


def relevant(rule_file: Path, test_text: str, into: Path) -> Path:
    """Only the groups of objectives that the test names: promtool evaluates all it is given."""
    rules = yaml.safe_load(rule_file.read_text(encoding="utf-8"))
    objectives = set(re.findall(r'objective="([^"]+)"', test_text))
    kept = [
        group
        for group in rules["groups"]
        if "-slo-" not in group["name"] or group["rules"][0]["labels"]["objective"] in objectives
    ]
    assert kept
    path = into / rule_file.name
    path.write_text(yaml.safe_dump({"groups": kept}), encoding="utf-8")
    return path


def test_the_committed_rules_load_and_lint() -> None:
    done = promtool("check", "rules", *sorted(RULES.glob("*.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.removesuffix(".test.yaml"))
def test_alerts_fire_stay_quiet_and_recover(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    document["rule_files"] = [
        str(relevant((HERE / name).resolve(), text, tmp_path)) for name in document["rule_files"]
    ]
    copy = tmp_path / path.name
    copy.write_text(yaml.safe_dump(document), encoding="utf-8")
    done = promtool("test", "rules", copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_of_its_text_of_silence_and_of_its_edges() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FILES]
    for name in ALERT_NAMES:
        whole = [yaml.safe_load(text) for text in texts if name in text]
        described = [
            case
            for document in whole
            for test in document["tests"]
            for case in test.get("alert_rule_test", ())
            if case["alertname"] == name and case["exp_alerts"]
        ]
        assert described, f"{name}: no test of its labels and annotations"
        mine = "\n".join(text for text in texts if name in text)
        for word in ("quiet", "NaN", "recovers|resolves"):
            assert re.search(word, mine), f"{name}: no test case for {word}"


def test_the_committed_alerts_are_the_known_ones() -> None:
    found = set()
    for path in RULES.glob("*.yaml"):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            found |= {rule["alert"] for rule in group["rules"] if "alert" in rule}
    assert found == set(ALERT_NAMES)
