"""`dflash2 serve`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from gguf.constants import GGMLQuantizationType

from dflash2 import native
from dflash2.commands.pair import pair_options, ready_pair
from dflash2.commands.terminal import FILE, THREADS, cell, console, errors
from dflash2.errors import OptionError
from dflash2.modelfiles import Pair, llama_server, serving
from dflash2.modelfiles.server_process import ServerProcess, StopRequest
from dflash2.modelfiles.serving import KEY_VARIABLE, Address, ServeOptions

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


class _Forwarding(click.Command):
    """A command that leaves what stands behind `--` to another program, in `ctx.obj`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before it."""
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The words of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- OPTIONS OF LLAMA-SERVER]"]


@click.command(cls=_Forwarding)
@pair_options
@click.option("--server", type=FILE, help="The llama-server to run. Default: the patched build, else one on PATH.")
@click.option("--python", "in_python", is_flag=True, help="Serve from Python instead: llama-cpp-python's server.")
@click.option("--depth", type=click.IntRange(min=1), help="Draft tokens verified per cycle. Default: all of a block.")
@click.option(
    "-c",
    "--ctx-size",
    type=click.IntRange(min=1, max=2**31 - 1),
    help="Tokens of context of each request. Default: what the target was trained with, 16384 at most.",
)
@click.option("-t", "--threads", type=THREADS, help="Default: the server's own choice.")
@click.option(
    "-ngl",
    "--gpu-layers",
    type=click.IntRange(min=-1, max=10_000),
    help="Layers on the GPU, -1 for all. Default: as many as fit.",
)
@click.option(
    "--cache-type",
    type=click.Choice(_CACHE_TYPES),
    default="f16",
    show_default=True,
    help="Type of both KV caches; q8_0 is exact on a CPU with any number of threads.",
)
@click.option(
    "-np",
    "--parallel",
    type=click.IntRange(min=1, max=256),
    default=1,
    show_default=True,
    help="Requests at once; drafting gains less with more.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 for a free one.")
@click.option(
    "--api-key",
    envvar=KEY_VARIABLE,
    metavar="KEY",
    help=f"What clients must send. Better in the environment's {KEY_VARIABLE}, which no process list shows.",
)
@click.option("-a", "--alias", help="Name of the model in the API. Default: that of the target's file.")
@click.option("--rpc", metavar="HOST:PORT,...", help="RPC servers of llama.cpp whose devices are used too.")
@click.option("--rpc-insecure", is_flag=True, help="Allow RPC servers that are not on this machine.")
@click.option("-v", "--verbose", is_flag=True, help="Show what the server logs.")
@click.pass_obj
def serve(
    forwarded: tuple[str, ...],
    /,
    server: Path | None,
    in_python: bool,
    rpc: str | None,
    rpc_insecure: bool,
    api_key: str | None,
    verbose: bool,
    **named: Any,
) -> None:
    """Serve TARGET with DRAFTER over HTTP, OpenAI's API, until it is interrupted.

    What stands behind -- goes to llama-server as it is.
    """
    key = None if api_key is None else serving.checked_key(api_key)
    if in_python and (server is not None or forwarded or named["parallel"] > 1):
        raise click.UsageError("--python takes neither --server, --parallel nor options of llama-server.")
    endpoints = _endpoints(rpc, allowed=rpc_insecure)
    for sentence in serving.undone_by(forwarded):
        errors.print(f"note: {sentence}", style="yellow", markup=False, soft_wrap=True)
    wishes = {field.name: named.pop(field.name) for field in fields(ServeOptions) if field.name in named}
    options = ServeOptions(rpc=endpoints, forwarded=forwarded, **wishes)
    pair = ready_pair(**named)
    if in_python:
        _serve_python(pair, options, key, verbose=verbose)
    else:
        _serve_program(pair, options, server, key, verbose=verbose)


def _endpoints(rpc: str | None, *, allowed: bool) -> tuple[str, ...]:
    if rpc is None:
        return ()
    endpoints = serving.rpc_endpoints(rpc)
    native.check_distinct(endpoints)
    foreign = [endpoint for endpoint in endpoints if not serving.is_loopback(endpoint.partition(":")[0])]
    if foreign and not allowed:
        raise OptionError(
            f"{foreign[0]} is another machine, and llama.cpp's RPC has no authentication: whoever reaches that port "
            "can use the machine and read what is sent; say --rpc-insecure if its network is yours alone."
        )
    return endpoints


def _serve_program(pair: Pair, options: ServeOptions, given: Path | None, key: str | None, *, verbose: bool) -> None:
    program = llama_server.find_server(given, rpc=bool(options.rpc))
    if program.patched:  # another one may speak another version of the protocol
        for endpoint in options.rpc:
            native.check_rpc_server(endpoint)
    address = serving.server_address(options)
    command = serving.command_line(pair, options, program, address)
    environment = {} if key is None else {KEY_VARIABLE: key}
    on_line = _show if verbose else None
    with (
        _stopping() as stop,
        ServerProcess(command, stop=stop, environment=environment, on_line=on_line) as process,
    ):
        with _loading(pair, options.rpc, spin=errors.is_terminal and not verbose):
            ready = process.wait_until_ready(address)
        if ready:
            _announce(pair, options, address, f"{program.path} ({program.origin})", key)
            process.wait()
    errors.print(f"{program.path.name} has stopped: {process.ended}", markup=False, soft_wrap=True)


def _show(line: str) -> None:
    errors.print(line, markup=False, soft_wrap=True)


def _loading(pair: Pair, rpc: tuple[str, ...], *, spin: bool) -> contextlib.AbstractContextManager[object]:
    """Say what is loaded, by a display that moves until the block ends if `spin`, and whom it is trusted to."""
    if rpc:
        errors.print(
            f"RPC has no authentication and no encryption: whoever reaches {', '.join(rpc)} can use what is behind.",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    what = f"loading {pair.target.label} with {pair.drafter.label}"
    if spin:
        return errors.status(cell(what))
    errors.print(what, markup=False, soft_wrap=True)
    return contextlib.nullcontext()


def _announce(pair: Pair, options: ServeOptions, address: Address, served_by: str, key: str | None) -> None:
    name = serving.served_name(pair, options)
    asks = serving.asks_for_key(options, key)
    token = f'os.environ["{KEY_VARIABLE}"]' if asks else '"none"'
    lines = [
        f"ready at {address.url}: {name}, by {served_by}",
        serving.example_request(address, name, key=asks),
        f'openai.OpenAI(base_url="{address.url}/v1", api_key={token})',
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if not asks and not address.is_private:
        errors.print(
            f"Whoever reaches port {address.port} of this machine can use it; --api-key asks for a key.",
            style="yellow",
            markup=False,
        )
    errors.print("Ctrl-C stops it.")


@contextlib.contextmanager
def _stopping() -> Iterator[StopRequest]:
    """Signals that end a program ask for a stop instead; what nohup ignores stays ignored."""
    stop = StopRequest()
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: stop.ask())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve_python(pair: Pair, options: ServeOptions, key: str | None, *, verbose: bool) -> None:
    from dflash2.runtime.server import PairSettings, ServerSettings
    from dflash2.runtime.server import serve as serve_models

    address = serving.server_address(options)
    cache_type = GGMLQuantizationType[options.cache_type.upper()].value
    name = serving.served_name(pair, options)
    model = PairSettings(
        model=str(pair.target.path),
        drafter=str(pair.drafter.path),
        model_alias=name,
        depth="auto" if options.depth is None else serving.checked_depth(pair, options.depth),
        n_ctx=serving.context_size(pair, options.ctx_size),
        n_gpu_layers=-1 if options.gpu_layers is None else options.gpu_layers,
        type_k=cache_type,
        type_v=cache_type,
        rpc_servers=",".join(options.rpc) or None,
        verbose=verbose,
        **({} if options.threads is None else {"n_threads": options.threads}),
    )
    settings = ServerSettings(host=address.hosts, port=address.port, api_key=key, interrupt_requests=False)
    ready = False

    def on_ready() -> None:
        nonlocal ready
        ready = True
        _announce(pair, options, address, "llama-cpp-python", key)

    try:
        with _loading(pair, options.rpc, spin=False):  # uvicorn and llama.cpp write their own lines meanwhile
            serve_models([model], settings, on_ready=on_ready)
    except (KeyboardInterrupt, SystemExit):  # the signals that uvicorn closed its server for
        if not ready:
            raise
    errors.print("the server has stopped")
