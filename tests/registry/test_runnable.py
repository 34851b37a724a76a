"""A model that cannot be run is refused by its first bytes, not after gigabytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmd.backend.models import dequantize
from llmd.registry import runnable
from llmd.registry.errors import BadModelFile, RegistryError, Unsupported
from llmd.registry.pull import pull
from llmd.registry.settings import PullSettings
from llmd.registry.sources import base
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import Hub, running_hub

SIZE = 4 << 20
LARGE_VOCABULARY = {"tokenizer.ggml.tokens": ["word"] * 40_000}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """With small files looked at early too."""
    monkeypatch.setattr(base, "EARLY_CHECK_BYTES", 1 << 20)
    return ModelStore(tmp_path / "models")


def gguf_of(metadata: Mapping[str, Any], type_id: int = 2) -> bytes:
    tensors: list[make.Tensor] = [("token_embd.weight", [256, 64], type_id)]
    header = make.gguf_bytes({**make.LLAMA_METADATA, **metadata}, tensors)
    return header + random.Random(3).randbytes(SIZE)


def pulled(store: ModelStore, hub: Hub) -> None:
    settings = PullSettings(
        hub_endpoint=hub.endpoint, give_up_s=60, reserve_bytes=0, part_bytes=1 << 20
    )
    asyncio.run(pull(store, "hf.co/o/r", settings=settings))


@pytest.mark.parametrize(
    ("content", "error", "text", "most_bytes"),
    [
        (gguf_of({"general.architecture": "rwkv9"}), Unsupported, "architecture rwkv9", 256 << 10),
        (
            gguf_of({"general.architecture": "rwkv9", **LARGE_VOCABULARY}),
            Unsupported,
            "supported are .*llama",
            256 << 10,
        ),
        (gguf_of({}, type_id=19), Unsupported, "tensors of type IQ1_S are not", 256 << 10),
        (gguf_of(LARGE_VOCABULARY, type_id=19), Unsupported, "IQ1_S", 1 << 20),
        (b"<html>" + bytes(SIZE), BadModelFile, "does not begin with the letters", 256 << 10),
    ],
    ids=["architecture", "far vocabulary", "types", "types behind", "a page"],
)
def test_it_is_refused_by_its_beginning_and_leaves_nothing(
    store: ModelStore, content: bytes, error: type[RegistryError], text: str, most_bytes: int
) -> None:
    with running_hub({"m.gguf": content}) as hub:
        with pytest.raises(error, match=text):
            pulled(store, hub)
        assert hub.bytes_served <= most_bytes
    assert [*store.blobs.iterdir(), *store.partial.iterdir(), *store.temp.iterdir()] == []


@pytest.mark.parametrize("metadata", [{}, LARGE_VOCABULARY], ids=["short", "long"])
def test_what_was_looked_at_is_not_fetched_again(
    store: ModelStore, metadata: dict[str, Any]
) -> None:
    content = gguf_of(metadata)
    with running_hub({"m.gguf": content}) as hub:
        pulled(store, hub)
        assert hub.bytes_served == len(content)
    (manifest,) = store.list()
    assert store.path_of(manifest.files[0]).read_bytes() == content


def test_a_source_that_knows_no_ranges_is_read_all_the_same(store: ModelStore) -> None:
    with running_hub({"m.gguf": gguf_of({})}) as hub:
        hub.faults.ignore_range = True
        pulled(store, hub)
    store.check()
    assert len(store.list()) == 1


def test_a_configuration_is_judged_before_the_weights_come(
    store: ModelStore, tmp_path: Path
) -> None:
    folder = make.write_safetensors_folder(tmp_path / "made", model_type="zebra")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["model.safetensors"] += bytes(SIZE)
    with running_hub(files) as hub:
        with pytest.raises(Unsupported, match="architecture zebra is not supported"):
            pulled(store, hub)
        assert hub.bytes_served == 0


def test_the_model_inside_a_larger_one_counts(tmp_path: Path) -> None:
    folder = make.write_safetensors_folder(
        tmp_path / "m", model_type="gemma3", text_config={"model_type": "gemma3_text"}
    )
    runnable.check_config(folder / "config.json", "m")
    encoder = make.write_safetensors_folder(tmp_path / "e", model_type="bert")
    runnable.check_config(encoder / "config.json", "e")


def test_the_lists_are_those_of_the_backend() -> None:
    from llmd.backend.models import encoder_config

    assert set(runnable.TENSOR_TYPES) == set(dequantize.SUPPORTED_TYPES)
    assert set(runnable.GGUF_ENCODERS) == set(encoder_config._GGUF_ENCODERS_ONLY)
    assert set(runnable.SAFETENSORS_ENCODERS) == set(encoder_config._ENCODERS_ONLY)
