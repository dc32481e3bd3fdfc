"""The terminal picture of the collector's overview. Pure: data, ``now`` and a width in, text out.

What came from engines and clients (model names, request types) is shown without its control
characters: a header must not be able to steer the reader's terminal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["MAX_BUDGETS", "MAX_ROWS", "STALE_SECONDS", "render"]

STALE_SECONDS = 5.0  # an answer older than this is shown as old
SILENT_SECONDS = 60.0  # a sidecar that sent nothing for longer is named, while in the window
MAX_ROWS = 24
MAX_BUDGETS = 8
MAX_NOTICES = 12
FIGURES_WIDTH = 78  # of the columns of figures, with their gaps
NONE = "-"

_GOOD = ("completed", "length")
_SHORT = (
    ("err", "red", ("error",)),
    ("timeout", "red", ("timeout",)),
    ("stuck", "red", ("stuck",)),
    ("rejected", "red", ("rejected",)),
    ("4xx", "yellow", ("client_error",)),
    ("left", "", ("client_disconnect", "cancelled")),
    ("unknown", "yellow", ("unknown",)),
)


def render(
    overview: Mapping[str, Any] | None,
    *,
    now: float,
    notices: Sequence[str] = (),
    width: int = 120,
    servers: Collection[str] | None = None,
) -> RenderableType:
    """The picture. ``overview`` None: the collector has not answered yet.

    ``notices`` are lines shown below: sources and where /metrics is, faults. A value that is
    missing or impossible shows as "-". Nothing raises on a strange overview. ``servers``: whose
    sidecars run now; only theirs are called quiet (None: all).
    """
    parts: list[RenderableType] = [_header(overview, now)]
    if overview is None:
        parts.append(Text("starting: the collector has not answered yet", style="dim"))
    else:
        parts += _states(overview, now, servers)
        rows = _mappings(overview.get("rows"))
        if not rows:
            window = _span(_number(overview, "window_seconds"))
            parts.append(Text(f"no request has ended in the last {window}", style="dim"))
        elif width >= _table_width(rows[:MAX_ROWS]):
            parts.append(_table(rows[:MAX_ROWS], now))
        else:
            parts += _stacked(rows[:MAX_ROWS], now)
        hidden = len(rows[MAX_ROWS:]) + int(_number(overview, "omitted_rows") or 0)
        if hidden:
            parts.append(Text(f"and {hidden} more rows", style="dim"))
        parts += _budgets(_mappings(overview.get("budgets")))
    parts += [_clean(notice, "dim") for notice in notices[:MAX_NOTICES]]
    return Group(*parts)


def _header(overview: Mapping[str, Any] | None, now: float) -> Text:
    clock = datetime.fromtimestamp(now, UTC).strftime("%H:%M:%S UTC")
    line = Text().append("servoscope", style="bold").append(f"  {clock}", style="dim")
    if overview is not None:
        rows = _mappings(overview.get("rows"))
        requests = sum(_number(row, "requests") or 0 for row in rows)
        window = _span(_number(overview, "window_seconds"))
        line.append(f"  {requests:.0f} requests in the last {window}")
    return line


def _states(overview: Mapping[str, Any], now: float, servers: Collection[str] | None) -> list[Text]:
    """What is wrong with the picture itself: an old answer, sidecars not heard."""
    lines = []
    made = _number(overview, "generated_unix_seconds")
    if made is not None and now - made > STALE_SECONDS:
        text = f"the collector is away: these figures are {_span(now - made)} old"
        lines.append(Text(text, style="bold red"))
        return lines
    sidecars = _mappings(overview.get("sidecars"))
    if not sidecars:
        lines.append(Text("no sidecar has sent anything yet", style="yellow"))
    window = _number(overview, "window_seconds") or 0.0
    if servers is not None:
        sidecars = [s for s in sidecars if s.get("server") in servers]
    for sidecar in sidecars[:MAX_NOTICES]:
        seen = _number(sidecar, "last_seen_unix_seconds")
        if seen is not None and SILENT_SECONDS < now - seen <= max(window, 2 * SILENT_SECONDS):
            # Idle or away: which of the two, only its own line below can say.
            line = Text("quiet: the sidecar of ", style="yellow")
            line.append_text(_clean(_word(sidecar, "server", 40)))
            lines.append(line.append(f" has sent nothing for {_span(now - seen)}"))
    return lines


# ---- one row ------------------------------------------------------------------------------------


def _slices(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The label columns that are worth showing: those with more than one value."""
    columns = (("model", "model_name"), ("version", "model_version"), ("GPU", "gpu_model"))
    return [(head, key) for head, key in columns if len({str(r.get(key)) for r in rows}) > 1]


def _figures(row: Mapping[str, Any]) -> list[tuple[str, float | None, bool]]:
    """Heading, value and whether it is a time (else a ratio) of each figure, in order."""
    ttft, tpot = (
        row.get(name) for name in ("time_to_first_token_seconds", "time_per_output_token_seconds")
    )
    return [
        ("TTFT ms\np50", _number(ttft, "p50"), True),
        ("\np99", _number(ttft, "p99"), True),
        ("TPOT ms\np50", _number(tpot, "p50"), True),
        ("\np99", _number(tpot, "p99"), True),
        ("queue ms\np99", _number(row.get("queue_seconds"), "p99"), True),
        ("KV hit\n%", _number(row, "kv_hit_ratio"), False),
        ("goodput\n%", _number(row, "goodput_ratio"), False),
    ]


