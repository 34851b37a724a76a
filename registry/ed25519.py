"""Ed25519 signatures, in integers of the language; some milliseconds each.

For the one signature that an account at a registry wants, now and then. Not hardened against
someone who times it on this machine: nothing else should sign with it.

    p = 2^255 - 19,  -x² + y² = 1 + d·x²·y²     points as (X, Y, Z, T): x = X/Z, y = Y/Z, xy = T/Z

Source: RFC 8032, section 5.1.
"""

from __future__ import annotations

import hashlib

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int, int, int]
NEUTRAL: Point = (0, 1, 1, 0)


def public_key(seed: bytes) -> bytes:
    """The 32 bytes that belong to a seed of 32 bytes."""
    return _encoded(_times(_secret(seed)[0], BASE))


def sign(seed: bytes, message: bytes) -> bytes:
    """The 64 bytes of the signature."""
    scalar, prefix = _secret(seed)
    nonce = _number(prefix, message) % ORDER
    commitment = _encoded(_times(nonce, BASE))
    challenge = _number(commitment, public_key(seed), message) % ORDER
    return commitment + ((nonce + challenge * scalar) % ORDER).to_bytes(32, "little")


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the owner of the key signed the message."""
    points = _decoded(public), _decoded(signature[:32])
    scalar = int.from_bytes(signature[32:], "little")
    if len(signature) != 64 or None in points or scalar >= ORDER:
        return False
    owner, commitment = points
    assert owner is not None and commitment is not None
    challenge = _number(signature[:32], public, message) % ORDER
    return _encoded(_times(scalar, BASE)) == _encoded(_sum(commitment, _times(challenge, owner)))


def _secret(seed: bytes) -> tuple[int, bytes]:
    """The scalar, and what the nonces are made with."""
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little")
    return scalar & ((1 << 254) - 8) | 1 << 254, digest[32:]


def _number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little")


def _sum(a: Point, b: Point) -> Point:
    low = (a[1] - a[0]) * (b[1] - b[0])
    high = (a[1] + a[0]) * (b[1] + b[0])
    cross, depth = 2 * D * a[3] * b[3], 2 * a[2] * b[2]
    e, f, g, h = high - low, depth - cross, depth + cross, high + low
    return e * f % P, g * h % P, f * g % P, e * h % P


def _times(scalar: int, point: Point) -> Point:
    total = NEUTRAL
    while scalar:
        if scalar & 1:
            total = _sum(total, point)
        point = _sum(point, point)
        scalar >>= 1
    return total


def _encoded(point: Point) -> bytes:
    inverse = pow(point[2], -1, P)
    x, y = point[0] * inverse % P, point[1] * inverse % P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _decoded(content: bytes) -> Point | None:
    number = int.from_bytes(content, "little")
    y, is_odd = number & ((1 << 255) - 1), number >> 255
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if len(content) != 32 or y >= P or (x * x - square) % P or (x == 0 and is_odd):
        return None
    x = P - x if x & 1 != is_odd else x
    return x, y, 1, x * y % P


def _base_point() -> Point:
    point = _decoded((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    assert point is not None
    return point


BASE = _base_point()
