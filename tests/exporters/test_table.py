"""Tables: versions, what a version offers, and that every table agrees with the catalogue."""

from __future__ import annotations

import pytest

from servoscope.exporters.catalog import Kind, metric
from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.table import Line, Ranks, Table, parse_version

TABLES = pytest.mark.parametrize(
    "table", [parser_for(engine, None).table for engine in ENGINES], ids=lambda t: t.engine
)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.10.2", (0, 10, 2)),
        ("v0.8.5", (0, 8, 5)),
        (" 0.32.0+cpu\n", (0, 32, 0)),
        ("0.10.2.dev12+g1a2b3c", (0, 10, 2)),
        ("0.9.0rc1", (0, 9, 0)),
        ("b11549", (11549,)),
        ("1.2.3.4.5", (1, 2, 3, 4)),
        ("", None),
        (None, None),
        ("main", None),
        ("dev-0.1", None),
        ("\u0661.2", None),
        ("9" * 5_000, (999_999_999,)),
        ("0.1.dev11+g1a2b3c", None),  # vLLM and SGLang from a checkout without tags
        ("0.0.0.dev1", None),
        ("v0.0.0", None),
        ("0.1.3", (0, 1, 3)),
    ],
)
def test_versions(text: str | None, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_what_a_version_does_not_offer_is_absent_in_it() -> None:
    line = Line("a", "running", Kind.GAUGE, Ranks.SUM, since="0.9.0", until="0.12.0")
    table = Table(
        engine="x", prefixes=("x:",), lines=(line,), not_used=frozenset(), core=("running",)
    )
    assert table.absent_in("0.8.9") == ("running",)
    assert table.absent_in("0.9.0") == ()
    assert table.absent_in("0.11.9") == ()
    assert table.absent_in("0.12.0") == ("running",)
    assert table.absent_in(None) == ()
    assert table.absent_in("nightly") == ()
    assert table.lines_of("running", "0.9.0") == (line,)
    assert table.lines_of("running", "0.12.0") == ()
    assert table.lines_of("running", None) == (line,)


@TABLES
def test_lines_agree_with_the_catalogue(table: Table) -> None:
    for line in table.lines:
        ours = metric(line.signal)
        assert ours.kind is line.kind, line
        ratio = ours.unit == "ratio"
        assert line.ranks is (Ranks.MAX if ratio else Ranks.SUM), line
        assert {name for name, _ in line.labels} <= set(ours.labels), line
        assert {name for _, name in line.renamed} <= set(ours.labels), line
        assert not {n for n, _ in line.where} & table.ignored_labels, line


@TABLES
def test_labels_of_a_table_are_one_thing_each(table: Table) -> None:
    groups = [{table.rank_label}, table.mirror_labels, table.ignored_labels, set(table.kept_labels)]
    every = [name for group in groups for name in group]
    assert len(every) == len(set(every))
    assert {name for _, name in table.renamed_labels} <= set(table.kept_labels)
    names = {line.name for line in table.lines}
    assert {name for name, _, _ in table.not_used_series} <= names


@TABLES
def test_names_are_in_their_short_form_and_known_once(table: Table) -> None:
    names = {line.name for line in table.lines}
    assert not names & table.not_used
    for name in names | table.not_used:
        assert not name.endswith("_total")
        assert not name.startswith(table.prefixes)
    assert len(set(table.lines)) == len(table.lines)
    assert {line.signal for line in table.lines} & set(table.core)


@TABLES
def test_versions_of_the_table_are_versions(table: Table) -> None:
    for line in table.lines:
        since, until = parse_version(line.since), parse_version(line.until)
        assert bool(line.since) == (since is not None)
        assert bool(line.until) == (until is not None)
        assert since is None or until is None or since < until
