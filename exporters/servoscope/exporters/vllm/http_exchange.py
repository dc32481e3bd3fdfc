"""The two ends of a POST that only its HTTP server sees: request received, first token sent.

vLLM stamps a request's arrival when it begins to render the prompt: after the body was read, JSON
and pydantic parsed it and the chat template ran. And it stamps the first token when it takes the
engine's output, before the text was made into a chunk and the chunk's turn came in the event loop.
A client's own time to first token is longer by both. So the ASGI application's ``__call__`` is
wrapped (FastAPI's; Starlette's where FastAPI has none of its own; both found in sys.modules,
nothing is imported), and of a POST are noted

- the wall clock at the last message of the body, less the time its bytes lay in the socket where
  that is known (socket_wait), the path and two headers. They are left in a context variable that
  the request's task and its child tasks see when they register with the engine;
- the wall clock at the first body message of the answer that is sent after one of the POST's
  engine requests had its first output, just before the server gets it. What is sent earlier
  (``created`` events, keep-alives) carries no token.

Only ``__call__`` is touched: the middleware stack is as the application built it (tracers look at
its types), and putting ``__call__`` back undoes everything.

Bodies pass by unseen: of messages only ``type`` and ``more_body`` are read.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any

from servoscope.exporters.vllm.socket_wait import seconds_in_socket

if TYPE_CHECKING:
    from servoscope.exporters.vllm.hooks import Hooks

__all__ = ["HttpExchange", "current_exchange", "watch_http"]

MAX_TEXT = 128
#: Records that one POST keeps until its first chunk; any server we know makes one a POST.
MAX_HELD = 64
_APPLICATIONS = (("fastapi", "FastAPI"), ("starlette.applications", "Starlette"))
_HEADERS = {b"x-request-type": "hint", b"x-tenant": "tenant"}

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[Any]]


class HttpExchange:
    """One POST. ``received``, ``first_sent``: wall clocks, None before that.

    ``unsent`` holds the states of its streamed engine requests until the first chunk is sent; while
    it holds any, a record can be held. What ends it (the chunk, the end of the call) empties it
    first and gives back the records then, so one that is held in between is given back by whoever
    held it: exactly once from whichever thread, because ``popleft`` is atomic.
    """

    __slots__ = (
        "_closed",
        "_held",
        "endpoint",
        "first_sent",
        "hint",
        "received",
        "spent",
        "tenant",
        "unsent",
    )

    def __init__(self) -> None:
        self.received: float | None = None
        self.first_sent: float | None = None
        self.endpoint: str | None = None  # URL path, without query
        self.hint: str | None = None  # x-request-type
        self.tenant: str | None = None  # x-tenant
        self.spent = False  # its engine requests have ended: what comes now is a later turn
        self.unsent: list[Any] = []
        self._held: deque[Callable[[], None]] = deque()
        self._closed = False

    def watch(self, state: Any) -> None:
        """One of its streamed engine requests has begun (``state``: vLLM's RequestState)."""
        if self.first_sent is None and not self._closed:
            self.unsent.append(state)

    def hold(self, deliver: Callable[[], None]) -> bool:
        """Call ``deliver`` at the first chunk or at the end. False: not held, nothing will come."""
        if not self.unsent or len(self._held) >= MAX_HELD:
            return False
        self._held.append(deliver)
        if not self.unsent:
            self._give_back()
        return True

    def sending(self, message: Any, clock: Callable[[], float]) -> None:
        """A message of the answer is about to be sent, and no token was sent yet."""
        if message["type"] == "http.response.body" and any(
            not state.is_prefilling for state in self.unsent
        ):
            self.first_sent = clock()
            self.settle()

    def settle(self) -> None:
        """Wait no longer: give back what is held."""
        self.unsent = []
        self._give_back()

    def close(self) -> None:
        """The call is over: nothing more will be sent."""
        self._closed = True
        self.settle()

    def _give_back(self) -> None:
        while self._held:
            try:
                deliver = self._held.popleft()
            except IndexError:  # another thread was faster
                return
            deliver()


_EXCHANGE: ContextVar[HttpExchange | None] = ContextVar("servoscope_http_exchange", default=None)


def current_exchange() -> HttpExchange | None:
    """The POST that the running task serves; None outside of one."""
    return _EXCHANGE.get()


def watch_http(
    hooks: Hooks,
    modules: Mapping[str, ModuleType] = sys.modules,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Wrap the ASGI applications of this process. False when there is none to wrap."""
    for module, name in _APPLICATIONS:
        owner = getattr(modules.get(module), name, None)
        if isinstance(owner, type) and hooks.wrap(
            owner, "__call__", lambda original: _watched(original, hooks, clock)
        ):
            return True
    return False


def _watched(original: Any, hooks: Hooks, clock: Callable[[], float]) -> Any:
    # A coroutine function, because servers tell ASGI 3 from ASGI 2 by that.
    async def asgi(self: Any, scope: Any, receive: Any, send: Any) -> None:
        exchange = None
        try:
            if scope["type"] == "http" and scope["method"] == "POST":
                exchange = None if hooks.off or hooks.bypass else _exchange_of(scope)
            # Servers let a connection's first context leak into its later tasks.
            if exchange is not None or _EXCHANGE.get() is not None:
                _EXCHANGE.set(exchange)
        except Exception as error:
            exchange = None
            hooks.fault(error)
        if exchange is None:
            await original(self, scope, receive, send)
            return
        try:
            await original(
                self,
                scope,
                _noting(receive, exchange, hooks, clock),
                _stamping(send, exchange, hooks, clock),
            )
        finally:
            _EXCHANGE.set(None)  # not reset(): that raises where a task was closed from elsewhere
            _close(exchange, hooks)

    return asgi


def _noting(
    receive: Receive, exchange: HttpExchange, hooks: Hooks, clock: Callable[[], float]
) -> Receive:
    async def noting() -> Any:
        message = await receive()
        if exchange.received is None:
            try:
                if message["type"] == "http.request" and not message.get("more_body", False):
                    exchange.received = clock() - seconds_in_socket(receive)
            except Exception as error:
                hooks.fault(error)
        return message

    return noting


def _stamping(send: Send, exchange: HttpExchange, hooks: Hooks, clock: Callable[[], float]) -> Send:
    # On the path of every chunk: no coroutine of ours, and one look once the first was sent.
    def stamping(message: Any) -> Awaitable[Any]:
        if exchange.unsent:
            try:
                if hooks.off or hooks.bypass:
                    exchange.settle()
                else:
                    exchange.sending(message, clock)
            except Exception as error:
                hooks.fault(error)
        return send(message)

    return stamping


def _close(exchange: HttpExchange, hooks: Hooks) -> None:
    """Give back all that is held, though one of it may fail."""
    for _ in range(MAX_HELD + 1):
        try:
            exchange.close()
        except Exception as error:
            hooks.fault(error)
        else:
            return


def _exchange_of(scope: Mapping[str, Any]) -> HttpExchange:
    """Path and allow-listed headers of a request (the first of each name), bounded."""
    exchange = HttpExchange()
    for name, value in scope["headers"]:
        if (kept := _HEADERS.get(name)) is not None and getattr(exchange, kept) is None:
            setattr(exchange, kept, _printable(value[:MAX_TEXT].decode("latin-1")))
    path = str(scope["path"])
    root = scope.get("root_path") or ""  # put in front by the server, not sent by the client
    if root and path.startswith(root):
        path = path[len(root) :]
    exchange.endpoint = _printable(path[:MAX_TEXT])
    return exchange


def _printable(text: str) -> str | None:
    """Without control characters; None when nothing is left."""
    text = text.strip()
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text or None
