"""A directory that another process writes to: hours, rotation, cuts, gaps, restarts of ours."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servoscope.sidecar.sources.position import PositionFile
from servoscope.sidecar.sources.tail import Tail


def hour(number: int) -> str:
    return f"sglang-request-metrics-20261129_{number:02d}.log"


def write(path: Path, *lines: str, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines[:-1]) + lines[-1] + end)


def texts(lines: list[bytes]) -> list[str]:
    return [line.decode() for line in lines]


class Bench:
    """A directory that is written, and sidecars that come and go."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "requests"
        self.directory.mkdir()
        self.state = tmp_path / "state" / "positions"
        self._tails: list[Tail] = []
        self.tail = self.new()

    def new(self, **options: int) -> Tail:
        """Another sidecar; the one before is gone."""
        self.close()
        position = PositionFile(self.state, "127.0.0.1:30000", self.directory)
        self.tail = Tail(self.directory, position, **options)
        self._tails.append(self.tail)
        return self.tail

    def close(self) -> None:
        while self._tails:
            self._tails.pop().close()

    def poll(self) -> list[str]:
        return texts(self.tail.poll())

    def path(self, number: int) -> Path:
        return self.directory / hour(number)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_it_starts_at_the_end_and_reads_what_comes(bench: Bench) -> None:
    write(bench.path(9), "old")
    write(bench.path(10), "older than us")
    assert bench.poll() == []
    write(bench.path(10), "a", "b")
    assert bench.poll() == ["a", "b"]
    assert bench.poll() == []


def test_a_new_hour_is_read_from_its_start_and_the_old_one_to_its_end(bench: Bench) -> None:
    write(bench.path(10), "before")
    bench.poll()
    write(bench.path(10), "last of ten")
    write(bench.path(11), "first of eleven")
    assert bench.poll() == ["last of ten", "first of eleven"]
    write(bench.path(10), "late one of ten")
    write(bench.path(11), "next")
    assert bench.poll() == ["late one of ten", "next"]


def test_a_clock_that_was_set_back_goes_on_in_an_older_file(bench: Bench) -> None:
    write(bench.path(8), "long ago")
    write(bench.path(12), "now")
    bench.poll()
    write(bench.path(8), "an hour that comes again")
    write(bench.path(7), "an hour that never was")
    assert sorted(bench.poll()) == ["an hour that comes again", "an hour that never was"]


def test_a_line_that_is_being_written_waits_for_its_end(bench: Bench) -> None:
    bench.poll()
    write(bench.path(10), "whole", '{"id": "ha', end="")
    assert bench.poll() == ["whole"]
    write(bench.path(10), 'lf"}', end="")
    assert bench.poll() == []
    write(bench.path(10), "", "next")
    assert bench.poll() == ['{"id": "half"}', "next"]


def test_a_renamed_file_is_read_on_and_a_new_one_of_its_name_from_the_start(bench: Bench) -> None:
    write(bench.path(10), "before")
    bench.poll()
    bench.path(10).rename(bench.directory / f"{hour(10)}.1")
    write(bench.directory / f"{hour(10)}.1", "after the rename")
    assert bench.poll() == ["after the rename"]
    write(bench.path(10), "of the new one")
    write(bench.directory / f"{hour(10)}.1", "still there")
    assert sorted(bench.poll()) == ["of the new one", "still there"]


def test_a_file_that_was_cut_is_read_from_its_start(bench: Bench) -> None:
    write(bench.path(10), "before", "and more before")
    bench.poll()
    os.truncate(bench.path(10), 0)
    write(bench.path(10), "after")
    assert bench.poll() == ["after"]
    assert bench.tail.drops["truncated_file"] == 1


def test_a_directory_that_is_gone_is_said_and_found_again(bench: Bench) -> None:
    write(bench.path(10), "before")
    bench.poll()
    with bench.path(10).open("a") as writer:
        shutil.rmtree(bench.directory)
        writer.write("into the deleted file\n")
        writer.flush()
        assert bench.poll() == ["into the deleted file"]
        assert "make it again" in bench.tail.problem
    bench.directory.mkdir()
    write(bench.path(11), "back")
    assert bench.poll() == ["back"]
    assert bench.tail.problem == ""


def test_a_directory_that_comes_later_is_read_from_then_on(tmp_path: Path) -> None:
    with closing(Tail(tmp_path / "later")) as tail:
        assert tail.poll() == []
        assert "No such file" in tail.problem
        (tmp_path / "later").mkdir()
        assert tail.poll() == []
        write(tmp_path / "later" / hour(10), "a")
        assert texts(tail.poll()) == ["a"]


def test_a_directory_that_may_not_be_read_is_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: object) -> object:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("servoscope.sidecar.sources.tail.os.scandir", refuse)
        assert bench.poll() == []
    assert "Permission denied; let this sidecar's user read it" in bench.tail.problem
    assert bench.poll() == []
    assert bench.tail.problem == ""


