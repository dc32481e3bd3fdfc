"""What a command line and an environment tell of a llama.cpp server, and what they do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.exporters.llamacpp.settings import Settings, settings_of

SERVER = "/opt/llama.cpp/llama-server"


def of(*words: str, **environ: str) -> Settings:
    return settings_of((SERVER, "-m", "m.gguf", *words), environ)


def test_a_server_without_flags_has_its_defaults() -> None:
    assert of() == Settings(batch_tokens=2048, ubatch_tokens=512, unified=True, sleeps=False)


def test_of_a_process_that_cannot_be_seen_nothing_is_known() -> None:
    assert settings_of((), {}) == Settings()


def test_of_another_program_only_what_it_was_told_in_the_servers_words() -> None:
    wrapper = ("python", "-m", "some.wrapper", "--batch-size", "256", "--parallel", "2")
    assert settings_of(wrapper, {}) == Settings(batch_tokens=256, unified=False)


@pytest.mark.parametrize("words", [("-b", "64"), ("--batch-size", "64"), ("--batch-size=64",)])
def test_flags_in_all_their_forms(words: tuple[str, ...]) -> None:
    found = of(*words)
    assert (found.batch_tokens, found.ubatch_tokens) == (64, 64)  # never more than the batch


def test_the_last_flag_counts_and_flags_stand_before_the_environment() -> None:
    assert of("-b", "64", "-b", "128", LLAMA_ARG_BATCH="32").batch_tokens == 128
    assert of(LLAMA_ARG_BATCH="32", LLAMA_ARG_UBATCH="16") == Settings(32, 16, True, False)


@pytest.mark.parametrize(
    ("words", "environ", "unified"),
    [
        (("-np", "4"), {}, False),
        (("-np", "4", "-kvu"), {}, True),
        (("--parallel=4", "--kv-unified"), {}, True),
        (("--no-kv-unified",), {}, False),
        (("-np", "-1"), {}, True),  # the number of slots is the server's choice
        ((), {"LLAMA_ARG_N_PARALLEL": "8"}, False),
        (("-np", "4"), {"LLAMA_ARG_KV_UNIFIED": "1"}, True),
        ((), {"LLAMA_ARG_KV_UNIFIED": "false"}, False),
    ],
)
def test_who_shares_the_cache(
    words: tuple[str, ...], environ: dict[str, str], unified: bool
) -> None:
    assert of(*words, **environ).unified is unified


@pytest.mark.parametrize(
    ("words", "sleeps"),
    [((), False), (("--sleep-idle-seconds", "60"), True), (("--sleep-idle-seconds=-1",), False)],
)
def test_whether_it_may_sleep(words: tuple[str, ...], sleeps: bool) -> None:
    assert of(*words).sleeps is sleeps


@pytest.mark.parametrize("word", ["", "x", "-5", "0", "1e3", "٣", "9" * 30, "20000000"])
def test_what_is_no_number_of_tokens_leaves_the_default(word: str) -> None:
    assert of("-b", word).batch_tokens == 2048


@given(words=st.lists(st.text(max_size=6) | st.sampled_from(["-b", "-ub", "-np", "-kvu", "-b=7"])))
def test_any_command_line(words: list[str]) -> None:
    found = settings_of((SERVER, *words), {})
    assert found.batch_tokens is not None
    assert found.ubatch_tokens is not None
    assert 0 < found.ubatch_tokens <= found.batch_tokens
