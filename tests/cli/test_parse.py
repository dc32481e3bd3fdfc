"""`servoscope parse`: JSON for bug reports, a table for people, exit codes for scripts."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servoscope.cli.main import main
from servoscope.exporters.engines import parser_for
from servoscope.exporters.exposition import MAX_BYTES

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines"
VLLM = FIXTURES / "vllm" / "0.32.0" / "metrics_under_load.txt"
SGLANG = FIXTURES / "sglang" / "0.5.12" / "synthetic.txt"
LLAMACPP = FIXTURES / "llamacpp" / "b11549" / "metrics_busy.txt"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(*words: str) -> tuple[int, str]:
    out = io.StringIO()
    return main(["parse", *words], out), out.getvalue()


def as_json(*words: str) -> tuple[int, dict[str, Any]]:
    code, text = run("--json", *words)
    return code, json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(text: str | bytes) -> str:
        path = tmp_path / "metrics.txt"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return save


@pytest.mark.parametrize(
    ("path", "engine"), [(VLLM, "vllm"), (SGLANG, "sglang"), (LLAMACPP, "llamacpp")]
)
def test_the_form_is_the_contract_and_the_numbers_are_the_parsers(path: Path, engine: str) -> None:
    code, found = as_json(str(path))
    assert code == 0
    assert {"engine", "version", "signals", "absent", "unknown", "refused"} <= set(found)
    assert (found["engine"], found["version"]) == (engine, None)
    assert (found["unknown"], found["refused"], found["refused_total"]) == ([], [], 0)
    assert not found["truncated"]
    sample = parser_for(engine, None).parse(path.read_text(encoding="utf-8"))
    assert found["absent"] == list(sample.absent)
    names = {r.name for r in sample.readings} | {h.name for h in sample.histograms}
    assert set(found["signals"]) == names
    for name, signal in found["signals"].items():
        assert {"value", "unit", "labels"} <= set(signal)
        if signal["kind"] == "histogram":
            counts = [h.count for h in sample.histograms if h.name == name]
            assert signal["count"] == sum(counts)
            assert signal["value"] == pytest.approx(signal["sum"] / signal["count"])
            assert all(series["buckets"][-1][0] == "+Inf" for series in signal["series"])
        else:
            total = sample.peak if signal["rule"] == "max" else sample.total
            assert signal["value"] == total(name)
        assert all(signal["labels"].items() <= s["labels"].items() for s in signal["series"])


def test_series_of_ranks_are_not_lost() -> None:
    _, found = as_json(str(SGLANG))
    running, usage = found["signals"]["running"], found["signals"]["kv_usage_ratio"]
    assert (running["value"], running["rule"]) == (6, "sum")
    assert [s["labels"]["rank"] for s in running["series"]] == ["0", "1"]
    assert running["labels"] == {"model_name": "m"}
    assert (usage["value"], usage["rule"], len(usage["series"])) == (0.5, "max", 2)


def test_a_version_tells_what_is_absent_by_design() -> None:
    _, found = as_json(str(FIXTURES / "vllm" / "0.8.5" / "synthetic.txt"), "--version", "0.8.5")
    assert found["version"] == "0.8.5"
    assert found["absent_by_design"] == ["reported_time_per_output_token_seconds"]
    code, text = run(str(FIXTURES / "vllm" / "0.8.5" / "synthetic.txt"), "--version", "0.8.5")
    assert code == 0
    assert "not in 0.8.5: reported_time_per_output_token_seconds" in text
    assert "absent:" not in text
    # A wrong version does not unsay what was found.
    _, found = as_json(str(VLLM), "--version", "0.8.5")
    assert found["absent_by_design"] == []


def test_refused_values_are_named_and_the_rest_is_kept(saved: Any) -> None:
    code, found = as_json(
        saved("vllm:num_requests_running NaN\nvllm:num_requests_waiting 4\nx y\n")
    )
    assert code == 1
    assert found["signals"]["waiting"]["value"] == 4
    assert found["refused"] == [
        {"name": "line", "value": "x y", "why": "line 3: value 'y' is no number"},
        {"name": "vllm:num_requests_running", "value": "nan", "why": "not a finite number"},
    ]
    assert found["refused_total"] == 2


def test_more_refusals_than_are_listed_are_counted(saved: Any) -> None:
    path = saved("vllm:num_requests_waiting 4\n" + "bad\n" * 5_000)
    code, found = as_json(path)
    assert (code, found["refused_total"], len(found["refused"])) == (1, 5_000, 100)
    assert "and 4960 more" in run(path)[1]


def test_unknown_names_are_reported_and_are_no_fault(saved: Any) -> None:
    path = saved("vllm:num_requests_running 4\nvllm:of_tomorrow 5\n")
    code, found = as_json(path)
    assert (code, found["unknown"]) == (0, ["vllm:of_tomorrow"])
    code, text = run(path)
    assert code == 0
    assert "unknown (1)\n  vllm:of_tomorrow\n" in text


def test_a_version_that_is_none_is_said() -> None:
    assert "abc  (not the number of a release" in run(str(VLLM), "--version", "abc")[1]
    assert "(not the number" not in run(str(VLLM), "--version", "0.32.0")[1]


def test_a_text_of_two_engines_says_so(saved: Any) -> None:
    path = saved(
        "vllm:num_requests_running 4\nsglang:num_queue_reqs 1\nsglang:num_running_reqs 2\n"
    )
    _, found = as_json(path)
    assert found["engine"] == "sglang"
    assert found["recognised"] == {"sglang": 2, "vllm": 1}
    assert "1 vllm series; choose with --engine" in run(path)[1]
    _, found = as_json(path, "--engine", "vllm")
    assert list(found["signals"]) == ["running"]
    assert found["signals"]["running"]["value"] == 4


def test_a_text_of_nobody_says_what_to_do(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(saved("process_cpu_seconds_total 5\n"))
    assert (code, found["engine"], found["signals"]) == (1, None, {})
    said = capsys.readouterr().err
    assert "no metric of vllm, sglang, llamacpp" in said
    assert "curl -s" in said
    assert "a sidecar's" not in said
    assert as_json(saved("# x\nservoscope_build_info 1\n"))[0] == 1
    assert "it is a sidecar's; name the engine's own" in capsys.readouterr().err
    assert run(saved(""))[0] == 1
    assert run(saved(""), "--engine", "vllm")[0] == 1


def test_standard_input_and_gzip(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    packed = gzip.compress(VLLM.read_bytes())
    expected = as_json(str(VLLM))
    assert as_json(saved(packed)) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(packed)))
    assert as_json("-") == expected
    code, found = as_json(saved(packed[:-20]))
    assert code == 1
    assert found["truncated"]
    assert found["refused"][0] == {"name": "text", "value": "", "why": "gzip is cut off"}
    assert found["signals"]


def test_a_bomb_and_an_endless_input_are_bounded(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = b"vllm:num_requests_running 4\n"
    code, found = as_json(saved(gzip.compress(head + b"\n" * (2 * MAX_BYTES))))
    assert (code, found["truncated"]) == (1, True)
    assert "gzip holds more than" in found["refused"][0]["why"]

    class Endless(io.RawIOBase):
        given = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            piece = (head + b"# " + b"x" * len(buffer))[: len(buffer)]
            buffer[: len(piece)] = piece
            self.given += len(piece)
            return len(piece)

    endless = Endless()
    stdin = io.TextIOWrapper(io.BufferedReader(endless, 1_048_576))
    monkeypatch.setattr(sys, "stdin", stdin)
    code, found = as_json("-")
    assert (code, found["truncated"]) == (1, True)
    assert found["signals"]["running"]["value"] == 4
    assert endless.given < 2 * MAX_BYTES


def test_files_that_cannot_be_read_and_wrong_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path / "none.txt"))[0] == 1
    assert capsys.readouterr().err.startswith("servoscope parse: cannot read ")
    assert run(str(tmp_path))[0] == 1
    capsys.readouterr()
    assert run("http://127.0.0.1:8000/metrics")[0] == 2
    assert "curl -s http://127.0.0.1:8000/metrics | servoscope parse -" in capsys.readouterr().err
    for words in (["parse"], ["parse", "--engine", "ollama", "x"], ["parse", "a", "b"]):
        with pytest.raises(SystemExit) as found:
            main(words, io.StringIO())
        assert found.value.code == 2


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" not in run(str(SGLANG))[1]
    terminal = Terminal()
    main(["parse", str(SGLANG)], terminal)
    assert "\x1b[1m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    main(["parse", str(SGLANG)], plain)
    assert plain.getvalue() == run(str(SGLANG))[1]


def test_names_and_labels_cannot_steer_a_terminal(saved: Any) -> None:
    path = saved(
        'vllm:num_requests_running{engine="0",model_name="\x1b[2J\x07evil"} 1\n'
        'vllm:num_requests_running{engine="1",model_name="\x9b31m"} 1\n'
        "vllm:\x1b[31m 1\n"
    )
    _, text = run(path)
    assert all(c.isprintable() for c in text.replace("\n", ""))
    assert "\\x1b[2J\\x07evil" in text
    _, found = as_json(path)
    assert found["signals"]["running"]["series"][0]["labels"]["model_name"] == "\x1b[2J\x07evil"


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_no_bytes_raise(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("servoscope.cli.commands.parse._bytes", lambda _: data)
        for words in (["any"], ["--json", "any"], ["--engine", "sglang", "any"]):
            assert run(*words)[0] in (0, 1)
