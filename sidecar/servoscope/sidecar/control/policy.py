"""What the collector tells every sidecar: how much may be controlled, and which objectives it has.

Pure. A policy only ever restricts: whatever it says, nothing is allowed that the settings of this
sidecar do not allow. A mode that we do not know is taken as ``observe``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["MODES", "Policy", "PolicyError", "parse_policy"]

#: Of the control loop, and whether a knob may be set at all while it is in force.
MODES = {
    "off": False, "observe": False, "canary": True, "on": True, "frozen": False, "rollback": False,
}  # fmt: skip
_MODE = re.compile(r"[a-z_]{1,32}")
_MAX_DIGEST_CHARACTERS = 128


class PolicyError(ValueError):
    """An answer that is no policy: the ``field`` at fault, and why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Policy:
    """As the collector answered."""

    control_mode: str
    slo_digest: str
    drift_freeze: bool

    @property
    def refuses_knobs(self) -> str:
        """Why no knob may be set under it, in words; empty when it may."""
        if self.drift_freeze:
            return "the collector's policy freezes control until a drift is over"
        if MODES[self.control_mode]:
            return ""
        return f"the collector's policy is control mode {self.control_mode!r}"


def parse_policy(body: bytes) -> Policy:
    """The policy in an answer; fields that we do not know are left alone. Raises PolicyError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise PolicyError("body", "no JSON") from None
    if not isinstance(found, dict):
        raise PolicyError("body", "no JSON object")
    mode, digest, freeze = (
        found.get(name) for name in ("control_mode", "slo_digest", "drift_freeze")
    )
    if not isinstance(mode, str) or not _MODE.fullmatch(mode):
        raise PolicyError("control_mode", f"a word such as observe expected, not {mode!r:.40}")
    if (
        not isinstance(digest, str)
        or not 0 < len(digest) <= _MAX_DIGEST_CHARACTERS
        or not (digest.isascii() and digest.isalnum())
    ):
        raise PolicyError("slo_digest", f"letters and digits expected, not {digest!r:.40}")
    if not isinstance(freeze, bool):
        raise PolicyError("drift_freeze", f"true or false expected, not {freeze!r:.40}")
    return Policy(mode if mode in MODES else "observe", digest, freeze)
