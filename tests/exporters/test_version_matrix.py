"""Every release for which there is a text, captured or made from its names: one replay each.

A text is any ``metrics*.txt`` (captured) or ``synthetic.txt`` (made by ``synthesis.py``) below
``tests/fixtures/engines/<engine>/<version>``: a new folder is found by itself. What a captured text
holds that no table can know (labels of the operator who ran it) is declared beside it, one a line,
in ``<name>.unknown``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporters.synthesis import COUNT, FIXTURES, RATIO, synthesize
from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.records import EngineSample
from servoscope.exporters.table import Table

TEXTS = sorted(
    path
    for engine in ENGINES
    for pattern in ("metrics*.txt", "synthetic.txt")
    for path in (FIXTURES / engine).glob(f"*/**/{pattern}")
)


def place(path: Path) -> tuple[str, str, str]:
    """Engine, version, and the text's name within it."""
    engine, version, *rest = path.relative_to(FIXTURES).parts
    return engine, version, "/".join(rest)


def releases(engine: str, pattern: str = "*.txt") -> set[str]:
    return {place(path)[1] for path in (FIXTURES / engine).glob(f"*/**/{pattern}")}


def families(text: str, table: Table) -> set[str]:
    """Names of the engine's own metrics in a text, as prometheus_client tells them apart."""
    names = {f.name for f in text_string_to_metric_families(text)}
    return {name for name in names if name.startswith(table.prefixes)}


def short(name: str, table: Table) -> str:
    prefix = next(p for p in table.prefixes if name.startswith(p))
    return name.removeprefix(prefix).removesuffix("_created").removesuffix("_total")


def check_core_signals(sample: EngineSample, table: Table, version: str) -> None:
    """Each is found, or declared absent for that version, or waits for its first event."""
    found = {r.name for r in sample.readings} | {h.name for h in sample.histograms}
    for signal in table.core:
        lines = table.lines_of(signal, version)
        if signal in found:
            assert lines, f"{signal} is in {version}, and the table does not expect it there"
            assert signal not in sample.absent
        else:
            assert signal in sample.absent
            assert all(line.after for line in lines), f"{signal} is expected in {version}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: "-".join(place(p)))
def test_every_release_is_read_whole(path: Path) -> None:
    engine, version, _ = place(path)
    parser = parser_for(engine, version)
    table, text = parser.table, path.read_text(encoding="utf-8")
    expected = path.with_suffix(".unknown")
    declared = expected.read_text(encoding="utf-8").split("\n") if expected.is_file() else []
    for _ in range(2):  # the second time through the caches
        sample = parser.parse(text)
        check_core_signals(sample, table, version)
        assert sample.refused == ()
        assert list(sample.unknown) == [line for line in declared if line]
    known = {line.name for line in table.lines} | table.not_used
    names = families(text, table)
    unreported = {
        name for name in names if short(name, table) not in known and name not in sample.unknown
    }
    assert unreported == set()
    assert len(names) >= 10
    if path.name == "synthetic.txt":
        ranks = 2 if f'{table.rank_label}="1"' in text else 1
        assert sample.total("running") == COUNT * ranks
        assert sample.peak("kv_usage_ratio") == RATIO


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.glob("*/*/names.txt")), ids=lambda p: "-".join(p.parts[-3:-1])
)
def test_synthetic_texts_are_what_their_names_give(path: Path) -> None:
    engine, version = path.parts[-3:-1]
    made = synthesize(engine, version, path.read_text(encoding="utf-8"))
    committed = (path.parent / "synthetic.txt").read_text(encoding="utf-8")
    assert committed == made, "run: python tests/exporters/synthesis.py"


def test_there_are_the_releases_people_run() -> None:
    assert len(releases("vllm")) >= 10
    assert len(releases("sglang")) >= 4
    assert {"0.8.5", "0.9.2", "0.10.2", "0.12.0", "0.16.0", "0.20.2", "0.32.0"} <= releases("vllm")
    assert {"0.3.6", "0.4.6", "0.5.3", "0.5.9", "0.5.23"} <= releases("sglang")
    for engine in ENGINES:
        assert releases(engine, "metrics*.txt"), f"nothing of {engine} was captured"


@pytest.mark.parametrize("engine", ENGINES)
def test_names_and_values_of_a_later_release_are_reported(engine: str) -> None:
    parser = parser_for(engine, "99.0")
    prefix = parser.table.prefixes[0]
    running = next(line for line in parser.table.lines if line.signal == "running")
    sample = parser.parse(
        f"# TYPE {prefix}of_tomorrow_seconds histogram\n"
        f'{prefix}of_tomorrow_seconds_bucket{{le="+Inf"}} 1\n'
        f"{prefix}of_tomorrow_seconds_sum 1\n{prefix}of_tomorrow_seconds_count 1\n"
        f"{prefix}{running.name}_v2 3\n{prefix}{running.name} 2\n"
    )
    assert sample.unknown == (f"{prefix}of_tomorrow_seconds", f"{prefix}{running.name}_v2")
    assert sample.total("running") == 2
