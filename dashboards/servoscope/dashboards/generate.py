"""``python -m servoscope.dashboards.generate [--check] [--output DIR]``: dashboards as JSON files.

The output depends on nothing but the source: the same text on every machine and on every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from servoscope.dashboards.inspection import metric_names, panel_queries, variable_queries
from servoscope.dashboards.overview import overview
from servoscope.dashboards.promql import QueryError, Recorded
from servoscope.dashboards.recorded import recorded_series
from servoscope.exporters.catalog import CATALOG, Kind

__all__ = ["check_names", "generated_directory", "main", "render", "rendered_dashboards"]

_HISTOGRAM_SERIES = ("_bucket", "_sum", "_count")


def generated_directory() -> Path:
    """Where the committed JSON lies: beside the source root, or inside the package in a wheel."""
    package = Path(__file__).resolve().parent
    for base in (package, package.parents[1]):
        if (base / "generated").is_dir():
            return base / "generated"
    raise FileNotFoundError("this installation of servoscope lacks its generated dashboards")


def render(dashboard: Dashboard) -> str:
    """The JSON text of a dashboard, with keys in one order and a last newline."""
    return JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(dashboard) + "\n"


def rendered_dashboards() -> dict[str, str]:
    """File name → text of every dashboard, each checked. Raises ``QueryError``."""
    recorded = recorded_series()
    texts = {"overview.json": render(overview(recorded))}
    for name, text in texts.items():
        check_names(name, json.loads(text), recorded)
    return texts


def check_names(origin: str, dashboard: Mapping[str, object], recorded: Recorded) -> None:
    """Refuse a query that names a series nobody publishes. Raises ``QueryError`` naming the panel."""
    known = _published() | set(recorded.labels)
    asked = [(f"panel {q.panel_title!r}", q.expr) for q in panel_queries(dashboard)]
    asked += [(f"variable {v.name!r}", v.selector) for v in variable_queries(dashboard)]
    for place, expr in asked:
        names = metric_names(expr)
        if not names:
            raise QueryError(f"{origin}: {place}: names no series of ours: {expr}")
        if unknown := names - known:
            raise QueryError(f"{origin}: {place}: nobody publishes {', '.join(sorted(unknown))}")


def _published() -> set[str]:
    names = set()
    for line in CATALOG:
        if line.since is None:
            continue
        suffixes: Collection[str] = _HISTOGRAM_SERIES if line.kind is Kind.HISTOGRAM else ("",)
        names |= {line.full_name + suffix for suffix in suffixes}
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or with ``--check`` say which differ (exit code 1)."""
    parser = argparse.ArgumentParser(prog="servoscope.dashboards.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if files differ")
    parser.add_argument("--output", type=Path, help="directory (default: the committed one)")
    args = parser.parse_args(argv)
    directory = args.output or generated_directory()
    texts = rendered_dashboards()
    stale = []
    for name, text in texts.items():
        path = directory / name
        if args.check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(str(path))
        else:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if args.check:
        known = {directory / name for name in texts}
        stale += [str(path) for path in sorted(directory.glob("*.json")) if path not in known]
    for path_text in stale:
        sys.stderr.write(
            f"out of date: {path_text} (run python -m servoscope.dashboards.generate)\n"
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
