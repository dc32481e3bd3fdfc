"""Conventions of every published name, and the page that is generated from them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from servoscope.exporters import generate
from servoscope.exporters.catalog import (
    CATALOG,
    LATENCY_BUCKETS_SECONDS,
    TOKEN_BUCKETS,
    Kind,
    Metric,
    metric,
    render_markdown,
)

ROOT = Path(__file__).parents[2]
PARTS = {"request", "slo", "engine", "gpu", "control", "drift", "self", "collector"}
UNITS = {"seconds", "tokens", "bytes", "ratio", "watts", "celsius", "hertz", "1"}
EACH = pytest.mark.parametrize("line", CATALOG, ids=lambda m: m.name)


def test_names_are_unique() -> None:
    names = [m.name for m in CATALOG]
    assert len(names) == len(set(names))
    # A histogram takes three names of its own, a counter one.
    series = [
        m.full_name + suffix
        for m in CATALOG
        for suffix in (("_bucket", "_sum", "_count") if m.kind is Kind.HISTOGRAM else ("",))
    ]
    assert len(series) == len(set(series))


@EACH
def test_conventions(line: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", line.name)
    assert not line.name.startswith("servoscope_")
    assert "__" not in line.name
    assert (line.kind is Kind.COUNTER) == line.name.endswith("_total")
    assert line.part in PARTS
    assert line.unit in UNITS
    if line.unit != "1":
        stem = line.name.removesuffix("_total")
        if line.unit == "tokens":
            assert "tokens" in stem
        else:
            assert stem.endswith(f"_{line.unit}")
    assert not line.name.endswith(("_bucket", "_sum", "_count", "_created"))


@EACH
def test_help_is_a_sentence(line: Metric) -> None:
    assert line.help[0].isupper() or line.help[0] in "(1"
    assert line.help.endswith(".")
    assert "\n" not in line.help
    assert "|" not in line.help  # it stands in a table
    assert len(line.help) <= 160


@EACH
def test_labels_are_valid_and_none_is_reserved(line: Metric) -> None:
    assert len(line.labels) == len(set(line.labels))
    for label in line.labels:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", label)
        assert label not in {"le", "quantile", "job", "instance"}


@EACH
def test_histograms_have_edges_and_others_have_none(line: Metric) -> None:
    assert bool(line.buckets) == (line.kind is Kind.HISTOGRAM)
    assert line.kind is not Kind.HISTOGRAM or line.unit in {"seconds", "tokens"}


@pytest.mark.parametrize("edges", [LATENCY_BUCKETS_SECONDS, TOKEN_BUCKETS])
def test_grids_rise_and_leave_infinity_to_the_writer(edges: tuple[float, ...]) -> None:
    assert list(edges) == sorted(set(edges))
    assert edges[0] > 0
    assert edges[-1] < float("inf")


def test_lines_are_found_by_name() -> None:
    assert metric("running").full_name == "servoscope_running"
    with pytest.raises(KeyError):
        metric("servoscope_running")


def test_the_page_names_every_metric_and_is_current() -> None:
    page = (ROOT / generate.PAGE).read_text(encoding="utf-8")
    assert page == render_markdown(), "run: python -m servoscope.exporters.generate"
    for line in CATALOG:
        assert f"| `{line.name}` |" in page


def test_the_generator_writes_checks_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    root = ["--root", str(tmp_path)]
    assert generate.main([*root, "--check"], out) == 1
    assert "out of date" in capsys.readouterr().err
    assert not (tmp_path / generate.PAGE).exists()
    assert generate.main(root, out) == 0
    assert (tmp_path / generate.PAGE).read_text(encoding="utf-8") == render_markdown()
    assert generate.main([*root, "--check"], out) == 0
    (tmp_path / generate.PAGE).write_text("edited by hand")
    assert generate.main([*root, "--check"], out) == 1
    assert generate.main(root, out) == 0
    assert out.getvalue().count("written") == 2
