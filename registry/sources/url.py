"""A GGUF file at a plain https address, with its sha256 if the user gives it.

    https://example.org/models/tiny.Q4_0.gguf#sha256=<64 hex>

Without a hash the server's ETag at least makes sure that all parts are of the same content.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from urllib.parse import unquote, urlsplit, urlunsplit

from ..download import in_thread
from ..errors import NameInvalid, SourceUnavailable
from ..settings import PullSettings
from ..transfer import RemoteFile, raise_for_status, validator_of
from ..web import NETWORK_ERRORS, Session
from .base import Fetched, WantedFile, Work

_TOTAL = re.compile(r"bytes \d+-\d+/(\d+)\Z")
_FRAGMENT = re.compile(r"sha256[=:]([0-9a-f]{64})\Z", re.IGNORECASE)


class UrlSource:
    """One address."""

    def __init__(self, url: str, settings: PullSettings) -> None:
        parts = urlsplit(url)
        match = _FRAGMENT.match(parts.fragment)
        if parts.fragment and not match:
            raise NameInvalid(url, "after # only sha256=<64 hex digits> may stand")
        if parts.scheme == "http" and not settings.insecure:
            raise NameInvalid(url, "insecure protocol http")
        self._url = urlunsplit(parts._replace(fragment=""))
        self._sha256 = match[1].lower() if match else None
        self._name = unquote(parts.path.rsplit("/", 1)[-1])
        allow_private = settings.allow_private or settings.insecure
        self._settings = replace(settings, allow_private=allow_private)

    @property
    def label(self) -> str:
        """For people; without a password or a signature."""
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def address(self) -> str:
        """See Source."""
        return self._url

    async def fetch(self, work: Work) -> Fetched:
        """See Source."""
        try:
            remote = await asyncio.wait_for(in_thread(self._probe), self._settings.give_up_s)
        except TimeoutError:
            raise SourceUnavailable(
                f"{self.label} did not answer within {self._settings.give_up_s:g} s"
            ) from None
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", self._name) or "model.gguf"
        files = await work.fetch_files([WantedFile(remote, name, "weights")], self._settings)
        return Fetched(files, self.label)

    def _probe(self) -> RemoteFile:
        """Ask for the first byte: that tells the size, and whether ranges are known there."""
        try:
            with Session(self._settings) as session:
                reply = session.get(self._url, {"Range": "bytes=0-0"})
                raise_for_status(reply, self._name)
        except NETWORK_ERRORS as error:
            raise SourceUnavailable(f"{self.label} cannot be reached: {error}") from None
        match = _TOTAL.match(reply.headers.get("content-range", ""))
        length = match[1] if match else reply.headers.get("content-length", "")
        if not length.isdigit():
            raise SourceUnavailable(f"{self.label} does not tell how large the file is")
        return RemoteFile(
            self._url, int(length), self._name, self._sha256, validator=validator_of(reply)
        )
