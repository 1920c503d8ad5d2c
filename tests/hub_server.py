"""A Hub on loopback: the part of its HTTP API that a download of model files uses, with a log of every request."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_LARGE = (".safetensors", ".bin", ".pt", ".gguf", ".model")


@dataclass
class Repository:
    """Files at one commit, and how the server misbehaves about them."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    branches: tuple[str, ...] = ("main",)
    card: dict | None = None
    # HTTP status and X-Error-Code of every answer, instead of the files.
    refusal: tuple[int, str] | None = None
    token: str | None = None
    # Files whose first download breaks off after so many bytes.
    cuts: dict[str, int] = field(default_factory=dict)
    # Files that arrive with other bytes of the same length than the stated hash.
    corrupt: frozenset[str] = frozenset()

    def revision_known(self, revision: str) -> bool:
        return revision == self.commit or revision in self.branches


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


class HubServer:
    """Serves `repositories` (id to Repository) on a free port until the block ends."""

    def __init__(self, repositories: dict[str, Repository]):
        self.repositories = repositories
        self.requests: list[Request] = []

    def __enter__(self) -> "HubServer":
        hub = self
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def downloaded(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order and with repeats."""
        marker = "/resolve/"
        paths = [r.path for r in self.requests if r.method == "GET" and marker in r.path]
        return [path.split(marker, 1)[1].split("/", 1)[1] for path in paths]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        self.hub.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        if parts[0] == "datasets":
            parts = parts[1:]
        organisation, model, *rest = parts[2:] if api else parts
        verb, revision, *name = rest or ["revision", "main"]
        repository = self.hub.repositories.get(f"{organisation}/{model}")
        if refusal := _refusal(repository, revision, token):
            self._refuse(*refusal)
        elif api and verb == "tree":
            self._json([_tree_entry(name, data) for name, data in repository.files.items()])
        elif api:
            self._json(_model_info(f"{organisation}/{model}", repository))
        elif "/".join(name) not in repository.files:
            self._refuse(404, "EntryNotFound")
        else:
            self._file(repository, "/".join(name))

    def _refuse(self, status: int, code: str):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, repository: Repository, name: str):
        data = repository.files[name]
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(name, data)}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in repository.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        end = repository.cuts.pop(name, len(data))
        self.wfile.write(data[start:end])
        if end < len(data):
            self.close_connection = True


def _refusal(repository: Repository | None, revision: str, token: str | None) -> tuple[int, str] | None:
    if repository is None:
        return 401, "RepoNotFound"
    if repository.refusal:
        return repository.refusal
    if repository.token and token != f"Bearer {repository.token}":
        return 401, "GatedRepo"
    return None if repository.revision_known(revision) else (404, "RevisionNotFound")


def _is_large(name: str) -> bool:
    return name.endswith(_LARGE)


def _etag(name: str, data: bytes) -> str:
    if _is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _large_file(name: str, data: bytes) -> dict | None:
    return {"sha256": _etag(name, data), "size": len(data), "pointerSize": 134} if _is_large(name) else None


def _model_info(repo_id: str, repository: Repository) -> dict:
    siblings = [
        {"rfilename": name, "size": len(data), "blobId": "b" * 40}
        | ({"lfs": lfs} if (lfs := _large_file(name, data)) else {})
        for name, data in repository.files.items()
    ]
    return {
        "_id": "0",
        "id": repo_id,
        "modelId": repo_id,
        "sha": repository.commit,
        "private": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "cardData": repository.card,
        "siblings": siblings,
    }


def _tree_entry(name: str, data: bytes) -> dict:
    lfs = _large_file(name, data)
    entry = {"type": "file", "path": name, "size": len(data), "oid": "b" * 40}
    return entry | ({"lfs": {"oid": lfs["sha256"], "size": len(data), "pointerSize": 134}} if lfs else {})
