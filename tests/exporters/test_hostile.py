"""Texts that mean harm, whole way through: bounded, each with a state that says what happened."""

from __future__ import annotations

import gzip

import pytest

from servoscope.exporters import assembly, exposition, mapping
from servoscope.exporters.engines import parser_for
from servoscope.exporters.packed import unpacked
from servoscope.exporters.records import EngineSample

GOOD = "vllm:num_requests_running 4\n"


def read(text: str | bytes, engine: str = "vllm") -> EngineSample:
    return parser_for(engine, None).parse(text)


def whys(sample: EngineSample) -> str:
    return "; ".join(refused.why for refused in sample.refused)


@pytest.mark.parametrize(
    "rest",
    [
        b"# " + b"x" * (100 * 2**20),  # one line of 100 MiB
        b"vllm:num_requests_waiting 1\n" * (100 * 2**20 // 28),  # 100 MiB of lines
        b"\n" * (100 * 2**20),
    ],
    ids=["one line", "lines", "blank lines"],
)
def test_a_body_of_100_mib_is_cut_and_says_so(rest: bytes) -> None:
    sample = read(GOOD.encode() + rest)
    assert sample.total("running") == 4
    assert f"longer than {exposition.MAX_BYTES} bytes" in whys(sample)
    assert len(sample.refused) <= assembly.MAX_REFUSED


def test_a_million_series_are_cut_and_say_so() -> None:
    text = GOOD + "".join(f'a{{b="{i}"}} 1\n' for i in range(1_000_000))
    sample = read(text)
    assert sample.total("running") == 4
    assert "the rest was not read" in whys(sample)


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("vllm", 'vllm:num_requests_running{{engine="{i}"}} 1'),
        ("vllm", 'vllm:num_requests_running{{l{i}="x"}} 1'),
        ("vllm", 'vllm:num_requests_running{{pid="{i}"}} 1'),
        ("vllm", "vllm:novel_{i} 1"),
        ("vllm", 'vllm:e2e_request_latency_seconds_bucket{{le="{i}"}} 1'),
        ("vllm", 'vllm:e2e_request_latency_seconds_count{{engine="{i}"}} 1'),
        ("sglang", 'sglang:num_running_reqs{{tp_rank="{i}"}} 1'),
        ("sglang", 'sglang:realtime_tokens_total{{mode="{i}"}} 1'),
    ],
)
def test_series_of_the_engines_own_names_are_bounded(
    engine: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "MAX_SERIES", 2_000)  # the bounds themselves take seconds
    monkeypatch.setattr(assembly, "MAX_READINGS", 500)
    monkeypatch.setattr(assembly, "MAX_HISTOGRAMS", 100)
    text = "".join(line.format(i=i) + "\n" for i in range(3_000))
    parser = parser_for(engine, None)
    for _ in range(2):
        sample = parser.parse(text)
        assert f"more than {exposition.MAX_SERIES} series" in whys(sample)
        assert len(sample.readings) <= assembly.MAX_READINGS
        assert len(sample.histograms) <= assembly.MAX_HISTOGRAMS
        assert len(sample.unknown) <= mapping.MAX_UNKNOWN
        assert len(sample.refused) <= assembly.MAX_REFUSED


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e999", "-1e999", "nan", "1_0"])
@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm", "num_requests_waiting"), ("vllm", "generation_tokens_total"),
     ("sglang", "num_queue_reqs"), ("sglang", "generation_tokens_total"),
     ("llamacpp", "requests_deferred"), ("llamacpp", "tokens_predicted_total")],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_by_name(engine: str, name: str, value: str) -> None:
    sample = read(f"{engine}:{name} {value}\n", engine)
    assert sample.readings == ()
    assert len(sample.refused) == 1
    assert name in sample.refused[0].name or name in sample.refused[0].value


@pytest.mark.parametrize("damage", [b"\xff\xfe\xfd", b"\x80" * 1_000, b"\xc3", b"\xed\xa0\x80"])
def test_bytes_that_are_no_utf8_lose_nothing_else(damage: bytes) -> None:
    sample = read(GOOD.encode() + b'a{b="' + damage + b'"} 1\n' + damage + b"\n")
    assert sample.total("running") == 4
    assert "not UTF-8" in whys(sample)


def test_a_text_cut_anywhere_in_its_last_line_says_so() -> None:
    for end in range(len(GOOD) + 1, 2 * len(GOOD)):
        sample = read((GOOD + GOOD)[:end])
        assert sample.total("running") == 4
        assert "ends inside this line" in whys(sample)


def test_a_gzip_bomb_is_undone_up_to_the_bound() -> None:
    bomb = gzip.compress(GOOD.encode() + b"\n" * (50 * 2**20))
    text, why = unpacked(bomb, exposition.MAX_BYTES)
    assert len(text) == exposition.MAX_BYTES
    assert "more than" in why
    assert read(text).total("running") == 4
    assert read(bomb).total("running") is None  # packed as it is: damage, and said
    assert read(bomb).refused != ()
