"""What a client may name as the origin of a model, and who may name a path of this machine.

A path is read with the daemon's rights, so only a program on this machine may name one: it comes
over the loopback, through no proxy, and from no web page (browsers say so with each request).
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace

from ...registry.errors import NameInvalid
from ...registry.pull import Reference, is_place, parse_reference
from ..errors import BadRequest, Forbidden
from .call import Call
from .lookup import parse_name

_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


def pull_reference(call: Call, asked: str, as_name: str | None = None) -> Reference:
    """What to pull, and the name it gets. Raises BadRequest, Forbidden."""
    if not is_place(asked):
        reference = Reference(parse_name(asked), is_plain_http=asked.lower().startswith("http://"))
    else:
        try:
            reference = parse_reference(asked)
        except NameInvalid as error:
            raise BadRequest(str(error)) from error
    if reference.path is not None:
        require_local(call)
    return reference if not as_name else replace(reference, name=parse_name(as_name))


def require_local(call: Call) -> None:
    """Raises Forbidden unless the caller is a program on this machine."""
    if not is_local(call):
        raise Forbidden(
            "only a program on the daemon's own machine may name a path there; from elsewhere, "
            "upload the files (POST /api/blobs) and create the model of them"
        )


def is_local(call: Call) -> bool:
    """Whether a program on this machine asks: over the loopback, directly, and no web page."""
    try:
        is_loopback = ipaddress.ip_address(call.peer).is_loopback
    except ValueError:
        return False
    is_page = bool(call.header("origin")) or call.header("sec-fetch-site") not in ("", "none")
    return is_loopback and not is_page and not any(map(call.header, _PROXY_HEADERS))
