"""Settings of a sidecar: sections ``sidecar``, ``labels`` and ``control`` of servoscope.yaml.

Every field has its default beside it; an empty file is the defaults. ``validate`` stops at the
first bad value and names its key as it is written in the file.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from servoscope.exporters.hosts import wrong_host

__all__ = ["ConfigError", "ControlConfig", "LabelsConfig", "SidecarConfig", "TypeRule"]

REQUEST_TYPE = re.compile(r"[a-z0-9_.-]{1,64}")
TAP_MODES = ("auto", "on", "off")
_MAX_ALLOWED_HOSTS = 100
_RANGES = ("prompt_tokens", "output_tokens", "max_output_tokens")


class ConfigError(ValueError):
    """A setting that cannot be used: ``key`` as written in the file, and why."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


def _require(ok: bool, key: str, message: str) -> None:
    if not ok:
        raise ConfigError(key, message)


def _number(value: object, key: str, least: float, most: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(key, f"must be a number, not {value!r}")
    _require(least <= value <= most, key, f"must be in {least:g}..{most:g}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRule:
    """Requests that match every given condition are of ``request_type``.

    Text conditions are shell patterns (``*``, ``?``); ranges are [least, most], both included,
    null for no bound. A condition on something that the source does not see does not match.
    """

    request_type: str
    endpoint: str | None = None
    model_name: str | None = None
    tenant: str | None = None
    streaming: bool | None = None
    prompt_tokens: tuple[int | None, int | None] | None = None
    output_tokens: tuple[int | None, int | None] | None = None
    max_output_tokens: tuple[int | None, int | None] | None = None

    def validate(self, key: str) -> None:
        """Raises ConfigError for a type name or a range that cannot be."""
        _require(
            bool(REQUEST_TYPE.fullmatch(self.request_type)),
            f"{key}.request_type",
            f"must match {REQUEST_TYPE.pattern}, not {self.request_type!r}",
        )
        for name in _RANGES:
            if (bounds := getattr(self, name)) is None:
                continue
            least, most = bounds
            _require(
                (least is None or least >= 0) and (most is None or most >= 0),
                f"{key}.{name}",
                "bounds are whole numbers from 0 up, or null",
            )
            _require(
                least is None or most is None or least <= most,
                f"{key}.{name}",
                f"least ({least}) is above most ({most})",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelsConfig:
    """What is believed of requests: caps on label values (the rest is ``other``), probes."""

    max_models: int = 50
    max_versions: int = 20
    max_request_types: int = 32
    max_tenants: int = 100
    max_slices: int = 400  # label sets of full histograms: about 300 lines of /metrics each
    max_slo_series: int = 5_000  # objective x slice x tenant: 4 lines of /metrics each
    trust_probe_header: bool = False  # may `x-request-type: probe` take a request out of the SLIs?

    def validate(self) -> None:
        """Raises ConfigError for a cap outside 1..100,000."""
        for f in fields(self):
            if f.name.startswith("max_"):
                _number(getattr(self, f.name), f"labels.{f.name}", 1, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """How knobs are held. The lease makes the engine revert by itself when the sidecar is gone."""

    owner: str = "servoscope-sidecar"
    lease_seconds: float = 30.0
    renew_seconds: float = 5.0
    max_audit_bytes: int = 64 * 1024 * 1024  # no change is made once the audit file is this large
    policy_seconds: float = 20.0  # between two questions for the collector's policy, give or take
    obey_policy: bool = False  # refuse to set knobs while the collector's control mode forbids it

    def validate(self) -> None:
        """Raises ConfigError for a lease that could lapse between two renewals."""
        _require(bool(self.owner), "control.owner", "must not be empty")
        _number(self.lease_seconds, "control.lease_seconds", 1.0, 30.0)
        _number(self.renew_seconds, "control.renew_seconds", 0.1, self.lease_seconds / 2)
        _number(self.max_audit_bytes, "control.max_audit_bytes", 4096, 2**40)
        _number(self.policy_seconds, "control.policy_seconds", 1.0, 3_600)


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """One sidecar. Times are seconds."""

    listen: str = "127.0.0.1"
    port: int = 9790  # the first free one from here
    port_attempts: int = 100
    allow_remote: bool = False  # must be true to listen on anything but loopback
    #: Names that clients may use for this sidecar besides every address, localhost and, beyond
    #: loopback, this host's own name. Any other is refused: it could be a web page's that resolves
    #: to us. "*" allows all.
    allowed_hosts: tuple[str, ...] = ()

    engine: str | None = None  # None: find out
    model_version: str | None = None  # None: from argv, the engine or the model's files

    scrape_interval_seconds: float = 5.0
    scrape_timeout_seconds: float = 4.0
    scrape_max_bytes: int = 8 * 1024 * 1024
    scrape_max_interval_seconds: float = 60.0  # backing off goes this far
    scrape_cost_ratio: float = 0.05  # share of the time that reading /metrics may take
    watch_interval_seconds: float = 2.0  # is the engine's process still the same?

    tap: str = "auto"  # auto: when there is no plug-in and the right is there; on; off
    tap_interface: str | None = None  # None: by the server's address
    relay: str | None = None  # HOST:PORT to listen on; None: no relay
    otlp: str | None = None  # HOST:PORT to take SGLang's trace spans on; None: do not
    request_file: bool = True  # read the file of requests that SGLang writes, where it does
    #: Read SGLang's request file although the engine writes prompts into it. Nothing of them is
    #: kept either way; false is for those who must not have them pass through.
    sglang_allow_prompt_text: bool = False
    loads_interval_seconds: float = 1.0  # between two questions for SGLang's load; 0: none

    collector_url: str = "http://127.0.0.1:9780"  # empty: records stay here
    collector_token_file: str = ""  # file with the collector's bearer token, where it wants one
    push_queue_records: int = 20_000
    push_batch_records: int = 1_000
    push_interval_seconds: float = 1.0
    push_attempts: int = 10  # of a batch that the collector answers and does not take
    spool_max_bytes: int = 64 * 1024 * 1024  # of records not yet sent, on disk; 0: memory only

    warmup_seconds: float = 60.0  # requests to an engine process younger than this are probes
    long_prompt_tokens: int = 1_024
    long_output_tokens: int = 256
    types: tuple[TypeRule, ...] = ()  # the first rule that matches names the type

    labels: LabelsConfig = field(default_factory=LabelsConfig)  # a section of its own in the file
    control: ControlConfig = field(default_factory=ControlConfig)  # likewise

    def validate(self) -> None:
        """Raises ConfigError at the first value that cannot be used."""
        _require(bool(self.listen), "sidecar.listen", "must not be empty")
        self._require_loopback("sidecar.listen", self.listen)
        _require(
            len(self.allowed_hosts) <= _MAX_ALLOWED_HOSTS,
            "sidecar.allowed_hosts",
            f"more than {_MAX_ALLOWED_HOSTS} names",
        )
        for i, name in enumerate(self.allowed_hosts):
            _require((why := wrong_host(name)) is None, f"sidecar.allowed_hosts[{i}]", why or "")
        _number(self.port, "sidecar.port", 0, 65_535)
        _number(self.port_attempts, "sidecar.port_attempts", 1, 1_000)
        _number(self.scrape_interval_seconds, "sidecar.scrape_interval_seconds", 0.05, 3_600)
        _number(self.scrape_timeout_seconds, "sidecar.scrape_timeout_seconds", 0.05, 300)
        _number(self.scrape_max_bytes, "sidecar.scrape_max_bytes", 1_024, 2**30)
        _number(
            self.scrape_max_interval_seconds,
            "sidecar.scrape_max_interval_seconds",
            self.scrape_interval_seconds,
            86_400,
        )
        _number(self.scrape_cost_ratio, "sidecar.scrape_cost_ratio", 0.001, 1.0)
        _number(self.watch_interval_seconds, "sidecar.watch_interval_seconds", 0.05, 60)
        _require(self.tap in TAP_MODES, "sidecar.tap", f"must be one of {', '.join(TAP_MODES)}")
        if self.relay is not None:
            self._require_loopback("sidecar.relay", self.relay_address()[0])
        if self.otlp is not None:
            self._require_loopback("sidecar.otlp", self.otlp_address()[0])
        for name in ("request_file", "sglang_allow_prompt_text"):
            told = getattr(self, name)
            _require(
                isinstance(told, bool), f"sidecar.{name}", f"must be true or false, not {told!r}"
            )
        if self.loads_interval_seconds != 0:
            _number(self.loads_interval_seconds, "sidecar.loads_interval_seconds", 0.05, 3_600)
        self._validate_push()
        _number(self.warmup_seconds, "sidecar.warmup_seconds", 0, 86_400)
        _number(self.long_prompt_tokens, "sidecar.long_prompt_tokens", 1, 10**8)
        _number(self.long_output_tokens, "sidecar.long_output_tokens", 1, 10**8)
        for i, rule in enumerate(self.types):
            rule.validate(f"sidecar.types[{i}]")
        self.labels.validate()
        self.control.validate()

    def relay_address(self) -> tuple[str, int]:
        """Host and port of ``relay``. Raises ConfigError unless it is HOST:PORT."""
        return _host_and_port("sidecar.relay", self.relay)

    def otlp_address(self) -> tuple[str, int]:
        """Host and port of ``otlp``. Raises ConfigError unless it is HOST:PORT."""
        return _host_and_port("sidecar.otlp", self.otlp)

    def _require_loopback(self, key: str, host: str) -> None:
        _require(
            self.allow_remote or _is_loopback(host),
            key,
            f"{host!r} is not loopback; set sidecar.allow_remote to true if you mean it",
        )

    def _validate_push(self) -> None:
        if self.collector_url:
            try:
                parts = urlsplit(self.collector_url)
                usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            except ValueError:  # brackets that hold no address
                usable = False
            _require(
                usable,
                "sidecar.collector_url",
                f"must be an http URL or empty, not {self.collector_url!r}",
            )
        _number(self.push_queue_records, "sidecar.push_queue_records", 1, 10_000_000)
        most = min(self.push_queue_records, 10_000)
        _number(self.push_batch_records, "sidecar.push_batch_records", 1, most)
        _number(self.push_interval_seconds, "sidecar.push_interval_seconds", 0.01, 3_600)
        _number(self.push_attempts, "sidecar.push_attempts", 1, 1_000)
        _number(self.spool_max_bytes, "sidecar.spool_max_bytes", 0, 2**34)


def _host_and_port(key: str, text: str | None) -> tuple[str, int]:
    host, _, port = (text or "").rpartition(":")
    _require(
        bool(host) and port.isascii() and port.isdigit() and int(port) <= 65_535,
        key,
        f"must be HOST:PORT, not {text!r}",
    )
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
