"""A token from the place that a registry names, if that place is its own.

    401  WWW-Authenticate: Bearer realm="https://host/token",service="...",scope="a b"
    GET realm?service=...&scope=a&scope=b  ──▶  {"token": "..."}

The realm must be on the registry's own host: otherwise any registry could have our requests signed
for elsewhere.

Source: RFC 6750; the token protocol of container registries.
"""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

from ..errors import AccessDenied
from ..web import Reply, Session, origin_of

MAX_ANSWER_BYTES = 1 << 20
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def authorization_for(session: Session, refusal: Reply, base: str, label: str) -> str:
    """The Authorization header's value for whoever asks. Raises AccessDenied."""
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
    query = [("service", fields.get("service", ""))]
    query += [("scope", scope) for scope in fields.get("scope", "").split()]
    reply = session.get(f"{realm}?{urlencode(query)}", {})
    body = reply.read(MAX_ANSWER_BYTES)
    try:
        if reply.status == 200:
            return f"Bearer {json.loads(body)['token']}"
    except (ValueError, KeyError, TypeError):
        pass  # an answer without a token is a refusal too
    raise AccessDenied(f"{label}: unauthorized: access denied")
