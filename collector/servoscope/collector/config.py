"""Settings of the collector: defaults beside the fields, ``validate`` names the key at fault."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from servoscope.exporters.hosts import wrong_host
from servoscope.exporters.paths import state_dir

__all__ = ["CollectorConfig", "is_loopback"]

MIN_TOKEN_CHARACTERS = 16
MAX_ALLOWED_HOSTS = 100


@dataclass(frozen=True, slots=True)
class CollectorConfig:
    """Where the collector listens, what it keeps and for how long, and its bounds."""

    listen: str = "127.0.0.1"
    port: int = 9780  # 0: any free port
    token_file: str = ""  # file with the bearer token; needed to listen beyond this host
    #: Names that clients may use for this collector besides every address, localhost and, beyond
    #: loopback, this host's own name. Any other is refused: it could be a web page's that resolves
    #: to us. "*" allows all.
    allowed_hosts: tuple[str, ...] = ()
    database: Path = field(default_factory=lambda: state_dir() / "collector.duckdb")

    retention_days: float = 30.0  # request records
    budget_retention_days: float = 95.0  # verdict counts by minute: longest objective window
    idempotency_hours: float = 48.0  # how long a batch that is sent again is still recognised
    max_database_bytes: int = 16 << 30  # above it the oldest records go first
    retention_interval_seconds: float = 600.0

    max_body_bytes: int = 8 << 20  # as received
    max_decoded_bytes: int = 16 << 20  # after decompression
    max_pending_batches: int = 64  # received and not yet stored; more are answered 503
    max_pending_queries: int = 16
    read_timeout_seconds: float = 30.0  # for the body of one request to arrive
    query_timeout_seconds: float = 20.0

    max_window_seconds: float = 31 * 86_400.0  # longest interval of one question
    max_rows: int = 500  # groups in one answer, the busiest first
    memory_limit_mebibytes: int = 768  # of the database engine
    threads: int = 2  # of the database engine

    def validate(self) -> None:
        """Raises ValueError whose text begins with the key."""
        if not self.listen:
            raise ValueError("listen: empty; 127.0.0.1 is this host only")
        if not is_loopback(self.listen) and not self.token_file:
            raise ValueError(
                f"listen: {self.listen} can be reached from other hosts; set token_file, "
                "or listen on 127.0.0.1"
            )
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port: {self.port} is outside 0..65535")
        if len(self.allowed_hosts) > MAX_ALLOWED_HOSTS:
            raise ValueError(f"allowed_hosts: more than {MAX_ALLOWED_HOSTS} names")
        for name in self.allowed_hosts:
            if (why := wrong_host(name)) is not None:
                raise ValueError(f"allowed_hosts: {why}")
        if self.database.is_dir():
            raise ValueError(f"database: {self.database} is a directory, expected a file")
        for key, low, high in _BOUNDS:
            value = getattr(self, key)
            if not low <= value <= high:
                raise ValueError(f"{key}: {value} is outside {low:g}..{high:g}")
        if self.max_decoded_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_decoded_bytes: {self.max_decoded_bytes} is below max_body_bytes "
                f"({self.max_body_bytes})"
            )

    def read_token(self) -> str:
        """The bearer token, or "" when none is asked for. Raises OSError naming the key."""
        if not self.token_file:
            return ""
        try:
            token = Path(self.token_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OSError(f"token_file: cannot read {self.token_file}: {error}") from error
        if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii():
            raise OSError(
                f"token_file: {self.token_file} must hold {MIN_TOKEN_CHARACTERS} ASCII characters "
                "or more"
            )
        return token


_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("retention_days", 0.01, 3_660),
    ("budget_retention_days", 1, 3_660),
    ("idempotency_hours", 1, 24 * 366),
    ("max_database_bytes", 1 << 20, 1 << 50),
    ("retention_interval_seconds", 1, 86_400),
    ("max_body_bytes", 1 << 10, 1 << 28),
    ("max_decoded_bytes", 1 << 10, 1 << 30),
    ("max_pending_batches", 1, 10_000),
    ("max_pending_queries", 1, 10_000),
    ("read_timeout_seconds", 0.1, 600),
    ("query_timeout_seconds", 0.1, 600),
    ("max_window_seconds", 60, 3_660 * 86_400),
    ("max_rows", 1, 10_000),
    ("memory_limit_mebibytes", 64, 1 << 20),
    ("threads", 1, 256),
)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
