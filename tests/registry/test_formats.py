"""Headers of real, broken and hostile model files."""

from __future__ import annotations

import gc
import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.registry.formats import gguf, safetensors
from llmd.registry.formats.errors import FormatError

from .. import model_files
from . import fuzz_headers
from . import model_makers as make


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.file"
        path.write_bytes(content)
        return path

    return write


Write = Callable[[bytes], Path]


@pytest.fixture(autouse=True)
def own_garbage() -> Iterator[None]:
    """A collection during a measured read looks at its objects, not at those of earlier tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.real_model
def test_the_real_header_is_read_fast(smollm2_gguf: Path) -> None:
    times = []
    for _ in range(3):
        start = time.process_time()  # not wall time: other processes may have the machine
        header = gguf.read_header(smollm2_gguf)
        times.append(time.process_time() - start)
    assert min(times) < 0.3  # 0.09 s alone; a crowded cache makes it slower
    assert header.architecture == "llama"
    assert header.num_parameters == 134_515_008
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49_152
    assert header.metadata["general.file_type"] == 3


@pytest.mark.slow  # the other reader takes ten seconds for this vocabulary
def test_the_real_header_agrees_with_the_reference_reader(smollm2_gguf: Path) -> None:
    from gguf import GGUFReader

    tensors = gguf.read_header(smollm2_gguf).tensors.values()
    found = {t.name: (t.offset, t.size_bytes, t.type, t.shape) for t in tensors}
    expected = {
        t.name: (t.data_offset, int(t.n_bytes), t.tensor_type.name, tuple(map(int, t.shape[::-1])))
        for t in GGUFReader(smollm2_gguf).tensors
    }
    assert found == expected


def test_every_kind_of_metadata_value_comes_back(written: Write) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "int": 7,
        "float": 0.5,
        "bool": True,
        "ints": [1, 2, 3],
        "bools": [True, False],
        "words": ["a", "", "ü"],
        "empty": [],
    }
    header = gguf.read_header(written(make.gguf_bytes(metadata)))
    assert header.metadata == metadata


def test_a_header_longer_than_the_first_read_is_read_whole(
    written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make.tiny_gguf({"words": ["word"] * 500})
    monkeypatch.setattr(gguf, "FIRST_READ_BYTES", 64)
    header = gguf.read_header(written(content))
    assert header.metadata["words"] == ["word"] * 500
    assert header.tensors["blk.0.ffn_up.weight"].shape == (64, 32)
    assert header.tensors["blk.0.ffn_up.weight"].size_bytes == 64 * 18


HUGE = struct.pack("<Q", (1 << 63) + 5)
BROKEN_GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated|begin"),
    "not one": (b"PK\x03\x04" + b"\0" * 50, "begin with the letters GGUF"),
    "version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version is 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<I", 3) + HUGE + bytes(8), "tensors are announced"),
    "pair count": (b"GGUF" + struct.pack("<IQ", 3, 0) + HUGE, "pairs are announced"),
    "key length": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE + bytes(9), "announced"),
    "array count": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + make.string("k") + struct.pack("<II", 9, 8) + HUGE,
        "strings are announced",
    ),
    "numbers count": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + make.string("k") + struct.pack("<II", 9, 4) + HUGE,
        "items are announced",
    ),
    "nesting": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + make.string("k")
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 50,
        "nested too deeply",
    ),
    "value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + make.string("k") + struct.pack("<IQ", 77, 0),
        "unknown type 77",
    ),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (make.string("kk") + make.value(1)),
        "twice",
    ),
    "alignment": (make.gguf_bytes({"general.alignment": 0}), "power of two"),
    "tensor type": (make.gguf_bytes({}, [("t", [32], 99)], 4096), "unknown type 99; known are F32"),
    "ragged row": (make.gguf_bytes({}, [("t", [33], 2)], 4096), "whole number of Q4_0 blocks"),
    "tensor outside": (make.gguf_bytes({}, [("t", [2048], 0)], 4096), "truncated: tensor 't' ends"),
    "tensor huge": (make.gguf_bytes({}, [("t", [1 << 62] * 4, 0)], 4096), "truncated: tensor"),
    "dimensions": (make.gguf_bytes({}, [("t", [1] * 5, 0)], 4096), "5 dimensions"),
    "same tensors": (make.gguf_bytes({}, [("t", [1], 0), ("t", [1], 0)], 9000), "two tensors"),
    "too many tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, gguf.MAX_ENTRIES + 1, 0) + bytes(1 << 20),
        f"{gguf.MAX_ENTRIES + 1} tensors are announced, more than {gguf.MAX_ENTRIES}",
    ),
    "too many pairs": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, gguf.MAX_ENTRIES + 1) + bytes(1 << 20),
        f"pairs are announced, more than {gguf.MAX_ENTRIES}",
    ),
    "too many items": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 2)
        + b"".join(
            make.string(key) + struct.pack("<IIQ", 9, 0, gguf.MAX_ITEMS) + bytes(gguf.MAX_ITEMS)
            for key in ("a", "b")
        ),
        "its lists have more than",
    ),
    "name": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + make.string(b"\xff" * 9) + bytes(9), "UTF-8"),
}


@pytest.mark.parametrize(("content", "reason"), BROKEN_GGUF.values(), ids=BROKEN_GGUF)
def test_a_broken_gguf_is_refused_with_its_reason(
    written: Write, content: bytes, reason: str
) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        gguf.read_header(written(content))
    assert "model.file" in str(caught.value)
    assert "\n" not in str(caught.value)


def broken_safetensors() -> dict[str, tuple[bytes, str]]:
    def headed(text: str | bytes, data: int = 64) -> bytes:
        body = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(body)) + body + bytes(data)

    def one(**entry: Any) -> bytes:
        usual = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
        return headed(json.dumps({"t": usual | entry}))

    return {
        "empty": (b"", "truncated"),
        "long header": (struct.pack("<Q", 1 << 60) + b"{}", "truncated or damaged"),
        "a list": (headed("[1]"), "no JSON object"),
        "not JSON": (headed("{oops"), "no JSON"),
        "not UTF-8": (headed(b'{"\xff": 1}'), "no JSON"),
        "deep": (headed('{"a":' + "[" * 100_000), "no JSON"),
        "entry": (headed('{"t": 5}'), "no description"),
        "dtype": (one(dtype="F7"), "unknown dtype 'F7'; known are BOOL"),
        "dtype list": (one(dtype=["F32"]), "unknown dtype"),
        "negative": (one(shape=[-4]), "wrong shape"),
        "boolean": (one(shape=[True]), "wrong shape"),
        "fraction": (one(shape=[4.0]), "wrong shape"),
        "dims": (one(shape=[1] * 17), "wrong shape"),
        "offsets": (one(data_offsets=[0]), "wrong offsets"),
        "backwards": (one(data_offsets=[16, 0]), "lies at 16 to 0"),
        "outside": (one(shape=[100], data_offsets=[0, 400]), "truncated"),
        "length": (one(shape=[5]), "not as long as its shape says"),
        "metadata": (headed('{"__metadata__": 3}'), "no object"),
    }


@pytest.mark.parametrize(
    ("content", "reason"), broken_safetensors().values(), ids=broken_safetensors()
)
def test_a_broken_safetensors_file_is_refused_with_its_reason(
    written: Write, content: bytes, reason: str
) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        safetensors.read_header(written(content))
    assert "model.file" in str(caught.value)


def test_a_safetensors_header_tells_where_each_tensor_lies(written: Write) -> None:
    content = make.safetensors_bytes({"a": ("BF16", [2, 3], 12), "b": ("F32", [], 4)})
    header = safetensors.read_header(written(content))
    assert header.tensors["a"].offset == header.data_offset
    assert header.tensors["b"].offset == header.data_offset + 12
    assert header.tensors["b"].shape == ()
    assert header.num_parameters == 7


@pytest.mark.alone
@pytest.mark.real_model
def test_two_thousand_damaged_real_headers_raise_nothing_but_the_documented_error(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    """scripts/fuzz has a hundred thousand of them."""
    whole, short = fuzz_headers.gguf_seeds(smollm2_gguf)
    tensors = fuzz_headers.safetensors_seed(model_files.all_minilm() / "model.safetensors")
    shares = [(whole, 5), (short, 595), (tensors, 1_400)]
    outcomes = fuzz_headers.run(shares, tmp_path, seed=11)
    for outcome in outcomes.values():
        assert outcome.refused > outcome.inputs // 2
        assert outcome.slowest_s < fuzz_headers.MAX_SECONDS
        assert outcome.growth < fuzz_headers.MAX_GROWTH


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 3))
def test_whatever_follows_the_magic_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, num_tensors: int, num_pairs: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + tail)
    with suppress(FormatError):
        gguf.read_header(path)


WORDS = st.text(max_size=20)
VALUES = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    WORDS,
    st.lists(WORDS, max_size=5),
    st.lists(st.integers(0, 2**32 - 1), max_size=5),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(WORDS.filter(lambda key: key != "general.alignment"), VALUES, max_size=8))
def test_any_metadata_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(make.gguf_bytes(metadata))
    header = gguf.read_header(path)
    assert header.metadata == metadata
    assert dict(gguf.read_pairs(path)).keys() == metadata.keys()
    short = gguf.read_header(path, max_items=2).metadata
    for key, value in metadata.items():
        is_long = isinstance(value, list) and len(value) > 2
        assert short[key] == ([] if is_long else value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=12), JSON, max_size=4))
def test_any_json_as_a_safetensors_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    with suppress(FormatError):
        safetensors.read_header(path)
