"""Registries of the Ollama protocol: a subset of the container registry's, version 2.

    GET /v2/<namespace>/<model>/manifests/<tag>     the manifest
    GET /v2/<namespace>/<model>/blobs/sha256:<hex>  a blob, or a redirect to where it is

A registry that wants a token names the place to get one (bearer.py).

Source: the protocol as written down in issue 4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote, urlsplit

from ..download import fetch_small, in_thread
from ..errors import SourceUnavailable, Unsupported
from ..names import ModelName
from ..ollama_format import (
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    MAX_TEXT_BYTES,
    TEXT_KINDS,
    Layer,
    file_names,
    parse_manifest,
    parse_texts,
)
from ..settings import PullSettings
from ..transfer import RemoteFile, raise_for_status
from ..web import NETWORK_ERRORS, Session
from .base import Fetched, WantedFile, Work
from .bearer import authorization_for


class OllamaRegistrySource:
    """One model of one registry."""

    def __init__(self, name: ModelName, settings: PullSettings) -> None:
        self.name = name
        scheme = "http" if settings.insecure else "https"
        self._base = (settings.registry_url or f"{scheme}://{name.host}").rstrip("/")
        # A registry of the user's own choice may well be in his own network.
        allow_private = settings.allow_private or bool(settings.registry_url) or settings.insecure
        self._settings = replace(settings, allow_private=allow_private)

    @property
    def label(self) -> str:
        """For people."""
        return f"registry {urlsplit(self._base).netloc}, {self.name.display}"

    @property
    def address(self) -> str:
        """See Source."""
        return self._base

    async def fetch(self, work: Work) -> Fetched:
        """See Source."""
        try:
            manifest, headers = await asyncio.wait_for(
                in_thread(self._look_up), self._settings.give_up_s
            )
        except TimeoutError:
            raise SourceUnavailable(
                f"{self.label} did not answer within {self._settings.give_up_s:g} s"
            ) from None
        layers = parse_manifest(manifest, self.name.display)
        texts = await in_thread(lambda: self._texts(layers, headers))
        settings = parse_texts(texts, self.name.display)
        files = await work.fetch_files(
            [
                WantedFile(self._remote(layer, name, headers), name, role)
                for layer, role, name in file_names(layers)
            ],
            self._settings,
        )
        return Fetched(
            files,
            self.label,
            go_template=settings.go_template,
            system=settings.system,
            params=settings.params,
            messages=settings.messages,
            license=settings.license,
        )

    @property
    def _path(self) -> str:
        return f"{self._base}/v2/{quote(self.name.namespace)}/{quote(self.name.model)}"

    def _look_up(self) -> tuple[bytes, Mapping[str, str]]:
        """The manifest's bytes, and the headers that further requests need. Blocking."""
        url = f"{self._path}/manifests/{quote(self.name.tag)}"
        headers: dict[str, str] = {}
        try:
            with Session(self._settings) as session:
                reply = session.get(url, {"Accept": MANIFEST_TYPE})
                if reply.status == 401:
                    authorization = authorization_for(
                        session, reply, self._base, self.label, self._settings.key
                    )
                    headers = {"Authorization": authorization}
                    reply = session.get(url, {"Accept": MANIFEST_TYPE, **headers})
                raise_for_status(reply, self.name.display)
                return reply.read(MAX_MANIFEST_BYTES), headers
        except NETWORK_ERRORS as error:
            raise SourceUnavailable(f"{self.label} cannot be reached: {error}") from None

    def _texts(
        self, layers: tuple[Layer, ...], headers: Mapping[str, str]
    ) -> list[tuple[str, bytes]]:
        texts = []
        for layer in layers:
            if layer.kind in TEXT_KINDS:
                if layer.size > MAX_TEXT_BYTES:
                    raise Unsupported(f"the {layer.kind} of {self.name} has {layer.size} bytes")
                remote = self._remote(layer, layer.kind, headers)
                texts.append((layer.kind, fetch_small(remote, self._settings)))
        return texts

    def _remote(self, layer: Layer, name: str, headers: Mapping[str, str]) -> RemoteFile:
        url = f"{self._path}/blobs/sha256:{layer.digest}"
        return RemoteFile(url, layer.size, name, layer.digest, headers=headers)
