"""push: a model of the store to a registry of the Ollama protocol.

    HEAD  /v2/<ns>/<model>/blobs/<digest>            is it there already?
    POST  /v2/<ns>/<model>/blobs/uploads/            ──▶ Location of an upload
    PATCH <location>   Content-Range: a-b            a part; or a redirect to where it is PUT
    PUT   <location>?digest=<digest>                 the blob is whole
    PUT   /v2/<ns>/<model>/manifests/<tag>           last, so that no half model is ever visible

A part that fails is sent again from its beginning, a few times; blobs that are there are skipped,
so a push that was interrupted goes on where it was.

Blocking: belongs into a thread. `should_stop` is asked between pieces.

Source: the protocol as written down in issue 4, which is the container registries', version 2.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import parse_qsl, quote, urlencode, urljoin, urlsplit, urlunsplit

from .errors import AccessDenied, BadModelFile, SourceUnavailable
from .names import ModelName
from .ollama_format import MANIFEST_TYPE, PushLayer, layers_of, manifest_bytes
from .settings import PullSettings
from .sources.base import PullProgress
from .sources.bearer import authorization_for
from .store import ModelStore
from .web import NETWORK_ERRORS, Reply, Session, origin_of

PART_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
MAX_TRIES = 4
MAX_ANSWER_BYTES = 1 << 20
OnProgress = Callable[[PullProgress], None]


class Stopped(Exception):
    """`should_stop` said so."""


def push(
    store: ModelStore,
    name: ModelName,
    settings: PullSettings,
    on_progress: OnProgress,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Send the model to the registry that its name tells. Raises a RegistryError or Stopped."""
    on_progress(PullProgress("retrieving manifest"))
    manifest = store.get(name)
    layers = layers_of(manifest, {file.name: store.path_of(file) for file in manifest.files})
    _Push(name, settings, on_progress, should_stop).run(layers)


