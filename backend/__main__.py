"""`python -m llmd.backend`: one worker process. The protocol is on stdin and stdout.

Descriptor 1 is moved away before anything else is imported: a library that prints would break the
stream of messages. What is printed goes to stderr, the log.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Serve one model until stdin ends. Exit code 0 after a Shutdown, 1 after a failure."""
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    from .worker import serve  # torch comes with it, hence after the move

    return serve(sys.stdin.buffer, messages)


if __name__ == "__main__":
    sys.exit(main())
