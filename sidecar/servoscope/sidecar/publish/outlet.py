"""What a sidecar has to do with its collector: records go there, its policy comes from there."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from servoscope.alerts.digest import digest
from servoscope.sidecar.control import token
from servoscope.sidecar.control.policy_poll import PolicyPoll, ask_collector
from servoscope.sidecar.publish.push import Pusher, http_post
from servoscope.sidecar.publish.spool import Spool
from servoscope.sidecar.publish.spool_thread import SpoolThread

if TYPE_CHECKING:
    import aiohttp

    from servoscope.alerts.spec import Objective
    from servoscope.sidecar.config import SidecarConfig

__all__ = ["Outlet"]


class Outlet:
    """``pusher`` and ``spool`` are ``None`` where no collector (or no spool) is configured.

    Raises TokenError or OSError when the collector's token cannot be read.
    """

    def __init__(
        self,
        config: SidecarConfig,
        objectives: Sequence[Objective],
        session: aiohttp.ClientSession,
        server_label: str,
        state: Path,
    ) -> None:
        url, word = config.collector_url, ""
        if url and config.collector_token_file:
            word = token.read_token(Path(config.collector_token_file).expanduser())
        self.policy = PolicyPoll(
            ask_collector(session, url, word) if url else None,
            digest(objectives),
            obeyed=config.control.obey_policy,
            interval_seconds=config.control.policy_seconds,
            clock=time.time,
        )
        self.spool: SpoolThread | None = None
        self.pusher: Pusher | None = None
        if not url:
            return
        if config.spool_max_bytes:
            spool = Spool(state / "spool", server_label, config.spool_max_bytes, time.time)
            self.spool = SpoolThread(spool)
        self.pusher = Pusher(
            http_post(session, url, word),
            sidecar_id=f"{socket.gethostname()}/{server_label}"[:128],
            epoch=time.time_ns() // 1_000_000,
            queue_records=config.push_queue_records,
            batch_records=config.push_batch_records,
            interval_seconds=config.push_interval_seconds,
            attempts=config.push_attempts,
            spool=self.spool,
        )
