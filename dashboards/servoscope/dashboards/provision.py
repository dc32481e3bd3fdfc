"""Put the dashboards into a running Grafana through its HTTP API (grafana-client).

Proven against a small server that checks what is sent, and the JSON against Grafana's own types;
not proven here: a real Grafana (dashboards/README.md says so too).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grafana_client.api import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException

from servoscope.dashboards.generate import rendered_dashboards

__all__ = ["FOLDER_TITLE", "FOLDER_UID", "ProvisionError", "Pushed", "push_dashboards"]

FOLDER_UID = "servoscope"
FOLDER_TITLE = "Servoscope"
_NOT_FOUND = 404


class ProvisionError(Exception):
    """Grafana did not take a dashboard; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """One dashboard that Grafana took."""

    uid: str
    url: str
    version: int


def push_dashboards(
    url: str,
    token: str,
    *,
    dashboards: Mapping[str, Mapping[str, Any]] | None = None,
    timeout_seconds: float = 10.0,
) -> list[Pushed]:
    """Create the folder where it is missing, then create or replace each dashboard by its uid.

    ``token`` is a service account's, with the right to write dashboards and folders.
    ``dashboards`` (file name → JSON) is all of ours unless given. Replaces what was edited by hand
    under the same uid: the source is the code. Raises ``ProvisionError``.
    """
    if dashboards is None:
        dashboards = {name: json.loads(text) for name, text in rendered_dashboards().items()}
    api: Any = GrafanaApi.from_url(url, credential=token, timeout=timeout_seconds)
    try:
        _ensure_folder(api)
        return [_push(api, name, dashboard) for name, dashboard in dashboards.items()]
    finally:
        api.client.s.close()


def _ensure_folder(api: Any) -> None:
    try:
        api.folder.get_folder(FOLDER_UID)
    except GrafanaClientError as error:
        if error.status_code != _NOT_FOUND:
            raise ProvisionError(f"folder {FOLDER_UID!r}: {error.message}") from error
    except (GrafanaException, OSError) as error:
        raise ProvisionError(f"folder {FOLDER_UID!r}: {error}") from error
    else:
        return
    try:
        api.folder.create_folder(title=FOLDER_TITLE, uid=FOLDER_UID)
    except (GrafanaException, OSError) as error:
        raise ProvisionError(f"folder {FOLDER_UID!r}: {error}") from error


def _push(api: Any, name: str, dashboard: Mapping[str, Any]) -> Pushed:
    if not dashboard.get("uid"):
        raise ProvisionError(f"{name}: no uid; Grafana would make a new copy at every push")
    request = {
        # Grafana numbers dashboards itself: an id of another installation is refused.
        "dashboard": {k: v for k, v in dashboard.items() if k not in ("id", "version")},
        "folderUid": FOLDER_UID,
        "overwrite": True,
        "message": "servoscope.dashboards.provision",
    }
    try:
        answer = api.dashboard.update_dashboard(request)
        return Pushed(str(answer["uid"]), str(answer["url"]), int(answer["version"]))
    except (GrafanaException, OSError) as error:
        raise ProvisionError(f"{name}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ProvisionError(f"{name}: Grafana's answer has no usable {error}") from error
