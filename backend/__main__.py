"""`python -m llmd.backend`: one worker process. The protocol is on stdin and stdout.

Descriptors 0 and 1 are moved away before anything else is imported: a library that prints would
break the stream of messages. What is printed goes to stderr, the log.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> int:
    """Serve one model until stdin ends. Exit code 0 after a Shutdown, 1 after a failure."""
    die_with_parent()
    # Importing and loading make a million objects that stay: to walk them while they grow takes a
    # third of the time. Worker.run collects once, and freezes what is left.
    gc.disable()
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # Not sys.stdin: the interpreter closes that at its end, while the reader still waits in it.
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from .deferred import deferred, not_for_inference

    if sys.platform != "win32":
        # Torch's library calls a fraction of the 90,000 functions that it would look up at once.
        sys.setdlopenflags(os.RTLD_LAZY)
    with deferred(not_for_inference()):
        from .worker import serve  # torch comes with it, hence after the move
    gc.freeze()  # modules stay, and to walk them once is a fifth of a second
    return serve(requests, messages)


def die_with_parent() -> None:
    """On Linux the kernel ends this process with the daemon, even in the middle of a load.

    Elsewhere, and if the daemon is gone already, the end of stdin does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
