"""Words in, HTTP out, exit code back.

Any failure is one line on stderr, `Error: ...`, and exit code 1; `main` is the one place that turns
errors into exit codes. `llmd --version` must be quick (0.3 s), so all else is imported later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .. import __version__

INTERRUPTED = 130  # what shells report for a program that Ctrl+C ended
_VERSION_PROBE_S = 1.0


def main() -> None:
    """The program `llmd`."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """The exit code."""
    if list(arguments) in (["--version"], ["-v"]):  # typer alone takes half of the time it may take
        print_version()
        return 0
    if list(arguments) in (["serve"], ["start"]):  # likewise
        from .serve import become_daemon

        return become_daemon()
    import typer

    from .autostart import StartFailed
    from .client import ApiError, Unreachable
    from .commands import app
    from .errors import CommandFailed

    try:
        code = app(args=with_think_value(arguments), standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        text = error.format_message()
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `llmd list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ApiError, Unreachable, StartFailed, CommandFailed, OSError) as error:
        text = str(error)
    print(f"Error: {text}", file=sys.stderr)
    return 1


def with_think_value(arguments: Sequence[str]) -> list[str]:
    """`--think` may stand alone or have a value; typer knows no such option."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = ["--think=true" if word == "--think" else word for word in arguments[:end]]
    return [*head, *arguments[end:]]


def print_version() -> None:
    """The daemon's version, and the client's if it is another one. Starts nothing."""
    from .address import read_address
    from .client import ApiError, Client, Unreachable

    client = Client(read_address(os.environ))
    try:
        answer = client.get("/api/version", _VERSION_PROBE_S)
    except (ApiError, Unreachable):
        print(f"llmd version is {__version__}")
        print("Warning: could not connect to a running llmd instance", file=sys.stderr)
        return
    version = answer.get("llmd_version") or answer.get("version")
    print(f"llmd version is {version}")
    if version != __version__:
        print(f"Warning: client version is {__version__}")
