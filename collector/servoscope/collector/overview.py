"""The questions the API answers, in SQL over the store. No clock: the interval is given.

Quantiles are exact (``quantile_cont``, linear between ranks). A record without a value is left out
of that value's quantile, and only of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from servoscope.alerts.spec import Objective
from servoscope.collector.answers import (
    BudgetAnswer,
    LengthsAnswer,
    LengthStream,
    OverviewAnswer,
    OverviewRow,
    Quantiles,
    RecentAnswer,
    RecentRecord,
    SidecarAnswer,
)
from servoscope.collector.lengths import EDGES, LengthCounts, Stream
from servoscope.collector.slo import HOUR_SECONDS, budget

__all__ = ["Interval", "IntervalError", "Read", "budgets", "lengths", "overview", "recent"]

MAX_SIDECARS = 1000
CLOCK_SKEW_SECONDS = 60.0  # records may be this far ahead of our clock (records.py)

#: SQL and its parameters in, rows out (``Store.read``).
Read = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]


class IntervalError(ValueError):
    """An interval that cannot be asked for: ``field`` is the parameter at fault."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``since`` on and before ``until``, unix seconds; ``seconds`` is the length asked for."""

    since: float
    until: float
    seconds: float

    @classmethod
    def asked(
        cls,
        *,
        window_seconds: float,
        since: float | None,
        until: float | None,
        now: float,
        max_seconds: float,
    ) -> Interval:
        """The interval that a question means: ``since`` wins over the window.

        Without ``until`` it reaches ``CLOCK_SKEW_SECONDS`` past ``now``: a record of a host whose
        clock is ahead is new, not in the future. Raises IntervalError.
        """
        end = now if until is None else until
        start = end - window_seconds if since is None else since
        if start >= end:
            raise IntervalError("since", f"{start:.3f} is not before {end:.3f}")
        if end - start > max_seconds:
            raise IntervalError("since", f"more than {max_seconds:g} s before the end")
        return cls(start, end + CLOCK_SKEW_SECONDS if until is None else end, end - start)


_QUANTILES = (
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "queue_seconds",
    "e2e_seconds",
)
_ROWS = f"""
SELECT request_type, model_name, model_version, gpu_model,
       count(*) AS requests,
       histogram(outcome),
       {", ".join(f"quantile_cont({name}, [0.5, 0.99])" for name in _QUANTILES)},
       (sum(cached_tokens) FILTER (prompt_tokens IS NOT NULL))::DOUBLE
           / nullif(sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL), 0),
       coalesce(sum(prompt_tokens), 0)::BIGINT,
       coalesce(sum(output_tokens), 0)::BIGINT,
       count(*) FILTER (meets_all)::DOUBLE / nullif(count(meets_all), 0),
       max(at_unix_seconds),
       count(*) OVER ()
FROM requests
WHERE at_unix_seconds >= ? AND at_unix_seconds < ?
GROUP BY request_type, model_name, model_version, gpu_model
ORDER BY requests DESC, request_type, model_name, model_version, gpu_model
LIMIT ?
"""  # noqa: S608 - our own names
_BUDGETS = """
SELECT o.service, o.objective,
       coalesce(sum(v.total), 0)::BIGINT, coalesce(sum(v.good), 0)::BIGINT,
       coalesce(sum(v.total) FILTER (v.minute_unix_seconds >= o.hour), 0)::BIGINT,
       coalesce(sum(v.good) FILTER (v.minute_unix_seconds >= o.hour), 0)::BIGINT
FROM (SELECT unnest(?::VARCHAR[]) AS service, unnest(?::VARCHAR[]) AS objective,
             unnest(?::DOUBLE[]) AS since, ?::DOUBLE AS hour) AS o
JOIN verdicts AS v
  ON v.service = o.service AND v.objective = o.objective AND v.minute_unix_seconds >= o.since
GROUP BY o.service, o.objective
"""
_SIDECARS = """
SELECT sidecar_id, server, engine, last_seen_unix_seconds, records
FROM sidecars ORDER BY last_seen_unix_seconds DESC, sidecar_id LIMIT ?
"""
_LENGTHS = """
SELECT model_version, request_type, side, bucket, count(*)
FROM (
    SELECT model_version, request_type, at_unix_seconds,
           unnest(['input', 'output']) AS side,
           unnest([input_bucket, output_bucket]) AS bucket
    FROM requests
    WHERE at_unix_seconds >= ? AND at_unix_seconds < ?
)
WHERE bucket IS NOT NULL
GROUP BY model_version, request_type, side, bucket
ORDER BY sum(count(*)) OVER (PARTITION BY model_version, request_type, side) DESC,
         model_version, request_type, side, bucket
"""
_RECENT = f"""
SELECT {", ".join(RecentRecord.model_fields)}
FROM requests ORDER BY at_unix_seconds DESC LIMIT ?
"""  # noqa: S608 - our own names


