"""The live view in a terminal that changes its size: no picture is ever written beside another."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest
from rich.text import Text

from servoscope.cli.screen import Screen

SECOND, FIRST = "\x1b[?1049h", "\x1b[?1049l"
UP = re.compile(r"\x1b\[\d*A")  # relative to what was written before: wrong after a resize
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """Our end of a pseudo-terminal."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        self.out: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self.resize(80, 24)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.out.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> str:
        """What was written since the last call."""
        self.out.write("\x00")
        self.out.flush()
        got = b""
        while not got.endswith(b"\x00"):
            got += os.read(self.master, 65_536)
        return got[:-1].decode().replace("\r\n", "\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    one = Terminal()
    yield one
    one.out.close()
    os.close(one.master)


def picture(width: int) -> Text:
    return Text("\n".join([f"width {width}", "x" * (width - 3), "end of it"]))


def frame(written: str) -> list[str]:
    return [line.rstrip() for line in SEQUENCE.sub("", written).split("\n")]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_each_picture_is_the_whole_terminal(terminal: Terminal, columns: int) -> None:
    screen = Screen(terminal.out)
    with screen:
        assert SECOND in terminal.read()
        screen.show(picture)
        terminal.read()
        for size in ((columns, 24), (columns, 10), (40, 50), (columns, 24)):
            terminal.resize(*size)
            screen.again()
            written = terminal.read()
            assert not UP.search(written)
            lines = frame(written)
            assert len(lines) == size[1]
            assert lines[:3] == [f"width {size[0]}", "x" * (size[0] - 3), "end of it"]
            assert not any(lines[3:])
            screen.show(picture)
            assert frame(terminal.read()) == lines
    written = terminal.read()
    assert FIRST in written
    assert written.count("end of it") == 1  # the last picture stays when it has ended


def test_the_terminal_is_believed_and_not_the_environment(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LINES", "60")
    terminal.resize(70, 20)
    with Screen(terminal.out) as screen:
        terminal.read()
        screen.show(picture)
        assert "width 70" in terminal.read()


def test_nothing_to_show_again(terminal: Terminal) -> None:
    screen = Screen(terminal.out)
    screen.again()
    with screen:
        screen.again()
    assert "width" not in terminal.read()


def test_elsewhere_pictures_are_printed_one_after_the_other() -> None:
    out = io.StringIO()
    with Screen(out) as screen:
        assert not screen.live
        screen.show(picture)
        screen.show(picture)
    assert out.getvalue().count("width 132") == 2
    assert "\x1b" not in out.getvalue()
