"""Texts no release wrote yet: both prefixes at once, kinds that changed, labels without a value,
numbers beyond belief. Whatever a fork or the next release does, nothing counts twice or raises.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servoscope.exporters.assembly import MAX_VALUE
from servoscope.exporters.catalog import Kind
from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.exposition import TextParser
from servoscope.exporters.records import EngineSample
from servoscope.exporters.report import report_of
from servoscope.exporters.table import Line, Table

TABLES = [parser_for(engine, None).table for engine in ENGINES]
EACH = pytest.mark.parametrize("table", TABLES, ids=lambda t: t.engine)


def series(prefix: str, line: Line, labels: str, value: float) -> list[str]:
    """All lines of one metric with these labels, as an engine would write them."""
    told = [f'{name}="{values[0]}"' for name, values in line.where if values[0]]
    told += [labels] if labels else []
    name, inside = prefix + line.name, ",".join(told)
    if line.kind is Kind.HISTOGRAM:
        edges = [f'{inside}{"," if inside else ""}le="{edge}"' for edge in ("1.0", "+Inf")]
        return [
            *(f"{name}_bucket{{{edge}}} {value!r}" for edge in edges),
            f"{name}_sum{{{inside}}} {value!r}",
            f"{name}_count{{{inside}}} {value!r}",
        ]
    return [f"{name}{'_total' if line.kind is Kind.COUNTER else ''}{{{inside}}} {value!r}"]


def read(table: Table, lines: list[str]) -> EngineSample:
    return parser_for(table.engine, None).parse("".join(f"{line}\n" for line in lines))


def told(sample: EngineSample) -> dict[object, object]:
    numbers: dict[object, object] = {(r.name, r.labels): r.value for r in sample.readings}
    return numbers | {(h.name, h.labels): (h.buckets, h.sum, h.count) for h in sample.histograms}


@EACH
def test_a_metric_under_several_spellings_is_one_metric(table: Table) -> None:
    plain = [text for line in table.lines for text in series(table.prefixes[0], line, "", 0.5)]
    once = told(read(table, plain))
    assert once
    for prefix in table.prefixes[1:]:
        both = [*plain, *(prefix + text.removeprefix(table.prefixes[0]) for text in plain)]
        assert told(read(table, both)) == once
    # A counter as a gauge of its name beside the counter: what some gateways leave behind.
    assert told(read(table, [*plain, *(x.replace("_total{", "{") for x in plain)])) == once


@EACH
def test_spellings_of_unlike_replicas_are_still_summed(table: Table) -> None:
    name = next(x.name for x in table.lines if x.signal == "running")
    lines = [f'{p}{name}{{server="{i}"}} {i + 1}' for i, p in enumerate(table.prefixes)]
    sample = read(table, lines)
    assert sample.total("running") == sum(range(1, len(lines) + 1))
    assert [x for x in sample.unknown if x.endswith("{server}")]


@EACH
def test_the_count_of_something_is_not_taken_for_the_gauge_of_its_name(table: Table) -> None:
    for line in table.lines:
        if line.kind is not Kind.GAUGE:
            continue
        name = f"{table.prefixes[0]}{line.name}"
        sample = read(table, [f"{name} 0.25", f"{name}_total 0.75"])
        assert sample.total(line.signal) == 0.25
        assert sample.unknown == (f"{name}_total",)
        alone = read(table, [f"# TYPE {name}_total counter", f"{name}_total 0.75"])
        assert (alone.readings, alone.unknown) == ((), (f"{name}_total",))


@EACH
@pytest.mark.parametrize("label", ["pid", "WorkerId", "x"])
@pytest.mark.parametrize("value", [MAX_VALUE * 1.01, 1e200, 1.7e308])
@pytest.mark.parametrize("ranks", [1, 4])
def test_numbers_beyond_belief_raise_nowhere_and_are_refused(
    table: Table, label: str, value: float, ranks: int
) -> None:
    ours, told_by = table.prefixes[0], [f'{label}="{rank}"' for rank in range(ranks)]
    lines = list(dict.fromkeys(
        text for line in table.lines for who in told_by for text in series(ours, line, who, value)
    ))  # fmt: skip
    sample = read(table, lines)
    assert (sample.readings, sample.histograms) == ((), ())
    assert {r.why for r in sample.refused} == {f"more than {MAX_VALUE:g}"}
    assert not {x.signal for x in table.lines} & set(sample.absent)  # bad values are not absence
    text = "".join(f"{line}\n" for line in lines)
    json.dumps(report_of(text, engine=table.engine), allow_nan=False)


@EACH
@settings(max_examples=25)
@given(value=st.floats(min_value=0, max_value=MAX_VALUE), ranks=st.integers(2, 64))
def test_sums_of_the_largest_numbers_stay_finite(table: Table, value: float, ranks: int) -> None:
    line = next(x for x in table.lines if x.signal == "running")
    lines = [f'{table.prefixes[0]}{line.name}{{x="{rank}"}} {value!r}' for rank in range(ranks)]
    assert read(table, lines).total("running") == math.fsum([value] * ranks)


@EACH
def test_processes_of_one_replica_do_not_hide_another_replica(table: Table) -> None:
    """Known fault 18 behind a router: the last to change of EACH replica, then their sum."""
    by_signal = {line.signal: table.prefixes[0] + line.name for line in table.lines}
    busy, full = by_signal["running"], by_signal["kv_usage_ratio"]
    parser = parser_for(table.engine, None)

    def sample(values: dict[tuple[str, int], int]) -> EngineSample:
        pairs = [(f'{{server="{s}",pid="{p}"}}', v) for (s, p), v in values.items()]
        return parser.parse(
            "".join(f"{busy}{labels} {v}\n{full}{labels} {v / 10}\n" for labels, v in pairs)
        )

    sample({("a", 1): 5, ("a", 2): 3, ("b", 1): 4, ("b", 2): 9})
    later = sample({("a", 1): 5, ("a", 2): 2, ("b", 1): 1, ("b", 2): 9})
    assert later.total("running") == 2 + 1
    assert later.peak("kv_usage_ratio") == 0.2


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.sampled_from(["", "v"]), max_size=5
    )
)
def test_a_label_without_a_value_is_no_label(labels: dict[str, str]) -> None:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    (found,) = TextParser().parse(f"m{{{inside}}} 1\n").samples
    assert dict(found.labels) == {name: value for name, value in labels.items() if value}


def test_a_series_with_and_without_an_empty_label_counts_once() -> None:
    table = TABLES[0]
    sample = read(
        table, ['vllm:num_requests_running{engine="0",role=""} 3',
                'vllm:num_requests_running{engine="0"} 3'],
    )  # fmt: skip
    assert sample.total("running") == 3
    assert sample.unknown == ()
    assert [r.why for r in sample.refused] == ["series written twice: the last value was taken"]
    with_twice = TextParser().parse('m{a="",a="x"} 1\n')
    assert with_twice.refused_total == 1
