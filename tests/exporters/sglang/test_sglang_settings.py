"""How an SGLang was started: from /server_info, else from its command line."""

from __future__ import annotations

from typing import Any

import pytest

from servoscope.exporters.sglang.settings import Settings, settings_of

ARGV = (
    "python", "-m", "sglang.launch_server", "--enable-metrics", "--export-metrics-to-file",
    "--export-metrics-to-file-dir", "old", "--export-metrics-to-file-dir=/d",
    "--log-requests", "--log-requests-level", "0", "--decode-log-interval", "5",
)  # fmt: skip
INFO = {
    "enable_metrics": True, "export_metrics_to_file": True, "export_metrics_to_file_dir": "/d",
    "log_requests": True, "log_requests_level": 0, "decode_log_interval": 5, "enable_trace": False,
    "otlp_traces_endpoint": "localhost:4317",
}  # fmt: skip


def test_both_ways_say_the_same() -> None:
    told, seen = settings_of(INFO, ()), settings_of({}, ARGV)
    assert told == Settings(
        metrics=True, file=True, file_dir="/d", writes_text=False, decode_log_interval=5,
        trace=False, trace_endpoint="localhost:4317",
    )  # fmt: skip
    assert (seen.metrics, seen.file, seen.file_dir) == (True, True, "/d")  # the last one wins
    assert (seen.writes_text, seen.decode_log_interval, seen.trace) == (False, 5, False)


def test_what_the_server_says_wins_over_its_command_line() -> None:
    assert settings_of(INFO | {"log_requests": False}, ARGV).writes_text is True


@pytest.mark.parametrize(
    ("logs", "level", "text"),
    [(False, 0, True), (True, 0, False), (True, 1, False), (True, 2, True), (True, 3, True)],
)
def test_which_levels_leave_the_text_out(logs: bool, level: int, text: bool) -> None:
    told: dict[str, Any] = INFO | {"log_requests": logs, "log_requests_level": level}
    assert settings_of(told, ()).writes_text is text


def test_a_level_that_is_not_given_is_two() -> None:
    argv = ("sglang", "--export-metrics-to-file", "--log-requests")
    assert settings_of({}, argv).writes_text is True


def test_nothing_told_is_nothing_known() -> None:
    assert settings_of({}, ()) == Settings()
