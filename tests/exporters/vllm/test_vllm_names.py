"""The table against the names of every release that was read, one replay each."""

from __future__ import annotations

from pathlib import Path

import pytest

from servoscope.exporters.table import parse_version
from servoscope.exporters.vllm.names import TABLE
from servoscope.exporters.vllm.parse import Parser

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "vllm"
RELEASES = sorted(
    (path.parent.name for path in FIXTURES.glob("*/names.txt")),
    key=lambda v: parse_version(v) or (),
)
LINES = {line.name: line for line in TABLE.lines}


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "ray_vllm:", "ray_vllm_"])
@pytest.mark.parametrize("release", RELEASES)
def test_every_release_with_every_prefix(release: str, prefix: str) -> None:
    text = (FIXTURES / release / "synthetic.txt").read_text(encoding="utf-8")
    sample = Parser(release).parse(text.replace("vllm:", prefix))
    assert (sample.unknown, sample.refused) == ((), ())
    assert sample.absent == TABLE.absent_in(release)


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
