"""Where the alerts' runbook_url leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from servoscope.alerts.rules import ALERT_NAMES
from servoscope.alerts.settings import RuleSettings


def test_every_alert_has_its_page(serve: Callable[..., Any]) -> None:
    running = serve()
    base = urlsplit(RuleSettings().runbook_base_url).path.rstrip("/")
    for name in ALERT_NAMES:
        answer = running.get(f"{base}/{name}.md")
        assert answer.status == 200
        assert name in answer.raw.decode()
        assert answer.headers["content-type"].startswith("text/markdown")


@pytest.mark.parametrize(
    "page", ["None.md", "..%2Fdata.py", "..%2F..%2Fpyproject.toml", "%00", "."]
)
def test_nothing_else_is_served(serve: Callable[..., Any], page: str) -> None:
    answer = serve().get(f"/runbooks/{page}")
    assert answer.status == 404
