"""Batches on disk: none lost, none twice, whatever the file or the disk does."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.publish.spool import MAX_AGE_SECONDS, Spool
from servoscope.sidecar.publish.spool_lines import Batch, batch_line, read_line, settled_line

NOW = 1_800_000_000.0


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def batch(seq: int, *, records: int = 3, size: int = 50, epoch: int = 7) -> Batch:
    return Batch(epoch, seq, records, bytes([seq % 256]) * size)


@contextmanager
def opened(directory: Path, *, max_bytes: int = 100_000, clock: Any = None) -> Iterator[Spool]:
    """As a thread of the sidecar has it; at the end it is gone without a word, as by kill -9."""
    subject = Spool(directory / "spool", "[::1]:8000", max_bytes, clock or Clock())
    subject.open()
    try:
        yield subject
    finally:
        subject._let_go()


def test_what_is_not_settled_is_there_after_a_kill(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        for seq in range(1, 6):
            first.append(batch(seq))
        first.settle((7, 2))
        first.settle((7, 4))
        assert first.results["written"] == 15
    with opened(tmp_path) as second:
        assert second.take_found() == [batch(1), batch(3), batch(5)]  # the very bytes, in order
        assert second.take_found() == []
        assert second.results["restored"] == 9
        second.append(batch(1, epoch=8))
        second.settle((7, 1))
    with opened(tmp_path) as third:
        assert [b.key for b in third.take_found()] == [(7, 3), (7, 5), (8, 1)]


def test_a_file_whose_batches_are_all_settled_is_empty_and_at_the_end_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as subject:
        for seq in range(100):
            subject.append(batch(seq))
            subject.settle((7, seq))
            assert subject.size == subject.path.stat().st_size == 0
        subject.close()
        assert not subject.path.exists()


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(mode=0o700)
    (tmp_path / "spool" / "[::1]:8000.spool").touch(mode=0o644)
    with opened(tmp_path) as subject:
        subject.append(batch(1))
        assert stat.S_IMODE(subject.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(subject.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_tail_that_was_cut_off_costs_its_own_batch_only(tmp_path: Path, cut: int) -> None:
    with opened(tmp_path) as first:
        first.append(batch(1))
        first.append(batch(2))
        os.truncate(first.path, first.size - cut)
    with opened(tmp_path) as second:
        assert second.take_found() == [batch(1)]
        assert second.damaged_lines == 1
        second.append(batch(3))
    with opened(tmp_path) as third:  # what came after the cut stands on a line of its own
        assert third.take_found() == [batch(1), batch(3)]
        assert third.damaged_lines == 0


@pytest.mark.parametrize(
    "spoil", [b"\0" * 40, b"\n\n\n", b"deadbeef B 1 2 3 4 AAAA", b"B", b"\xff" * 500, b"x" * 5000]
)
def test_spoiled_lines_cost_no_other(tmp_path: Path, spoil: bytes) -> None:
    with opened(tmp_path) as first:
        first.append(batch(1))
        with first.path.open("ab") as file:
            file.write(spoil + b"\n")
        first._size = first.path.stat().st_size
        first.append(batch(2))
    with opened(tmp_path) as second:
        assert second.take_found() == [batch(1), batch(2)]
        assert second.damaged_lines == (spoil + b"\n").count(b"\n")


def test_a_batch_of_which_a_byte_changed_is_not_sent(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        first.append(batch(1))
        raw = bytearray(first.path.read_bytes())
    for place in range(0, len(raw) - 1, 5):
        spoiled = raw[:]
        spoiled[place] ^= 1
        first.path.write_bytes(spoiled)
        with opened(tmp_path) as second:
            assert second.take_found() == []


def test_the_file_is_bounded_and_what_finds_no_room_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=10_000) as subject:
        for seq in range(1_000):
            subject.append(batch(seq, size=200))
            assert subject.size == subject.path.stat().st_size <= 10_000
        written, full = subject.results["written"], subject.results["full"]
        assert written + full == 3_000
        assert written >= 75  # a quarter of the limit at least
        assert subject.ready is False
        assert "full" in (subject.problem or "")
        for seq in range(20):
            subject.settle((7, seq))
        subject.append(batch(2_000, size=200))  # there is room again
        assert subject.ready
    with opened(tmp_path, max_bytes=10_000) as again:
        assert sum(b.records for b in again.take_found()) == written - 60 + 3


def test_it_is_written_anew_when_it_is_mostly_settled_lines(tmp_path: Path) -> None:
    """For ever two batches open: the file never is empty, and never full."""
    with opened(tmp_path, max_bytes=5_000) as subject:
        for seq in range(2_000):
            subject.append(batch(seq, size=100))
            subject.settle((7, seq - 2))
            assert subject.path.stat().st_size == subject.size <= 5_000
        assert subject.results["full"] == 0
        assert [path.name for path in subject.path.parent.iterdir()] == [subject.path.name]
    with opened(tmp_path) as again:
        assert [b.seq for b in again.take_found()] == [1_998, 1_999]


def test_a_file_that_was_written_anew_is_still_held(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=2_000) as subject:
        for seq in range(50):
            subject.append(batch(seq, size=100))
            subject.settle((7, seq - 2))
        with opened(tmp_path) as other:
            assert "another sidecar" in (other.problem or "")
            assert other.take_found() == []
            other.append(batch(1))
            assert other.results["failed"] == 3
    with opened(tmp_path) as other:  # its holder has ended
        assert other.ready


def test_two_sidecars_of_one_server_do_not_share_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as first:
        first.append(batch(1))
        with opened(tmp_path) as second:
            for seq in range(10):
                second.append(batch(seq))
            assert (second.ready, second.results["failed"]) == (False, 30)
            assert caplog.text.count("not kept on disk") == 1
            first._let_go()
            second.append(batch(11))  # it takes over, with what the first has left
            assert second.ready
            assert second.take_found() == [batch(1)]


def test_a_full_disk_is_told_once_and_spoils_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:20])  # a part of it went through

    with opened(tmp_path) as subject:
        subject.append(batch(1))
        before = subject.path.read_bytes()
        monkeypatch.setattr(os, "write", full)
        for seq in range(2, 7):
            subject.append(batch(seq))
        assert subject.path.read_bytes() == before
        assert (subject.ready, subject.results["failed"]) == (False, 15)
        assert caplog.text.count("not kept on disk") == 1
        monkeypatch.setattr(os, "write", real)
        subject.append(batch(7))
        assert subject.ready
    with opened(tmp_path) as again:
        assert [b.seq for b in again.take_found()] == [1, 7]
        assert again.damaged_lines == 0


@pytest.mark.parametrize("place", ["file", "folder", "link", "fifo", "directory"])
def test_a_place_that_cannot_be_used_costs_the_spool_only(tmp_path: Path, place: str) -> None:
    path = tmp_path / "spool" / "[::1]:8000.spool"
    if place == "file":
        (tmp_path / "spool").touch()
    elif place == "folder":
        (tmp_path / "spool").mkdir()
        (tmp_path / "spool").chmod(0o777)  # anybody could put a file there
    else:
        (tmp_path / "spool").mkdir(mode=0o700)
        if place == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif place == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
    with opened(tmp_path) as subject:
        subject.append(batch(1))
        subject.settle((7, 1))
        assert (subject.ready, subject.results["failed"]) == (False, 3)
        assert "spool" in (subject.problem or "")
        subject.close()
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        first.append(batch(1))
        first.path.unlink()
        first.append(batch(2))
    with opened(tmp_path) as second:
        assert second.take_found() == [batch(1), batch(2)]


@pytest.mark.parametrize(
    ("age", "sent"),
    [(0.0, True), (MAX_AGE_SECONDS - 1, True), (MAX_AGE_SECONDS + 1, False), (-3600.0, True)],
)
def test_what_the_collector_may_have_forgotten_is_not_sent(
    tmp_path: Path, age: float, sent: bool
) -> None:
    """Also after the clock was set back: then the age is negative."""
    clock = Clock()
    with opened(tmp_path, clock=clock) as first:
        first.append(batch(1))
    clock.now += age
    with opened(tmp_path, clock=clock) as second:
        assert bool(second.take_found()) is sent
        assert second.results["old"] == (0 if sent else 3)
        assert (second.size > 0) is sent


def test_files_that_nobody_came_back_for_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    old, held, young, foreign = (
        folder / name for name in ("a.spool", ".b.spool.7", "c.spool", "notes.txt")
    )
    for path in (old, held, young, foreign):
        path.write_text("x")
        os.utime(path, (NOW, NOW - (60 if path is young else 2 * MAX_AGE_SECONDS)))
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with opened(tmp_path) as subject:
            assert sorted(folder.iterdir()) == sorted([held, young, foreign, subject.path])


def test_a_file_above_the_limit_is_read_up_to_it(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        for seq in range(100):
            first.append(batch(seq))
    with opened(tmp_path, max_bytes=1_000) as second:
        assert 5 < len(second.take_found()) < 12
        assert second.damaged_lines == 1
        assert second.path.stat().st_size == second.size <= 1_200


@given(
    st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.binary(),
    st.integers(0, 2**40),
)  # fmt: skip
def test_a_line_reads_back_as_it_was_written(
    epoch: int, seq: int, records: int, body: bytes, at: int
) -> None:
    made = Batch(epoch, seq, records, body)
    line = batch_line(made, at)
    assert line.count(b"\n") == 1
    assert read_line(line) == (made.key, float(at), made)
    assert read_line(settled_line(made.key)) == (made.key, 0.0, None)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_line_or_none(raw: bytes) -> None:
    assert read_line(raw) is None or raw.count(b" ") >= 3


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=40))
def test_any_course_of_events_leaves_what_was_not_settled(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, bool]]
) -> None:
    directory = tmp_path_factory.mktemp("course")
    expected: dict[int, Batch] = {}
    with opened(directory, max_bytes=1_500) as subject:
        for seq, settles in events:
            if settles:
                subject.settle((7, seq))
                expected.pop(seq, None)
            elif seq not in expected:
                subject.append(batch(seq))
                expected[seq] = batch(seq)
    with opened(directory) as again:
        assert again.take_found() == list(expected.values())
