"""Which engine a sidecar holds and who sees its requests, in lines for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from servoscope.exporters.records import Source

if TYPE_CHECKING:
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.sources.selection import Candidate

__all__ = ["attached", "better_ones", "seen_by"]


def attached(target: Target, metrics_url: str, source: Source) -> str:
    """The lines of the start, once it is known who sees the requests."""
    engine = f"{target.engine} {target.version or 'of unknown version'}"
    return (
        f"attached to {engine} (model {target.model_name}) at {target.url}\n"
        f"metrics at {metrics_url}\n{seen_by(source)}"
    )


def seen_by(source: Source) -> str:
    """Whose requests count from now on."""
    if source is Source.SCRAPE:
        return "requests seen by: scrape (the engine's own counts; no single requests, no SLIs)"
    return f"requests seen by: {source.value}"


def better_ones(candidates: Iterable[Candidate]) -> list[str]:
    """For each source that would be preferred: what is missing, and what grants it."""
    found = ((c.source.source.value, c.missing()) for c in candidates)
    return [f"not by {name}: {missing}" for name, missing in found if missing]
