"""A connection to an Ollama server: what it can be asked, and what goes wrong as one sentence each.

Through the `ollama` client where that has the call; blobs and `draft_files`, which it lacks, over its HTTP client.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from dflash2.errors import OllamaBrokenError, OllamaDigestError, OllamaError
from dflash2.modelfiles.ollama.client import NO_ADDRESS, connect, is_own, package

if TYPE_CHECKING:
    import ollama

# The server hashes a blob, and quantises a model, without a word in between.
_PATIENT = httpx.Timeout(None, connect=10, write=120)
_SHOWN_CHARACTERS = 300
_READ_BYTES = 1 << 20
_MAX_COUNT = 2**63 - 1
# Of a server or proxy that is busy, restarts or gave up waiting: another try may do.
_PASSING = (502, 503, 504)
_FULL_DISK = ("no space left", "not enough space", "disk quota", "disk full")
# What parsing an answer of something that is no Ollama raises, inside the client too.
_NONSENSE = (ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Step:
    """What the server says it is doing: `completed` of `total` bytes, where it counts them."""

    status: str
    completed: int
    total: int | None


class Server:
    """One Ollama server; raises OllamaError if `host` is no address.

    `host` is an address as OLLAMA_HOST has it (`host`, `host:port` or a URL); None takes OLLAMA_HOST, else
    127.0.0.1:11434.
    """

    def __init__(self, host: str | None = None) -> None:
        self._client, self._http = connect(host)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        """Where it is."""
        return str(self._http.base_url).rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether its address is one of this machine's own: loopback, or the unspecified address."""
        return is_own(self._http.base_url.host)

    def version(self) -> str:
        """Its version, as "0.33.0"; raises OllamaError if nothing answers there, or something that is no Ollama."""
        with self._translated("the request for its version"), self._http.stream("GET", "api/version") as response:
            if response.is_redirect:
                raise OllamaError(
                    f"{self.url} redirects to {_one_line(response.headers.get('Location', ''))}; give that address with"
                    " --host or OLLAMA_HOST."
                )
            version = json.loads(_read(response))["version"]
            if not response.is_success or not isinstance(version, str):
                raise ValueError("no version")
        return version

    def show(self, model: str) -> ollama.ShowResponse:
        """What it knows of `model`; raises OllamaError if it has no such model."""
        with self._translated(f"the request for {model}"):
            return self._client.show(model)

    def running(self) -> list[str]:
        """Names of the models that are loaded."""
        with self._translated("the request for what runs"):
            return [name for model in self._client.ps().models if (name := model.model or model.name)]

    def models(self) -> list[str]:
        """Names of the models that it has."""
        with self._translated("the request for its models"):
            return [model.model for model in self._client.list().models if model.model]

    def has_blob(self, digest: str) -> bool:
        """Whether it has the blob `digest` (`sha256:` and 64 hexadecimal digits)."""
        with self._translated("the request for a blob"):
            response = self._http.head(f"api/blobs/{digest}")
        if response.status_code == httpx.codes.NOT_FOUND:
            return False
        self._require_success(response, "the request for a blob")
        return True

    def send_blob(self, digest: str, n_bytes: int, chunks: Iterable[bytes]) -> None:
        """Send the `n_bytes` bytes of a blob.

        Raises:
            OllamaBrokenError: the connection broke; another try may do.
            OllamaDigestError: other bytes arrived than those of `digest`.
            OllamaError: it refused the blob.
        """
        headers = {"Content-Length": str(n_bytes), "Content-Type": "application/octet-stream"}
        path = f"api/blobs/{digest}"
        with (
            self._translated("the upload"),
            self._http.stream("POST", path, content=chunks, headers=headers, timeout=_PATIENT) as response,
        ):
            self._require_success(response, "the upload")

    def create(self, model: str, request: Mapping[str, Any]) -> Iterator[Step]:
        """Have `model` made; yields what the server reports.

        Raises OllamaError if it reports an error, or ends without having said that it is done.
        """
        what = f"the creation of {model}"
        body = {"model": model, "stream": True, **request}
        done = False
        with (
            self._translated(what),
            self._http.stream("POST", "api/create", json=body, timeout=_PATIENT) as response,
        ):
            self._require_success(response, what)
            for line in _lines(response):
                report = json.loads(line)
                if report.get("error"):
                    raise OllamaError(self._refusal(what, str(report["error"])))
                done = done or report.get("status") == "success"
                completed, total = _count(report.get("completed")), _count(report.get("total"))
                yield Step(str(report.get("status", "")), completed, total or None)
        if not done:
            raise OllamaError(
                f"The answer of {self.url} ended before {model} was made; look into the server's log and run it again."
            )

    def _require_success(self, response: httpx.Response, what: str) -> None:
        if response.is_success:
            return
        # An answer to HEAD has no body.
        said = _error_text(_read(response)).strip() or response.reason_phrase or "no reason given"
        text = f"{said} (status {response.status_code})"
        if response.status_code in _PASSING:
            raise OllamaBrokenError(self._refusal(what, text))
        is_digest = response.status_code == httpx.codes.BAD_REQUEST and "digest mismatch" in text
        raise (OllamaDigestError if is_digest else OllamaError)(self._refusal(what, text))

    def _refusal(self, what: str, text: str) -> str:
        is_full = any(mark in text.lower() for mark in _FULL_DISK)
        advice = "; make room where the server keeps its models (OLLAMA_MODELS), then run it again." if is_full else "."
        return f"Ollama at {self.url} refused {what}: {_one_line(text).rstrip('.')}{advice}"

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Errors of the client and of what it is built on, as ours."""
        try:
            yield
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise OllamaError(f"{self.url} {NO_ADDRESS}") from error
        except (httpx.ConnectError, httpx.ConnectTimeout, ConnectionError) as error:
            raise OllamaBrokenError(
                f"No Ollama answers at {self.url}; start it with `ollama serve`, or give its address with --host or"
                " OLLAMA_HOST."
            ) from error
        except httpx.HTTPError as error:
            raise OllamaBrokenError(
                f"The connection to {self.url} broke during {what} ({type(error).__name__}); run it again."
            ) from error
        except package().ResponseError as error:
            raise OllamaError(self._refusal(what, f"{error.error} (status {error.status_code})")) from error
        except _NONSENSE as error:
            raise OllamaError(
                f"What answers at {self.url} does not speak as Ollama does; give another address with --host or"
                " OLLAMA_HOST, or look for a proxy in between."
            ) from error


def _read(response: httpx.Response) -> bytes:
    """The beginning of an answer's body: what is longer than an answer is none."""
    body = b""
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > _READ_BYTES:
            break
    return body


def _count(value: Any) -> int:
    """A number of bytes, 0 for none; raises ValueError or OverflowError for what is none."""
    count = int(value or 0)
    if not 0 <= count <= _MAX_COUNT:
        raise ValueError("no number of bytes")
    return count


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Lines of an answer as they come, empty ones left out; raises ValueError for one without an end."""
    rest = b""
    for chunk in response.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(bytes.strip, lines)
        if len(rest) > _READ_BYTES:
            raise ValueError("a line has no end")
    if rest.strip():
        yield rest


def _error_text(body: bytes) -> str:
    """What a refusal says: Ollama's `error`, else the beginning of whatever it is."""
    text = body.decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except _NONSENSE:
        return text


def _one_line(text: str) -> str:
    words = " ".join(text[: 4 * _SHOWN_CHARACTERS].split())
    return words if len(words) <= _SHOWN_CHARACTERS else f"{words[:_SHOWN_CHARACTERS]} ..."
