"""The daemon from the moment it has a socket to its last: build each part once, stop in reverse.

start.py ──▶ store, manager, downloads ──▶ app ──▶ uvicorn ──▶ SIGTERM/SIGINT
                                                                     │
            workers drain and end ◀── pulls stop ◀── no new requests ◀┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

from .. import __version__
from ..registry.errors import RegistryError
from ..registry.store import ModelStore
from .app import make_app
from .downloads import Downloads, pull_settings
from .http_server import calm_collector, make_server, run
from .manager import ModelManager
from .metrics import Metrics
from .routes.services import Services
from .settings import Settings
from .spare_worker import SpareWorker

log = logging.getLogger("llmd.daemon")


def live(settings: Settings, listener: socket.socket, spare: SpareWorker) -> int:
    """Serve until a signal comes. Exit code 0 then, 1 if the models folder cannot be used."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        store = ModelStore(settings.models)
    except (RegistryError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    _log_settings(settings)
    calm_collector()
    run(serve(settings, listener, store, spare))
    return 0


def _log_settings(settings: Settings) -> None:
    for name, variable in settings.sources.items():
        value = "(hidden)" if name == "api_key" else getattr(settings, name, None)
        log.info("%s from %s%s", name, variable, "" if value is None else f": {value}")
    log.info("llmd %s, models in %s", __version__, settings.models)


async def serve(
    settings: Settings, listener: socket.socket, store: ModelStore, spare: SpareWorker
) -> None:
    """Serve until a signal comes, then stop everything that was started."""
    manager = ModelManager(settings, store, spare=spare)
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
    loop.call_later(settings.spare_worker_s, _end_unwanted, spare)
    log.info("listening on %s:%d", *listener.getsockname()[:2])
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    tidying = asyncio.create_task(tidy(store, not settings.noprune))
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping")
    spare.end()
    server.should_exit = True
    await downloads.shutdown()
    await manager.shutdown()
    await serving
    waiting.cancel()
    await tidying
    log.info("stopped")


def _end_unwanted(spare: SpareWorker) -> None:
    if spare.end():
        log.info("no model was loaded so far: the spare worker has ended")


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
