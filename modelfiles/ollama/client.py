"""The `ollama` package, imported so that no environment breaks that.

It makes a client when it is imported, from OLLAMA_HOST and the proxies of the environment: an odd one of those would
end a command that was given a good address.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
from importlib import import_module
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import httpx

from dflash2.errors import OllamaError

if TYPE_CHECKING:
    import ollama

NO_ADDRESS = "is no address of a server; give host:port with --host or OLLAMA_HOST."
# What a client is made of where it is told nothing.
_READ_AT_IMPORT = (
    "ollama_host",
    "ollama_api_key",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "ssl_cert_file",
    "ssl_cert_dir",
)
_TIMEOUT = httpx.Timeout(120, connect=10)


def package() -> Any:
    """The module `ollama`."""
    if "ollama" in sys.modules:
        return sys.modules["ollama"]
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower() in _READ_AT_IMPORT}
    try:
        return import_module("ollama")
    finally:
        os.environ.update(hidden)


def connect(host: str | None) -> tuple[ollama.Client, httpx.Client]:
    """A client of the server at `host`, else at OLLAMA_HOST, else at 127.0.0.1:11434, and what it speaks HTTP with.

    A loopback address is never asked of a proxy: Ollama's own client does not either. Raises OllamaError if it is no
    address, or if the proxy, the certificates or the key of the environment cannot be used.
    """
    given = host or os.environ.get("OLLAMA_HOST") or ""
    address = _plain(given) or "127.0.0.1"
    _check_key()
    make: Any = package().Client
    options: dict[str, Any] = {"timeout": _TIMEOUT, "follow_redirects": False, "verify": _certificates()}
    try:
        client = make(address, trust_env=False, **options)
        url = client._client.base_url
        if url.scheme not in ("http", "https"):
            raise ValueError(url.scheme)
    except (ValueError, httpx.InvalidURL) as error:
        raise OllamaError(f"{given} {NO_ADDRESS}") from error
    if not is_own(url.host):
        client._client.close()
        try:
            client = make(address, **options)
        except (ValueError, httpx.InvalidURL, ImportError) as error:
            raise OllamaError(
                f"The proxy that the environment names for {url} (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY) cannot be used;"
                " name one that starts with http://, or put the server into NO_PROXY."
            ) from error
    return client, client._client


def _certificates() -> ssl.SSLContext:
    """Those that a server over https is checked with."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise OllamaError(
            "The certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be read; correct or unset it."
        ) from error


def _check_key() -> None:
    """The client sends it as a header, which holds printable ASCII only."""
    key = os.environ.get("OLLAMA_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise OllamaError("OLLAMA_API_KEY has characters that no key has; copy it again.")


def _plain(host: str) -> str:
    """`host` without the spaces and quotes around it, an IPv6 address in brackets: as Ollama itself reads it."""
    scheme, mark, rest = host.strip().strip("\"'").strip().rpartition("://")
    name, slash, path = rest.partition("/")
    with contextlib.suppress(ValueError):  # a name, or with a port
        name = f"[{name}]" if ip_address(name).version == 6 else name
    return f"{scheme}{mark}{name}{slash}{path}"


def is_own(host: str) -> bool:
    """Whether `host` is one of this machine's own: loopback, or the unspecified address."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified
