"""From names to signals: suffixes, ranks, processes, unexpected labels, names nobody knows."""

from __future__ import annotations

import pytest

from servoscope.exporters import mapping
from servoscope.exporters.catalog import Kind
from servoscope.exporters.exposition import TextParser
from servoscope.exporters.mapping import Mapper
from servoscope.exporters.records import EngineSample
from servoscope.exporters.table import Line, Ranks, Table

TABLE = Table(
    engine="test",
    prefixes=("t:", "t_"),
    lines=(
        Line("busy", "running", Kind.GAUGE, Ranks.SUM),
        Line("full", "kv_usage_ratio", Kind.GAUGE, Ranks.MAX),
        Line("full_old", "kv_usage_ratio", Kind.GAUGE, Ranks.MAX, preference=1),
        Line("done", "engine_requests_total", Kind.COUNTER, Ranks.SUM,
             renamed=(("why", "finish_reason"),)),
        Line("took_seconds", "reported_e2e_seconds", Kind.HISTOGRAM, Ranks.SUM),
        Line("lasted_seconds", "reported_e2e_seconds", Kind.HISTOGRAM, Ranks.SUM, preference=1),
        Line("looked", "kv_query_tokens_total", Kind.COUNTER, Ranks.SUM,
             where=(("how", ("new", "found")),)),
        Line("looked", "kv_hit_tokens_total", Kind.COUNTER, Ranks.SUM,
             where=(("how", ("found", "")),)),
        Line("line", "waiting", Kind.GAUGE, Ranks.SUM, whole=(("class", ""),)),
    ),
    not_used=frozenset({"boring", "boring_seconds"}),
    core=("running", "kv_usage_ratio", "waiting"),
    rank_label="engine",
    mirror_labels=frozenset({"tp", "pp"}),
    kept_labels=("model_name",),
    renamed_labels=(("name", "model_name"),),
    ignored_labels=frozenset({"WorkerId"}),
    not_used_series=frozenset({("looked", "how", "guessed")}),
)  # fmt: skip


class Reader:
    def __init__(self) -> None:
        self.text = TextParser()
        self.mapper = Mapper(TABLE, "1.0")

    def __call__(self, *lines: str) -> EngineSample:
        return self.mapper.sample(self.text.parse("".join(line + "\n" for line in lines)))


@pytest.fixture
def read() -> Reader:
    return Reader()


def values(sample: EngineSample) -> dict[tuple[object, ...], float]:
    return {(r.name, *r.labels): r.value for r in sample.readings}


def histogram(name: str, labels: str = "", count: int = 2) -> tuple[str, ...]:
    return (
        f'{name}_bucket{{{labels}le="0.5"}} 1',
        f'{name}_bucket{{{labels}le="+Inf"}} {count}',
        f"{name}_sum{{{labels.rstrip(',')}}} 3",
        f"{name}_count{{{labels.rstrip(',')}}} {count}",
    )


def test_ranks_stay_apart_and_are_put_together_on_demand(read: Reader) -> None:
    sample = read(
        't:busy{engine="0",model_name="m"} 3',
        't:busy{engine="1",model_name="m"} 4',
        't:full{engine="0",model_name="m"} 0.25',
        't:full{engine="1",model_name="m"} 0.75',
    )
    model = ("model_name", "m")
    assert values(sample) == {
        ("running", model, ("rank", "0")): 3,
        ("running", model, ("rank", "1")): 4,
        ("kv_usage_ratio", model, ("rank", "0")): 0.25,
        ("kv_usage_ratio", model, ("rank", "1")): 0.75,
    }
    assert sample.total("running") == 7
    assert sample.peak("kv_usage_ratio") == 0.75
    assert sample.unknown == ()


def test_every_prefix_and_both_spellings_of_a_counter(read: Reader) -> None:
    for name in ("t:done_total", "t:done", "t_done_total", "t_done"):
        sample = read(f'{name}{{why="stop"}} 5')
        assert values(sample) == {("engine_requests_total", ("finish_reason", "stop")): 5}


def test_other_peoples_metrics_are_neither_read_nor_unknown(read: Reader) -> None:
    sample = read("process_cpu_seconds_total 5", "python_info 1", "u:busy 5", "busy 7")
    assert sample.readings == ()
    assert sample.unknown == ()
    assert sample.absent == ("running", "kv_usage_ratio", "waiting")


