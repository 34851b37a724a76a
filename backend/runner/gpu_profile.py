"""What a start on a GPU found out, kept for the next one: working memory, and the fastest tiles.

Measuring takes seconds, and gives the same as long as nothing changes that it depends on: the card,
its driver, the model and how it is laid out, the versions of what computes. Those make the file's
name, so a changed machine measures anew and never believes an old file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

log = logging.getLogger("llmd.runner")


@dataclass(frozen=True, slots=True)
class Profile:
    """`working_bytes`: the most that a step allocates beside weights and cache. `tiles`: by the
    name of a product (kernels.tiles), the place of the fastest tile among the candidates."""

    working_bytes: int
    tiles: dict[str, int] = field(default_factory=dict)


class ProfileFile:
    """Where one model's profile on one machine is kept. `folder` None: nowhere."""

    def __init__(self, folder: Path | None, meaning: Mapping[str, str]) -> None:
        text = json.dumps(dict(meaning), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._path = None if folder is None else folder / f"{digest}.json"
        self._meaning = dict(meaning)

    def read(self) -> Profile | None:
        """None if there is none, or none that can be understood."""
        if self._path is None:
            return None
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            tiles = {str(name): int(place) for name, place in stored["tiles"].items()}
            return Profile(int(stored["working_bytes"]), tiles)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the profile %s is not used: %s", self._path, error)
            return None

    def write(self, profile: Profile) -> None:
        """Keep it. A disk that refuses costs the next start some seconds, no more."""
        if self._path is None:
            return
        content = json.dumps({"of": self._meaning, **asdict(profile)}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self._path.parent, delete=False
            ) as file:
                file.write(content)
            Path(file.name).replace(self._path)
        except OSError as error:
            log.warning("the profile cannot be kept: %s", error)


def meaning_of(
    devices: Sequence[torch.device], digest: str, dtype: torch.dtype, batch_tokens: int
) -> dict[str, str]:
    """All that a profile depends on."""
    found = {
        "model": digest,
        "dtype": str(dtype),
        "batch_tokens": str(batch_tokens),
        "layers": ",".join(str(device) for device in devices),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "llmd": _version("llmd"),
        "driver": _driver(),
    }
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            card = torch.cuda.get_device_properties(device)
            found[str(device)] = f"{card.name} {card.major}.{card.minor} {card.total_memory}"
    return found


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "none"


def _driver() -> str:
    """The display driver's version, where there is NVIDIA's library to say it."""
    if importlib.util.find_spec("pynvml") is None:
        return str(torch.version.cuda)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return str(torch.version.cuda)
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
