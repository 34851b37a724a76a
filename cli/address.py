"""Where the daemon is, and other words of the environment: `LLMD_HOST`, then `OLLAMA_HOST`, as `[scheme://]host[:port][/path]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 11434
_PORT_OF_SCHEME = {"http": 80, "https": 443}
# One listens on these, but cannot connect to them.
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_LOCAL_HOSTS = ("localhost", "::1")


@dataclass(frozen=True, slots=True)
class Address:
    """A daemon's address, ready to connect to."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    scheme: str = "http"
    path: str = ""  # before every route, for a daemon behind a proxy; no slash at its end

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def is_local(self) -> bool:
        """On this machine, so that a daemon can be started there."""
        is_loopback = self.host in _LOCAL_HOSTS or self.host.startswith("127.")
        return is_loopback and self.scheme == "http" and not self.path


def read_address(environ: Mapping[str, str]) -> Address:
    """A port that cannot be read counts as the default one: the daemon's start reports it."""
    for variable in ("LLMD_HOST", "OLLAMA_HOST"):
        text = environ.get(variable, "").strip().strip("\"'").strip()
        if text:
            return parse_address(text)
    return Address()


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether `LLMD_NAME`, else `OLLAMA_NAME`, says yes."""
    text = environ.get(f"LLMD_{name}") or environ.get(f"OLLAMA_{name}") or ""
    return text.strip().lower() not in ("", "0", "false", "f")


def parse_address(text: str) -> Address:
    scheme, separator, rest = text.rpartition("://")
    scheme = scheme.lower() if separator else "http"
    authority, _, path = rest.partition("/")
    host, port_text = _split_port(authority)
    default_port = _PORT_OF_SCHEME.get(scheme, DEFAULT_PORT) if separator else DEFAULT_PORT
    is_port = port_text.isascii() and port_text.isdigit() and 0 < int(port_text) < 65536
    host = _ANY_ADDRESS.get(host, host) or DEFAULT_HOST
    path = path.rstrip("/")
    return Address(
        host, int(port_text) if is_port else default_port, scheme, f"/{path}" if path else ""
    )


def _split_port(authority: str) -> tuple[str, str]:
    if authority.startswith("["):
        host, _, rest = authority[1:].partition("]")
        return host, rest.removeprefix(":")
    if authority.count(":") > 1:
        return authority, ""  # a bare IPv6 address
    host, _, port = authority.partition(":")
    return host, port
