"""All that is wrong in a file is told at once, with its lines, and no more than can be read."""

from __future__ import annotations

import pytest

from servoscope.alerts.alertmanager import parse_notify
from servoscope.alerts.problems import MAX_PROBLEMS, Problems, SpecError, shown
from servoscope.alerts.spec import load_spec

WRONG = """\
service: My Chat
objectiv: 1
objectives:
  - name: a
    sli: e2e
    threshold: 2
    target: 200%
    window: 90d
    where: {model: m, tenant: [], streaming: maybe}
    disconnects: never
    description: 5
  - 7
  - name: a
    sli: ttft
    threshold: fast
    treshold: 1s
  - {name: good, sli: error_ratio, target: 99%}
"""


def test_a_spec_tells_everything_with_its_line() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(WRONG, "chat.yaml")
    error = caught.value
    assert [(p.line, p.key) for p in error.problems] == [
        (1, "service"), (2, "objectiv"), (6, "objectives[0].threshold"),
        (7, "objectives[0].target"), (8, "objectives[0].window"),
        (9, "objectives[0].where.model"), (9, "objectives[0].where.tenant"),
        (9, "objectives[0].where.streaming"), (10, "objectives[0].disconnects"),
        (11, "objectives[0].description"), (12, "objectives[1]"),
        (13, "objectives[2].target"), (13, "objectives[2].name"), (14, "objectives[2].sli"),
        (15, "objectives[2].threshold"), (16, "objectives[2].treshold"),
    ]  # fmt: skip
    assert error.omitted == 0
    assert (error.key, error.line) == ("service", 1)
    assert str(error).splitlines() == error.lines()
    assert error.lines("chat.yaml")[0].startswith("chat.yaml: line 1: service: 'My Chat'")


def test_a_hundred_problems_are_counted_and_the_first_are_told() -> None:
    text = "service: chat\nobjectives:\n" + "  - {name: A, sli: x}\n" * 50
    with pytest.raises(SpecError) as caught:
        load_spec(text)
    lines = caught.value.lines()
    # three each: name, sli, target; and the name is used again by all but the first
    assert len(caught.value.problems) == MAX_PROBLEMS
    assert caught.value.omitted == 50 * 3 + 49 - MAX_PROBLEMS
    assert lines[-1] == f"and {caught.value.omitted} more"
    assert len(lines) == MAX_PROBLEMS + 1


def test_receivers_tell_everything() -> None:
    document = {
        "pager": [],
        "page": [
            {"webhook": {"url": "ftp://x", "token_file": "relative"}},
            {"pagerduty": {"url": "http://a:b@c/"}},
            {"pagerduty": {"routing_key_file": "x", "url": "http://a:b@c/", "key": 1}},
            {"smoke": {}},
            3,
        ],
        "ticket": 5,
        "capacity": [{"webhook": {"url": "http://127.0.0.1/"}}, {"webhook": {"url": "http://["}}],
    }
    with pytest.raises(SpecError) as caught:
        parse_notify(document)
    assert [p.key for p in caught.value.problems] == [
        "notify.pager", "notify.page[0].webhook.token_file", "notify.page[0].webhook.url",
        "notify.page[1].pagerduty.routing_key_file",
        "notify.page[2].pagerduty.key", "notify.page[3].smoke", "notify.page[3]",
        "notify.page[4]", "notify.ticket", "notify.capacity[1].webhook.url",
    ]  # fmt: skip


def test_nothing_noted_is_no_error() -> None:
    problems = Problems()
    assert problems.take(int, "7") == 7
    problems.end()


def test_other_lines_are_bounded_the_same_way() -> None:
    assert shown(["a"] * MAX_PROBLEMS) == ["a"] * MAX_PROBLEMS
    assert shown(["a"] * (MAX_PROBLEMS + 3)) == ["a"] * MAX_PROBLEMS + ["and 3 more"]
    assert shown([]) == []
