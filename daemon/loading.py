"""What a worker is told to load."""

from __future__ import annotations

from ..backend.protocol import Load, ModelFile
from ..registry.store import ModelStore
from .entry import Entry
from .settings import Settings

NUM_SEQS = 256  # sequences that one worker runs at once


def load_message(
    entry: Entry, store: ModelStore, settings: Settings, kv_capacity_bytes: int
) -> Load:
    """`kv_capacity_bytes` is what its KV could ever hold: the present budget comes when it is
    ready; 0 where the worker alone knows. Raises BadModelFile if a file is gone or was changed."""
    manifest = entry.manifest
    files = [ModelFile(file.name, file.role, str(store.path_of(file))) for file in manifest.files]
    return Load(
        name=manifest.name.display,
        digest=manifest.digest,
        files=files,
        context_length=settings.context_length,
        parts=list(entry.parts),
        dtype=settings.dtype,
        kv_budget_bytes=kv_capacity_bytes,
        max_num_seqs=NUM_SEQS,
        num_threads=settings.num_threads,
        template=manifest.template,
        cache_dir=str(store.root / "derived" / manifest.digest / entry.folder),
        prefix_budget_bytes=settings.prefix_cache_bytes,
    )
