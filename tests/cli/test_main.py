"""Ctrl-C at any moment of a start: code 130 and not a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from servoscope.cli.main import COMMANDS, main, run


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.25])
def test_an_interrupt_while_modules_load_is_silent(delay: float) -> None:
    code = (
        "import servoscope.cli.main as m, sys; sys.argv = ['servoscope', 'up', '--help'];"
        "print('on', flush=True); m.run()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (130, 0)  # 0: it had printed its help by then


def test_the_first_signal_meets_the_quiet_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    codes: list[int] = []

    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(3)  # what a real exit would not come back to

    monkeypatch.setattr("servoscope.cli.main.build_parser", interrupt)
    monkeypatch.setattr("servoscope.cli.main.os._exit", codes.append)
    with pytest.raises(SystemExit):
        main(["up"], sys.stdout)
    assert codes == [130]
    assert signal.getsignal(signal.SIGINT) is before


def test_run_turns_an_interrupt_into_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("servoscope.cli.main.main", interrupted)
    with pytest.raises(SystemExit) as found:
        run()
    assert found.value.code == 130


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_says_its_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as found:
        main([command, "--help"], sys.stdout)
    assert found.value.code == 0
    assert "Exit codes: 0 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("inspect", "8000"), "'8000'"),
        (("sidecar", "ftp://127.0.0.1:8000"), "'ftp://127.0.0.1:8000'"),
        (("knobs", "http://127.0.0.1:99999", "get"), "'http://127.0.0.1:99999'"),
        (("knobs", "http://127.0.0.1:1", "set", "chunk_tokens"), "'chunk_tokens'"),
        (("up", "http://127.0.0.1:99999"), "'http://127.0.0.1:99999'"),
        (("up", "--embedded", "http://127.0.0.1:8000"), "--embedded"),
        (("up", "--minutes", "0"), "--minutes"),
    ],
)
def test_wrong_words_are_named_and_end_with_2(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, sys.stdout) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"servoscope {words[0]}: ")
    assert named in said
