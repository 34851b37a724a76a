"""A token from the place that a registry names, if that place is its own.

    401  WWW-Authenticate: Bearer realm="https://host/token",service="...",scope="a b"
    GET realm?service=...&scope=a&scope=b&ts=<now>&nonce=<random>
        Authorization: <public key>:<signature of "GET,<address>,<hash of the empty body>">
    ──▶  {"token": "..."}

The signature tells whose account asks; it holds for this address and moment alone. A user without a
key asks without it, and is told how to have one if the registry wants it.

The realm must be on the registry's own host: otherwise any registry could have our requests signed
for elsewhere.

Source: RFC 6750; the token protocol of container registries; the signature as written down in
issue 4.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
from pathlib import Path
from urllib.parse import urlencode

from ..errors import AccessDenied
from ..identity import Identity, read_identity, usual_key
from ..web import Reply, Session, origin_of

MAX_ANSWER_BYTES = 1 << 20
NO_BODY = base64.b64encode(hashlib.sha256(b"").hexdigest().encode()).decode()
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def authorization_for(
    session: Session, refusal: Reply, base: str, label: str, key: Path | None = None
) -> str:
    """The Authorization header's value for whoever asks. `key`: the user's, None for the usual.

    Raises AccessDenied, or BadRequest if the key cannot be used.
    """
    challenge = refusal.headers.get("www-authenticate", "")
    refusal.read(MAX_ANSWER_BYTES)
    fields = dict(_CHALLENGE.findall(challenge))
    realm = fields.get("realm", "")
    if not challenge.startswith("Bearer ") or not realm:
        raise AccessDenied(f"{label}: unauthorized: access denied")
    if origin_of(realm) != origin_of(base):
        raise AccessDenied(
            f"{label} sends for a token to another host, {origin_of(realm)}; refused"
        )
    path = key or usual_key()
    identity = read_identity(path) if path.is_file() else None
    query = [("service", fields.get("service", ""))]
    query += [("scope", scope) for scope in fields.get("scope", "").split()]
    query += [("ts", str(int(time.time()))), ("nonce", secrets.token_urlsafe(16))]
    url = f"{realm}?{urlencode(query)}"
    reply = session.get(url, _signed(url, identity) if identity is not None else {})
    body = reply.read(MAX_ANSWER_BYTES)
    try:
        if reply.status == 200:
            return f"Bearer {json.loads(body)['token']}"
    except (ValueError, KeyError, TypeError):
        pass  # an answer without a token is a refusal too
    raise AccessDenied(f"{label}: unauthorized: access denied; {_advice(path, identity)}")


def _signed(url: str, identity: Identity) -> dict[str, str]:
    signature = identity.signature(f"GET,{url},{NO_BODY}".encode())
    return {"Authorization": f"{identity.public_blob}:{signature}"}


def _advice(path: Path, identity: Identity | None) -> str:
    if identity is not None:
        return f"does your account there know the key {path}.pub?"
    return f"an account there wants a key: ssh-keygen -t ed25519 -N '' -f {path}"
