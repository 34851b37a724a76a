"""The HTTP server: uvicorn with a patience that has an end.

    connected ──▶ HEAD ──headers complete──▶ the application ──answered──▶ idle ──▶ HEAD
                   │                            │  reads the body: see routes/call.py
                   └─ late, or too large        └─ the client does not read: stalled

A client that sends its request's head a byte at a time, or never reads its answer, holds a socket
and perhaps a model; each of these has a time, after which the connection is closed. Bodies have
theirs in routes/call.py, where what has come so far counts.

What a stream has for a client that keeps up need not wait for anything: the Wire in the request's
scope takes it in one call, and all streams are written together (Outbox). It is what makes hundreds
of streams cheap.

httptools parses, uvloop runs the event loop where there is one: at many streams the parser in
Python and the loop in Python are most of what a token costs here (benchmarks/daemon_overhead.py).

Owner: the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_TIMEOUT_S = 30.0  # from the connection, or the head's first byte, to its end
MAX_HEAD_BYTES = 64 * 1024  # what other servers allow; cookies of a whole site fit
KEEP_ALIVE_S = 75.0  # longer than the pools of common clients keep a connection
STALL_TIMEOUT_S = 600.0  # a reader that takes nothing for so long is gone

WIRE = "llmd.wire"  # in scope["extensions"]: a Wire; not there for a request that has to wait

T = TypeVar("T")


class Connection(HttpToolsProtocol):
    """One connection. Its timers and the wire are all the state added to uvicorn's."""

    head_timeout_s = HEAD_TIMEOUT_S
    stall_timeout_s = STALL_TIMEOUT_S

    def __init__(self, outbox: Outbox, **given: Any) -> None:
        super().__init__(**given)
        self._outbox = outbox

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._wire: Wire | None = None  # of the answer that is being given
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = None
        before = self.cycle
        super().on_headers_complete()
        is_next = before is None or before.response_complete
        if is_next and self.cycle is not None and self.cycle.scope is self.scope:
            self._wire = Wire(self.cycle, self._outbox)
            self.scope["extensions"] = {WIRE: self._wire}  # type: ignore[dict-item]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_at_wire()
        self._stall_timer = self.loop.call_later(self.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stall_timer)
        self._stall_timer = None
        super().resume_writing()
        self._look_at_wire()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        self._head_timer = None
        _cancel(self._stall_timer)
        self._stall_timer = None
        super().connection_lost(exc)
        self._look_at_wire()

    def _look_at_wire(self) -> None:
        if self._wire is not None:
            self._wire.look()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(
                self.head_timeout_s, self._refuse, b"408 Request Timeout"
            )

    def _refuse(self, status: bytes) -> None:
        _cancel(self._head_timer)
        self._head_timer = None
        if not self.transport.is_closing():
            head = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
            self.transport.write(head)
            self.transport.close()


class Wire:
    """The direct way of an answer's body to its socket.

    Open from the head of a chunked answer to its end, while the client is there and keeps up. That
    is looked at when it may have changed, not for each of thousands of pieces a second.
    """

    __slots__ = ("_cycle", "_is_open", "_outbox", "_transport", "_waiting")

    def __init__(self, cycle: RequestResponseCycle, outbox: Outbox) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._outbox = outbox
        self._is_open = False
        self._waiting = b""  # for the end of this turn

    def __repr__(self) -> str:
        return f"<Wire {'open' if self._is_open else 'closed'}, {len(self._waiting)} bytes wait>"

    def look(self) -> None:
        """The answer's or the connection's state may have changed."""
        cycle = self._cycle
        is_running = bool(cycle.chunked_encoding) and not cycle.response_complete
        self._is_open = is_running and not cycle.disconnected and not cycle.flow.write_paused

    def put(self, piece: bytes) -> bool:
        """What cycle.send does with a piece of the body. False: not now, send it as a message."""
        if not self._is_open:
            return False
        if self._waiting:
            self._waiting += b"%x\r\n%b\r\n" % (len(piece), piece)
        else:
            self._waiting = b"%x\r\n%b\r\n" % (len(piece), piece)
            self._outbox.add(self)
        return True

    def flush(self) -> None:
        """Write what waits. A client that left in this turn gets nothing."""
        waiting, self._waiting = self._waiting, b""
        if waiting and not self._transport.is_closing():  # uvloop raises for one that is closed
            self._transport.write(waiting)


class Outbox:
    """The wires that were given something in this turn of the event loop, written at its end.

    One socket after the other, the system's part and ours do not drive each other out of the
    processor's caches, a fifth of what a piece costs; and where we are late, what has piled up for
    a stream leaves in one go, so that we are not late for long.
    """

    def __init__(self) -> None:
        self._wires: list[Wire] = []

    def __repr__(self) -> str:
        return f"<Outbox {len(self._wires)} wires>"

    def add(self, wire: Wire) -> None:
        if not self._wires:
            asyncio.get_running_loop().call_soon(self.flush)
        self._wires.append(wire)

    def flush(self) -> None:
        """Nothing that a client does costs another one its piece."""
        wires, self._wires = self._wires, []
        for wire in wires:
            wire.flush()


def _with_wires(app: ASGIApp) -> ASGIApp:
    """The application; its messages go behind the pieces before them, and may open a wire."""

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        wire: Wire | None = scope.get("extensions", {}).get(WIRE)

        async def send_and_look(message: Message) -> None:
            if wire is None:
                await send(message)
                return
            wire.flush()
            await send(message)
            wire.look()

        await app(scope, receive, send_and_look)

    return watched


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: whoever serves has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, drain_s: float = 1.0, **more: Any) -> Server:
    """A server for this application, not started. `more` is uvicorn's (port, sockets...)."""
    return Server(
        uvicorn.Config(
            _with_wires(app),
            http=functools.partial(Connection, Outbox()),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=round(KEEP_ALIVE_S),
            timeout_graceful_shutdown=max(1, round(drain_s)),
            **more,
        )
    )


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, on the fastest event loop there is."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def calm_collector() -> None:
    """For a process that serves: once, when all is imported.

    Thousands of deltas a second live for a moment and are in no cycle. The collector would look at
    them, and at all modules, again and again. What importing left behind is little, and is kept.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":  # uvloop is not made for it
        return None
    import uvloop

    return uvloop.new_event_loop


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
