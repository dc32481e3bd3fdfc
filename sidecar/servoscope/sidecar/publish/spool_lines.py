"""The lines of a spool file: a batch exactly as it is sent, or the word that one is settled. Pure.

    <crc32> B <unix seconds> <epoch> <seq> <records> <the gzip body in base64>
    <crc32> S <epoch> <seq>

Every line carries its own checksum, so that a spoiled one costs no other.
"""

from __future__ import annotations

import binascii
import zlib
from dataclasses import dataclass

__all__ = ["Batch", "Key", "batch_line", "read_line", "settled_line"]

Key = tuple[int, int]  # epoch, seq


@dataclass(frozen=True, slots=True)
class Batch:
    """A body as it is sent, and how many records are in it."""

    epoch: int
    seq: int
    records: int
    body: bytes

    @property
    def key(self) -> Key:
        """What tells it from every other batch of this sidecar."""
        return (self.epoch, self.seq)


def _line(text: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text), text)


def batch_line(batch: Batch, at: float) -> bytes:
    """The line of a batch that was made at ``at`` (unix seconds)."""
    head = b"B %d %d %d %d " % (at, batch.epoch, batch.seq, batch.records)
    return _line(head + binascii.b2a_base64(batch.body, newline=False))


def settled_line(key: Key) -> bytes:
    """The line that takes a batch back."""
    return _line(b"S %d %d" % key)


def read_line(line: bytes) -> tuple[Key, float, Batch | None] | None:
    """(key, when, batch), without a batch where it is settled; ``None`` for what is neither."""
    crc, _, text = line.rstrip(b"\n").partition(b" ")
    try:
        if int(crc, 16) != zlib.crc32(text):
            return None
        kind, *words = text.split(b" ")
        if kind == b"S":
            epoch, seq = map(int, words)
            return (epoch, seq), 0.0, None
        at, epoch, seq, records = map(int, words[:4])
        body = binascii.a2b_base64(words[4], strict_mode=True)
    except (ValueError, IndexError):
        return None
    if kind != b"B" or min(epoch, seq, records) < 0:
        return None
    return (epoch, seq), float(at), Batch(epoch, seq, records, body)
