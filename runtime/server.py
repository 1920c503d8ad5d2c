"""llama-cpp-python's OpenAI-compatible server, serving pairs: one request at a time, the others queue.

Needs the packages of the extra `server`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from socket import socket
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from dflash2.errors import Dflash2Error
from dflash2.runtime.llama_compat import DFlashLlama
from dflash2.runtime.sampling import Verify

try:
    import llama_cpp
    import uvicorn
    from llama_cpp.server import app as upstream_app
    from llama_cpp.server.model import LlamaProxy
    from llama_cpp.server.settings import ModelSettings, ServerSettings
    from pydantic import Field
except ImportError as error:
    raise Dflash2Error(f"the server needs more packages ({error}); install llama-dflash2[server].") from error

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["PairSettings", "ServerSettings", "create_app", "serve"]


class PairSettings(ModelSettings):
    """llama_cpp's settings of one model, with its drafter.

    Other defaults: flash attention, which keeps near-ties as they are without drafting, and no `logits_all`, which
    logprobs do not need here.
    """

    drafter: str | None = Field(default=None, description="Path of the drafter's GGUF, or its name in its repository.")
    hf_drafter_repo_id: str | None = Field(
        default=None, description="Hub id of the drafter, if it is to be downloaded."
    )
    depth: int | Literal["auto"] = Field(
        default="auto", description="Draft tokens verified per cycle; 0: none, auto: the fastest."
    )
    verify: Verify = Field(default="coupled", description="How sampled requests are verified.")
    flash_attn: bool = Field(default=True, description="Whether to use flash attention.")
    logits_all: bool = Field(default=False, description="Whether to keep the logits of every token.")


class PairProxy(LlamaProxy):
    """llama_cpp's holder of the model in use; a model with a drafter becomes a `DFlashLlama`."""

    @staticmethod
    def load_llama_from_model_settings(settings: ModelSettings) -> llama_cpp.Llama:
        """The object that `settings` describe."""
        load = LlamaProxy.load_llama_from_model_settings
        if not isinstance(settings, PairSettings) or settings.drafter is None:
            return load(settings)
        # Upstream's loader knows handlers, tokenizers and caches; only the class it makes is another one.
        return _rebound(
            load, llama_cpp=SimpleNamespace(**{**vars(llama_cpp), "Llama": _Maker(settings, settings.drafter)})
        )(settings)


class _Maker:
    """What upstream's loader calls in the place of the class `Llama`."""

    def __init__(self, settings: PairSettings, drafter: str) -> None:
        self._options: dict[str, Any] = {"depth": settings.depth, "verify": settings.verify}
        self._drafter = drafter
        self._repo_id = settings.hf_drafter_repo_id

    def __call__(self, **arguments: Any) -> DFlashLlama:
        return DFlashLlama(drafter_path=self._drafter, **self._options, **arguments)

    def from_pretrained(self, **arguments: Any) -> DFlashLlama:
        if self._repo_id is None:
            return DFlashLlama.from_pretrained(drafter_path=self._drafter, **self._options, **arguments)
        return DFlashLlama.from_pretrained(
            drafter_repo_id=self._repo_id, drafter_filename=self._drafter, **self._options, **arguments
        )


def create_app(models: Sequence[ModelSettings], server: ServerSettings | None = None) -> FastAPI:
    """The ASGI application for `models`; the first one is loaded now and answers requests that name none of them.

    Without `server` a stream is not cut off by the next request, as it is by llama_cpp's default.
    A process can hold one such application. Raises what `DFlashLlama` raises.
    """
    if not models:
        raise Dflash2Error("no model to serve; give at least one PairSettings.")
    settings = server or ServerSettings(interrupt_requests=False)
    make = _rebound(upstream_app.create_app, set_llama_proxy=_set_proxy)
    return make(server_settings=settings, model_settings=list(models))


def serve(
    models: Sequence[ModelSettings],
    server: ServerSettings | None = None,
    *,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Answer requests at `server.host` and `server.port` until interrupted; `on_ready` is called once it does."""
    settings = server or ServerSettings(interrupt_requests=False)
    config = uvicorn.Config(create_app(models, settings), host=settings.host, port=settings.port)
    _Server(config, on_ready).run()


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()


def _set_proxy(model_settings: list[ModelSettings]) -> None:
    upstream_app._llama_proxy = PairProxy(models=model_settings)


def _rebound(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """`function` with some of the names that it looks up in its module meaning something else."""
    known = {**function.__globals__, **names}
    bound = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound
