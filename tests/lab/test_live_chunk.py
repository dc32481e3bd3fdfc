"""The live chunk of a real llama.cpp: set, seen in its steps, given back, taken back."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from servoscope.exporters.knobs.client import KnobClient, find_knob_sockets
from servoscope.exporters.records import KnobMode, Outcome
from servoscope.lab.client import PlannedRequest, run_closed
from servoscope.lab.embedded.server import EmbeddedEngine
from servoscope.lab.request import Observed
from servoscope.sidecar.config import ControlConfig
from servoscope.sidecar.control.audit import AuditLog
from servoscope.sidecar.control.knobs import ControlError, KnobControl

pytestmark = pytest.mark.engine
BOOT, SLOTS, PROMPT = 512, 2, 1200


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("run")
        place.chmod(0o700)
        patch.setenv("SERVOSCOPE_RUN_DIR", str(place))
        yield place


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, run_dir: Path) -> Iterator[EmbeddedEngine]:
    folder = tmp_path_factory.mktemp("embedded")
    with EmbeddedEngine(folder, slots=SLOTS, batch_tokens=BOOT, live_chunk=True) as running:
        yield running
    assert list(run_dir.iterdir()) == []  # the socket went with the engine


@pytest_asyncio.fixture
async def control(
    engine: EmbeddedEngine, run_dir: Path, tmp_path: Path
) -> AsyncIterator[KnobControl]:
    """As a sidecar has it."""
    made = KnobControl(
        ControlConfig(), AuditLog(tmp_path / "audit.jsonl", 100_000), "h:1",
        lambda: find_knob_sockets([run_dir], [engine.pid]), engine="llamacpp", clock=lambda: 0.0,
        boot_values=lambda: {"ubatch_tokens": 256.0, "chunk_tokens": 1.0},
    )  # fmt: skip
    yield made
    await made.aclose()


def decodes(engine: EmbeddedEngine) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{engine.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(next(x for x in lines if x.startswith("llamacpp:n_decode_total")).split()[-1])


async def prompt(engine: EmbeddedEngine, number: int) -> tuple[int, Observed]:
    """How many calls of llama_decode a prompt and its one token took."""
    before = decodes(engine)
    one = PlannedRequest(
        request_id=f"p{number}", prompt=f"{number} " + "x" * PROMPT, max_tokens=1,
        extra_body={"cache_prompt": False},
    )  # fmt: skip
    (seen,) = await run_closed(engine.url, [one], 1)
    assert (seen.outcome, seen.output_tokens) == (Outcome.LENGTH, 1)
    return decodes(engine) - before, seen


async def test_a_smaller_chunk_is_seen_in_the_engines_steps_and_given_back(
    engine: EmbeddedEngine, control: KnobControl, tmp_path: Path
) -> None:
    knobs = {knob.name: knob for knob in await control.knobs()}
    chunk = knobs["chunk_tokens"]
    assert (chunk.mode, chunk.value, chunk.minimum, chunk.maximum) == (
        KnobMode.LIVE, BOOT, SLOTS + 1, BOOT,
    )  # fmt: skip
    assert (knobs["ubatch_tokens"].mode, knobs["ubatch_tokens"].value) == (KnobMode.RESTART, 256)
    at_boot, first = await prompt(engine, 1)
    assert at_boot <= PROMPT // BOOT + 3
    assert await control.set({"chunk_tokens": 64}, "ann") == {"chunk_tokens": 64}
    (state,) = await control.states()
    assert (state.knobs["chunk_tokens"].value, state.lease_owner) == (64, "servoscope-sidecar")
    in_small, second = await prompt(engine, 1)
    assert in_small >= PROMPT // 64
    assert second.text_sha256 == first.text_sha256  # only when, not what, it computes
    (state,) = await control.states()
    assert state.in_force == {"chunk_tokens": 64}
    await control.release("ann")
    assert (await prompt(engine, 2))[0] <= PROMPT // BOOT + 3
    results = [json.loads(x)["result"] for x in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert results == ["begin", "applied", "begin", "released"]


async def test_it_changes_under_load_and_no_request_fails(
    engine: EmbeddedEngine, control: KnobControl
) -> None:
    plan = [
        PlannedRequest(request_id=f"l{n}", prompt=f"{n} " + "y" * 900, max_tokens=40)
        for n in range(8)
    ]
    running = asyncio.create_task(run_closed(engine.url, plan, 3))
    for chunk in (64, 512, SLOTS + 1, 128):
        assert await control.set({"chunk_tokens": chunk}, "ann") == {"chunk_tokens": chunk}
        await asyncio.sleep(0.1)
    await control.set({"chunk_tokens": BOOT}, "ann")
    seen = await running
    assert {(one.outcome, one.output_tokens) for one in seen} == {(Outcome.LENGTH, 40)}


@pytest.mark.parametrize(("value", "why"), [(BOOT + 1, "above the value at boot"), (2, "below 3")])
async def test_a_value_out_of_bounds_is_refused(control: KnobControl, value: int, why: str) -> None:
    with pytest.raises(ControlError, match=why) as refused:
        await control.set({"chunk_tokens": value}, "ann")
    assert refused.value.status == 422
    assert not control.held


async def test_without_renewal_the_engine_takes_it_back_by_itself(
    engine: EmbeddedEngine, run_dir: Path
) -> None:
    (path,) = find_knob_sockets([run_dir], [engine.pid])
    client = await KnobClient.connect(path)
    await client.lease("gone", 1.0)
    assert await client.set({"chunk_tokens": 64}) == {"chunk_tokens": 64}
    await client.aclose()  # its holder is gone
    await asyncio.sleep(1.5)
    assert (await prompt(engine, 3))[0] <= PROMPT // BOOT + 3
    client = await KnobClient.connect(path)
    state = await client.get()
    await client.aclose()
    assert state.knobs["chunk_tokens"].value == BOOT
    assert state.lease_owner is None
