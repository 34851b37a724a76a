"""The daemon's first tenth of a second: all that may end the start, then the spare worker.

    settings ──▶ socket ──▶ folder lock ──▶ spare worker ──▶ the rest is imported (lifecycle.py)

The web server takes half a second to import, the worker's torch two: they go on side by side. A
start that fails has started nothing, for what it may fail of comes first and needs little. Clients
that come meanwhile wait in the socket's queue.
"""

from __future__ import annotations

import gc
import os
import socket
import sys

from .folder_lock import FolderLock, FolderTaken
from .settings import Settings, SettingsInvalid, read_settings
from .spare_worker import SpareWorker, worker_command


class StartFailed(Exception):
    """The daemon cannot start. One sentence says why and what to do."""


def main() -> int:
    """Run the daemon. Exit code 0 after a signal, 1 if it could not start."""
    gc.disable()  # until all is imported (http_server.calm_collector): modules are no garbage
    try:
        settings = read_settings()
        listener = bind(settings.host, settings.port)
        lock = FolderLock(settings.models, settings.host, settings.port)
    except (SettingsInvalid, StartFailed, FolderTaken, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    spare = start_spare(settings)
    try:
        from .lifecycle import live  # not above: this is what the spare worker does not wait for

        return live(settings, listener, spare)
    finally:
        spare.end()
        lock.release()


def start_spare(settings: Settings) -> SpareWorker:
    """None is started where none is wanted, or the system has no room for a process: the daemon
    does without."""
    if not wants_spare(settings):
        return SpareWorker()
    try:
        return SpareWorker.start(worker_command())
    except OSError as error:
        print(f"no spare worker: {error}", file=sys.stderr)
        return SpareWorker()


def wants_spare(settings: Settings) -> bool:
    """Somebody may use it, and it costs the daemon's own start no time.

    Not on Windows: there a pipe belongs to an event loop from its beginning.
    """
    return (
        os.name == "posix"
        and settings.spare_worker_s > 0
        and not settings.worker_command
        and _num_cores() > 1
        and any((settings.models / "manifests").rglob("*.json"))
    )


def _num_cores() -> int:
    """Those that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    import psutil  # not above: only a start that fails asks

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,):
                if connection.pid is None:
                    return None
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return None  # other users' sockets may be hidden
    return None
