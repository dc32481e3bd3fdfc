"""The terminal picture, as text: what a reader sees in each state and width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from servoscope.cli.view import MAX_BUDGETS, MAX_ROWS, render

NOW = 1_000_000.0


def show(overview: Any, *, width: int = 120, now: float = NOW, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    console.print(render(overview, now=now, width=width, **options))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def row(request_type: str = "chat", **values: Any) -> dict[str, Any]:
    return {
        "request_type": request_type,
        "model_name": "tiny",
        "model_version": "3f2a",
        "gpu_model": "none",
        "requests": 120,
        "outcomes": {"length": 110, "completed": 7, "client_disconnect": 2, "error": 1},
        "time_to_first_token_seconds": {"p50": 0.0297, "p99": 0.164},
        "time_per_output_token_seconds": {"p50": 0.00084, "p99": 0.0048},
        "queue_seconds": {"p50": 0.01, "p99": 0.5},
        "e2e_seconds": {"p50": 1.0, "p99": 2.0},
        "kv_hit_ratio": 0.067,
        "prompt_tokens": 1000,
        "output_tokens": 500,
        "goodput_ratio": 0.992,
        "last_finished_unix_seconds": NOW - 2.0,
    } | values


RAG = row(
    "rag",
    requests=80,
    outcomes={"length": 80},
    time_to_first_token_seconds={"p50": 0.0908, "p99": 1.234},
    time_per_output_token_seconds={"p50": None, "p99": None},
    queue_seconds={"p50": None, "p99": None},
    kv_hit_ratio=None,
    goodput_ratio=None,
)
BUDGET = {
    "service": "interactive",
    "objective": "ttft",
    "target_ratio": 0.99,
    "window_seconds": 2_592_000.0,
    "total": 100,
    "good": 99,
    "bad": 1,
    "remaining_ratio": 0.4,
    "burn_1h": 1.2,
}
SIDECAR = {
    "sidecar_id": "a",
    "server": "127.0.0.1:8000",
    "engine": "llamacpp",
    "last_seen_unix_seconds": NOW - 1.0,
    "records": 200,
}


def overview(*rows: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {
        "generated_unix_seconds": NOW - 1.0,
        "window_seconds": 300.0,
        "rows": list(rows),
        "omitted_rows": 0,
        "budgets": [BUDGET],
        "sidecars": [SIDECAR],
    } | values


def test_wide_shows_a_table() -> None:
    notices = ["127.0.0.1:8000: http://127.0.0.1:9790/metrics   relay ok, scrape ok"]
    assert show(overview(row(), RAG), notices=notices, width=120).splitlines() == WIDE.splitlines()


WIDE = """\
servoscope  13:46:40 UTC  200 requests in the last 5 min
                        TTFT ms        TPOT ms        queue ms  KV hit  goodput
