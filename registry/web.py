"""One ranged GET after another over plain sockets: redirects, proxies, private CAs, refusals.

The standard library's http.client in threads, not an async client: a body then goes from the
socket to the file with the interpreter lock released, at memory speed, and the daemon's event loop
never sees a byte of it.

    Session    the connections of one thread, reused; follows redirects and drops the
               Authorization header when one leads to another origin
    Reply      status, headers and the body of the last hop; `first_headers` of the first, where a
               hub says what the file is

A host on a private network is refused unless the settings allow it, by the address that the socket
is really connected to, so that neither a redirect nor a DNS answer can lead inside.

Source: RFC 9110 §14 (ranges), §15.4 (redirects); WHATWG URL (origin).
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import os
import ssl
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from .errors import SourceUnavailable, Unsupported
from .settings import PullSettings

MAX_REDIRECTS = 8
REDIRECTS = frozenset({301, 302, 303, 307, 308})
USER_AGENT = "llmd"
NETWORK_ERRORS = (OSError, http.client.HTTPException)
FIRST_PIECE_BYTES = 64 << 10
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
Body = bytes | Iterable[bytes]  # an iterable goes with a Content-Length of the caller's


@dataclass(slots=True)
class Reply:
    """An answer whose body has not been read. Header names are lower-case."""

    status: int
    headers: Mapping[str, str]
    first_headers: Mapping[str, str]
    body: http.client.HTTPResponse
    url: str
    _is_drained: bool = False  # what came in with the headers has been read

    def read_into(self, view: memoryview) -> int:
        """Some bytes of the body, as many as are there and fit; 0 at its end.

        From the socket into the view, without an object for each piece in between. Whoever reads
        so counts by himself, and closes the body when all of it has come.
        """
        if self.body.chunked or not self._is_drained:
            self._is_drained = True
            piece = self.body.read1(min(len(view), FIRST_PIECE_BYTES))
            view[: len(piece)] = piece
            return len(piece)
        return self.body.fp.raw.readinto(view) or 0

    def read(self, limit: int) -> bytes:
        """The body; raises SourceUnavailable if it is longer than `limit`."""
        content = self.body.read(limit + 1)
        if len(content) > limit:
            raise SourceUnavailable(f"{origin_of(self.url)} answered with more than {limit} bytes")
        return content


class Session:
    """The open connections of one thread, which owns them; only `abort` may come from another."""

    def __init__(self, settings: PullSettings) -> None:
        self._settings = settings
        self._context: ssl.SSLContext | None = None
        # Idle or in use, by (scheme, host, port). One at most is in use.
        self._open: dict[tuple[str, str, int], http.client.HTTPConnection] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def get(self, url: str, headers: Mapping[str, str], method: str = "GET") -> Reply:
        """Send the request and follow redirects.

        Raises OSError or HTTPException when the network fails, SourceUnavailable when the rules
        forbid the way.
        """
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **headers}
        first: dict[str, str] | None = None
        for _ in range(MAX_REDIRECTS):
            response = self._send(method, url, sent)
            found = {name.lower(): value for name, value in response.getheaders()}
            first = found if first is None else first
            if response.status not in REDIRECTS or "location" not in found:
                return Reply(response.status, found, first, response, url)
            response.read(64 << 10)
            target = urljoin(url, found["location"])
            if url.startswith("https:") and target.startswith("http:") and not self._is_lax:
                raise SourceUnavailable(f"{origin_of(url)} redirects to plain http; refused")
            if origin_of(target) != origin_of(url):
                sent.pop("Authorization", None)
            url = target
        raise SourceUnavailable(f"{origin_of(url)} redirects without end")

    def send(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | None = None
    ) -> Reply:
        """One request, whose redirect is the caller's affair: a body is not sent twice unasked.

        Raises as `get` does.
        """
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **headers}
        response = self._send(method, url, sent, body)
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, found, found, response, url)

    @property
    def _is_lax(self) -> bool:
        return self._settings.insecure

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    def abort(self) -> None:
        """Make a read that is under way in the owning thread fail now."""
        for connection in list(self._open.values()):
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(2)
                except OSError:
                    continue  # already closed by the other side

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | None = None
    ) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        key = _key_of(parts)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if key[0] == "http" and proxy_for(*key[:2]) is not None:
            path = url  # a proxy of plain http is told the whole address (RFC 9112 §3.2.2)
        was_open = key in self._open
        try:
            return self._send_on(self._connection(key, parts), method, path, headers, body)
        except NETWORK_ERRORS:
            self._drop(key)
            if not was_open or body is not None:
                raise
        return self._send_on(self._connection(key, parts), method, path, headers, None)

    def _send_on(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Body | None,
    ) -> http.client.HTTPResponse:
        connection.request(method, path, body, dict(headers))
        return connection.getresponse()

    def _connection(
        self, key: tuple[str, str, int], parts: SplitResult
    ) -> http.client.HTTPConnection:
        if key in self._open:
            return self._open[key]
        connection, is_direct = self._connect(key)
        if is_direct and not self._settings.allow_private:
            _refuse_private(connection, key[1])
        self._open[key] = connection
        return connection

    def _connect(self, key: tuple[str, str, int]) -> tuple[http.client.HTTPConnection, bool]:
        """A connected connection, and whether it leads there without a proxy."""
        scheme, host, port = key
        if scheme not in ("http", "https"):
            raise Unsupported(f"{scheme}:// is no address to pull from; https:// is")
        proxy = proxy_for(scheme, host)
        at, at_port, tunnel_headers = (host, port, {}) if proxy is None else _proxy_parts(proxy)
        timeout = self._settings.give_up_s
        connection: http.client.HTTPConnection
        if scheme == "https":
            context = self._tls_context()
            connection = http.client.HTTPSConnection(at, at_port, timeout=timeout, context=context)
        else:
            connection = http.client.HTTPConnection(at, at_port, timeout=timeout)
        if proxy is not None and scheme == "https":
            connection.set_tunnel(host, port, tunnel_headers)
        connection.connect()
        connection.sock.settimeout(self._settings.stall_s)
        return connection, proxy is None

    def _tls_context(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = _make_context(self._settings.insecure)
        return self._context

    def _drop(self, key: tuple[str, str, int]) -> None:
        connection = self._open.pop(key, None)
        if connection is not None:
            connection.close()


def origin_of(url: str) -> str:
    """Scheme, host and port: what a token is bound to."""
    scheme, host, port = _key_of(urlsplit(url))
    return f"{scheme}://{host}:{port}"


def proxy_for(scheme: str, host: str) -> str | None:
    """The proxy that the environment names for this host, if any."""
    if urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(scheme) or proxies.get("all")


def proxy_shown(url: str) -> str | None:
    """The proxy for this address without its password, to be shown to people."""
    parts = urlsplit(url)
    proxy = proxy_for(parts.scheme, parts.hostname or "")
    if proxy is None:
        return None
    found = urlsplit(proxy)
    return f"{found.scheme}://{found.hostname}:{found.port or 8080}"


def _key_of(parts: SplitResult) -> tuple[str, str, int]:
    try:
        port = parts.port
    except ValueError:
        raise Unsupported(f"{parts.geturl()[:200]!r} has no valid port") from None
    scheme = parts.scheme.lower()
    if not parts.hostname:
        raise Unsupported(f"{parts.geturl()[:200]!r} names no host")
    return scheme, parts.hostname, port or (443 if scheme == "https" else 80)


def _proxy_parts(proxy: str) -> tuple[str, int, dict[str, str]]:
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    headers = {}
    if parts.username:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(secret.encode()).decode()
    return parts.hostname or "", parts.port or 8080, headers


def _make_context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for variable in CA_VARIABLES:
        path = os.environ.get(variable)
        if path and os.path.isfile(path):  # noqa: PTH113 - a plain string from the environment
            context.load_verify_locations(cafile=path)
    if not context.cert_store_stats()["x509_ca"]:  # a Python without the system's certificates
        import certifi

        context.load_verify_locations(cafile=certifi.where())
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _refuse_private(connection: http.client.HTTPConnection, host: str) -> None:
    address = ipaddress.ip_address(connection.sock.getpeername()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_global:
        connection.close()
        raise SourceUnavailable(
            f"{host} is {address}, an address of this machine or a private network; "
            f"pull with --insecure to allow that"
        )
