"""What can be set about pulling, as one frozen value. The daemon fills it from its own settings."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Every knob of the downloads. Durations in seconds, sizes in bytes."""

    give_up_s: float = 5.0  # an unreachable source is left after this, and the next one tried
    connections: int = 6  # of one file at once
    part_bytes: int = 16 << 20  # one ranged request
    stall_s: float = 25.0  # a connection without a byte for so long is closed and asked again
    max_failures: int = 8  # in a row without any progress
    backoff_s: float = 0.5  # the first pause after a failure; doubles up to max_backoff_s
    max_backoff_s: float = 30.0
    max_retry_after_s: float = 300.0  # the longest wait that a server may ask for
    rate_limit: int = 0  # bytes per second over all connections; 0: none
    reserve_bytes: int = 256 << 20  # free disk space that a pull leaves alone
    insecure: bool = False  # plain http, unchecked TLS
    allow_private: bool = False  # hosts on loopback and private networks
    hub_endpoint: str | None = None  # None: as huggingface_hub has it (HF_ENDPOINT)
    hub_token: str | None = None  # None: as huggingface_hub finds it (HF_TOKEN, `hf auth login`)
    registry_url: str = ""  # of bare names; "": https and the name's own host
    key: Path | None = None  # of the user's account at registries; None: where Ollama has it
    python: str = sys.executable  # whose pip fetches packages
    user_aliases: Path | None = None  # a table like aliases.toml that comes first
