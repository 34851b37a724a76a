"""Request bodies that came compressed: Content-Encoding gzip, deflate or zstd.

What they unpack to is bounded: a few kilobytes can hold gigabytes of nothing. Some coding agents
compress with zstd without asking first.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import zstandard

from ..errors import BadRequest, TooLarge

MAX_UNPACKED_BYTES = 20 * 2**20


def unpacked(body: bytes, encoding: str, max_bytes: int = MAX_UNPACKED_BYTES) -> bytes:
    """Raises BadRequest for what is damaged or of another kind, TooLarge beyond `max_bytes`."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    unpack = _UNPACKERS.get(name)
    if unpack is None:
        raise BadRequest(f"content-encoding {name!r} is not supported; use gzip, deflate or zstd")
    try:
        text = unpack(body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadRequest(f"the request body is no valid {name}: {error}") from error
    if len(text) > max_bytes:
        raise TooLarge(f"the request body unpacks to more than {max_bytes // 2**20} MiB")
    return text


def _zlib(wbits: int) -> Callable[[bytes, int], bytes]:
    def unpack(body: bytes, limit: int) -> bytes:
        stream = zlib.decompressobj(wbits)
        text = stream.decompress(body, limit)
        if len(text) < limit and not stream.eof:
            raise zlib.error("it ends too early")
        return text

    return unpack


def _zstd(body: bytes, limit: int) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(body) as reader:
        return reader.read(limit)


_UNPACKERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _zlib(31),
    "x-gzip": _zlib(31),
    "deflate": _zlib(15),
    "zstd": _zstd,
}
