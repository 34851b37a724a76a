"""Every knob of the daemon, read from the environment once.

`LLMD_X` first, then `OLLAMA_X`, so that existing setups keep working. A value that cannot be read
stops the start with one sentence: a typing error must not silently become a default.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import platformdirs

from .routes.durations import DurationInvalid, parse_duration

T = TypeVar("T")

DEFAULT_PORT = 11434
PREFIXES = ("LLMD_", "OLLAMA_")
_OWN_ALONE = frozenset(
    {
        *("API_KEY", "HOSTS", "WORKER_COMMAND", "REGISTRY", "REGISTRY_KEY", "ALIASES"),
        *("DEVICES", "REQUIRE_GPU", "REPLICAS", "SPARE_WORKER"),
    }
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


class SettingsInvalid(Exception):
    """A variable holds something that cannot be read. The text names it and what is expected."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All knobs. Durations in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    models: Path = field(
        default_factory=lambda: Path(platformdirs.user_data_dir("llmd", appauthor=False)) / "models"
    )
    keep_alive_s: float = 300.0  # how long an idle model stays; math.inf: forever
    load_timeout_s: float = 300.0  # without any progress; 0: never give up
    replicas: int = 1  # workers of one model, each on a GPU of its own
    max_loaded_models: int = 0  # 0: as many as fit the memory
    max_queue: int = 512  # waiting requests before 503
    context_length: int = 0  # default num_ctx; 0: what the model and the memory allow
    memory_limit_bytes: int = 0  # for all models together; 0: most of what the machine has
    prefix_cache_bytes: int = 512 * 10**6  # of each model's known prefixes on disk; 0: none
    gpu_overhead_bytes: int = 0  # of each GPU, left to other programs
    spread: bool = False  # over all GPUs, also where one would do
    require_gpu: bool = False  # rather fail than leave a layer on the CPU
    devices: Path | None = None  # a list of devices that is believed instead of the machine
    dtype: str = "auto"
    num_threads: int = 0  # of one worker; 0: the physical cores
    drain_s: float = 5.0  # how long running answers may go on at shutdown
    # How long a worker without a model waits for the first load; 0: none is started. Whoever starts
    # a daemon to ask something asks soon, and the memory is not held for someone who does not.
    spare_worker_s: float = 60.0
    worker_command: tuple[str, ...] = ()  # what starts a worker; empty: this interpreter's own
    origins: tuple[str, ...] = ()  # browser origins besides the built-in ones
    hosts: tuple[str, ...] = ()  # names in the Host header besides the machine's own
    api_keys: tuple[str, ...] = ()
    pull_rate_bytes: int = 0  # per second, of all connections of one download; 0: no cap
    pull_connections: int = 6  # of one download
    pull_private: bool = False  # models may come from hosts of a private network
    registry: str = ""  # address of the registry of bare names; "": the usual one
    registry_key: Path | None = None  # of an account at registries; None: ~/.ollama/id_ed25519
    aliases: Path | None = None  # a table of short names that comes before the shipped one
    noprune: bool = False  # leave unnamed blobs alone at the start
    sources: Mapping[str, str] = field(default_factory=dict)  # setting -> variable it came from

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach the port."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Raises SettingsInvalid."""
    reader = _Reader(os.environ if environ is None else environ)
    defaults = Settings()
    host, port = reader.get("HOST", parse_host, (defaults.host, defaults.port))
    settings = Settings(
        host=host,
        port=port,
        models=reader.get("MODELS", lambda text: Path(text).expanduser(), defaults.models),
        keep_alive_s=reader.get("KEEP_ALIVE", _keep_alive, defaults.keep_alive_s),
        load_timeout_s=reader.get("LOAD_TIMEOUT", _length_of_time, defaults.load_timeout_s),
        replicas=reader.get("REPLICAS", _one_or_more, 1),
        max_loaded_models=reader.get("MAX_LOADED_MODELS", _natural, 0),
        max_queue=reader.get("MAX_QUEUE", _natural, defaults.max_queue),
        context_length=reader.get("CONTEXT_LENGTH", _natural, 0),
        memory_limit_bytes=reader.get("MEMORY_LIMIT", parse_size, 0),
        prefix_cache_bytes=reader.get("PREFIX_CACHE", parse_size, defaults.prefix_cache_bytes),
        gpu_overhead_bytes=reader.get("GPU_OVERHEAD", parse_size, 0),
        spread=reader.get("SCHED_SPREAD", _truth, False),
        require_gpu=reader.get("REQUIRE_GPU", _truth, False),
        devices=reader.get("DEVICES", _existing_file, None),
        dtype=reader.get("DTYPE", _dtype, defaults.dtype),
        num_threads=reader.get("NUM_THREADS", _natural, 0),
        drain_s=reader.get("DRAIN", _length_of_time, defaults.drain_s),
        spare_worker_s=reader.get("SPARE_WORKER", _length_of_time, defaults.spare_worker_s),
        worker_command=reader.get("WORKER_COMMAND", _command, ()),
        origins=reader.get("ORIGINS", _list, ()),
        hosts=reader.get("HOSTS", _list, ()),
        api_keys=reader.get("API_KEY", _list, ()),
        pull_rate_bytes=reader.get("PULL_RATE", parse_size, 0),
        pull_connections=reader.get("PULL_CONNECTIONS", _one_or_more, defaults.pull_connections),
        pull_private=reader.get("PULL_PRIVATE", _truth, False),
        registry=reader.get("REGISTRY", _address, ""),
        registry_key=reader.get("REGISTRY_KEY", _existing_file, None),
        aliases=reader.get("ALIASES", _existing_file, None),
        noprune=reader.get("NOPRUNE", _truth, False),
        sources=reader.sources,
    )
    if not settings.is_loopback and not settings.api_keys and not reader.allows_open():
        raise SettingsInvalid(
            f"LLMD_HOST={settings.host} would let everyone on the network in; set LLMD_API_KEY, or "
            "LLMD_ALLOW_OPEN=1 if that is what you want"
        )
    return settings


