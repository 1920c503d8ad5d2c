"""Devices of other machines, lent by llama.cpp's `ggml-rpc-server`."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

from dflash2.errors import NativeError
from dflash2.native.devices import ggml

# Of ggml-rpc.h and ggml-rpc.cpp: the protocol that both ends must speak, and its first request.
_MAJOR, _MINOR = 7, 0
_HELLO = 14
_CAPABILITIES = 24  # bytes; all zero: nothing but TCP
_TIMEOUT = 10.0  # seconds; a server that has another client answers none but that one

_lent: dict[str, tuple[str, ...]] = {}  # by endpoint, those of this process; ggml forgets none of them


def add_rpc_server(endpoint: str) -> tuple[str, ...]:
    """Names of the devices that the server at `endpoint` ("host:port") lends; models can be put on them from now on.

    llama.cpp uses them as it uses GPUs: also those who name no device. A server that was added before is not added
    again. Raises NativeError if the library in use has no RPC, if nobody answers there who speaks its protocol, or if
    that server was added under another name.
    """
    if endpoint not in _lent:
        check_distinct((*_lent, endpoint))
        _lent[endpoint] = _add(endpoint)
    return _lent[endpoint]


def _add(endpoint: str) -> tuple[str, ...]:
    library = ggml()
    library.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    library.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    rpc = library.ggml_backend_reg_by_name(b"RPC")
    if not rpc:
        raise NativeError("the llama.cpp library in use has no RPC; `dflash2 build --targets libs,rpc` makes one.")
    check_rpc_server(endpoint)
    library.ggml_backend_reg_get_proc_address.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    address = library.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_add_server")
    server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)(endpoint.encode())
    if not server:
        raise NativeError(f"the RPC server at {endpoint} lends no device.")
    library.ggml_backend_register.argtypes, library.ggml_backend_register.restype = [ctypes.c_void_p], None
    library.ggml_backend_register(server)
    library.ggml_backend_reg_dev_count.argtypes = [ctypes.c_void_p]
    library.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    lent = (library.ggml_backend_reg_dev_get(server, i) for i in range(library.ggml_backend_reg_dev_count(server)))
    return tuple(library.ggml_backend_dev_name(device).decode() for device in lent)


def check_distinct(endpoints: Sequence[str]) -> None:
    """Raise NativeError if two endpoints are one server, which answers one client alone: the second would wait forever.

    Names are resolved as ggml resolves them, to IPv4; one that cannot be is left to `check_rpc_server`.
    """
    seen: dict[tuple[str, int], str] = {}
    for endpoint in endpoints:
        addresses = _addresses(endpoint)
        for address in addresses:
            if address in seen:
                raise NativeError(
                    f"{seen[address]} and {endpoint} are the same RPC server, which can be used once; leave one out."
                )
        seen.update(dict.fromkeys(addresses, endpoint))


def _addresses(endpoint: str) -> set[tuple[str, int]]:
    """IPv4 address and port of each place that `endpoint` leads to; 0.0.0.0 leads to this machine."""
    host, _, port = endpoint.partition(":")
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, OverflowError, ValueError):
        return set()
    return {(str(place[0]).replace("0.0.0.0", "127.0.0.1"), int(place[1])) for *_, place in found}


def check_rpc_server(endpoint: str) -> None:
    """Say hello to the server at `endpoint` as ggml will, which aborts where this raises NativeError."""
    host, _, port = endpoint.partition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise NativeError(f"an RPC server is named by host:port, not {endpoint!r}.")
    request = struct.pack(f"<BQ{_CAPABILITIES}x", _HELLO, _CAPABILITIES)
    try:
        with socket.create_connection((host, int(port)), _TIMEOUT) as connection, connection.makefile("rb") as answer:
            connection.sendall(request)
            size, major, minor = struct.unpack("<QBB", answer.read(10))
    except (OSError, OverflowError, struct.error) as error:
        raise NativeError(
            f"no RPC server answers at {endpoint} ({error}); start ggml-rpc-server there, one for each program."
        ) from error
    if size != 4 + _CAPABILITIES or major != _MAJOR or minor > _MINOR:
        raise NativeError(f"the RPC server at {endpoint} is of another version than this llama.cpp library.")
