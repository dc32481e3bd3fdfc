"""Fuzz target: one text through every engine's parser, by the cache and without it.

``python tests/fuzz/parse_text.py -max_total_time=60 tests/fuzz/corpus/parse_text`` where atheris is
installed; ``test_fuzz_targets.py`` runs the corpus through ``check`` without it. A file that broke
``check`` goes into the corpus together with its fix.
"""

from __future__ import annotations

import json
import math
import sys

from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.exposition import MAX_REFUSED, TextParser
from servoscope.exporters.report import report_of

__all__ = ["check"]

_SURVIVOR = b'survivor{a="b"} 42\n'


def check(data: bytes) -> None:
    """Raises AssertionError for a text that breaks a promise of the parsers."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return  # the line below would be half a character
    text = _SURVIVOR + data
    kept = TextParser()
    first, second, fresh = kept.parse(text), kept.parse(text), TextParser().parse(text)
    for read in (first, second):
        found = {(s.name, s.labels): v for s, v in read.samples.items()}
        assert ("survivor", (("a", "b"),)) in found, "a good line was lost"
        assert repr(found) == repr({(s.name, s.labels): v for s, v in fresh.samples.items()})
        assert read.refused == fresh.refused, "the cache judges otherwise"
        assert (read.refused_total, read.truncated) == (fresh.refused_total, fresh.truncated)
        assert len(read.refused) <= min(MAX_REFUSED, read.refused_total)
    other = kept.parse(_SURVIVOR + data.replace(b"1", b"2"))
    again = TextParser().parse(_SURVIVOR + data.replace(b"1", b"2"))
    assert {(s.name, s.labels): repr(v) for s, v in other.samples.items()} == {
        (s.name, s.labels): repr(v) for s, v in again.samples.items()
    }, "another text was read by the last one's shape"
    for engine in ENGINES:
        parser = parser_for(engine, "1.0")
        for _ in range(2):
            sample = parser.parse(data)
            assert all(math.isfinite(r.value) and r.value >= 0 for r in sample.readings)
            for h in sample.histograms:
                assert h.buckets[-1] == (math.inf, h.count)
    json.dumps(report_of(data), allow_nan=False)


def main() -> None:
    """Fuzz until stopped or told otherwise by libFuzzer's flags."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415

    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