class _Reader:
    """Looks a knob up under its names and says where it was found."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.sources: dict[str, str] = {}

    def get(self, name: str, parse: Callable[[str], T], default: T) -> T:
        # The client libraries' OLLAMA_API_KEY is what *they* send, not what this server demands.
        prefixes = PREFIXES[:1] if name in _OWN_ALONE else PREFIXES
        for prefix in prefixes:
            text = _unquoted(self._environ.get(prefix + name, ""))
            if not text:
                continue
            try:
                value = parse(text)
            except ValueError as error:
                raise SettingsInvalid(f"{prefix}{name}={text!r}: {error}") from error
            self.sources[name.lower()] = prefix + name
            return value
        return default

    def allows_open(self) -> bool:
        return self._environ.get("LLMD_ALLOW_OPEN", "") not in ("", "0", "false")


def _unquoted(text: str) -> str:
    """Without blanks and the quotes around it, if it begins and ends with the same."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1].strip()
    return text


def parse_host(text: str) -> tuple[str, int]:
    """`[scheme://]host[:port]` to host and port. An empty host is the loopback."""
    scheme, _, rest = text.rpartition("://")
    default = {"http": 80, "https": 443}.get(scheme, DEFAULT_PORT)
    if rest.count(":") > 1 and not rest.startswith("["):
        rest = f"[{rest}]"  # a bare IPv6 address
    parts = urlsplit(f"//{rest}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"a port from 1 to 65535 is expected ({error})") from error
    return parts.hostname or "127.0.0.1", default if port is None else port


def parse_size(text: str) -> int:
    """`8GB`, `512MiB`, `1.5G` or a number of bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("a size such as 8GB or 512MiB is expected")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " KMGT".index(unit.upper() or " "))


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("a whole number, 0 or more, is expected")
    return int(text)


def _one_or_more(text: str) -> int:
    number = _natural(text)
    if number < 1:
        raise ValueError("a whole number, 1 or more, is expected")
    return number


def _truth(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError("1 or 0 is expected")
    return known[text.lower()]


def _address(text: str) -> str:
    if urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname:
        raise ValueError("an address such as https://registry.example.org is expected")
    return text.rstrip("/")


def _existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError("there is no such file")
    return path


def _keep_alive(text: str) -> float:
    """A duration or whole seconds; negative is forever."""
    seconds = _seconds(text)
    return math.inf if seconds < 0 else seconds


def _length_of_time(text: str) -> float:
    """Negative is none at all."""
    return max(_seconds(text), 0.0)


def _seconds(text: str) -> float:
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return float(text)
    try:
        return parse_duration(text)
    except DurationInvalid as error:
        raise ValueError(str(error)) from error


def _dtype(text: str) -> str:
    if text not in ("auto", "bfloat16", "float16", "float32"):
        raise ValueError("auto, bfloat16, float16 or float32 is expected")
    return text


def _command(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
