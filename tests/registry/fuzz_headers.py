"""Headers of real model files, damaged at random: only the documented error may come of it.

    python -m tests.registry.fuzz_headers [INPUTS] [SEED]

The real headers of a GGUF and of a safetensors file, whole and (of the GGUF) with its long lists
cut, so that most of the damage hits lengths, counts, types and offsets instead of words. Each input
has a number; the same seed and number make the same input again. Besides the error, three
things are watched: processor seconds of each input, resident memory of the process, and that a file
which is still read has all its tensors inside it.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmd.registry.formats import gguf, safetensors
from llmd.registry.formats.errors import FormatError

from . import model_makers as make

MAX_SECONDS = 1.0
MAX_GROWTH = 64 << 20
LONG_LIST = 64
EDGES = (0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Seed:
    """A sound header to damage, and the size of the file that it stands at the beginning of."""

    name: str
    header: bytes
    file_size: int
    read: Callable[[Path], Any]


@dataclass
class Outcome:
    """What came of many inputs."""

    inputs: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    growth: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def gguf_seeds(path: Path) -> list[Seed]:
    """The header as it is, and one with the same keys and tensors whose lists are short."""
    header = gguf.read_header(path)
    with path.open("rb") as file:
        whole = file.read(header.data_offset)
    size = path.stat().st_size
    return [
        Seed("GGUF, whole", whole, size, gguf.read_header),
        Seed("GGUF, lists cut", cut(path, header), size, gguf.read_header),
    ]


def cut(path: Path, header: gguf.GGUFHeader) -> bytes:
    """The header again, by hand: real pairs, but of a long list only its beginning."""
    pairs = [
        make.string(key) + make.value(header.metadata[key][:LONG_LIST])
        if isinstance(header.metadata[key], list)
        else raw
        for key, raw in gguf.read_pairs(path)
    ]
    ids = {name: number for number, (name, _, _) in gguf.TENSOR_TYPES.items()}
    content = b"GGUF" + struct.pack("<IQQ", header.version, len(header.tensors), len(pairs))
    content += b"".join(pairs)
    for tensor in header.tensors.values():
        dims = tuple(reversed(tensor.shape))
        content += make.string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        content += struct.pack("<IQ", ids[tensor.type], tensor.offset - header.data_offset)
    return content + bytes(-len(content) % 32)


def safetensors_seed(path: Path) -> Seed:
    with path.open("rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
    return Seed("safetensors", header, path.stat().st_size, safetensors.read_header)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, bytes, numbers at the edges, pieces cut, doubled, moved."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if rng.random() < 0.7 else rng.randrange(min(len(data), 64))
        match rng.randrange(8):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(EDGES))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(EDGES) & 0xFFFFFFFF)
            case 4:
                del data[at : at + rng.randint(1, 64)]
            case 5:
                data[at:at] = data[at : at + rng.randint(1, 64)]
            case 6:
                other = rng.randrange(len(data))
                data[at : at + 16] = data[other : other + 16]
            case _:
                data = data[: max(at, 1)]
        if not data:
            data = bytearray(b"G")
    return bytes(data)


def run(seeds: Sequence[tuple[Seed, int]], folder: Path, seed: int) -> dict[str, Outcome]:
    """So many inputs of each. Any other exception than FormatError ends it, naming the input."""
    outcomes = {}
    for start, count in seeds:
        outcomes[start.name] = outcome = Outcome()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(count):
            one_input(start, number, seed, folder / "model.file", outcome)
        outcome.growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return outcomes


def one_input(start: Seed, number: int, seed: int, path: Path, outcome: Outcome) -> None:
    rng = random.Random(f"{seed} {start.name} {number}")
    content = damaged(start.header, rng)
    with path.open("wb") as file:
        file.write(content)
        if rng.random() < 0.5:  # sparse: the weights are there, as far as a size can tell
            file.truncate(max(len(content), start.file_size))
    size = path.stat().st_size
    begun = time.process_time()
    outcome.inputs += 1
    try:
        header = start.read(path)
    except FormatError as error:
        outcome.refused += 1
        outcome.reasons[reason_of(error)] += 1
        assert len(str(error)) < 2000 and "\n" not in str(error), f"{start.name} {number}: {error}"
    except BaseException as error:
        error.add_note(f"input {number} of {start.name}, seed {seed}")
        raise
    else:
        ends = [tensor.offset + tensor.size_bytes for tensor in header.tensors.values()]
        assert max(ends, default=0) <= size, f"{start.name} {number}: a tensor leaves the file"
    outcome.slowest_s = max(outcome.slowest_s, time.process_time() - begun)


def reason_of(error: FormatError) -> str:
    """The sentence without what is of this input alone."""
    words = str(error).partition(": ")[2] or str(error)
    plain = "".join("#" if letter.isdigit() else letter for letter in words)
    for quote in ("'", '"'):
        parts = plain.split(quote)
        if len(parts) > 2:
            plain = f"{parts[0]}…{parts[-1]}"
    while "##" in plain:
        plain = plain.replace("##", "#")
    return plain[:70]


def main() -> None:
    from .. import model_files

    inputs = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    whole, short = gguf_seeds(model_files.smollm2_gguf())
    tensors = safetensors_seed(model_files.all_minilm() / "model.safetensors")
    shares = [(whole, inputs // 100), (short, inputs * 59 // 100), (tensors, inputs * 2 // 5)]
    with tempfile.TemporaryDirectory(prefix="llmd-fuzz-") as folder:
        outcomes = run(shares, Path(folder), seed)
    print(f"Seed {seed}. Limits: {MAX_SECONDS:g} s of processor time, {MAX_GROWTH >> 20} MiB.\n")
    print("| header | inputs | refused | slowest | memory grew by | kinds of reasons |")
    print("|---|---|---|---|---|---|")
    for name, outcome in outcomes.items():
        print(
            f"| {name} | {outcome.inputs} | {outcome.refused} | {outcome.slowest_s * 1e3:.0f} ms "
            f"| {outcome.growth / 2**20:.0f} MiB | {len(outcome.reasons)} |"
        )
    for outcome in outcomes.values():
        assert outcome.slowest_s < MAX_SECONDS
        assert outcome.growth < MAX_GROWTH


if __name__ == "__main__":
    main()
