"""The exposition parser: equal to prometheus_client where both read, and bounded everywhere."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from servoscope.exporters import exposition
from servoscope.exporters.exposition import Exposition, TextParser

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _spelled(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


NAMES = st.from_regex(r"\A[a-zA-Z_:][a-zA-Z0-9_:]{0,20}\Z")
LABEL_NAMES = st.from_regex(r"\A[a-zA-Z][a-zA-Z0-9_]{0,10}\Z").filter(lambda n: n != "__name__")
LABEL_VALUES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=20
) | st.sampled_from(["", "a,b", "}", "{", 'say "x"', "back\\slash", "line\nfeed", "x # y", "a=b"])
NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True).map(_spelled),
    st.integers(-(10**12), 10**12).map(str),
    st.sampled_from(["+Inf", "-Inf", "NaN", "1e3", "0", "-0", "+4", "1.", ".5"]),
)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


QUOTED_NAMES = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12
) | st.sampled_from(["a.b", "a b", 'say "x"', "back\\slash", "line\nfeed", "{", "}", ",", "="])


@st.composite
def sample_lines(draw: st.DrawFn) -> str:
    labels = draw(st.dictionaries(LABEL_NAMES, LABEL_VALUES, max_size=4))
    block = ",".join(f'{n}="{_escaped(v)}"' for n, v in labels.items())
    braces: bool = draw(st.booleans())
    if labels or braces:
        block = "{" + block + draw(st.sampled_from(["", ","] if labels else [""])) + "}"
    space = draw(st.sampled_from([" ", "  ", " "]))
    timestamp = draw(st.sampled_from(["", "", "", " 1795953994087"]))
    return f"{draw(NAMES)}{block}{space}{draw(NUMBERS)}{timestamp}"


@st.composite
def quoted_lines(draw: st.DrawFn) -> str:
    names = QUOTED_NAMES.filter(lambda n: not n.startswith("__"))
    labels = draw(st.dictionaries(names, LABEL_VALUES, max_size=3))
    parts = [f'"{_escaped(draw(QUOTED_NAMES))}"']
    parts += [f'"{_escaped(n)}"="{_escaped(v)}"' for n, v in labels.items()]
    return "{" + ",".join(parts) + "} " + draw(NUMBERS)


def ours(text: str | bytes, parser: TextParser | None = None) -> tuple[Samples, Exposition]:
    read = (parser or TextParser()).parse(text)
    return {(s.name, s.labels): v for s, v in read.samples.items()}, read


def theirs(text: str, *, openmetrics: bool = False) -> Samples:
    families = openmetrics_families if openmetrics else text_string_to_metric_families
    return {  # without empty labels: it keeps what to Prometheus is no label
        (s.name, tuple(sorted(pair for pair in s.labels.items() if pair[1]))): float(s.value)
        for family in families(text)
        for s in family.samples
    }


def same(one: Samples, other: Samples) -> bool:
    return one.keys() == other.keys() and all(
        other[k] == v or (math.isnan(other[k]) and math.isnan(v)) for k, v in one.items()
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(sample_lines(), max_size=8))
def test_reads_what_prometheus_client_reads(lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    parser = TextParser()
    expected = theirs(text)
    for _ in range(2):  # the second time through the cache
        samples, read = ours(text, parser)
        assert same(samples, expected)
        assert not [r for r in read.refused if "twice" not in r.why]


@settings(max_examples=100, deadline=None)
@given(st.lists(sample_lines(), min_size=1, max_size=6), st.data())
def test_later_texts_are_read_as_by_a_new_parser(lines: list[str], data: st.DataObject) -> None:
    parser = TextParser()
    parser.parse("".join(line + "\n" for line in lines))
    changed = [
        f"{line.split('} ')[0]}}} {data.draw(NUMBERS)}" if "} " in line else line for line in lines
    ]
    text = "".join(line + "\n" for line in data.draw(st.permutations(changed)))
    cached, cached_read = ours(text, parser)
    fresh, fresh_read = ours(text)
    assert same(cached, fresh)
    assert cached_read.refused == fresh_read.refused


@settings(max_examples=100, deadline=None)
@given(
    st.lists(sample_lines() | st.sampled_from(["# TYPE a counter", ""]), min_size=1, max_size=6),
    st.data(),
)
def test_a_text_of_the_same_shape_is_read_as_by_a_new_parser(
    lines: list[str], data: st.DataObject
) -> None:
    """The quick way, line beside line: also where a line only looks as if it fitted."""
    parser = TextParser()
    numbers = NUMBERS | st.sampled_from(
        ["", "1_0", "\u0661", "x", " 5", "5 ", "5 179", "5\r", "6 # {} 1", "6\t", "{}", "_"]
    )
    for _ in range(3):
        lines = [
            f"{line[: line.rindex(' ') + 1]}{data.draw(numbers)}"
            if " " in line and data.draw(st.booleans())
            else line
            for line in lines
        ]
        text = "".join(line + "\n" for line in lines)
        quick, quick_read = ours(text, parser)
        fresh, fresh_read = ours(text)
        assert same(quick, fresh)
        assert quick_read.refused == fresh_read.refused
        assert fresh_read.types.items() <= quick_read.types.items()


def test_a_text_that_was_handed_out_stays_as_it_was() -> None:
    parser = TextParser()
    first = parser.parse("a 1\nb 2\n")
    second = parser.parse("a 3\nb 2\n")
    assert sorted(first.samples.values()) == [1, 2]
    assert sorted(second.samples.values()) == [2, 3]


def test_types_survive_that_older_ones_are_forgotten() -> None:
    parser = TextParser()
    for i in range(2_000):  # more types than are kept
        parser.parse(f"# TYPE a{i} gauge\na{i} 1\n")
    for number in range(3):
        assert parser.parse(f"# TYPE a counter\na {number}\n").types["a"] == "counter"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        sample_lines()
        | st.text(max_size=40)
        | st.text(alphabet='a{}="\\,# 1\t', max_size=40)
        | st.sampled_from(["# TYPE a counter", "# HELP a b", "# UNIT a seconds", "# EOF", "#", ""]),
        max_size=8,
    ),
)
def test_no_text_raises_and_no_good_line_is_lost(lines: list[str]) -> None:
    parser = TextParser()
    good = 'survivor{a="b"} 42'
    text = "\n".join([good, *lines, "survivor_2 43", ""])
    for _ in range(2):
        samples, read = ours(text, parser)
        assert samples["survivor", (("a", "b"),)] is not None
        assert samples["survivor_2", ()] == 43
        assert read.refused_total >= len(read.refused)
    try:
        expected = theirs(text)
    except Exception:  # it raises whatever it meets on texts it does not read
        return
    for key, value in ours(text)[0].items():
        if key in expected and not math.isnan(value):
            assert expected[key] == value


@settings(max_examples=80, deadline=None)
@given(st.lists(quoted_lines(), max_size=5))
def test_quoted_names_are_read_as_they_were_written(lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    parser = TextParser()
    for _ in range(2):
        samples, read = ours(text, parser)
        assert not [r for r in read.refused if "twice" not in r.why]
        assert len(samples) <= len(lines)
    try:
        expected = theirs(text)
    except ValueError:  # it has stricter ideas of some names
        return
    for key, value in expected.items():
        assert key not in samples or samples[key] == value or math.isnan(value)


def test_quoted_names_and_types() -> None:
    text = (
        '# TYPE "vllm.running" gauge\n'
        '{"vllm.running",engine="0","model name"="m"} 4\n'
        '{ "plain" , } 5\n'
        '{"quote\\"s \\\\ \\n"} 6 1795953994087\n'
    )
    samples, read = ours(text)
    assert read.refused == ()
    assert read.types == {"vllm.running": "gauge"}
    assert samples == {
        ("vllm.running", (("engine", "0"), ("model name", "m"))): 4,
        ("plain", ()): 5,
        ('quote"s \\ \n', ()): 6,
    }
    # A name is the same whether it is quoted or not.
    assert len(ours('a{b="c"} 1\n{"a",b="c"} 2\n')[0]) == 1


def test_openmetrics_as_written_by_prometheus_client() -> None:
    registry = CollectorRegistry()
    requests = Counter("requests", "with an exemplar", ["path"], registry=registry)
    requests.labels('a"b\\c\nd').inc(3, {"trace_id": "abc"})
    latency = Histogram("latency_seconds", "x", buckets=(0.1, 1), registry=registry)
    latency.observe(0.05, {"trace_id": "def"})
    Gauge("level", "x", registry=registry).set(float("-inf"))
    Info("build", "x", registry=registry).info({"version": "1"})
    text: str = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]
    assert " # {" in text
    parser = TextParser()
    for _ in range(2):
        samples, read = ours(text, parser)
        assert same(samples, theirs(text, openmetrics=True))
        assert read.refused == ()
        assert not read.truncated
        assert read.types["requests"] == "counter"
        assert read.types["latency_seconds"] == "histogram"


def test_exemplars_timestamps_units_and_line_ends_are_tolerated() -> None:
    text = (
        "# HELP a_seconds what it is\r\n# TYPE a_seconds histogram\r\n# UNIT a_seconds seconds\r\n"
        'a_seconds_bucket{le="1"} 5 1795953994.087 # {id="x y"} 0.5 1795953994.1\r\n'
        'a_seconds_bucket{le="+Inf"} 6 # {} 2\r\n'
        "a_seconds_count\t6\t1795953994087\r\n"
        "a_seconds_sum  3.5  \r\n"
        "\r\n# a comment\r\n# EOF\r\n"
    )
    parser = TextParser()
    for _ in range(2):
        samples, read = ours(text, parser)
        assert read.refused == ()
        assert samples == {
            ("a_seconds_bucket", (("le", "1"),)): 5,
            ("a_seconds_bucket", (("le", "+Inf"),)): 6,
            ("a_seconds_count", ()): 6,
            ("a_seconds_sum", ()): 3.5,
        }


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a", "no value"),
        ('a{b="c"}', "no value"),
        ("a one", "value 'one' is no number"),
        ("a 1_000", "value '1_000' is no number"),
        ("a \u0661\u0662", "is no number"),
        ("a 1 soon", "timestamp 'soon' is no number"),
        ("a 1 2 3", "not of the form"),
        ('a{b="c} 1', "labels do not end"),
        ("a{b=c} 1", "labels cannot be read"),
        ('a{b="c" d="e"} 1', "labels cannot be read"),
        ('a{b="c",b="d"} 1', "stands twice"),
        ('a{__name__="c"} 1', "reserved"),
        ("9a 1", "does not begin with a metric name"),
        ('{b="c"} 1', "no metric name"),
        ("{} 1", "no metric name"),
        ('{""} 1', "no metric name"),
        ('{b="c","a.b"} 1', "'a.b' has no value"),
        ('a{"b"} 1', "'b' has no value"),
        ('{"a","b"} 1', "'b' has no value"),
        ('{"a",b} 1', "'b' has no value"),
        ('{"a",""="b"} 1', "reserved"),
        ('{"a.b"', "labels do not end"),
        ('"a.b" 1', "does not begin with a metric name"),
        ("{count:1,sum:2,schema:0} 1", "labels cannot be read"),
        ("a {count:24,sum:100,schema:0,zero_threshold:0.001,zero_count:4}", "native histogram"),
        ('a{b="c"} {count:24,sum:100,schema:0} 1795953994.087', "native histogram"),
        ("17 1", "does not begin with a metric name"),
        ("a 1 # exemplar", "no exemplar"),
        ('a 1 # {b="c"}', "no exemplar"),
        ('a 1 # {b="c"} x', "exemplar value"),
        (f'a{{b="{"x" * (exposition.MAX_LABEL_CHARS + 1)}"}} 1', "longer than 4096"),
        (f"{'a' * (exposition.MAX_NAME_CHARS + 1)} 1", "name longer"),
        ("a" * (exposition.MAX_LINE_CHARS + 1) + " 1", "longer than 16384"),
        ("a{" + ",".join(f'l{i}="x"' for i in range(129)) + "} 1", "more than 128 labels"),
    ],
)
def test_a_bad_line_is_refused_with_why_and_nothing_else_is_lost(line: str, why: str) -> None:
    parser = TextParser()
    for _ in range(2):
        samples, read = ours(f"before 1\n{line}\nafter 2\n", parser)
        assert samples == {("before", ()): 1, ("after", ()): 2}
        assert read.refused_total == 1
        (refused,) = read.refused
        assert refused.name == "line"
        assert refused.why.startswith("line 2: ")
        assert why in refused.why
        assert len(refused.value) <= 64


def test_a_known_series_with_a_bad_number_is_refused() -> None:
    parser = TextParser()
    parser.parse("a 1\nb 2\n")
    for number in ("x", "1_0", "\u0661", ""):
        samples, read = ours(f"a {number}\nb 3\n", parser)
        assert samples == {("b", ()): 3}
        assert read.refused_total == 1


def test_a_text_that_ends_inside_a_line_loses_only_that_line() -> None:
    samples, read = ours("a 1\nb 1234")
    assert samples == {("a", ()): 1}
    assert read.truncated
    assert read.refused[0].why == "line 2: the text ends inside this line"
    assert not ours("a 1\n# EOF")[1].truncated


def test_bytes_that_are_not_utf8_are_replaced_and_said() -> None:
    samples, read = ours(b'a{b="\xff\xfe"} 1\nc 2\n')
    assert samples == {("a", (("b", "\ufffd\ufffd"),)): 1, ("c", ()): 2}
    assert read.refused[0].why == "bytes that are not UTF-8 were replaced"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_texts_as_saved_on_windows(encoding: str) -> None:
    text = '# HELP a \u00e4\r\n# TYPE a gauge\r\na{b="\u00fc"} 4\r\n'
    samples, read = ours(text.encode(encoding))
    assert samples == {("a", (("b", "\u00fc"),)): 4}
    assert read.refused == ()


def test_a_series_written_twice_counts_once() -> None:
    samples, read = ours('a{b="1",c="2"} 1\na{c="2",b="1"} 5\n')
    assert samples == {("a", (("b", "1"), ("c", "2"))): 5}
    assert "twice" in read.refused[0].why


def test_line_separators_of_unicode_do_not_end_a_line() -> None:
    samples, _ = ours('a{b="x\u2028y\x85z\x0b"} 1\n')
    assert samples == {("a", (("b", "x\u2028y\x85z\x0b"),)): 1}


def test_a_type_that_changes_is_followed() -> None:
    parser = TextParser()
    for kind in ("gauge", "counter", "gauge"):
        assert parser.parse(f"# TYPE a {kind}\na 1\n").types["a"] == kind


def test_bytes_are_bounded() -> None:
    body = b"a 1\n" + b"# " + b"x" * (2 * exposition.MAX_BYTES)
    samples, read = ours(body)
    assert samples == {("a", ()): 1}
    assert read.truncated
    assert "bytes" in read.refused[0].why


def test_lines_are_bounded() -> None:
    samples, read = ours("a 1\n" + "\n" * exposition.MAX_LINES + "b 2\n")
    assert samples == {("a", ()): 1}
    assert read.truncated
    assert "lines" in read.refused[0].why


def test_series_are_bounded() -> None:
    over = exposition.MAX_SERIES + 50
    text = "".join(f'a{{b="{i}"}} 1\n' for i in range(over))
    parser = TextParser()
    for _ in range(2):
        read = parser.parse(text)
        assert len(read.samples) == exposition.MAX_SERIES
        assert read.truncated
        assert "series" in read.refused[0].why


def test_the_list_of_refusals_is_bounded_and_counted() -> None:
    _, read = ours("bad\n" * 5_000)
    assert len(read.refused) == exposition.MAX_REFUSED
    assert read.refused_total == 5_000


def test_series_that_come_and_go_do_not_pile_up() -> None:
    parser = TextParser()
    for scrape in range(100):
        names = "".join(
            f'# TYPE m{scrape}_{i} gauge\nm{scrape}_{i}{{b="{scrape}"}} 1\n' for i in range(200)
        )
        samples, _ = ours("stays 1\n" + names, parser)
        assert len(samples) == 201
    assert len(parser._by_text) <= 2 * 201 + 1_024
    assert len(parser._by_identity) <= 2 * 201 + 1_024
    assert len(parser._comments) <= 2 * (2 * 201 + 1_024)
    assert len(parser._types) <= 2 * 201 + 1_024


def test_a_series_is_the_same_object_from_text_to_text() -> None:
    parser = TextParser()
    (first,) = parser.parse('a{b="1"} 1\n').samples
    (second,) = parser.parse('a{b="1",} 2\n').samples
    assert first is second


@pytest.mark.timeout(20)  # an expression that goes back over its text takes a minute here
@pytest.mark.parametrize(
    "line",
    [
        "a{" + '"' * 16_000,
        "a{" + "\\" * 16_000 + "} 1",
        'a{b="' + "\\" * 15_000 + '"} 1',
        "a" + "{" * 16_000,
        "a{" + "," * 16_000 + "} 1",
        "a{" + 'b="c",' * 2_700 + "} 1",
        "a " + "1 " * 8_000,
        "a 1 # {" + '"' * 15_000,
        " " * 16_000 + "a",
    ],
)
def test_hostile_lines_end(line: str) -> None:
    samples, read = ours(f"{line}\n" * 20 + "a 1\n")
    assert samples == {("a", ()): 1}
    assert read.refused_total == 20
