"""`servoscope slo compile`: what it writes is what Prometheus and Alertmanager accept."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest

from servoscope.cli.main import main
from stack.processes import ensure_installed

SPEC = """\
service: shop
objectives:
  - {name: chat-ttft, sli: time_to_first_token, threshold: 1s, target: 99%, window: 7d,
     where: {request_type: chat}}
"""


def test_compiled_files_pass_the_real_checkers(tmp_path: Path) -> None:
    ensure_installed()
    spec = tmp_path / "shop.yaml"
    spec.write_text(SPEC)
    config = tmp_path / "servoscope.yaml"
    config.write_text("notify: {page: [{webhook: {url: 'http://127.0.0.1:1/x'}}]}\n")
    out = io.StringIO()
    words = ["--config", str(config), "slo", "compile", str(spec), "--out", str(tmp_path / "o")]
    assert main(words, out) == 0
    rules = sorted((tmp_path / "o" / "rules").glob("*.yaml"))
    assert [p.name for p in rules] == ["engines.yaml", "shop.yaml"]
    subprocess.run(["promtool", "check", "rules", *map(str, rules)], check=True)
    subprocess.run(["amtool", "check-config", str(tmp_path / "o/alertmanager.yaml")], check=True)
    assert "http://127.0.0.1:1/x" in (tmp_path / "o" / "alertmanager.yaml").read_text()
    assert "example receivers" not in out.getvalue()


def test_default_objectives_without_any_file(tmp_path: Path) -> None:
    out = io.StringIO()
    assert main(["slo", "compile", "--out", str(tmp_path)], out) == 0
    assert (tmp_path / "rules" / "default.yaml").is_file()
    assert "example receivers" in out.getvalue()


def test_links_of_the_alerts_lead_where_they_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--runbooks", "https://wiki.example.org/r/", "--dashboard", "https://g.example.org/d"]
    assert main(["slo", "compile", "--out", str(tmp_path), *where], io.StringIO()) == 0
    for name in ("default", "engines"):
        rules = (tmp_path / "rules" / f"{name}.yaml").read_text()
        assert "https://wiki.example.org/r/" in rules
        assert "org/r//" not in rules
        assert "https://g.example.org/d" in rules
        assert "127.0.0.1" not in rules
    assert main(["slo", "compile", "--out", str(tmp_path), "--runbooks", "x"], io.StringIO()) == 2
    assert "--runbooks: 'x' is not an http URL" in capsys.readouterr().err


def test_wrong_specs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "shop.yaml"
    spec.write_text(SPEC.replace("99%", "200%"))
    assert main(["slo", "compile", str(spec), "--out", str(tmp_path)], io.StringIO()) == 1
    assert "objectives[0].target" in capsys.readouterr().err
    other = tmp_path / "other" / "shop.yaml"
    other.parent.mkdir()
    other.write_text(SPEC)
    worse = tmp_path / "worse.yaml"
    worse.write_text(SPEC.replace("99%", "200%").replace("1s", "1"))
    names = ["/none.yaml", str(spec), str(other), str(worse)]
    assert main(["slo", "compile", *names, "--out", str(tmp_path)], io.StringIO()) == 1
    said = capsys.readouterr().err
    assert "cannot read /none.yaml" in said
    assert f"{spec}: line 3: objectives[0].target: " in said
    assert f"{other}: the name shop is taken" in said
    assert f"{worse}: line 3: objectives[0].target: " in said
    assert f"{worse}: line 3: objectives[0].threshold: " in said
    assert len(said.splitlines()) == 5
    assert not (tmp_path / "rules").exists()


def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["slo", "compile", "--out", str(tmp_path / "file" / "x")], io.StringIO()) == 1
    said = capsys.readouterr().err
    assert said.startswith("servoscope slo: cannot write ")
    assert said.count("\n") == 1