def _outcomes(row: Mapping[str, Any]) -> Text:
    """``498 ok, 1 err``: completed and length together, the rest by name, nothing that is zero."""
    counts = row.get("outcomes")
    if not isinstance(counts, Mapping):
        return Text(NONE)
    text = Text(f"{sum(_number(counts, name) or 0 for name in _GOOD):.0f} ok")
    for short, style, names in _SHORT:
        count = sum(_number(counts, name) or 0 for name in names)
        if count:
            text.append(", ").append(f"{count:.0f} {short}", style=style)
    return text


def _age(row: Mapping[str, Any], now: float) -> str:
    last = _number(row, "last_finished_unix_seconds")
    return NONE if last is None else _span(max(0.0, now - last))


def _table_width(rows: Sequence[Mapping[str, Any]]) -> int:
    """What the table needs to be readable; on less, each row becomes a few lines."""
    keys = ["request_type", *(key for _, key in _slices(rows))]
    words = sum(max(12, *(len(_word(row, key, 24)) for row in rows)) + 2 for key in keys)
    return words + FIGURES_WIDTH + min(12, max(len(_outcomes(row)) for row in rows))


def _table(rows: Sequence[Mapping[str, Any]], now: float) -> Table:
    slices = _slices(rows)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("request type", no_wrap=True)
    for head, _ in slices:
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    table.add_column("requests", justify="right", no_wrap=True)
    for head, _, _ in _figures({}):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("ago", justify="right", no_wrap=True)
    table.add_column("outcomes")
    for row in rows:
        table.add_row(
            _clean(_word(row, "request_type", 24), "cyan"),
            *(_clean(_word(row, key, 24)) for _, key in slices),
            _count(_number(row, "requests")),
            *(_milli(v) if is_time else _percent(v) for _, v, is_time in _figures(row)),
            _age(row, now),
            _outcomes(row),
        )
    return table


def _stacked(rows: Sequence[Mapping[str, Any]], now: float) -> list[Text]:
    """For narrow terminals: a heading and two lines of figures a row."""
    slices = _slices(rows)
    lines = []
    for row in rows:
        head = _clean(_word(row, "request_type", 24), "bold cyan")
        for _, key in slices:
            head.append("  ").append_text(_clean(_word(row, key, 24)))
        head.append(f"  {_count(_number(row, 'requests'))} requests: ").append_text(_outcomes(row))
        ttft, ttft99, tpot, tpot99, queue, hit, goodput = (
            _seconds(v) if is_time else _ratio(v) for _, v, is_time in _figures(row)
        )
        lines += [
            head,
            Text(f"  TTFT {ttft} / {ttft99}  TPOT {tpot} / {tpot99}  (p50 / p99)"),
            Text(f"  queue p99 {queue}  KV hit {hit}  goodput {goodput}  {_age(row, now)} ago"),
        ]
    return lines


# ---- budgets ------------------------------------------------------------------------------------


def _budgets(budgets: Sequence[Mapping[str, Any]]) -> list[Text]:
    """A line an objective that counted anything; one line when none did."""
    counted = [b for b in budgets if _number(b, "total")]
    if budgets and not counted:
        return [Text(f"budget  {len(budgets)} objectives, nothing counted yet", style="dim")]
    lines = []
    for budget in counted[:MAX_BUDGETS]:
        left, burn = _number(budget, "remaining_ratio"), _number(budget, "burn_1h")
        line = Text("budget  ").append_text(_clean(_word(budget, "service", 24)))
        line.append(" ").append_text(_clean(_word(budget, "objective", 32)))
        line.append(f" {_target(_number(budget, 'target_ratio'))} over ")
        line.append(f"{_span(_number(budget, 'window_seconds'))}: ")
        line.append(f"{_ratio(left)} left", style="red" if left is not None and left < 0 else "")
        bad, total = _count(_number(budget, "bad")), _count(_number(budget, "total"))
        line.append(f" ({bad} bad of {total})")
        if burn is not None:  # 6: the slower of the two paging burn rates
            line.append(f", burning {burn:.3g}x", style="red" if burn >= 6.0 else "")
        lines.append(line)
    if len(counted) > MAX_BUDGETS:
        lines.append(Text(f"and {len(counted) - MAX_BUDGETS} more objectives", style="dim"))
    return lines


# ---- values -------------------------------------------------------------------------------------


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def _number(value: Any, key: str) -> float | None:
    found = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found):
        return float(found)
    return None


def _word(row: Mapping[str, Any], key: str, most: int) -> str:
    word = str(row.get(key) or NONE)
    return word if len(word) <= most else word[: most - 1] + "~"


def _clean(text: str, style: str = "") -> Text:
    """Text without control characters, never read as markup."""
    return Text("".join(c if c.isprintable() else "?" for c in text), style=style)


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value * 100:.1f} %"


def _target(value: float | None) -> str:
    return NONE if value is None else f"{value * 100:g} %"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value * 100:.1f}"


def _milli(value: float | None) -> str:
    """Milliseconds in three digits: 0.84, 23.1, 640; more where they are needed."""
    if value is None or value < 0:
        return NONE
    number = value * 1000
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f}"


def _seconds(value: float | None) -> str:
    """With its unit: 0.84 ms, 640 ms, 1.53 s."""
    if value is None or value < 0.9995:
        milli = _milli(value)
        return milli if milli == NONE else f"{milli} ms"
    return f"{value:.{2 if value < 99.5 else 0}f} s"


def _span(value: float | None) -> str:
    """A length of time in its largest whole unit: 40 s, 5 min, 28 d."""
    if value is None or value < 0:
        return NONE
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if value >= 2 * size or (value >= size and value % size == 0):
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"
