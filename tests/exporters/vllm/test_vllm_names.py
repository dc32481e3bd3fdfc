"""The table against the names of every release that was read, one replay each."""

from __future__ import annotations

from pathlib import Path

import pytest

from servoscope.exporters.catalog import Kind
from servoscope.exporters.table import parse_version
from servoscope.exporters.vllm.names import TABLE
from servoscope.exporters.vllm.parse import Parser

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "vllm"
RELEASES = sorted(
    (path.parent.name for path in FIXTURES.glob("*/names.txt")),
    key=lambda v: parse_version(v) or (),
)
LINES = {line.name: line for line in TABLE.lines}


def short(name: str) -> str:
    return name.removeprefix("vllm:").removesuffix("_total")


def exposition(names: list[str], prefix: str = "vllm:") -> str:
    """What a server of that release would print, one series a name (four for a histogram)."""
    out: list[str] = []
    for name in names:
        line = LINES.get(short(name))
        full = prefix + name.removeprefix("vllm:")
        if line is not None and line.kind is Kind.HISTOGRAM:
            out += [
                f"# TYPE {full} histogram",
                f'{full}_bucket{{engine="0",model_name="m",le="0.3"}} 1',
                f'{full}_bucket{{engine="0",model_name="m",le="+Inf"}} 2',
                f'{full}_sum{{engine="0",model_name="m"}} 1.5',
                f'{full}_count{{engine="0",model_name="m"}} 2',
            ]
        elif line is not None and line.kind is Kind.GAUGE:
            out.append(f'{full}{{engine="0",model_name="m"}} 0.5')
        else:
            counter = full if full.endswith("_total") else f"{full}_total"
            out += [
                f"# TYPE {counter} counter",
                f'{counter}{{engine="0",model_name="m"}} {1 if "hits" in name else 3}',
                f'{counter.removesuffix("_total")}_created{{engine="0",model_name="m"}} 1.7e9',
            ]
    return "\n".join(out) + "\n"


def test_there_are_the_releases_people_run() -> None:
    assert len(RELEASES) == 9
    assert RELEASES[0] == "0.8.5"
    assert RELEASES[-1] == "0.33.0"


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "ray_vllm:", "ray_vllm_"])
@pytest.mark.parametrize("release", RELEASES)
def test_replay_of_every_release(release: str, prefix: str) -> None:
    names = (FIXTURES / release / "names.txt").read_text(encoding="utf-8").split()
    sample = Parser(release).parse(exposition(names, prefix))
    assert sample.unknown == ()
    assert sample.refused == ()
    assert sample.absent == TABLE.absent_in(release)  # found, or declared absent: nothing else
    found = {r.name for r in sample.readings} | {h.name for h in sample.histograms}
    assert set(TABLE.core) - set(sample.absent) <= found


def test_what_old_releases_do_not_have() -> None:
    assert TABLE.absent_in("0.8.5") == ("reported_time_per_output_token_seconds",)
    assert TABLE.absent_in("0.11.0") == ()
    assert TABLE.absent_in("0.33.0") == ()


def test_a_name_of_a_later_release_is_reported() -> None:
    sample = Parser("0.40.0").parse(
        "vllm:prefix_cache_hits_v2_total 3\nvllm:num_requests_running 1\n"
    )
    assert sample.unknown == ("vllm:prefix_cache_hits_v2_total",)
    assert sample.total("running") == 1


def test_versions_of_the_table_agree_with_the_sources() -> None:
    rows = (FIXTURES / "matrix.txt").read_text(encoding="utf-8").splitlines()
    releases = rows[0].split()[1:]
    checked = 0
    for row in rows[1:]:
        name, *cells = row.split()
        line = LINES.get(name)
        if line is None:
            assert name in TABLE.not_used, name
            continue
        in_it = [release for release, cell in zip(releases, cells, strict=True) if cell != "no"]
        since, until = parse_version(line.since) or (0,), parse_version(line.until) or (999,)
        expected = [r for r in releases if since <= (parse_version(r) or ()) < until]
        assert in_it == expected, name
        checked += 1
    assert checked >= 8