def test_what_is_not_a_request_file_is_left_alone(bench: Bench) -> None:
    bench.poll()
    write(bench.directory / "sglang-request-metrics-20261129_10.log.1", "rotated by somebody")
    write(bench.directory / "notes.txt", "hello")
    os.mkfifo(bench.path(3))
    bench.path(4).mkdir()
    bench.path(5).symlink_to(bench.directory / "notes.txt")
    write(bench.path(10), "a")
    assert bench.poll() == ["a"]
    assert (bench.tail.problem, dict(bench.tail.drops)) == ("", {})


@pytest.mark.parametrize("newest", [True, False])
def test_a_file_that_cannot_be_opened_is_a_problem_only_where_it_is_the_one_that_grows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, newest: bool
) -> None:
    write(bench.path(10), "old")
    bench.poll()
    opened, bad = os.open, bench.path(11 if newest else 9)
    write(bad, "x")

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if Path(path) == bad:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("servoscope.sidecar.sources.tail.os.open", refuse)
        for text in ("a", "b"):
            write(bench.path(10), text)
            assert bench.poll() == [text]
            assert ("Permission denied" in bench.tail.problem) is newest
            assert bench.tail.drops["unreadable_file"] == 1
            assert bench.tail.poll(look=False) == []
    assert bench.poll() == ["x"]
    assert bench.tail.problem == ""


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("end", ["", "half a li"])
def test_a_line_that_began_before_us_is_not_read_in_part(
    bench: Bench, end: str, again: bool
) -> None:
    write(bench.path(9), "old", end, end="")
    write(bench.path(10), "old", end, end="")
    bench.poll()
    if again:
        bench.new()
        bench.poll()
    for number in (9, 10):
        write(bench.path(number), "ne", f"new {number}")
    assert bench.poll() == (["new 9", "new 10"] if end else ["ne", "new 9", "ne", "new 10"])
    assert bench.tail.drops == {}


def test_a_file_that_was_cut_and_is_as_long_again_after_a_restart(bench: Bench) -> None:
    bench.poll()
    write(bench.path(10), "one line")
    assert bench.poll() == ["one line"]
    bench.new()
    assert bench.poll() == []
    bench.path(10).write_text("two line\n")
    assert bench.poll() == ["two line"]
    bench.path(10).write_text("and more\nthan before\n")
    assert bench.poll() == ["and more", "than before"]


@pytest.mark.parametrize("more", [1, 2, 500])
def test_a_file_that_was_cut_and_is_longer_again_is_read_from_its_start(
    bench: Bench, more: int
) -> None:
    """Rotation by copy and truncate, and a busy engine."""
    write(bench.path(10), "before us")
    bench.poll()
    write(bench.path(10), "a", "b")
    assert bench.poll() == ["a", "b"]
    fresh = [f"another line {i}" for i in range(more)]
    with bench.path(10).open("r+") as file:
        file.truncate(0)
        file.write("".join(f"{line}\n" for line in fresh) + "begun")
    assert bench.poll() == fresh
    write(bench.path(10), " and ended")
    assert bench.poll() == ["begun and ended"]
    assert bench.tail.drops == {"truncated_file": 1}


def test_a_line_that_is_too_long_is_passed_over_in_bounded_memory(bench: Bench) -> None:
    tail = bench.new(max_line_bytes=100)
    tail.poll()
    write(bench.path(10), "a", "x" * 1_000_000, "b", "y" * 101, "c" * 100)
    found: list[str] = []
    for _ in range(3):
        found += bench.poll()
    assert found == ["a", "b", "c" * 100]
    assert tail.drops["oversize_line"] == 2
    write(bench.path(10), "z" * 150, end="")
    assert bench.poll() == []
    write(bench.path(10), "zz", "after")
    assert bench.poll() == ["after"]
    assert tail.drops["oversize_line"] == 3


def test_much_is_handed_over_in_rounds(bench: Bench) -> None:
    tail = bench.new(round_bytes=300_000)
    tail.poll()
    write(bench.path(10), *(f"{n:0999d}" for n in range(1_000)))
    rounds: list[int] = []
    while not rounds or tail.behind:
        rounds.append(len(tail.poll()))
    assert sum(rounds) == 1_000
    assert len(rounds) > 1
    assert max(rounds) <= 600


def test_after_a_restart_it_reads_what_was_written_meanwhile_and_nothing_twice(
    bench: Bench,
) -> None:
    write(bench.path(9), "long ago")
    bench.poll()
    write(bench.path(9), "seen")
    write(bench.path(10), "seen too", "ha", end="")
    assert bench.poll() == ["seen", "seen too"]
    bench.close()
    write(bench.path(10), "lf", "missed")
    write(bench.path(11), "missed of the next hour")
    bench.new()
    assert bench.poll() == ["half", "missed", "missed of the next hour"]
    bench.new()
    assert bench.poll() == []


def test_a_restart_finds_a_file_that_was_rotated_meanwhile(bench: Bench) -> None:
    bench.poll()
    write(bench.path(10), "seen")
    assert bench.poll() == ["seen"]
    bench.close()
    write(bench.path(10), "missed")
    bench.path(10).rename(bench.directory / f"{hour(10)}.1")
    write(bench.path(10), "of the new one")
    bench.new()
    assert sorted(bench.poll()) == ["missed", "of the new one"]
    bench.new()
    assert bench.poll() == []


