"""A worker's process and its three pipes, on the event loop: spawned here, or adopted.

Owner: the WorkerProcess that asked for it, on the event loop.
"""

from __future__ import annotations

import asyncio
import subprocess
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import IO

from .spare_worker import worker_environ


class Child:
    """Made by `spawn` or `adopt`. `close` it when it has ended."""

    def __init__(
        self,
        process: Process | subprocess.Popen[bytes],
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
        transports: Sequence[asyncio.BaseTransport] = (),
    ) -> None:
        self._process = process
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self._transports = transports  # that nobody else closes

    def __repr__(self) -> str:
        return f"<Child {self.pid}, exit code {self.returncode}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None before `wait` has told it: until then the pid is this process's own."""
        return self._process.returncode

    async def wait(self) -> None:
        """Return when it has ended. Whoever waits has killed it, or read the end of its stdout."""
        if isinstance(self._process, subprocess.Popen):
            await asyncio.to_thread(self._process.wait)
        else:
            await self._process.wait()

    def close(self) -> None:
        """The pipes go back to the system."""
        self.stdin.close()
        for transport in self._transports:
            transport.close()


async def spawn(command: Sequence[str], line_limit: int) -> Child:
    """Raises OSError. `line_limit`: bytes of one line of its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        limit=line_limit,
        start_new_session=True,  # Ctrl+C in the daemon's terminal is the daemon's
        env=worker_environ(),
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    return Child(process, process.stdin, process.stdout, process.stderr)


async def adopt(process: subprocess.Popen[bytes], line_limit: int) -> Child:
    """A process that was started before there was an event loop, with three unbuffered pipes.

    It is gone if this fails or is cancelled.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    loop = asyncio.get_running_loop()
    try:
        writing, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), process.stdin
        )
        stdout, reading = await _reader(process.stdout, line_limit)
        stderr, logging = await _reader(process.stderr, line_limit)
    except BaseException:
        process.kill()
        process.wait()
        raise
    stdin = asyncio.StreamWriter(writing, protocol, None, loop)
    return Child(process, stdin, stdout, stderr, (reading, logging))


async def _reader(
    pipe: IO[bytes], line_limit: int
) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader(line_limit)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader, transport
