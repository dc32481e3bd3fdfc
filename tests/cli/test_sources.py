"""What the view says of a sidecar."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from servoscope.cli.sidecars import Registered
from servoscope.cli.sources import gauge_sum, scrape_notice, source_lines

METRICS = (
    "# TYPE servoscope_running gauge\n"
    'servoscope_running{server="a b"} 2.0\n'
    'servoscope_running{server="c"} 1\n'
    "servoscope_running_total 9\n"
    'servoscope_waiting{server="c"} NaN\n'
)


def test_a_gauge_is_added_up_and_what_is_no_number_left_out() -> None:
    assert gauge_sum(METRICS, "servoscope_running") == 3.0
    assert gauge_sum(METRICS, "servoscope_waiting") is None
    assert gauge_sum("servoscope_running x\n", "servoscope_running") is None


def test_the_notice_says_what_to_do_and_what_the_engine_has() -> None:
    assert scrape_notice("e:1", "vllm", METRICS).endswith("--relay` (now 3 running)")
    assert scrape_notice("e:1", None, "").endswith("--relay`")


@pytest.mark.parametrize(
    ("engine", "first"),
    [
        ("vllm", "load the plug-in in the engine, run as root"),
        ("sglang", "start the engine with its request file, run as root"),
        ("llamacpp", "run as root"),
    ],
)
def test_the_notice_names_what_this_engine_can_have(engine: str, first: str) -> None:
    assert f"(scrape only): {first}" in scrape_notice("e:1", engine, "")


@pytest.mark.parametrize(("source", "lines"), [("scrape", 2), ("plugin", 1), (None, 1)])
async def test_scrape_alone_gets_a_line_of_its_own(source: str | None, lines: int) -> None:
    async def inspect(_: web.Request) -> web.Response:
        states = [{"source": "scrape", "state": "ok"}, {"source": "tap", "state": "off"}]
        body = {"engine": "vllm", "model_name": "m", "sources": states, "requests_from": source}
        return web.json_response(body)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    app = web.Application()
    app.add_routes([web.get("/api/v1/inspect", inspect), web.get("/metrics", metrics)])
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{server.port}"
        found = await source_lines(http, Registered("e:1", 1, url, None))
    assert found[0] == f"e:1: {url}/metrics   vllm m   scrape ok"
    assert len(found) == lines
    assert all("single requests cannot be seen" in line and "3 running" in line
               for line in found[1:])  # fmt: skip


async def test_a_sidecar_that_does_not_answer(unused_tcp_port: int) -> None:
    async with aiohttp.ClientSession() as http:
        sidecar = Registered("e:1", 1, f"http://127.0.0.1:{unused_tcp_port}", None)
        assert "does not answer" in (await source_lines(http, sidecar))[0]
