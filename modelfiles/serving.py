"""A pair, a machine and a user's wishes as one command line of `llama-server`."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dflash2.errors import OptionError, ServerError
from dflash2.gguf_info import read_gguf_info
from dflash2.modelfiles.llama_server import COUPLED, FIT_MARGIN, ServerProgram
from dflash2.modelfiles.pairs import Pair
from dflash2.text import printable

KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server's own name for it
# Of each request, where the model was trained with more: its cache is allocated at once, for target and drafter.
_MOST_CONTEXT = 16384
_UNKNOWN_CONTEXT = 4096
_MIB = 1 << 20
# Options that our own are made of: a port 0 becomes a number, and llama-server would collect both names.
_HOST, _PORT, _ALIAS = "--host", "--port", ("--alias", "-a")
# llama-server's default margin of --fit, MiB: it measures the target alone and leaves the drafter out.
_MARGIN = 1024
_MODEL = frozenset(("-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo"))
_DRAFTER = frozenset(
    ("-md", "--model-draft", "--spec-draft-model", "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf")
)
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class ServeOptions:
    """What a user asked for; None is what fits the pair and the machine.

    Attributes:
        depth: draft tokens of a cycle, 1 to block size - 1; None for all of them.
        ctx_size: tokens of context of each request.
        threads: CPU threads.
        gpu_layers: layers on devices, of the target and of the drafter; -1 for all, None for as many as fit.
        cache_type: type of the KV caches of both.
        parallel: requests at once.
        host: address to listen at.
        port: TCP port, 0 for a free one.
        alias: name of the model in the API; None for the target's.
        rpc: endpoints ("host:port") of llama.cpp's RPC servers.
        forwarded: options of llama-server as they are; they go before all others.
    """

    depth: int | None = None
    ctx_size: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    cache_type: str = "f16"
    parallel: int = 1
    host: str = "127.0.0.1"
    port: int = 8080
    alias: str | None = None
    rpc: tuple[str, ...] = ()
    forwarded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Address:
    """Where a server answers: at `hosts`, one or several separated by commas."""

    hosts: str
    port: int
    secure: bool = False
    prefix: str = ""

    @property
    def connect(self) -> str:
        """What a client on this machine connects to."""
        host = self.hosts.split(",")[0]
        return _ANY_ADDRESS.get(host, host)

    @property
    def is_private(self) -> bool:
        """Whether only this machine reaches it."""
        return all(map(is_loopback, self.hosts.split(",")))

    @property
    def url(self) -> str:
        """Without a slash at the end."""
        host = f"[{self.connect}]" if ":" in self.connect else self.connect
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.prefix}"


def served_name(pair: Pair, options: ServeOptions) -> str:
    """The model's name in the API, by default that of the target's file; raises OptionError if it is no text."""
    alias = _forwarded(options, *_ALIAS) or options.alias
    if alias is None:  # llama-server takes a comma for the end of a name
        return printable(pair.target.path.stem).replace(",", "_")
    if not alias or not alias.isprintable():
        raise OptionError(f"the alias {alias!r} is empty or does not print; give another name with --alias.")
    return alias


def context_size(pair: Pair, wanted: int | None) -> int:
    """Tokens of context of one request."""
    info = read_gguf_info(pair.target.path)
    return wanted or min(_MOST_CONTEXT, info.integer(info.own("context_length")) or _UNKNOWN_CONTEXT)


def checked_depth(pair: Pair, depth: int | None) -> int:
    """Draft tokens of a cycle; raises OptionError for more than the block has."""
    most = pair.block_size - 1
    if depth is not None and not 1 <= depth <= most:
        raise OptionError(f"the drafter proposes {most} tokens at most, not {depth}; give --depth 1 to {most}.")
    return depth or most


def server_address(options: ServeOptions) -> Address:
    """Where the server is to listen, a free port chosen; what was forwarded counts.

    Raises ServerError if nothing can listen there, and OptionError for what is no TCP address.
    """
    hosts = _forwarded(options, _HOST) or options.host
    port = _forwarded(options, _PORT) or str(options.port)
    if hosts.endswith(".sock"):
        raise OptionError(f"{hosts} is a Unix socket; dflash2 serve watches over a TCP port, run llama-server itself.")
    if not port.isascii() or not port.isdigit():
        raise OptionError(f"the port {port!r} is no number; give 0 to 65535.")
    secure = bool(_forwarded(options, "--ssl-cert-file") or os.environ.get("LLAMA_ARG_SSL_CERT_FILE"))
    prefix = _forwarded(options, "--api-prefix") or os.environ.get("LLAMA_ARG_API_PREFIX", "")
    return Address(hosts, _free_port(hosts.split(",")[0], int(port)), secure, prefix)


def asks_for_key(options: ServeOptions, key: str | None) -> bool:
    """Whether clients must send a key: ours, or one that was forwarded."""
    return key is not None or _forwarded(options, "--api-key", "--api-key-file") is not None


def _forwarded(options: ServeOptions, *names: str) -> str | None:
    """The value of an option among the forwarded ones, as llama-server takes it: the last; None if it is not there."""
    values = [value for key, value in pairwise(options.forwarded) if key in names]
    return values[-1] if values else None


def _free_port(host: str, port: int) -> int:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(place[:2], family=family) as listener:
            number: int = listener.getsockname()[1]
            return number
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServerError(
                f"port {port} of {host} is in use; choose another with --port, or --port 0 for a free one."
            ) from error
        raise ServerError(f"no server can listen at {host}:{port}: {error.strerror or error}.") from error
    except OverflowError as error:
        raise OptionError(f"the port {port} is too large; give 0 to 65535.") from error


def undone_by(forwarded: Sequence[str]) -> tuple[str, ...]:
    """A sentence for each forwarded option that sets aside the pair that was checked, or its drafting."""
    found = []
    for name, value in pairwise((*forwarded, "")):
        option = printable(f"{name} {value}".strip())
        if name in _MODEL:
            found.append(f"{option} replaces the target, and nothing was checked of the new one; give it as TARGET.")
        elif name in _DRAFTER:
            found.append(f"{option} replaces the drafter, and nothing was checked of the new one; give it as DRAFTER.")
        elif name == "--spec-draft-n-max" and value and not value.strip("+-0"):
            found.append(f"{option} turns drafting off; leave it out, or say --depth before the --.")
        elif name == "--spec-type" and value.strip() != "draft-dflash":
            found.append(f"{option} can turn DFlash drafting off or mix it with another kind; leave it out.")
    return tuple(found)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def rpc_endpoints(text: str) -> tuple[str, ...]:
    """The endpoints of "host:port,..."; raises OptionError for what is none."""
    endpoints = tuple(part.strip() for part in text.split(","))
    for endpoint in endpoints:
        host, _, port = endpoint.partition(":")
        if not host or not host.isprintable() or not (port.isascii() and port.isdigit()):
            raise OptionError(f"an RPC server is named by host:port, not {endpoint!r}; separate several by commas.")
    return endpoints


def checked_key(key: str) -> str:
    """An API key as a header can carry it; raises OptionError, without the key, for another."""
    if not key or not key.isascii() or not key.isprintable() or set(key) & set(' ,"'):
        raise OptionError("an API key is made of ASCII letters, digits and signs, without blanks, commas and quotes.")
    return key


def command_line(pair: Pair, options: ServeOptions, program: ServerProgram, address: Address) -> list[str]:
    """The program and its options, those of the user last: llama-server takes the last of each."""
    depth = checked_depth(pair, options.depth)
    command = [
        *(str(program.path), "--model", str(pair.target.path), "--alias", served_name(pair, options)),
        *("--spec-type", "draft-dflash", "--spec-draft-model", str(pair.drafter.path)),
        *("--spec-draft-n-max", str(depth), *(COUPLED if program.couples else ())),
        *("--ctx-size", str(context_size(pair, options.ctx_size) * options.parallel)),
        # Without flash attention the CPU's numbers depend on how many rows are evaluated together (README).
        *("--parallel", str(options.parallel), "--flash-attn", "on"),
    ]
    for caches in ("--cache-type", "--spec-draft-type"):
        command += [f"{caches}-k", options.cache_type, f"{caches}-v", options.cache_type]
    if options.threads is not None:
        command += ["--threads", str(options.threads)]
    if options.gpu_layers is not None:
        layers = "all" if options.gpu_layers < 0 else str(options.gpu_layers)
        command += ["--gpu-layers", layers, "--spec-draft-ngl", layers]
    elif program.fits:
        command += [FIT_MARGIN, str(_MARGIN + -(-pair.drafter.path.stat().st_size // _MIB))]
    if options.rpc:  # before the options that name its devices
        command[1:1] = ["--rpc", ",".join(options.rpc)]
    return [*command, "--host", address.hosts, "--port", str(address.port), *_rest(options.forwarded)]


def _rest(forwarded: Sequence[str]) -> list[str]:
    """All but those that our own are made of."""
    kept: list[str] = []
    words = iter(forwarded)
    for word in words:
        if word in (_HOST, _PORT, *_ALIAS):
            next(words, None)
        else:
            kept.append(word)
    return kept


def example_request(address: Address, name: str, *, key: bool) -> str:
    """A line for a shell that asks the server something; with `key`, of the variable that holds it."""
    body = {"model": name, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 64}
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if key else ""
    return (
        f"curl {shlex.quote(address.url + '/v1/chat/completions')} -H 'Content-Type: application/json'{header}"
        f" -d {shlex.quote(json.dumps(body))}"
    )