request type  requests      p50   p99      p50   p99       p99       %        %  ago  outcomes
chat               120     29.7   164     0.84  4.80       500     6.7     99.2  2 s  117 ok, 1 err, 2 left
rag                 80     90.8  1234        -     -         -       -        -  2 s  80 ok
budget  interactive ttft 99 % over 30 d: 40.0 % left (1 bad of 100), burning 1.2x
127.0.0.1:8000: http://127.0.0.1:9790/metrics   relay ok, scrape ok
"""  # noqa: E501 - as it is seen


def test_narrow_shows_lines() -> None:
    assert show(overview(row(), RAG, budgets=[]), width=70) == (
        "servoscope  13:46:40 UTC  200 requests in the last 5 min\n"
        "chat  120 requests: 117 ok, 1 err, 2 left\n"
        "  TTFT 29.7 ms / 164 ms  TPOT 0.84 ms / 4.80 ms  (p50 / p99)\n"
        "  queue p99 500 ms  KV hit 6.7 %  goodput 99.2 %  2 s ago\n"
        "rag  80 requests: 80 ok\n"
        "  TTFT 90.8 ms / 1.23 s  TPOT - / -  (p50 / p99)\n"
        "  queue p99 -  KV hit -  goodput -  2 s ago"
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    rows = [row("a" * 40, model_version=str(n) * 30, gpu_model=f"NVIDIA H{n}") for n in range(3)]
    text = show(overview(*rows), width=width, notices=["n" * 300])
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [110, 120, 160])
def test_a_table_cuts_no_figure(width: int) -> None:
    text = show(overview(row(), row("rag", gpu_model="NVIDIA H200")), width=width)
    for figure in ("29.7", "164", "0.84", "4.80", "500", "6.7", "99.2", "2 s"):
        assert figure in text
    assert "…" not in text


def test_label_columns_only_where_they_differ() -> None:
    assert "GPU" not in show(overview(row(), RAG), width=160)
    text = show(overview(row(), row(gpu_model="NVIDIA H200", model_version="b")), width=160)
    assert "GPU" in text
    assert "version" in text
    assert "NVIDIA H200" in text
    assert "model " not in text
    narrow = show(overview(row(), row(gpu_model="NVIDIA H200")), width=60)
    assert "chat  NVIDIA H200  120 requests" in narrow


def test_starting() -> None:
    assert show(None, notices=["engine http://127.0.0.1:8000"]) == (
        "servoscope  13:46:40 UTC\n"
        "starting: the collector has not answered yet\n"
        "engine http://127.0.0.1:8000"
    )


def test_no_data_yet() -> None:
    text = show(overview(budgets=[BUDGET | {"total": 0}], sidecars=[]))
    assert text == (
        "servoscope  13:46:40 UTC  0 requests in the last 5 min\n"
        "no sidecar has sent anything yet\n"
        "no request has ended in the last 5 min\n"
        "budget  1 objectives, nothing counted yet"
    )


def test_collector_away_keeps_the_last_figures() -> None:
    text = show(overview(row()), now=NOW + 40)
    assert "the collector is away: these figures are 41 s old" in text
    assert "117 ok" in text


def test_a_quiet_sidecar_is_named_while_it_is_in_the_window() -> None:
    quiet = SIDECAR | {"last_seen_unix_seconds": NOW - 90.0}
    gone = SIDECAR | {"server": "127.0.0.1:1", "last_seen_unix_seconds": NOW - 5000.0}
    text = show(overview(row(), sidecars=[quiet, gone]))
    assert "quiet: the sidecar of 127.0.0.1:8000 has sent nothing for 90 s" in text
    assert "127.0.0.1:1 " not in text


def test_a_sidecar_that_does_not_run_now_is_not_called_quiet() -> None:
    quiet = SIDECAR | {"last_seen_unix_seconds": NOW - 90.0}
    picture = overview(row(), sidecars=[quiet])
    assert "quiet" in show(picture, servers={"127.0.0.1:8000"})
    assert "quiet" not in show(picture, servers={"127.0.0.1:8001"})
    assert "no sidecar" not in show(picture, servers=())


def test_outcomes_by_name() -> None:
    outcomes = {
        "completed": 1,
        "length": 1,
        "error": 2,
        "timeout": 3,
        "stuck": 4,
        "rejected": 5,
        "client_error": 6,
        "client_disconnect": 3,
        "cancelled": 4,
        "unknown": 8,
    }
    assert "2 ok, 2 err, 3 timeout, 4 stuck, 5 rejected, 6 4xx, 7 left, 8 unknown" in show(
        overview(row(outcomes=outcomes)), width=90
    )


def test_rows_and_budgets_are_bounded_and_the_rest_counted() -> None:
    rows = [row(f"type-{n}") for n in range(MAX_ROWS * 100)]
    budgets = [BUDGET | {"objective": f"o{n}"} for n in range(MAX_BUDGETS + 3)]
    text = show(overview(*rows, budgets=budgets, omitted_rows=7))
    assert f"and {MAX_ROWS * 99 + 7} more rows" in text
    assert "and 3 more objectives" in text
    assert len(text.splitlines()) == 1 + 2 + MAX_ROWS + 1 + MAX_BUDGETS + 1


def test_control_characters_and_markup_do_nothing() -> None:
    text = show(
        overview(row("\x1b[2J[red]x[/red]"), sidecars=[]),
        width=120,
        notices=["\x1b]0;title\x07 [bold]"],
    )
    assert "\x1b" not in text
    assert "?[2J[red]x[/red]" in text
    assert "?]0;title? [bold]" in text


def test_colour_only_on_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=True, color_system="standard").print(
        render(overview(row()), now=NOW, width=120)
    )
    assert "\x1b[" in out.getvalue()
    assert "\x1b" not in show(overview(row()))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["p50", "p99", "request_type", "requests", "total"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ["rows", "budgets", "sidecars", "window_seconds", "generated_unix_seconds"], VALUES
        )
        | {"omitted_rows": st.integers(-5, 5) | st.floats()},
    ),
    st.dictionaries(st.sampled_from(sorted(row())), VALUES),
    st.integers(30, 200),
)
def test_nothing_raises_on_a_strange_overview(
    strange: dict[str, Any], strange_row: dict[str, Any], width: int
) -> None:
    assert show(strange, width=width).startswith("servoscope")
    assert "servoscope" in show(overview(row() | strange_row), width=width)
