"""For the whole suite."""

from __future__ import annotations

import signal

from hypothesis import settings

# No test may fail because the machine was busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Where the suite runs in the background, it inherits SIGINT ignored, and so would every process
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
