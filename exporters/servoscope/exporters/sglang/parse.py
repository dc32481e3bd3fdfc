"""SGLang's /metrics text → :class:`EngineSample`. Pure; one parser a server.

Which processes say what (read in the sources of 0.3.6 to 0.5.23):

- One HTTP process counts finished requests, their tokens and latencies: no rank label.
- Each scheduler process says what it sees, with ``tp_rank``, ``pp_rank``, ``moe_ep_rank`` and,
  where there are replicas, ``dp_rank``. The schedulers of one replica work on the SAME requests.
  Gauges come from tensor rank 0 alone unless ``--enable-metrics-for-all-schedulers`` is given,
  but of each pipeline rank; ``queue_time_seconds`` and ``num_retracted_requests_total`` come from
  every one of them at any time. So over those labels the largest counts, once, and only
  ``dp_rank`` is a rank of ours, to be summed over.
- Before 0.5 there was no rank label at all, and replicas wrote over each other's gauges: the text
  holds one of them and nothing says which (known fault 19). Our own count of open requests is
  what tells.

Gauges hold their last value while the engine idles and move once in ``--decode-log-interval``
(40) decode steps; ``scheduled_tokens_total`` moves at every step.
"""

from __future__ import annotations

from servoscope.exporters.mapping import TableParser
from servoscope.exporters.sglang.names import TABLE

__all__ = ["Parser"]


class Parser(TableParser):
    """Reads the texts of one SGLang server, of any version from 0.3.6 on. A rank is a DP rank."""

    table = TABLE
