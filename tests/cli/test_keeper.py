"""The collector of `servoscope up`, as it can be configured: with a token, on IPv6."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from servoscope.cli.children import Children
from servoscope.cli.keeper import Keeper
from servoscope.cli.scratch import StackError
from servoscope.collector.config import CollectorConfig

TOKEN = "0123456789abcdef"


def keeper(tmp_path: Path, http: aiohttp.ClientSession, config: CollectorConfig) -> Keeper:
    file = tmp_path / "servoscope.yaml"
    file.write_text(
        f"collector: {{listen: '{config.listen}', token_file: '{config.token_file}', "
        f"database: '{config.database}'}}\n"
    )
    return Keeper(
        config,
        http,
        Children(tmp_path / "logs"),
        lambda *words: [sys.executable, "-m", "servoscope.cli.main", "--config", str(file), *words],
        say=lambda _: None,
        notices=[],
        stopping=asyncio.Event(),
    )


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1", "[::1]"])
async def test_one_of_our_own_answers_with_its_token(tmp_path: Path, listen: str) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    config = CollectorConfig(
        listen=listen, port=0, token_file=str(token), database=tmp_path / "c.duckdb"
    )
    async with aiohttp.ClientSession() as http:
        one = keeper(tmp_path, http, config)
        try:
            await one.start()
            assert one.url == f"http://{one.address}"
            assert ("[::1]" in one.url) == (":" in listen)
            overview = await one.overview(60)
            assert overview is not None
            assert overview["rows"] == []
            async with http.get(f"{one.url}/api/v1/overview") as got:
                assert got.status == 401
        finally:
            one._children.end_all()
        assert await one.overview(60) is None


async def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    config = CollectorConfig(port=0, database=tmp_path / "dir")
    async with aiohttp.ClientSession() as http:
        one = keeper(tmp_path, http, config)
        with pytest.raises(StackError, match=r"collector\.database"):
            await one.start()
