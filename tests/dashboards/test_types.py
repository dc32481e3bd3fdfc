"""Grafana's own TypeScript types accept the dashboards, and refuse wrong ones."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent / "tsc"
ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "dashboards" / "generated"
INSTALL_SECONDS, CHECK_SECONDS = 180, 60
PANEL_TYPES = {
    "stat": "StatPanel",
    "state-timeline": "StateTimelinePanel",
    "table": "TablePanel",
    "timeseries": "TimeSeriesPanel",
}

Dashboard = dict[str, Any]


def installed_modules() -> Path:
    """node_modules for tsc/package.json, installed once outside the checkout."""
    npm = shutil.which("npm")
    assert npm, "npm is missing: install Node.js 18 or later (apt-get install nodejs npm)"
    wanted = (HERE / "package.json").read_bytes()
    cache = Path.home() / ".cache" / "servoscope" / "npm"
    cache.mkdir(parents=True, exist_ok=True)
    done = cache / hashlib.sha256(wanted).hexdigest()[:16]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_dir():
            partial = done.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            (partial / "package.json").write_bytes(wanted)
            command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock"]
            run = subprocess.run(
                [*command, "--ignore-scripts"],
                cwd=partial,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
            assert run.returncode == 0, f"npm install failed:\n{run.stdout}\n{run.stderr}"
            partial.rename(done)
    return done / "node_modules"


def as_typescript(dashboard: Dashboard) -> str:
    """The dashboard as a literal of Grafana's type, and each panel as one of its plugin's type."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    names = ", ".join(sorted({"OverviewDashboard", *PANEL_TYPES.values()}))
    lines = [f'import type {{ {names} }} from "./grafana";']
    lines.append(f"export const dashboard: OverviewDashboard = {json.dumps(dashboard, indent=1)};")
    for position, panel in enumerate(panels):
        kind = PANEL_TYPES[panel["type"]]
        lines.append(f"export const panel{position}: {kind} = {json.dumps(panel, indent=1)};")
    return "\n".join(lines) + "\n"


class TypeChecker:
    """Type-checks dashboards with tsc: all that are given in one run, each in a file of its own."""

    def __init__(self, folder: Path, modules: Path) -> None:
        self.folder = folder
        for name in ("grafana.ts", "tsconfig.json"):
            shutil.copy(HERE / name, folder / name)
        (folder / "node_modules").symlink_to(modules)

    def complaints(self, dashboards: dict[str, Dashboard]) -> dict[str, list[str]]:
        """Name → tsc's complaints, each with the line of the literal that it is about."""
        sources = {name: as_typescript(board) for name, board in dashboards.items()}
        for name, source in sources.items():
            (self.folder / f"{name}.ts").write_text(source, encoding="utf-8")
        config = json.loads((HERE / "tsconfig.json").read_text(encoding="utf-8"))
        config["files"] = [f"{name}.ts" for name in sources]
        (self.folder / "tsconfig.json").write_text(json.dumps(config), encoding="utf-8")
        compiler = self.folder / "node_modules" / "typescript" / "bin" / "tsc"
        run = subprocess.run(
            ["node", str(compiler), "--pretty", "false", "--project", "tsconfig.json"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
        assert run.stderr == ""
        found: dict[str, list[str]] = {name: [] for name in sources}
        for complaint in run.stdout.splitlines():
            if complaint.startswith(" "):  # more on the complaint before
                continue
            place = re.match(r"(\w+)\.ts\((\d+),\d+\): error TS\d+: ", complaint)
            assert place, complaint
            line = sources[place[1]].splitlines()[int(place[2]) - 1].strip()
            found[place[1]].append(f"{complaint} | {line}")
        assert (run.returncode == 0) == (not any(found.values()))
        return found


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> TypeChecker:
    return TypeChecker(tmp_path_factory.mktemp("tsc"), installed_modules())


def committed() -> Dashboard:
    text = (GENERATED / "overview.json").read_text(encoding="utf-8")
    loaded: Dashboard = json.loads(text)
    return loaded


def first(dashboard: Dashboard, kind: str) -> Dashboard:
    found: Dashboard = next(p for p in dashboard["panels"] if p["type"] == kind)
    return found


def test_grafana_types_accept_the_overview(checker: TypeChecker) -> None:
    assert checker.complaints({"overview": committed()}) == {"overview": []}


def wrong_schema_version(dashboard: Dashboard) -> None:
    dashboard["schemaVersion"] = "41"


def unknown_dashboard_key(dashboard: Dashboard) -> None:
    dashboard["titel"] = "Servoscope overview"


def unknown_variable_refresh(dashboard: Dashboard) -> None:
    dashboard["templating"]["list"][1]["refresh"] = "often"


def unknown_threshold_mode(dashboard: Dashboard) -> None:
    first(dashboard, "stat")["fieldConfig"]["defaults"]["thresholds"]["mode"] = "relative"


def unknown_stat_option(dashboard: Dashboard) -> None:
    first(dashboard, "stat")["options"]["colorMode"] = "rainbow"


def unknown_draw_option(dashboard: Dashboard) -> None:
    first(dashboard, "timeseries")["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 1


def target_without_ref_id(dashboard: Dashboard) -> None:
    del first(dashboard, "table")["targets"][0]["refId"]


def target_without_expression(dashboard: Dashboard) -> None:
    del first(dashboard, "state-timeline")["targets"][0]["expr"]


BREAKS: dict[Callable[[Dashboard], None], str] = {
    wrong_schema_version: "schemaVersion",
    unknown_dashboard_key: "titel",
    unknown_variable_refresh: "refresh",
    unknown_threshold_mode: "relative",
    unknown_stat_option: "colorMode",
    unknown_draw_option: "lineWidht",
    target_without_ref_id: "refId",
    target_without_expression: "expr",
}


def test_grafana_types_refuse_each_wrong_dashboard(checker: TypeChecker) -> None:
    wrong = {}
    for break_ in BREAKS:
        wrong[break_.__name__] = copy.deepcopy(committed())
        break_(wrong[break_.__name__])
    complaints = checker.complaints(wrong)
    for break_, named in BREAKS.items():
        found = complaints[break_.__name__]
        assert any(named in complaint for complaint in found), f"{break_.__name__}: {found}"


def test_types_are_those_of_the_grafana_that_compose_starts() -> None:
    pinned = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    image = compose["services"]["grafana"]["image"]
    assert image == f"grafana/grafana:{pinned['@grafana/schema']}"
