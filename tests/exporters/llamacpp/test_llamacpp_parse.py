"""llama.cpp's own texts: what its counters leave out, and the gauges that every scrape resets."""

from __future__ import annotations

from pathlib import Path

import pytest

from servoscope.exporters.llamacpp.names import NOT_BELIEVED, TABLE
from servoscope.exporters.llamacpp.parse import Parser
from servoscope.exporters.records import EngineSample

CAPTURES = Path(__file__).parents[2] / "fixtures" / "engines" / "llamacpp" / "b11549"
NAMES = sorted(path.name for path in CAPTURES.glob("metrics_*.txt"))


def read(name: str) -> EngineSample:
    return Parser("b11549").parse((CAPTURES / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_a_real_text_is_known(name: str) -> None:
    sample = read(name)
    assert (sample.unknown, sample.refused) == ((), ())
    assert sample.absent == TABLE.absent_in("b11549")
    assert "kv_usage_ratio" in sample.absent
    assert sample.engine == "llamacpp"


def test_there_are_four_captures() -> None:
    assert len(NAMES) == 4


def test_what_a_busy_server_says() -> None:
    sample = read("metrics_busy.txt")
    assert sample.total("running") == 4
    assert sample.total("waiting") == 4
    assert sample.total("engine_generated_tokens_total") == 512
    # prompt_tokens_total (5905) leaves the 3500 cached ones out.
    assert sample.total("engine_prompt_tokens_total") == 5905 + 3500
    assert sample.total("kv_query_tokens_total") == 5905 + 3500
    assert sample.total("kv_hit_tokens_total") == 3500
    assert [r.labels for r in sample.readings if r.name == "kv_hit_tokens_total"] == [
        (("kv_tier", "device"),)
    ]
    assert sample.histograms == ()


DOCS = Path(__file__).parents[3] / "docs" / "engines.md"


@pytest.mark.parametrize("name", NOT_BELIEVED)
def test_what_is_not_what_its_name_says_is_never_a_reading_and_is_documented(name: str) -> None:
    told = "".join(
        f"# TYPE llamacpp:{name} {kind}\nllamacpp:{name}{total} 77\n"
        for kind, total in (("gauge", ""), ("counter", "_total"))
    )
    sample = Parser("b11549").parse(told)
    assert (sample.readings, sample.histograms, sample.unknown) == ((), (), ())
    assert name in TABLE.not_used
    assert not any(line.name == name for line in TABLE.lines)
    assert f"`{name}" in DOCS.read_text(encoding="utf-8")


def test_progress_is_seen_during_a_long_answer() -> None:
    """Fault 21: tokens are counted when the answer has ended; steps are counted as they are made.

    Both texts were told by a b11549 while one request ran, 0.12 s apart.
    """
    texts = (
        "llamacpp:tokens_predicted_total 0\nllamacpp:n_decode_total 152\n",
        "llamacpp:tokens_predicted_total 0\nllamacpp:n_decode_total 249\n",
    )
    parser = Parser("b11549")
    first, second = (parser.parse(text) for text in texts)
    tokens, steps = "engine_generated_tokens_total", "scheduler_steps_total"
    assert first.total(tokens) == second.total(tokens) == 0
    assert (first.total(steps), second.total(steps)) == (152, 249)


def test_gauges_that_a_scrape_resets_are_not_used() -> None:
    # The second text was read right after the first: its two rate gauges fell from 3831.91 to 0.
    first, second = read("metrics_after.txt"), read("metrics_after2.txt")
    assert first.readings == second.readings


def test_a_build_without_the_cached_counter_has_no_prompt_count() -> None:
    sample = Parser("b4000").parse(
        "llamacpp:prompt_tokens_total 100\nllamacpp:kv_cache_usage_ratio 0.25\n"
        "llamacpp:kv_cache_tokens 7\nllamacpp:requests_processing 1\n"
    )
    assert sample.total("engine_prompt_tokens_total") is None
    assert {"engine_prompt_tokens_total", "kv_query_tokens_total"} <= set(sample.absent)
    assert sample.peak("kv_usage_ratio") == 0.25
    assert sample.unknown == ()


def test_impossible_numbers_are_refused_by_name() -> None:
    sample = Parser().parse(
        "llamacpp:prompt_tokens_total NaN\nllamacpp:prompt_tokens_cached_total 5\n"
        "llamacpp:requests_processing -1\nllamacpp:tokens_predicted_total 3\n"
    )
    assert {r.name for r in sample.refused} == {
        "llamacpp:prompt_tokens_total",
        "llamacpp:requests_processing",
    }
    assert sample.total("engine_prompt_tokens_total") is None
    assert sample.total("engine_generated_tokens_total") == 3