class _Push:
    """One push over one connection at a time."""

    def __init__(
        self,
        name: ModelName,
        settings: PullSettings,
        on_progress: OnProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        scheme = "http" if settings.insecure else "https"
        self._base = (settings.registry_url or f"{scheme}://{name.host}").rstrip("/")
        self._repo = f"{self._base}/v2/{quote(name.namespace)}/{quote(name.model)}"
        self._name = name
        allow_private = settings.allow_private or bool(settings.registry_url) or settings.insecure
        self._settings = replace(settings, allow_private=allow_private)
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._authorization = ""
        self._total = self._done = 0

    @property
    def label(self) -> str:
        return f"registry {urlsplit(self._base).netloc}, {self._name.display}"

    def run(self, layers: tuple[PushLayer, ...]) -> None:
        self._total = sum(layer.size for layer in layers)
        with self._network(), Session(self._settings) as session:
            for layer in layers:
                self._layer(session, layer)
            self._on_progress(PullProgress("pushing manifest", source=self.label))
            content = manifest_bytes(layers)
            url = f"{self._repo}/manifests/{quote(self._name.tag)}"
            reply = self._ask(session, "PUT", url, {"Content-Type": MANIFEST_TYPE}, content)
            self._expect(reply, (200, 201, 202), "the manifest")

    @contextmanager
    def _network(self) -> Iterator[None]:
        try:
            yield
        except NETWORK_ERRORS as error:
            hint = ""
            if isinstance(error, ssl.SSLError) and not self._settings.insecure:
                hint = "; one without a certificate that is trusted here wants --insecure"
            raise SourceUnavailable(f"{self.label} cannot be reached: {error}{hint}") from None

    # ---------------------------------------------------------------- one blob

    def _layer(self, session: Session, layer: PushLayer) -> None:
        self._tell(layer, 0)
        known = self._ask(session, "HEAD", f"{self._repo}/blobs/sha256:{layer.digest}", {})
        if known.status not in (200, 302, 307):  # there, or to be had at another place
            self._upload(session, layer)
        self._done += layer.size
        self._tell(layer, layer.size, already_counted=True)

    def _upload(self, session: Session, layer: PushLayer) -> None:
        begun = self._ask(session, "POST", f"{self._repo}/blobs/uploads/", {"Content-Length": "0"})
        self._expect(begun, (201, 202), layer.kind)
        if begun.status == 201:
            return
        location = self._location(begun, self._repo)
        for start in range(0, max(layer.size, 1), PART_BYTES):
            location = self._part(session, layer, location, start)
        url = _with_query(location, {"digest": f"sha256:{layer.digest}"})
        done = self._ask(session, "PUT", url, {"Content-Length": "0"})
        self._expect(done, (200, 201, 202, 204), layer.kind)

    def _part(self, session: Session, layer: PushLayer, location: str, start: int) -> str:
        """Send one part; returns where the next goes."""
        size = min(PART_BYTES, layer.size - start)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
            "Content-Range": f"{start}-{start + size - 1}",
            "X-Redirect-Uploads": "1",
        }
        for attempt in range(MAX_TRIES):
            try:
                pieces = self._pieces(layer, start, size)
                reply = self._ask(session, "PATCH", location, headers, pieces)
                if reply.status in (301, 302, 307, 308):
                    self._put_elsewhere(session, layer, reply, start, size)
                else:
                    self._expect(reply, (200, 201, 202, 204), layer.kind)
                return self._location(reply, location)
            except (*NETWORK_ERRORS, SourceUnavailable):
                session.close()
                if attempt + 1 == MAX_TRIES:
                    raise
                threading.Event().wait(self._settings.backoff_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _put_elsewhere(
        self, session: Session, layer: PushLayer, reply: Reply, start: int, size: int
    ) -> None:
        """A part may be wanted on another host, which then does not see our token."""
        target = reply.headers.get("location", "")
        if self._base.startswith("https:") and not target.startswith("https:"):
            raise SourceUnavailable(f"{self.label} redirects to plain http; refused")
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        stored = session.send("PUT", target, headers, self._pieces(layer, start, size))
        stored.read(MAX_ANSWER_BYTES)
        self._expect(stored, (200, 201, 202, 204), layer.kind)

    def _pieces(self, layer: PushLayer, start: int, size: int) -> Iterator[bytes]:
        """The part's bytes as they are sent, with progress. Raises Stopped."""
        sent = 0
        for piece in _read(layer, start, size):
            if self._should_stop():
                raise Stopped
            yield piece
            sent += len(piece)
            self._tell(layer, start + sent)

    # ------------------------------------------------------------ one request

    def _ask(
        self,
        session: Session,
        method: str,
        url: str,
        headers: dict[str, str],
        body: bytes | Iterator[bytes] | None = None,
    ) -> Reply:
        """With our token, which is fetched at the first refusal."""
        is_ours = origin_of(url) == origin_of(self._base)
        sent = dict(headers)
        if self._authorization and is_ours:
            sent["Authorization"] = self._authorization
        reply = session.send(method, url, sent, body)
        if reply.status == 401 and is_ours and not self._authorization:
            self._authorization = authorization_for(
                session, reply, self._base, self.label, self._settings.key
            )
            if body is None or isinstance(body, bytes):
                return self._ask(session, method, url, headers, body)
            raise SourceUnavailable(f"{self.label} asks for a token in the middle")
        reply.read(MAX_ANSWER_BYTES)
        return reply

    def _expect(self, reply: Reply, statuses: tuple[int, ...], what: str) -> None:
        if reply.status in statuses:
            return
        if reply.status in (401, 403):
            raise AccessDenied(
                f"{self.label} does not take {what} (status {reply.status}): this registry wants "
                f"an account, and llmd has none there"
            )
        if 400 <= reply.status < 500 and reply.status != 429:
            raise BadModelFile(f"{self.label} refuses {what} with status {reply.status}")
        raise SourceUnavailable(f"{self.label} answered {what} with status {reply.status}")

    def _location(self, reply: Reply, base: str) -> str:
        """Where the upload goes on: on the registry's own host, or nowhere."""
        if reply.status in (301, 302, 307, 308):
            return base
        target = urljoin(base, reply.headers.get("location", base))
        if origin_of(target) != origin_of(self._base):
            raise SourceUnavailable(f"{self.label} sends the upload to another host; refused")
        return target

    def _tell(self, layer: PushLayer, completed: int, *, already_counted: bool = False) -> None:
        overall = self._done + (0 if already_counted else completed)
        self._on_progress(
            PullProgress(
                f"pushing {layer.digest[:12]}",
                f"sha256:{layer.digest}",
                layer.size,
                completed,
                self.label,
                self._total,
                overall,
            )
        )


def _read(layer: PushLayer, start: int, size: int) -> Iterator[bytes]:
    if isinstance(layer.content, bytes):
        yield layer.content[start : start + size]
        return
    with layer.content.open("rb") as file:
        file.seek(start)
        while size and (piece := file.read(min(PIECE_BYTES, size))):
            size -= len(piece)
            yield piece


def _with_query(url: str, more: dict[str, str]) -> str:
    parts = urlsplit(url)
    query = urlencode([*parse_qsl(parts.query, keep_blank_values=True), *more.items()], safe=":")
    return urlunsplit(parts._replace(query=query))
