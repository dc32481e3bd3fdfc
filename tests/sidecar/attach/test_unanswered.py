"""Why nobody answered, in words that name no port twice and no encryption that is not there."""

from __future__ import annotations

import aiohttp
import pytest

from servoscope.sidecar.attach.unanswered import reason_of


async def test_a_closed_port_and_a_name_without_address(unused_tcp_port: int) -> None:
    async with aiohttp.ClientSession() as session:
        for url, reason in (
            (f"http://127.0.0.1:{unused_tcp_port}", "Connection refused"),
            (f"http://[::1]:{unused_tcp_port}", "Connection refused"),
            ("http://servoscope.invalid", "no address for this name: "),
        ):
            with pytest.raises(aiohttp.ClientError) as caught:
                await session.get(url)
            said = reason_of(caught.value)
            assert said.startswith(reason)
            assert "ssl" not in said


def test_what_has_no_words_is_named_by_its_kind() -> None:
    assert reason_of(TimeoutError()) == "no answer in time"
    assert reason_of(OSError()) == "OSError"
    assert reason_of(aiohttp.ServerDisconnectedError()) == "Server disconnected"
