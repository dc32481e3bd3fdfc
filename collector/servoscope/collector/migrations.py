"""The schema of the store, as steps that are applied once each and never edited afterwards.

A new field of ``RequestRecord`` needs a new step: the store writes the wire fields that the table
has, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIGRATIONS", "Migration"]


@dataclass(frozen=True, slots=True)
class Migration:
    """One step: ``statements`` bring a store from version - 1 to ``version``."""

    version: int
    name: str
    statements: tuple[str, ...]


_REQUESTS = """
CREATE TABLE requests (
    at_unix_seconds DOUBLE NOT NULL,  -- when it finished, else when it came in
    sidecar_id VARCHAR NOT NULL,
    request_id VARCHAR NOT NULL,
    source VARCHAR NOT NULL,
    outcome VARCHAR NOT NULL,
    phase VARCHAR NOT NULL,
    finish_reason VARCHAR,
    status_code INTEGER,
    engine VARCHAR NOT NULL,
    server VARCHAR NOT NULL,
    rank INTEGER,
    model_name VARCHAR NOT NULL,
    model_version VARCHAR NOT NULL,
    gpu_model VARCHAR NOT NULL,
    request_type VARCHAR NOT NULL,
    request_type_hint VARCHAR,
    tenant VARCHAR NOT NULL,
    endpoint VARCHAR,
    streaming BOOLEAN,
    received_unix_seconds DOUBLE,
    first_token_unix_seconds DOUBLE,
    finished_unix_seconds DOUBLE,
    queue_seconds DOUBLE,
    prefill_seconds DOUBLE,
    decode_seconds DOUBLE,
    time_to_first_token_seconds DOUBLE,
    time_to_first_answer_seconds DOUBLE,
    time_per_output_token_seconds DOUBLE,
    max_inter_token_seconds DOUBLE,
    e2e_seconds DOUBLE,
    prompt_tokens BIGINT,
    output_tokens BIGINT,
    cached_tokens BIGINT,
    max_output_tokens BIGINT,
    preemptions BIGINT,
    meets_all BOOLEAN,     -- every objective that counts it is met; NULL: none counts it
    input_bucket INTEGER,  -- lengths.bucket_of(prompt_tokens)
    output_bucket INTEGER  -- lengths.bucket_of(output_tokens)
)
"""

MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        1,
        "request records, batches, verdicts by minute, sidecars",
        (
            _REQUESTS,
            """
            CREATE TABLE batches (
                sidecar_id VARCHAR NOT NULL,
                epoch BIGINT NOT NULL,
                seq BIGINT NOT NULL,
                accepted BIGINT NOT NULL,
                stored_unix_seconds DOUBLE NOT NULL,
                PRIMARY KEY (sidecar_id, epoch, seq)
            )
            """,
            """
            CREATE TABLE verdicts (
                minute_unix_seconds BIGINT NOT NULL,
                service VARCHAR NOT NULL,
                objective VARCHAR NOT NULL,
                good BIGINT NOT NULL,
                total BIGINT NOT NULL,
                over BIGINT NOT NULL,
                censored BIGINT NOT NULL,
                PRIMARY KEY (minute_unix_seconds, service, objective)
            )
            """,
            """
            CREATE TABLE sidecars (
                sidecar_id VARCHAR PRIMARY KEY,
                server VARCHAR NOT NULL,
                engine VARCHAR NOT NULL,
                last_seen_unix_seconds DOUBLE NOT NULL,
                records BIGINT NOT NULL
            )
            """,
        ),
    ),
)
