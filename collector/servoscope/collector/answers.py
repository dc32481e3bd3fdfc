"""What the API answers, as models: they are the OpenAPI document and the promise to its readers.

``None`` means "nothing to say it from" (no request had the value), never zero.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

__all__ = [
    "BudgetAnswer",
    "ErrorAnswer",
    "HealthAnswer",
    "LengthStream",
    "LengthsAnswer",
    "OverviewAnswer",
    "OverviewRow",
    "PolicyAnswer",
    "Quantiles",
    "RecentAnswer",
    "RecentRecord",
    "RecordsAnswer",
    "RefusedAnswer",
    "SidecarAnswer",
]


class ErrorAnswer(BaseModel):
    """Why a request was refused, and which part of it is at fault."""

    field: str
    why: str


class RefusedAnswer(BaseModel):
    """One value of a batch that was not believed."""

    row: int
    field: str
    why: str
    row_lost: bool  # false: the row was kept, without this value


class RecordsAnswer(BaseModel):
    """What became of a batch. ``refused`` describes the first few, the counters count all."""

    accepted: int  # rows that are stored under this batch's key
    duplicate: bool  # the key was stored before: nothing was stored now
    refused: list[RefusedAnswer]
    refused_rows: int
    refused_values: int
    unknown_columns: list[str]  # tolerated, not stored


class Quantiles(BaseModel):
    """Exact quantiles (linear interpolation) over the requests that have the value."""

    p50: float | None
    p99: float | None


class OverviewRow(BaseModel):
    """One slice of the traffic."""

    request_type: str
    model_name: str
    model_version: str
    gpu_model: str
    requests: int
    outcomes: dict[str, int]
    time_to_first_token_seconds: Quantiles
    time_per_output_token_seconds: Quantiles
    queue_seconds: Quantiles
    e2e_seconds: Quantiles
    kv_hit_ratio: float | None  # cached / prompt tokens, where both are known
    prompt_tokens: int
    output_tokens: int
    goodput_ratio: float | None  # requests that met every objective that counts them
    last_finished_unix_seconds: float


class BudgetAnswer(BaseModel):
    """The error budget of one objective over its own window."""

    service: str
    objective: str
    target_ratio: float
    window_seconds: float
    total: int
    good: int
    bad: int
    remaining_ratio: float | None
    burn_1h: float | None


class SidecarAnswer(BaseModel):
    """A sidecar that has sent records."""

    sidecar_id: str
    server: str
    engine: str
    last_seen_unix_seconds: float
    records: int


class OverviewAnswer(BaseModel):
    """The fleet at a glance."""

    generated_unix_seconds: float
    window_seconds: float
    since_unix_seconds: float
    until_unix_seconds: float
    rows: list[OverviewRow]
    omitted_rows: int  # slices beyond the cap, the least busy ones
    budgets: list[BudgetAnswer]
    sidecars: list[SidecarAnswer]


class PolicyAnswer(BaseModel):
    """What every sidecar is told. A reader should take an unknown ``control_mode`` as observe."""

    control_mode: Literal["observe"]
    slo_digest: str = Field(pattern="^[0-9a-f]{16}$")
    drift_freeze: bool


class LengthStream(BaseModel):
    """Counts of one stream by bucket: ``counts[i]`` requests from ``edges[i]`` tokens on."""

    model_version: str
    request_type: str
    side: Literal["input", "output"]
    total: int
    counts: list[int]


class LengthsAnswer(BaseModel):
    """Length distributions on the one fixed grid."""

    generated_unix_seconds: float
    since_unix_seconds: float
    until_unix_seconds: float
    edges: list[int]
    streams: list[LengthStream]
    omitted: int  # lengths in streams beyond the cap


class RecentRecord(BaseModel):
    """One finished request. There is no text in it."""

    at_unix_seconds: float
    request_id: str
    source: str
    outcome: str
    phase: str
    server: str
    model_name: str
    model_version: str
    request_type: str
    streaming: bool | None
    queue_seconds: float | None
    time_to_first_token_seconds: float | None
    time_per_output_token_seconds: float | None
    e2e_seconds: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    meets_all: bool | None


class RecentAnswer(BaseModel):
    """The newest finished requests, newest first."""

    records: list[RecentRecord]


class HealthAnswer(BaseModel):
    """Whether the process runs (healthz) or takes records (readyz)."""

    status: Literal["ok", "not ready"]
    why: str = ""
