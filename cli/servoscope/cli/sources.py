"""What the live view says of each sidecar: its sources, and what they leave unseen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import aiohttp

from servoscope.cli.sidecars import Registered
from servoscope.exporters.catalog import PREFIX

__all__ = ["gauge_sum", "scrape_notice", "source_line", "source_lines"]

SCRAPE_ONLY = "single requests cannot be seen (scrape only): "
#: What only some engines can have, before what any can.
OWN_SOURCE = {
    "vllm": "load the plug-in in the engine, ",
    "sglang": "start the engine with its request file, ",
}
ANY_SOURCE = "run as root for the tap, or put clients through `servoscope sidecar URL --relay`"
MAX_METRICS_BYTES = 4 << 20


async def source_lines(http: aiohttp.ClientSession, sidecar: Registered) -> list[str]:
    """Which source is in force and where /metrics is; a second line where that is scrape only."""
    where = f"{sidecar.server}: {sidecar.url}/metrics"
    try:
        async with http.get(f"{sidecar.url}/api/v1/inspect") as got:
            body = await got.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return [f"{where} (the sidecar does not answer)"]
    if not isinstance(body, Mapping):
        return [f"{where} (the sidecar's answer is not understood)"]
    lines = [source_line(where, body)]
    if body.get("requests_from") == "scrape":
        lines.append(
            scrape_notice(sidecar.server, body.get("engine"), await _metrics(http, sidecar))
        )
    return lines


def source_line(where: str, body: Mapping[str, Any]) -> str:
    """One line of the ``inspect`` answer of a sidecar."""
    states = [
        f"{s.get('source')} {s.get('state')}"
        for s in body.get("sources") or []
        if isinstance(s, Mapping) and s.get("state") != "off"
    ]
    return f"{where}   {body.get('engine')} {body.get('model_name')}   {', '.join(states)}"


def scrape_notice(server: str, engine: str | None, metrics: str) -> str:
    """Why no request shows, what to do, and what the engine itself says it has now."""
    values = ((name, gauge_sum(metrics, PREFIX + name)) for name in ("running", "waiting"))
    now = [f"{value:.0f} {name}" for name, value in values if value is not None]
    what = f"{SCRAPE_ONLY}{OWN_SOURCE.get(engine or '', '')}{ANY_SOURCE}"
    return f"{server}: {what}" + (f" (now {', '.join(now)})" if now else "")


def gauge_sum(text: str, name: str) -> float | None:
    """Sum of a gauge's series in an exposition of ours; ``None`` where there is none."""
    values = []
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                continue
            if math.isfinite(value):
                values.append(value)
    return sum(values) if values else None


async def _metrics(http: aiohttp.ClientSession, sidecar: Registered) -> str:
    try:
        async with http.get(f"{sidecar.url}/metrics") as got:
            body = await got.content.read(MAX_METRICS_BYTES) if got.status == 200 else b""
            return body.decode("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError):
        return ""