def overview(
    read: Read, objectives: Sequence[Objective], interval: Interval, *, now: float, max_rows: int
) -> OverviewAnswer:
    """Slices of the traffic in ``interval``; budgets up to ``now``, each over its own window."""
    found = read(_ROWS, [interval.since, interval.until, max_rows])
    return OverviewAnswer(
        generated_unix_seconds=now,
        window_seconds=interval.seconds,
        since_unix_seconds=interval.since,
        until_unix_seconds=interval.until,
        rows=[_row(row) for row in found],
        omitted_rows=int(found[0][-1]) - len(found) if found else 0,
        budgets=budgets(read, objectives, now=now),
        sidecars=[
            SidecarAnswer(
                sidecar_id=sidecar_id,
                server=server,
                engine=engine,
                last_seen_unix_seconds=seen,
                records=records,
            )
            for sidecar_id, server, engine, seen, records in read(_SIDECARS, [MAX_SIDECARS])
        ],
    )


def _row(row: tuple[Any, ...]) -> OverviewRow:
    quantiles = {
        name: Quantiles(p50=pair[0], p99=pair[1]) if pair else Quantiles(p50=None, p99=None)
        for name, pair in zip(_QUANTILES, row[6:10], strict=True)
    }
    return OverviewRow(
        request_type=row[0],
        model_name=row[1],
        model_version=row[2],
        gpu_model=row[3],
        requests=row[4],
        outcomes=dict(sorted(row[5].items())),
        kv_hit_ratio=row[10],
        prompt_tokens=row[11],
        output_tokens=row[12],
        goodput_ratio=row[13],
        last_finished_unix_seconds=row[14],
        **quantiles,
    )


def budgets(read: Read, objectives: Sequence[Objective], *, now: float) -> list[BudgetAnswer]:
    """The budget of every objective, in the order in which they are given."""
    parameters = [
        [o.service for o in objectives],
        [o.name for o in objectives],
        [now - o.window_seconds for o in objectives],
        now - HOUR_SECONDS,
    ]
    counts = {(row[0], row[1]): row[2:] for row in read(_BUDGETS, parameters)}
    answers = []
    for objective in objectives:
        total, good, hour_total, hour_good = counts.get(
            (objective.service, objective.name), (0, 0, 0, 0)
        )
        found = budget(
            objective, total=total, good=good, hour_total=hour_total, hour_good=hour_good
        )
        answers.append(BudgetAnswer(**asdict(found)))
    return answers


def lengths(read: Read, interval: Interval, *, now: float) -> LengthsAnswer:
    """Prompt and output lengths in ``interval``, the busiest streams first up to the cap."""
    counts = LengthCounts()
    counts.add_all(
        (Stream(version, request_type, side), bucket, count)
        for version, request_type, side, bucket, count in read(
            _LENGTHS, [interval.since, interval.until]
        )
    )
    return LengthsAnswer(
        generated_unix_seconds=now,
        since_unix_seconds=interval.since,
        until_unix_seconds=interval.until,
        edges=list(EDGES),
        streams=[
            LengthStream(
                model_version=stream.model_version,
                request_type=stream.request_type,
                side=stream.side,
                total=sum(buckets),
                counts=list(buckets),
            )
            for stream, buckets in counts.streams()
        ],
        omitted=counts.omitted,
    )


def recent(read: Read, limit: int) -> RecentAnswer:
    """The newest ``limit`` records."""
    names = list(RecentRecord.model_fields)
    return RecentAnswer(
        records=[
            RecentRecord(**dict(zip(names, row, strict=True))) for row in read(_RECENT, [limit])
        ]
    )
