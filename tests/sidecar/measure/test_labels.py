"""The cap on label values keeps what is used and folds junk."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from servoscope.sidecar.measure.labels import OTHER, LabelCap, LabelTable


@given(st.lists(st.text(max_size=8), max_size=400), st.integers(1, 10))
def test_it_is_never_larger_than_its_capacity(values: list[str], capacity: int) -> None:
    cap = LabelCap(capacity)
    for value in values:
        assert cap.admit(value) in (value, OTHER)
    assert len(cap) <= capacity


def test_100_000_junk_names_do_not_push_out_ten_real_tenants() -> None:
    evicted: list[str] = []
    cap = LabelCap(100, evicted.append)
    real = [f"tenant-{i}" for i in range(10)]
    rng = random.Random(11)
    lost = 0
    for i in range(100_000):
        assert cap.admit(f"junk-{i}") in (f"junk-{i}", OTHER)
        if i % 50 == 0:  # real tenants are 2 % of the traffic
            tenant = rng.choice(real)
            lost += cap.admit(tenant) != tenant
    assert set(real) <= set(cap.values())
    assert lost <= 10  # only before a tenant was known for real
    assert cap.folded >= 100_000 - 100
    assert not set(evicted) & set(real)


def test_real_tenants_get_in_after_the_junk_was_there_first() -> None:
    cap = LabelCap(50)
    for i in range(5_000):
        cap.admit(f"junk-{i}")
    for _ in range(5):
        cap.admit("late")
    assert cap.admit("late") == "late"


def test_junk_that_comes_twice_evicts_nobody_who_is_busy() -> None:
    cap = LabelCap(20)
    for i in range(20_000):
        cap.admit(f"junk-{i // 2}")
        cap.admit(f"real-{i % 10}")
    assert {f"real-{i}" for i in range(10)} <= set(cap.values())


def test_what_was_busy_once_gives_way_in_the_end() -> None:
    cap = LabelCap(2)
    for _ in range(1_000):
        cap.admit("old-a")
        cap.admit("old-b")
    for _ in range(200):
        cap.admit("new")
    assert cap.admit("new") == "new"
    assert cap.evicted >= 1


def test_empty_and_other_take_no_place_and_long_values_are_folded() -> None:
    cap = LabelCap(1)
    assert cap.admit("") == ""
    assert cap.admit(OTHER) == OTHER
    assert cap.admit("x" * 1000) == OTHER
    assert len(cap) == 0
    assert cap.folded == 1


def test_a_table_has_one_cap_a_label() -> None:
    evicted: list[tuple[str, str]] = []
    table = LabelTable({"a": 1, "b": 2}, lambda label, value: evicted.append((label, value)))
    table.admit("a", "x")
    for _ in range(3):
        table.admit("a", "y")
    table.admit("b", "x")
    assert table.sizes() == {"a": 1, "b": 1}
    assert evicted == [("a", "x")]
    assert table.folded()["b"] == 0


@given(st.lists(st.text(max_size=4), max_size=60), st.integers(1, 5), st.text(max_size=4))
def test_what_is_shown_is_what_a_first_arrival_would_get(
    values: list[str], capacity: int, value: str
) -> None:
    cap = LabelCap(capacity)
    for each in values:
        cap.admit(each)
    before = (list(cap.values()), cap.folded, cap.evicted)
    shown = cap.shown(value)
    assert before == (list(cap.values()), cap.folded, cap.evicted)
    if value in cap.values() or len(cap) < capacity:
        assert shown == value == cap.admit(value)
    else:
        assert shown == (value and OTHER)
