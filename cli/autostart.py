"""The daemon starts by itself: if none answers, one is started in the background.

    does it answer? ──yes──▶ done
         │no
         ▼
    spawn, detached ──▶ ask again and again ──answers──▶ done
                              │ the child has ended, and nobody answers
                              ▼
                        the last words of its log

Two command lines that start at once each spawn a daemon. One binds the port, the other's says that
the port is taken and ends; both command lines then find the one that answers. So no lock is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from .address import Address, is_on
from .client import ApiError, Client, Unreachable
from .render import Spinner
from .serve import daemon_command

START_TIMEOUT_S = 60.0  # a cold disk reads Python's packages for a while
POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_GRACE_S = 3.0  # for another daemon, which took the port before ours did


class StartFailed(Exception):
    """No daemon could be started. The text says why."""


def connect(environ: Mapping[str, str], address: Address) -> Client:
    """A client of a daemon that answers; starts one if need be. Raises Unreachable, StartFailed."""
    client = client_of(environ, address)
    if answers(client):
        return client
    if not address.is_local:
        raise Unreachable(f"could not connect to llmd at {address}; is it running there?")
    if is_on(environ, "NO_AUTOSTART"):
        raise Unreachable(
            f"could not connect to llmd at {address}; run 'llmd serve' to start it "
            "(LLMD_NO_AUTOSTART is set)"
        )
    with Spinner("starting llmd"):
        _start(client, log_path())
    return client


def client_of(environ: Mapping[str, str], address: Address) -> Client:
    """A client with the environment's key. Nothing is asked and nothing started."""
    key = environ.get("LLMD_API_KEY") or environ.get("OLLAMA_API_KEY") or ""
    return Client(address, key.split(",")[0].strip())


def answers(client: Client) -> bool:
    """Whether a daemon is there. Raises Unreachable if something else is."""
    try:
        return "version" in client.get("/api/version", _PROBE_TIMEOUT_S)
    except ApiError as error:
        raise Unreachable(
            f"{client.address} is taken by a program that is not llmd (it says: {error}); "
            "set LLMD_HOST to another port"
        ) from error
    except Unreachable as error:
        if _is_refused(error.__cause__):
            return False
        raise Unreachable(
            f"what listens at {client.address} does not answer as llmd would ({error}); "
            "set LLMD_HOST to another port"
        ) from error


def _is_refused(cause: BaseException | None) -> bool:
    return isinstance(cause, ConnectionRefusedError)


def log_path() -> Path:
    """Where a daemon that was started in the background writes its log."""
    from platformdirs import user_log_path

    return user_log_path("llmd", appauthor=False) / "daemon.log"


def _start(client: Client, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        begin = output.tell()
        child = _spawn(output.fileno())
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(client):
        if child.poll() is not None:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not _is_port_taken(log, begin):
                raise StartFailed(_last_words(log, begin))
        if time.monotonic() > deadline:
            raise StartFailed(f"llmd did not start; its log is {log}")
        time.sleep(POLL_S)


def _spawn(output: int) -> subprocess.Popen[bytes]:
    """Detached: it outlives this terminal, and its Ctrl+C is not the daemon's."""
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
    return subprocess.Popen(
        daemon_command(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=Path(sys.executable).anchor,  # holds on to no folder that the user may want to remove
        start_new_session=os.name == "posix",
        creationflags=flags,
    )


def _is_port_taken(log: Path, begin: int) -> bool:
    return " is taken" in _written(log, begin)


def _last_words(log: Path, begin: int) -> str:
    lines = [line for line in _written(log, begin).splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    if errors:
        return errors[-1]
    reason = f": {lines[-1]}" if lines else ""
    return f"llmd did not start{reason} (its log is {log})"


def _written(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode("utf-8", "replace")
