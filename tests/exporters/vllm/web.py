"""A watched ASGI application with an engine behind it, as an HTTP server drives it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from exporters.vllm import fakes
from servoscope.exporters.vllm.hooks import Hooks, install
from servoscope.exporters.vllm.http_exchange import watch_http
from servoscope.exporters.vllm.lifecycle import Lifecycle

Handler = Callable[[Any, Any, Any], Awaitable[None]]


class Web:
    """An application class, its server's messages, and an engine behind it."""

    def __init__(self, *, module: str = "fastapi", name: str = "FastAPI", ranks: int = 1) -> None:
        self.clock = fakes.Clock(100.0)
        self.hooks = Hooks()
        self.messages: list[dict[str, Any]] = []
        self.life = Lifecycle(self.messages.append, clock=self.clock, ranks=ranks)
        processor, self.stats_class, self.llm_class = fakes.fresh_classes()
        install(self.hooks, self.life, processor, self.stats_class, self.llm_class)
        self.processor = processor()
        self.got: list[Any] = []
        web = self

        class Application:
            handler: Handler

            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                web.got.append((scope, receive, send))
                await self.handler(scope, receive, send)

        self.application = Application
        self.modules = {module: ModuleType(module)}
        setattr(self.modules[module], name, Application)
        self.life.http_watched = watch_http(self.hooks, self.modules, self.clock)

    def app(self, handler: Handler) -> Any:
        made = self.application()
        made.handler = handler
        return made

    def server(self, *messages: dict[str, Any], step: float = 1.0) -> Callable[[], Awaitable[Any]]:
        """``receive`` of a server: each message comes ``step`` seconds after the one before."""
        left = list(messages)

        async def receive() -> Any:
            await asyncio.sleep(0)
            self.clock.now += step
            return left.pop(0)

        return receive

    def register(self, ident: str, external: str, arrival: float | None = None) -> None:
        at = self.clock.now if arrival is None else arrival
        self.processor.add_request(fakes.EngineCoreRequest(ident, external, at))

    def finish(self, ident: str) -> None:
        """First token 2 s after now, last one 3 s."""
        for number, finish in ((2.0, None), (3.0, fakes.FinishReason.STOP)):
            stats = self.stats_class(self.clock.now + number)
            events = None if finish else (9.0, 9.5)
            self.processor.process(ident, 1, 10.0 + number, stats, events=events, finish=finish)


def body(data: bytes = b"", *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


DISCONNECT = {"type": "http.disconnect"}


def post(*headers: tuple[bytes, bytes], path: str = "/v1/completions", **more: Any) -> Any:
    return {"type": "http", "method": "POST", "path": path, "headers": list(headers), **more}


async def read(receive: Any) -> None:
    while (await receive()).get("more_body"):
        pass


async def nothing(_message: Any) -> None:
    pass
