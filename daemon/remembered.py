"""How much memory a model took the last time: a better estimate than any formula.

One small file in the model's folder of derived files; it goes with the model. A file that cannot be
read is as good as absent, one that cannot be written is done without.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

log = logging.getLogger("llmd.manager")

FILE_NAME = "memory.json"
CHANGE = 0.02  # differences below are not written again


class Remembered:
    """Base sizes (everything but the KV cache) by model and number format."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # one folder for each digest is in it
        self._sizes: dict[tuple[str, str], int] = {}

    def get(self, digest: str, dtype: str) -> int | None:
        """Bytes; None if it was never loaded."""
        key = (digest, dtype)
        if key not in self._sizes:
            size = self._read(digest).get(dtype)
            if not isinstance(size, int) or size <= 0:
                return None
            self._sizes[key] = size
        return self._sizes[key]

    def put(self, digest: str, dtype: str, size: int) -> None:
        known = self.get(digest, dtype)
        if known is not None and abs(size - known) <= CHANGE * known:
            return
        self._sizes[digest, dtype] = size
        path = self._folder / digest / FILE_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps({**self._read(digest), dtype: size}), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            log.warning("the size of a model could not be noted: %s", error)

    def _read(self, digest: str) -> dict[str, int]:
        try:
            found = json.loads((self._folder / digest / FILE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
