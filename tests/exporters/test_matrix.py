"""The generated part of docs/engines.md."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from servoscope.exporters import generate
from servoscope.exporters.catalog import Kind
from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.matrix import BEGIN, END, Release, render_matrix, with_matrix
from servoscope.exporters.table import Line, Ranks, Table

ROOT = Path(__file__).parents[2]
TABLE = Table(
    engine="x",
    prefixes=("x:",),
    lines=(
        Line("busy", "running", Kind.GAUGE, Ranks.SUM, since="0.2"),
        Line("full", "kv_usage_ratio", Kind.GAUGE, Ranks.MAX, since="0.10"),
        Line("full_old", "kv_usage_ratio", Kind.GAUGE, Ranks.MAX, until="0.10", preference=1),
        Line("lost", "preemptions_total", Kind.COUNTER, Ranks.SUM, after="a loss",
             where=(("how", ("", "bad")),)),
    ),
    not_used=frozenset(),
    core=("running", "kv_usage_ratio", "waiting"),
)  # fmt: skip


def test_what_each_release_has_and_from_which_name() -> None:
    page = render_matrix([TABLE], {"x": [Release("0.10", True), Release("0.1", False)]})
    assert "| signal | ranks | 0.1 | 0.10 |" in page  # by version, not by spelling
    assert "|  | names | captured |" in page
    assert "| `running` | sum | - | yes |" in page
    assert "| `waiting` |  | - | - |" in page
    assert "| `preemptions_total` | sum | yes\\* | yes\\* |" in page
    assert "- `kv_usage_ratio`: `full` (from 0.10); else `full_old` (before 0.10)" in page
    assert "- `preemptions_total`: `lost{how=none/bad}`" in page
    assert "`preemptions_total`: a loss." in page


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_matrix(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for broken in ("", f"{BEGIN}\n", f"{END}\n"):
        with pytest.raises(ValueError, match="the page lacks"):
            with_matrix(broken, "new")


def test_the_page_is_current_and_has_every_engine() -> None:
    page = (ROOT / generate.ENGINES_PAGE).read_text(encoding="utf-8")
    found = generate.releases(ROOT)
    tables = [parser_for(engine, None).table for engine in ENGINES]
    current = with_matrix(page, render_matrix(tables, found))
    assert page == current, "run: python -m servoscope.exporters.generate"
    for engine in ENGINES:
        assert found[engine]
        for line in parser_for(engine, None).table.lines:
            assert f"`{line.name}" in page
        for release in found[engine]:
            assert f" {release.version} |" in page


def test_the_generator_fills_the_page_by_hand(tmp_path: Path) -> None:
    page = tmp_path / generate.ENGINES_PAGE
    page.parent.mkdir()
    page.write_text(f"mine\n{BEGIN}\n{END}\n", encoding="utf-8")
    root = ["--root", str(tmp_path)]
    assert generate.main([*root, "--check"], io.StringIO()) == 1
    assert generate.main(root, io.StringIO()) == 0
    assert generate.main([*root, "--check"], io.StringIO()) == 0
    assert page.read_text(encoding="utf-8").startswith(f"mine\n{BEGIN}\n### vLLM\n")