def test_a_restart_reads_a_cut_or_replaced_file_from_its_start(bench: Bench) -> None:
    bench.poll()
    write(bench.path(10), "a long line that was seen", "and another")
    assert len(bench.poll()) == 2
    bench.close()
    # The same inode, longer than before, with another beginning.
    os.truncate(bench.path(10), 0)
    write(bench.path(10), *(f"{n:040d}" for n in range(10)))
    bench.new()
    assert len(bench.poll()) == 10
    assert bench.tail.drops["truncated_file"] == 1


def test_a_restart_in_an_empty_directory_reads_all_that_came_after_the_first_start(
    bench: Bench,
) -> None:
    bench.poll()
    bench.close()
    write(bench.path(10), "missed")
    bench.new()
    assert bench.poll() == ["missed"]


@pytest.mark.parametrize(
    "spoiled",
    [b"", b"{", b"[]", b'{"version": 1}', b"\xff", b'{"version": 9, "directory": "", "files": []}',
     json.dumps({"version": 1, "directory": "/elsewhere", "files": []}).encode()],
)  # fmt: skip
def test_a_position_that_is_spoiled_or_of_elsewhere_is_none(bench: Bench, spoiled: bytes) -> None:
    bench.poll()
    write(bench.path(10), "seen")
    bench.poll()
    bench.close()
    (bench.state / "127.0.0.1:30000.json").write_bytes(spoiled)
    write(bench.path(10), "missed")
    bench.new()
    assert bench.poll() == []
    write(bench.path(10), "new")
    assert bench.poll() == ["new"]


@pytest.mark.parametrize("field", ["inode", "offset", "head_bytes", "head"])
@pytest.mark.parametrize("number", [10**15, 10**400, -1])
def test_a_mark_whose_numbers_are_spoiled_raises_nothing(
    bench: Bench, field: str, number: int
) -> None:
    bench.poll()
    write(bench.path(10), "seen")
    bench.poll()
    bench.close()
    path = bench.state / "127.0.0.1:30000.json"
    told = json.loads(path.read_bytes())
    told["files"][0][field] = number
    path.write_text(json.dumps(told))
    bench.new()
    bench.poll()
    write(bench.path(10), "new")
    assert bench.poll() == ["new"]


def test_a_mark_with_a_path_in_it_is_not_followed(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path / "private", "secret")
    bench.poll()
    bench.close()
    mark = {"name": "../private", "inode": 1, "offset": 0, "head_bytes": 0, "head": 0}
    told = {"version": 1, "directory": str(bench.directory), "files": [mark]}
    (bench.state / "127.0.0.1:30000.json").write_text(json.dumps(told))
    bench.new()
    assert bench.poll() == []


def test_a_second_sidecar_of_the_same_server_reads_and_does_not_keep_the_position(
    bench: Bench,
) -> None:
    write(bench.path(10), "before")
    bench.poll()
    position = PositionFile(bench.state, "127.0.0.1:30000", bench.directory)
    with closing(Tail(bench.directory, position)) as second:
        assert second.poll() == []
        assert "in use by another sidecar" in position.problem
        write(bench.path(10), "a")
        assert bench.poll() == ["a"]
        assert texts(second.poll()) == ["a"]


def test_a_position_that_cannot_be_written_stops_nothing(bench: Bench) -> None:
    bench.poll()
    shutil.rmtree(bench.state)
    write(bench.path(10), "a")
    assert bench.poll() == ["a"]


def test_old_files_are_let_go(bench: Bench) -> None:
    bench.poll()
    for number in range(20):
        write(bench.path(number), "a")
    assert len(bench.poll()) == 20
    for _ in range(3):
        assert bench.poll() == []
    assert len(bench.tail.files_open()) <= 8
    write(bench.path(2), "late")
    assert bench.poll() == ["late"]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=25))
def test_whatever_happens_each_line_comes_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    """Lines written, hours, rotations, restarts and rests in any order."""
    bench = Bench(tmp_path_factory.mktemp("tail"))
    bench.poll()
    written: list[str] = []
    found: list[str] = []
    now, half = 10, False
    for step in steps:
        if step in (0, 1):
            text = f"line number {len(written)} of {now}"
            write(bench.path(now), text[5:] if half else text)
            if half:
                text = "line " + text[5:]
            half = False
            written.append(text)
        elif step == 2 and not half:
            write(bench.path(now), "line ", end="")
            half = True
        elif step == 3 and not half:
            now += 1
        elif step == 4 and not half and bench.path(now).exists():
            found += bench.poll()  # rotated and replaced at once is one file too many to find
            target = bench.directory / f"{hour(now)}.{len(written)}"
            bench.path(now).rename(target)
            now += 1
        elif step == 5:
            bench.new()
        else:
            found += bench.poll()
    found += bench.poll()
    assert sorted(found) == sorted(written)
    bench.close()
