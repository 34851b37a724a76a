"""The daemon from its first to its last second: build each part once, serve, stop in reverse.

    settings ──▶ socket ──▶ store, manager, downloads ──▶ app ──▶ uvicorn ──▶ SIGTERM/SIGINT
                                                                                   │
                          workers drain and end ◀── pulls stop ◀── no new requests ◀┘

The socket is bound before anything else is made: a port that is taken ends the start at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

import psutil

from .. import __version__
from ..registry.errors import RegistryError
from ..registry.store import ModelStore
from .app import make_app
from .downloads import Downloads, pull_settings
from .folder_lock import FolderLock, FolderTaken
from .http_server import calm_collector, make_server, run
from .manager import ModelManager
from .metrics import Metrics
from .routes.services import Services
from .settings import Settings, SettingsInvalid, read_settings

log = logging.getLogger("llmd.daemon")


class StartFailed(Exception):
    """The daemon cannot start. One sentence says why and what to do."""


def main() -> int:
    """Run the daemon. Exit code 0 after a signal, 1 if it could not start."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        settings = read_settings()
        listener = bind(settings.host, settings.port)
        lock = FolderLock(settings.models, settings.host, settings.port)
        store = ModelStore(settings.models)
    except (SettingsInvalid, StartFailed, FolderTaken, RegistryError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    _log_settings(settings)
    calm_collector()
    run(serve(settings, listener, store))
    lock.release()
    return 0


def _log_settings(settings: Settings) -> None:
    for name, variable in settings.sources.items():
        value = "(hidden)" if name == "api_key" else getattr(settings, name, None)
        log.info("%s from %s%s", name, variable, "" if value is None else f": {value}")
    log.info("llmd %s, models in %s", __version__, settings.models)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartFailed, naming who has the port if that can be known."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartFailed(_why_not(host, port, error)) from error
    listener.setblocking(False)
    return listener


def _why_not(host: str, port: int, error: OSError) -> str:
    owner = owner_of_port(port)
    by_whom = f" by {owner}" if owner else ""
    if owner or "in use" in (error.strerror or ""):
        return (
            f"port {port} on {host} is taken{by_whom}; stop that program or set LLMD_HOST to "
            f"another port, for example LLMD_HOST=127.0.0.1:{port + 1}"
        )
    return f"{host}:{port} can't be listened on: {error.strerror}; set LLMD_HOST to another address"


def owner_of_port(port: int) -> str | None:
    """ "name (pid 1)" of the process that listens there; None if the system does not tell."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,):
                if connection.pid is None:
                    return None
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return None  # other users' sockets may be hidden
    return None


async def serve(settings: Settings, listener: socket.socket, store: ModelStore) -> None:
    """Serve until a signal comes, then stop everything that was started."""
    manager = ModelManager(settings, store)
    downloads = Downloads(store, pull_settings(settings, os.environ))
    stopping = asyncio.Event()
    services = Services(
        manager=manager,
        store=store,
        downloads=downloads,
        metrics=Metrics(manager.loaded, manager.counters),
        version=__version__,
        stop=stopping.set,
        context_length=settings.context_length,
    )
    app = make_app(
        services,
        is_loopback=settings.is_loopback,
        origins=settings.origins,
        hosts=settings.hosts,
        api_keys=settings.api_keys,
    )
    server = make_server(app, settings.drain_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: uvicorn's own way
            loop.add_signal_handler(number, stopping.set)
    log.info("listening on %s:%d", *listener.getsockname()[:2])
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    tidying = asyncio.create_task(tidy(store, not settings.noprune))
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping")
    server.should_exit = True
    await downloads.shutdown()
    await manager.shutdown()
    await serving
    waiting.cancel()
    await tidying
    log.info("stopped")


async def tidy(store: ModelStore, is_wanted: bool) -> None:
    """Remove what an earlier daemon left behind: unnamed blobs, partial downloads of last week."""
    if not is_wanted:
        return
    try:
        collected = await asyncio.to_thread(store.collect)
    except (RegistryError, OSError) as error:
        log.warning("the models folder is not tidied up: %s", error)
        return
    if collected.paths:
        log.info("removed %d left files, %d bytes", len(collected.paths), collected.size)