def test_known_but_not_used_is_not_unknown(read: Reader) -> None:
    sample = read(
        "t:boring 1", "t:boring_total 1", "t:boring_created 1", *histogram("t:boring_seconds")
    )
    assert (sample.readings, sample.histograms, sample.unknown) == ((), (), ())


def test_created_times_are_left_out(read: Reader) -> None:
    sample = read('t:done_total{why="stop"} 1', 't:done_created{why="stop"} 1.7e9')
    assert [r.value for r in sample.readings] == [1]
    assert sample.unknown == ()


def test_a_new_name_is_reported_once_by_its_family(read: Reader) -> None:
    sample = read(
        "# TYPE t:novel_seconds histogram",
        *histogram("t:novel_seconds"),
        "# TYPE t:novel_total counter",
        "t:novel_total 1",
        "t:novel_created 1.7e9",
        't:strange{a="1"} 1',
        't:strange{a="2"} 1',
    )
    assert sample.unknown == ("t:novel_seconds", "t:novel_total", "t:strange")
    assert read("t:busy 1").unknown == ()  # gone from the text, gone from the report


def test_a_name_that_became_another_kind_is_reported_not_guessed(read: Reader) -> None:
    sample = read("# TYPE t:busy histogram", *histogram("t:busy"), "t:took_seconds 4")
    assert sample.readings == ()
    assert sample.histograms == ()
    assert sample.unknown == ("t:busy", "t:took_seconds")


def test_of_an_old_and_a_new_name_only_the_new_counts(read: Reader) -> None:
    both = read('t:full{engine="0"} 0.5', 't:full_old{engine="0"} 0.9')
    assert values(both) == {("kv_usage_ratio", ("rank", "0")): 0.5}
    assert values(read('t:full_old{engine="0"} 0.9')) == {("kv_usage_ratio", ("rank", "0")): 0.9}
    both = read(*histogram("t:took_seconds"), *histogram("t:lasted_seconds", count=9))
    assert [h.count for h in both.histograms] == [2]
    assert [h.count for h in read(*histogram("t:lasted_seconds", count=9)).histograms] == [9]


def test_series_of_several_deployments_are_put_together(read: Reader) -> None:
    sample = read(
        't:busy{WorkerId="a",engine="0"} 3',
        't:busy{WorkerId="b",engine="0"} 4',
        't:full{WorkerId="a",engine="0"} 0.25',
        't:full{WorkerId="b",engine="0"} 0.5',
        *histogram("t:took_seconds", 'WorkerId="a",'),
        *histogram("t:took_seconds", 'WorkerId="b",'),
    )
    assert values(sample) == {
        ("running", ("rank", "0")): 7,
        ("kv_usage_ratio", ("rank", "0")): 0.5,
    }
    assert [(h.count, h.buckets[0]) for h in sample.histograms] == [(4, (0.5, 2))]
    assert sample.unknown == ()


def test_an_unexpected_label_is_reported_and_its_series_put_together(read: Reader) -> None:
    sample = read('t:done_total{why="stop",zone="a"} 3', 't:done_total{why="stop",zone="b"} 4')
    assert values(sample) == {("engine_requests_total", ("finish_reason", "stop")): 7}
    assert sample.unknown == ("t:done_total{zone}",)


def test_a_label_nobody_knows_is_reported_once(read: Reader) -> None:
    sample = read(
        't:busy{zone="a"} 3', 't:done_total{why="stop",zone="a"} 3', *histogram(
            "t:took_seconds", 'zone="a",'
        ), 't:full{row="1",zone="a"} 0.5',
    )  # fmt: skip
    assert sample.unknown == ("t:busy{zone}", "t:full{row}")


def test_series_are_told_apart_by_a_value(read: Reader) -> None:
    sample = read(
        't:looked_total{how="new"} 5',
        't:looked_total{how="found"} 3',
        't:looked_total{how="guessed"} 100',
        't:looked_total{how="stolen"} 100',
    )
    assert values(sample) == {("kv_query_tokens_total",): 8, ("kv_hit_tokens_total",): 3}
    assert sample.unknown == ('t:looked_total{how="stolen"}',)
    assert values(read("t:looked_total 4")) == {("kv_hit_tokens_total",): 4}


