"""servoscope.yaml: defaults, order, and errors that name the key."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servoscope.cli.main import main
from servoscope.cli.settings import Settings, SettingsError, as_yaml, load_settings, parse_settings


def test_empty_file_equals_defaults() -> None:
    assert parse_settings("", {}, "defaults") == Settings()


def test_environment_wins_over_the_file() -> None:
    text = "sidecar: {port: 9801, scrape_interval_seconds: 7}\n"
    settings = parse_settings(text, {"SERVOSCOPE_SIDECAR__PORT": "9802", "SERVOSCOPE_STATE": "x"})
    assert settings.sidecar.port == 9802
    assert settings.sidecar.scrape_interval_seconds == 7.0


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("sidecar: {prot: 1}", "sidecar.prot: unknown key; did you mean port?"),
        ("sidecars: {}", "sidecars: unknown key; did you mean sidecar?"),
        ("sidecar: {port: abc}", "sidecar.port: 'abc' is not a whole number"),
        ("sidecar: {port: true}", "sidecar.port: True is not a whole number"),
        ("sidecar: {port: 70000}", "sidecar.port"),
        ("sidecar: 5", "sidecar: expected a mapping"),
        ("slos: 5", "slos: expected a list"),
        ("- a", "expected a mapping of sections"),
        ("a: [", "not valid YAML in line 1"),
        ("notify: {page: [{webhook: {url: 'ftp://x'}}]}", "notify.page[0]"),
        ("notify: {pager: []}", "notify.pager"),
        ("sidecar: {1: 3}", "sidecar.1: unknown key"),
        ("sidecar: {collector_url: 'http://[::1'}", "sidecar.collector_url: must be an http URL"),
        ("collector: {database: 5}", "collector.database: 5 is not text"),
        ("a: &a [x]\nslos: *a", "aliases are not accepted"),
        (
            "sidecar: {types: [{request_type: a, prompt_tokens: [1]}]}",
            "sidecar.types[0].prompt_tokens: Not enough values",
        ),
    ],
)
def test_wrong_keys_are_named(text: str, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(text, {})
    assert key in str(caught.value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings("sidecar: {prot: 1}\ncollector: {prot: 2}\nx: 1\n", {})
    assert all(k in str(caught.value) for k in ("sidecar.prot", "collector.prot", "x: unknown"))


def test_shown_configuration_reads_back_to_itself() -> None:
    text = "sidecar: {port: 9801}\nnotify: {page: [{webhook: {url: 'http://127.0.0.1:1/x'}}]}\n"
    settings = parse_settings(text, {})
    assert settings.notify.page
    assert parse_settings(as_yaml(settings), {}) == settings


@pytest.mark.parametrize("place", ["port", "listen", "types", "tap"])
def test_a_message_about_a_large_value_is_short(place: str) -> None:
    value = "[" + ",".join(["[" + "x," * 1000 + "x]"] * 100) + "]"
    with pytest.raises(SettingsError) as caught:
        parse_settings(f"sidecar: {{{place}: {value}}}", {})
    assert all(len(line) < 1000 for line in str(caught.value).splitlines())


def test_an_endless_spec_file_is_refused() -> None:
    settings = parse_settings("slos: [/dev/zero]", {})
    with pytest.raises(SettingsError, match="slos: /dev/zero"):
        settings.objectives()


@given(st.text(max_size=200))
def test_garbage_is_an_error_never_a_crash(text: str) -> None:
    with contextlib.suppress(SettingsError):
        parse_settings(text, {})


def test_commands_check_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("sidecar: {port: 9801}\n")
    out = io.StringIO()
    assert main(["config", "check", str(good)], out) == 0
    assert out.getvalue().startswith("ok: ")
    out = io.StringIO()
    assert main(["config", "show", str(good)], out) == 0
    assert "port: 9801" in out.getvalue()
    bad = tmp_path / "bad.yaml"
    bad.write_text("sidecar: {prot: 1}\n")
    assert main(["config", "check", str(bad)], io.StringIO()) == 2
    assert "did you mean port?" in capsys.readouterr().err
    assert main(["config", "check", str(tmp_path / "none.yaml")], io.StringIO()) == 2


def test_spec_files_are_read_and_duplicates_refused(tmp_path: Path) -> None:
    spec = tmp_path / "a.yaml"
    spec.write_text(
        "service: llm\nobjectives:\n"
        "  - {name: ttft, sli: time_to_first_token, threshold: 2s, target: 99%, window: 30d}\n"
    )
    settings = parse_settings(f"slos: ['{spec}']\n", {})
    assert [o.name for o in settings.objectives()] == ["ttft"]
    with pytest.raises(SettingsError, match="defined twice"):
        parse_settings(f"slos: ['{spec}', '{spec}']\n", {}).objectives()
    with pytest.raises(SettingsError, match="cannot read"):
        parse_settings("slos: [/nonexistent.yaml]\n", {}).objectives()


SPEC = (
    "service: llm\nobjectives:\n"
    "  - {name: ttft, sli: time_to_first_token, threshold: 2s, target: 99%, window: 30d}\n"
)


def test_spec_files_are_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "slos").mkdir()
    (tmp_path / "slos" / "llm.yaml").write_text(SPEC)
    file = tmp_path / "servoscope.yaml"
    file.write_text("slos: [slos/llm.yaml]\n")
    settings = load_settings(str(file), {})
    assert settings.slos == (str(tmp_path / "slos" / "llm.yaml"),)
    assert [o.name for o in settings.objectives()] == ["ttft"]


def test_wrong_types_wrong_values_and_wrong_spec_files_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SPEC.replace("99%", "200%"))
    file = tmp_path / "servoscope.yaml"
    file.write_text(
        "sidecar: {port: abc, tap: maybe, long_prompt_tokens: 0, warmup_seconds: -1}\n"
        "collector: {port: 99999, max_rows: 0}\nlabels: {max_models: 0, max_tenants: 0}\n"
        "slos: [a.yaml, none.yaml]\n"
    )
    with pytest.raises(SettingsError) as caught:
        load_settings(str(file), {})
    told = str(caught.value)
    for key in (
        "sidecar.port: 'abc'", "sidecar.tap", "sidecar.long_prompt_tokens", "sidecar.warmup",
        "collector.port", "collector.max_rows", "labels.max_models", "labels.max_tenants",
        "a.yaml: line 3: objectives[0].target", "none.yaml",
    ):  # fmt: skip
        assert told.count(key) >= 1, key


def test_keys_that_hold_only_together_are_no_problem_and_hide_none() -> None:
    good = "sidecar: {listen: 0.0.0.0, allow_remote: true, scrape_interval_seconds: 120, "
    assert parse_settings(good + "scrape_max_interval_seconds: 600}", {}).sidecar.allow_remote
    with pytest.raises(SettingsError) as caught:
        parse_settings(good + "tap: maybe, push_attempts: 0}", {})
    lines = [line.split(": ")[1] for line in str(caught.value).splitlines()[1:]]
    wanted = ["sidecar.scrape_max_interval_seconds", "sidecar.tap", "sidecar.push_attempts"]
    assert lines == wanted


def test_a_wrong_variable_is_blamed_by_its_name() -> None:
    environment = {
        "SERVOSCOPE_SIDECAR__PORT": "abc", "SERVOSCOPE_COLLECTOR__PORT": "99999",
        "SERVOSCOPE_SIDECAR__TAPP": "on", "SERVOSCOPE_SIDECARS__TAP": "on",
        "SERVOSCOPE_LABELS__MAX_MODELS": "[",
    }  # fmt: skip
    with pytest.raises(SettingsError) as caught:
        parse_settings("sidecar: {warmup_seconds: -1}", environment)
    told = [line.strip() for line in str(caught.value).splitlines()]
    for name in environment:
        assert any(line.startswith(f"{name}: ") for line in told), name
    assert any(line.startswith("line 1: sidecar.warmup_seconds: ") for line in told)


@pytest.mark.parametrize(("word", "mode"), [("off", "off"), ("on", "on"), ("auto", "auto")])
def test_tap_as_people_write_it(word: str, mode: str) -> None:
    assert parse_settings(f"sidecar: {{tap: {word}}}", {}).sidecar.tap == mode
    assert parse_settings("", {"SERVOSCOPE_SIDECAR__TAP": word}).sidecar.tap == mode


EVERYTHING = """\
sidecar:
  port: abc
  types:
    - {request_type: "Not Good", prompt_tokens: [9, 1], output_tokens: [1], endpint: x}
    - {streaming: 5, max_output_tokens: [-1, 2]}
    - 7
    - {request_type: fine, endpoint: /v1/chat/*}
collector:
  allowed_hosts: metrics.example.org

notify:
  page:
    - webhook: {url: ftp://x, token_file: relative}
  ticket: [{smoke: {}}]
slos: [a.yaml]
"""


def test_every_kind_of_file_tells_all_with_key_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SPEC.replace("99%", "200%").replace("2s", "2"))
    file = tmp_path / "servoscope.yaml"
    file.write_text(EVERYTHING)
    with pytest.raises(SettingsError) as caught:
        load_settings(str(file), {})
    told = [line.strip() for line in str(caught.value).splitlines()[1:]]
    wanted = [
        "line 2: sidecar.port:", "line 4: sidecar.types[0].request_type:",
        "line 4: sidecar.types[0].prompt_tokens:", "line 4: sidecar.types[0].output_tokens:",
        "line 4: sidecar.types[0].endpint: unknown key; did you mean endpoint?",
        "line 5: sidecar.types[1].request_type: is missing", "line 5: sidecar.types[1].streaming:",
        "line 5: sidecar.types[1].max_output_tokens:", "line 6: sidecar.types[2]: expected",
        "line 9: collector.allowed_hosts: 'metrics.example.org' is not a list",
        "line 13: notify.page[0].webhook.url:", "line 13: notify.page[0].webhook.token_file:",
        "line 14: notify.ticket[0].smoke:", "slos: ",
    ]  # fmt: skip
    for start in wanted:
        assert any(line.startswith(start) for line in told), (start, told)
    for part in ("a.yaml: line 3: objectives[0].target", "a.yaml: line 3: objectives[0].threshold"):
        assert any(part in line for line in told), (part, told)
    assert len(told) <= 20


def test_a_file_that_is_all_wrong_is_told_in_twenty_lines() -> None:
    text = "sidecar:\n" + "".join(f"  key{n}: 1\n" for n in range(500))
    with pytest.raises(SettingsError) as caught:
        parse_settings(text, {})
    assert len(str(caught.value).splitlines()) == 22  # the file's name, 20, and how many more
    assert str(caught.value).endswith("and 480 more")


def test_a_key_given_twice_is_refused_with_its_line() -> None:
    with pytest.raises(SettingsError, match="line 3: the key 'port' is given twice"):
        parse_settings("sidecar:\n  port: 1\n  port: 2\n", {})


def test_lists_of_hosts_from_file_and_environment() -> None:
    settings = parse_settings("collector: {allowed_hosts: [a.example, b]}", {})
    assert settings.collector.allowed_hosts == ("a.example", "b")
    assert parse_settings(as_yaml(settings), {}) == settings
    given = parse_settings("", {"SERVOSCOPE_COLLECTOR__ALLOWED_HOSTS": "[c]"})
    assert given.collector.allowed_hosts == ("c",)
    with pytest.raises(SettingsError, match="SERVOSCOPE_COLLECTOR__ALLOWED_HOSTS: "):
        parse_settings("", {"SERVOSCOPE_COLLECTOR__ALLOWED_HOSTS": "[c, 5]"})


def test_without_a_file_the_environment_is_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"^environment:\n  SERVOSCOPE_SIDECAR__PORT: "):
        load_settings(None, {"SERVOSCOPE_SIDECAR__PORT": "abc"})
    with pytest.raises(SettingsError) as caught:
        load_settings("none.yaml", {})
    assert str(caught.value) == "cannot read none.yaml: No such file or directory"
