"""For the whole suite."""

from __future__ import annotations

from hypothesis import settings

# No test may fail because the machine was busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
