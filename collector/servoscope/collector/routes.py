"""What can be asked of the collector over HTTP, and how refusals are answered.

Every refusal has the form ``{"field": ..., "why": ...}``. The event loop only moves bytes here;
``Intake`` and ``Inquiry`` do the work on threads.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from servoscope.alerts.data import data_text
from servoscope.alerts.digest import digest
from servoscope.collector.answers import (
    ErrorAnswer,
    HealthAnswer,
    LengthsAnswer,
    OverviewAnswer,
    PolicyAnswer,
    RecentAnswer,
    RecordsAnswer,
    RefusedAnswer,
)
from servoscope.collector.ingest import IngestError, check_headers
from servoscope.collector.intake import BusyError
from servoscope.collector.overview import Interval, IntervalError, lengths, overview, recent
from servoscope.collector.service import Collector
from servoscope.collector.store import StoreError
from servoscope.collector.telemetry import CONTENT_TYPE
from servoscope.exporters.wire import MAX_ROWS, REQUIRED_COLUMNS, SCHEMA

__all__ = ["handle_errors", "probes", "questions", "records"]

STORE_RETRY_SECONDS = 5

_ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorAnswer, "description": "No token, or a wrong one."},
    422: {"model": ErrorAnswer, "description": "A parameter is wrong."},
    503: {"model": ErrorAnswer, "description": "Busy or without a store; see Retry-After."},
}
_POST_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The batch is wrong; the field is named."},
    401: _ERRORS[401],
    408: {"model": ErrorAnswer, "description": "The body did not arrive in time."},
    413: {"model": ErrorAnswer, "description": "The body is too large; send fewer rows."},
    415: {"model": ErrorAnswer, "description": "Not JSON, or not gzip."},
    503: _ERRORS[503],
}
_BATCH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["schema", "sidecar_id", "epoch", "seq", "columns"],
    "properties": {
        "schema": {"const": SCHEMA},
        "sidecar_id": {"type": "string", "minLength": 1, "maxLength": 128},
        "epoch": {"type": "integer", "minimum": 0},
        "seq": {"type": "integer", "minimum": 0},
        "columns": {
            "type": "object",
            "required": list(REQUIRED_COLUMNS),
            "additionalProperties": {"type": "array", "maxItems": MAX_ROWS},
        },
    },
}


def probes(collector: Collector) -> APIRouter:
    """/healthz: the process runs. /readyz: it takes records. Both without a token."""
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> HealthAnswer:
        return HealthAnswer(status="ok")

    @router.get("/readyz", responses={503: {"model": HealthAnswer}})
    async def readyz(response: Response) -> HealthAnswer:
        why = "stopping" if collector.intake.closing else collector.intake.failure
        if not why:
            return HealthAnswer(status="ok")
        response.status_code = 503
        return HealthAnswer(status="not ready", why=why)

    return router


def records(collector: Collector) -> APIRouter:
    """The way in for sidecars."""
    router = APIRouter()
    body = {"required": True, "content": {"application/json": {"schema": _BATCH_SCHEMA}}}

    @router.post("/api/v1/records", responses=_POST_ERRORS, openapi_extra={"requestBody": body})
    async def post_records(request: Request) -> RecordsAnswer:
        """Take one batch. 200 means stored: the same key sent again is answered ``duplicate``."""
        config, headers = collector.config, request.headers
        encoding = check_headers(
            headers.get("content-type"),
            headers.get("content-encoding"),
            headers.get("content-length"),
            config.max_body_bytes,
        )
        with collector.intake.slot():
            raw = await _read_body(request, config.max_body_bytes, config.read_timeout_seconds)
            batch, inserted = await collector.intake.take(raw, encoding)
        return RecordsAnswer(
            accepted=inserted.accepted,
            duplicate=inserted.duplicate,
            refused=[
                RefusedAnswer(row=c.row, field=c.field, why=c.why, row_lost=c.row_lost)
                for c in batch.refused
            ],
            refused_rows=batch.refused_rows,
            refused_values=batch.refused_values,
            unknown_columns=list(batch.unknown_columns),
        )

    return router


async def _read_body(request: Request, limit: int, timeout_seconds: float) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise IngestError(413, "body", f"larger than {limit} bytes")
    except TimeoutError:
        raise IngestError(408, "body", f"did not arrive within {timeout_seconds:g} s") from None
    except ClientDisconnect:
        raise IngestError(400, "body", "the connection ended before the body did") from None
    return bytes(body)


def questions(collector: Collector) -> APIRouter:
    """What people, pages and sidecars ask."""
    router = APIRouter(responses=_ERRORS)
    longest = collector.config.max_window_seconds

    async def asked_interval(
        window_seconds: float = Query(
            900.0, gt=0, le=longest, allow_inf_nan=False, description="seconds up to the end"
        ),
        since: float | None = Query(
            None, ge=0, le=1e11, allow_inf_nan=False, description="unix seconds; wins over window"
        ),
        until: float | None = Query(
            None, ge=0, le=1e11, allow_inf_nan=False, description="unix seconds; default: now"
        ),
    ) -> Interval:
        return collector.interval(window_seconds, since, until)

    chosen = Depends(asked_interval)

    @router.get("/api/v1/overview")
    async def get_overview(interval: Interval = chosen) -> OverviewAnswer:
        """Slices of the traffic, budgets and sidecars."""
        now, max_rows = collector.clock(), collector.config.max_rows
        return await collector.inquiry.ask(
            lambda read: overview(read, collector.objectives, interval, now=now, max_rows=max_rows)
        )

    @router.get("/api/v1/lengths")
    async def get_lengths(interval: Interval = chosen) -> LengthsAnswer:
        """Counts of prompt and output lengths on the fixed grid."""
        now = collector.clock()
        return await collector.inquiry.ask(lambda read: lengths(read, interval, now=now))

    @router.get("/api/v1/records/recent")
    async def get_recent(limit: int = Query(50, ge=1, le=500)) -> RecentAnswer:
        """The newest finished requests."""
        return await collector.inquiry.ask(lambda read: recent(read, limit))

    @router.get("/api/v1/policy")
    async def get_policy() -> PolicyAnswer:
        """What every sidecar is told; sidecars poll it and go on with the last answer they got.

        ``{"control_mode": "observe", "slo_digest": "0123456789abcdef", "drift_freeze": false}``

        * ``control_mode``: ``observe``: knobs are set by people only.
        * ``slo_digest``: of the objectives that budgets are counted by, 16 hexadecimal digits
          (``servoscope.alerts.digest`` of a sidecar's own should be the same).
        * ``drift_freeze``: true: nothing may be tuned until drift is over.

        With a ``token_file`` it needs the bearer token, as every question does.
        """
        return PolicyAnswer(
            control_mode="observe",
            slo_digest=digest(collector.objectives),
            drift_freeze=False,
        )

    @router.get("/runbooks/{page}", response_class=Response)
    async def get_runbook(page: str) -> Response:
        """A page of alerts/runbooks, as Markdown: where every alert's runbook_url leads."""
        try:
            text = data_text("runbooks", page)
        except (OSError, ValueError) as error:
            raise IngestError(404, "page", f"there is no runbook {page!r}") from error
        return Response(text, headers={"content-type": "text/markdown; charset=utf-8"})

    @router.get("/metrics", include_in_schema=False)
    async def get_metrics() -> Response:
        """This process's own metrics."""
        return Response(
            collector.telemetry.render(collector.store.path),
            headers={"content-type": CONTENT_TYPE},
        )

    return router


# ---- errors ------------------------------------------------------------------------------------


def handle_errors(app: FastAPI) -> None:
    """Answer every refusal in one form."""

    def answer(status: int, field: str, why: str, **headers: str) -> JSONResponse:
        content = ErrorAnswer(field=field, why=why).model_dump()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return JSONResponse(content, status, named)

    @app.exception_handler(IngestError)
    async def refused(_: Request, error: IngestError) -> JSONResponse:
        headers = {"www_authenticate": "Bearer"} if error.status == 401 else {}
        return answer(error.status, error.field, error.why, **headers)

    @app.exception_handler(IntervalError)
    async def wrong_interval(_: Request, error: IntervalError) -> JSONResponse:
        return answer(422, error.field, error.why)

    @app.exception_handler(RequestValidationError)
    async def wrong_parameter(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return answer(422, str(first["loc"][-1]), str(first["msg"])[:300])

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> JSONResponse:
        why = "too much is waiting; come again"
        return answer(503, "collector", why, retry_after=str(error.retry_seconds))

    @app.exception_handler(StoreError)
    async def no_store(_: Request, error: StoreError) -> JSONResponse:
        return answer(503, "store", str(error), retry_after=str(STORE_RETRY_SECONDS))