def test_parts_of_a_total_do_not_count_beside_it(read: Reader) -> None:
    sample = read('t:line{class=""} 5', 't:line{class="1"} 2', 't:line{class="2"} 3')
    assert sample.total("waiting") == 5
    assert sample.unknown == ()
    assert read("t:line 4").total("waiting") == 4


def test_processes_with_the_same_requests_count_once(read: Reader) -> None:
    sample = read(
        't:busy{tp="0",pp="0",WorkerId="a"} 3',
        't:busy{tp="1",pp="0",WorkerId="a"} 4',
        't:busy{tp="0",pp="1",WorkerId="a"} 1',
        't:busy{tp="0",pp="0",WorkerId="b"} 10',
        *histogram("t:took_seconds", 'tp="0",', count=5),
        *histogram("t:took_seconds", 'tp="1",', count=9),
        *histogram("t:took_seconds", 'tp="2",', count=7),
    )
    assert sample.total("running") == 4 + 10
    assert [h.count for h in sample.histograms] == [9]
    assert sample.unknown == ()


def test_an_older_label_is_kept_under_our_name(read: Reader) -> None:
    assert values(read('t:busy{name="m"} 3')) == {("running", ("model_name", "m")): 3}


def test_the_preferred_source_counts_also_where_only_one_of_them_has_ranks(read: Reader) -> None:
    sample = read(
        't:full{engine="0",model_name="m"} 0.5', 't:full{engine="1",model_name="m"} 0.25',
        't:full_old{model_name="m"} 0.75', 't:full_old{model_name="other"} 1',
    )  # fmt: skip
    assert sorted(r.value for r in sample.readings) == [0.25, 0.5, 1]


def test_a_gauge_split_by_process_follows_the_one_that_changed_last(read: Reader) -> None:
    def running(first: int, second: int) -> float | None:
        sample = read(f't:busy{{pid="11"}} {first}', f't:busy{{pid="12"}} {second}')
        assert sample.unknown == ("t:busy{pid}",)
        return sample.total("running")

    assert running(7, 3) == 7  # nothing known yet: the largest
    assert running(7, 2) == 2  # 11 stands still at 7: it no longer gets updates
    assert running(7, 0) == 0
    assert running(5, 0) == 5
    assert running(5, 0) == 5


def test_refused_values_do_not_make_a_signal_absent(read: Reader) -> None:
    sample = read('t:busy{engine="0"} NaN', 't:busy{engine="1"} 2', "t:full 7")
    assert values(sample) == {("running", ("rank", "1")): 2}
    assert {(r.name, r.value, r.why) for r in sample.refused} == {
        ("t:busy", "nan", "not a finite number"),
        ("t:full", "7.0", "ratio above 1"),
    }
    assert sample.absent == ("waiting",)


def test_lines_that_could_not_be_read_are_in_the_sample(read: Reader) -> None:
    sample = read("t:busy", "t:full 0.5")
    assert [r.name for r in sample.refused] == ["line"]
    assert sample.total("kv_usage_ratio") == 0.5


def test_a_bucket_edge_that_is_no_number_refuses_its_histogram(read: Reader) -> None:
    lines = [line.replace("0.5", "half") for line in histogram("t:took_seconds")]
    sample = read(*lines, "t:busy 1")
    assert sample.histograms == ()
    assert [r.name for r in sample.refused] == ["t:took_seconds"]
    assert sample.total("running") == 1


def test_ten_thousand_unknown_names_are_bounded(read: Reader) -> None:
    sample = read(*(f"t:novel_{i} 1" for i in range(10_000)), "t:busy 1")
    assert len(sample.unknown) == mapping.MAX_UNKNOWN
    assert sample.total("running") == 1


def test_series_that_come_and_go_do_not_pile_up(read: Reader) -> None:
    for scrape in range(60):
        lines = [f't:busy{{model_name="{scrape}-{i}",pid="{i}"}} 1' for i in range(100)]
        read(*lines, f"t:novel_{scrape} 1", *histogram("t:took_seconds", f'WorkerId="{scrape}",'))
    limit = 2 * 105 + 1_024 + 105
    for table in (
        read.mapper._plan, read.mapper._groups, read.mapper._unknown, read.mapper._changes
    ):  # fmt: skip
        assert len(table) <= 2 * limit
