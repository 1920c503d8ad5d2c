"""`DFlashLlama`: how a pair is opened through `llama_cpp.Llama`; what it does then is in `llama_calls`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from dflash2 import native
from dflash2.errors import ContextLimitError, Dflash2Error, NativeError
from dflash2.hub import HubFolders, fetch_files
from dflash2.runtime.checkpoints import CheckpointLimits
from dflash2.runtime.checks import check_devices, check_options, check_ubatch
from dflash2.runtime.detokenize import Detokenizer
from dflash2.runtime.lattice import Lattice, lattices
from dflash2.runtime.llama_calls import LlamaCalls
from dflash2.runtime.pair import DrafterSpec, read_pair
from dflash2.runtime.planning import Depth
from dflash2.runtime.sampling import Sampling, Verify
from dflash2.runtime.session import Session
from dflash2.runtime.stats import CycleRecord, DraftStats
from dflash2.runtime.turns import Turns

_REFUSED = {
    "draft_model": "DFlashLlama drafts with its own drafter; leave draft_model out, or use llama_cpp.Llama.",
    "embedding": "DFlashLlama generates text; use llama_cpp.Llama(embedding=True) for embeddings.",
    "vocab_only": "DFlashLlama needs the weights; use llama_cpp.Llama(vocab_only=True).",
}


_N_BATCH = 512  # Llama's default of n_batch, n_ubatch and n_ctx


class DFlashLlama(LlamaCalls):
    """`llama_cpp.Llama` that generates faster with a DFlash drafter, with unchanged output.

    Every method of `Llama` works as documented there, but `embed`. Greedy requests (temperature 0) are verified by
    argmax, others as `verify` says. Threads may share an object: a call waits for the one that runs, and ends a stream
    that someone has begun to read and not finished.
    """

    def __init__(
        self,
        model_path: str | Path,
        drafter_path: str | Path,
        *,
        depth: Depth | None = "auto",
        draft_block: int | None = None,
        verify: Verify = "coupled",
        auto_disable: bool = True,
        n_gpu_layers_draft: int | None = None,
        device_draft: Sequence[str] | None = None,
        type_k_draft: int | None = None,
        type_v_draft: int | None = None,
        rpc_servers: str | Sequence[str] | None = None,
        ctx_checkpoints: int = 8,
        checkpoint_min_step: int = 2048,
        **llama_kwargs: Any,
    ) -> None:
        """Load a target and its drafter, both GGUF.

        Args:
            model_path: the target.
            drafter_path: the drafter, converted for this target.
            depth: draft tokens verified per cycle, 0 (no drafting) to block size - 1; None is as many as `n_batch`
                allows. "auto" finds the fastest while it generates, none included; a request with a seed and
                verify="rejection" has the largest then, since its tokens depend on it.
            draft_block: rows of a draft pass at a fixed depth, 2 to block size; by default all the drafter was trained
                for, though fewer drafts are verified. depth="auto" drafts fewer where that saves more than it loses.
            verify: how a sampled request chooses and verifies tokens. Every way draws from the target's distribution
                after the whole sampler chain. "coupled": target and drafts share noise made from the seed, so that
                a seed gives the same text at every depth, 0 included. "rejection": speculative sampling; accepts a
                little more where the chain hardly truncates, and a seed gives the same text at the same depth only.
                "match": llama.cpp's own sampler, once per token; a seed gives the text of `llama_cpp.Llama`.
            auto_disable: switch drafting off, with a warning, when next to no draft token is accepted.
            n_gpu_layers_draft: the drafter's layers on devices, as `n_gpu_layers`; by default as many as the target's.
            device_draft: names of the devices for them (CUDA0, RPC0), () for the CPU; by default all there are.
            type_k_draft, type_v_draft: types of the drafter's KV cache, as `type_k`; by default the target's.
            rpc_servers: "host:port" of servers of llama.cpp's RPC, as a sequence or separated by commas, whose devices
                come before those of this machine (`tensor_split` shares layers among all of them, `device_draft` names
                them RPC0, RPC1...). `n_gpu_layers` is -1 then unless it is given. They stay for the whole process.
            ctx_checkpoints: how many states of the two memories to keep for requests whose history diverges, where
                the memories cannot step back by themselves (recurrent and sliding layers); 0 for none.
            checkpoint_min_step: tokens between two of them.
            llama_kwargs: keyword arguments of `llama_cpp.Llama`. One default differs: `flash_attn=True`. Without
                flash attention llama.cpp's CPU backend computes several rows with another kernel than one row, so
                near-ties between tokens may fall differently with drafting than without.

        Raises GGUFError, TargetMismatchError, NativeError, or Dflash2Error for arguments that exclude drafting.
        """
        for name, reason in _REFUSED.items():
            if llama_kwargs.get(name):
                raise Dflash2Error(f"{name} cannot be combined with a drafter. {reason}")
        self._turns = Turns()
        self._drafted = None
        self._on_cycle: Callable[[CycleRecord], None] | None = None
        spec = read_pair(Path(model_path), Path(drafter_path))
        self._sampling = Sampling(verify)
        native.require_symbols()
        own = {"type_k_draft": type_k_draft, "type_v_draft": type_v_draft}
        check_options({**llama_kwargs, **own}, shares_head=spec.shares_head)
        self._rpc_servers = _add_rpc_servers(rpc_servers, llama_kwargs)
        if device_draft is not None:
            on_devices = llama_kwargs.get("n_gpu_layers", 0) != 0
            check_devices(tuple(device_draft), native.gpu_names() if on_devices else (), shares_head=spec.shares_head)
        most = self._default_depth(spec, llama_kwargs) if depth in (None, "auto") else depth
        if type(most) is not int:
            raise Dflash2Error(f'depth must be "auto", None or a whole number, got {depth!r}.')
        if draft_block is not None and (type(draft_block) is not int or not 2 <= draft_block <= spec.block_size):
            raise Dflash2Error(f"draft_block must lie in 2..{spec.block_size} for this drafter, got {draft_block!r}.")
        check_ubatch(llama_kwargs, most, snapshots=spec.target_keeps_snapshots)
        self._n_rs_seq = max(most, 0) if spec.target_keeps_snapshots else 0
        llama_kwargs.setdefault("flash_attn", True)
        try:
            super().__init__(model_path=str(model_path), **llama_kwargs)
        except (ValueError, RuntimeError) as error:
            raise NativeError(f"llama.cpp cannot load {model_path}: {error} (verbose=True shows its log).") from error
        if len(self.input_ids) < self._n_ctx:  # llama.cpp rounds the context up; one figure is the limit everywhere
            self.input_ids = np.zeros(self._n_ctx, np.int32)
            if self._logits_all:
                self.scores = np.zeros((self._n_ctx, self._n_vocab), np.float32)
        if not self._logits_all:  # n_batch rows, and nothing is ever written into them
            self.scores = np.zeros((1, self._n_vocab), np.float32)
        if self.lora_path:
            warnings.warn(
                "a LoRA adapter changes the target, not the drafter: output is that of the adapted target, but fewer "
                "draft tokens may be accepted; see `stats`.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._detokenizer = Detokenizer(_pieces(self._model, self._n_vocab), self.token_bos())
        self.drafter_path = str(drafter_path)
        self._drafter_options = {
            "draft_block": draft_block,
            "n_gpu_layers_draft": n_gpu_layers_draft,
            "device_draft": device_draft,
            "type_k_draft": type_k_draft,
            "type_v_draft": type_v_draft,
            "ctx_checkpoints": ctx_checkpoints,
            "checkpoint_min_step": checkpoint_min_step,
        }
        self._session = Session(
            native.Context(self._ctx.ctx),
            Path(drafter_path),
            spec,
            placement=native.Placement(
                n_gpu_layers=self.model_params.n_gpu_layers if n_gpu_layers_draft is None else n_gpu_layers_draft,
                split_mode=self.model_params.split_mode,
                main_gpu=self.model_params.main_gpu,
                tensor_split=tuple(self.tensor_split) if self.tensor_split else None,
                load_mode=self.model_params.load_mode,
                devices=None if device_draft is None else tuple(device_draft),
            ),
            # By default the target's, so that F32 caches without flash attention (exact) can be had for both.
            attention=native.AttentionOptions(
                flash_attn_type=self.context_params.flash_attn_type,
                type_k=self.context_params.type_k if type_k_draft is None else type_k_draft,
                type_v=self.context_params.type_v if type_v_draft is None else type_v_draft,
            ),
            threads=(self.n_threads, self.n_threads_batch),
            depth=most if depth is None else depth,
            n_ctx=self._n_ctx,
            auto_disable=auto_disable,
            swa_full=self.context_params.swa_full,
            checkpoints=CheckpointLimits(ctx_checkpoints, checkpoint_min_step),
        )
        if draft_block is not None:
            self._session.planner.draft_block = draft_block
        self._stack.callback(self._session.close)  # last in, first out: the drafter goes before the target
        _clear_together(self._ctx, self._session)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str,
        drafter_repo_id: str | None = None,
        drafter_filename: str = "*.gguf",
        *,
        additional_files: Sequence[str] | None = None,
        local_dir: str | PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",  # noqa: ARG003 (huggingface_hub dropped it; Llama still has it)
        cache_dir: str | PathLike[str] | None = None,
        **kwargs: Any,
    ) -> DFlashLlama:
        """Download a target and its drafter (or give `drafter_path`) and load them.

        Args:
            repo_id: Hub id of the target, `org/name`.
            filename: name or pattern of the target's GGUF in it; the first one of a split file.
            drafter_repo_id: Hub id of the drafter, by default the target's.
            drafter_filename: name or pattern of the drafter's GGUF in it.
            additional_files: names or patterns of more files to download from the target's, such as the other parts.
            local_dir: folder for plain copies; by default huggingface_hub's cache is used.
            local_dir_use_symlinks: ignored.
            cache_dir: another cache folder.
            kwargs: arguments of the constructor.

        Raises PretrainedError if a name matches no file or several, HubError, and what the constructor raises.
        """
        local, cache = (None if folder is None else Path(folder) for folder in (local_dir, cache_dir))
        folders = HubFolders(local, cache)
        drafter_path = kwargs.pop("drafter_path", None)
        target, *others = fetch_files(repo_id, [filename, *(additional_files or ())], folders)
        if drafter_path is None:
            shared = drafter_repo_id in (None, repo_id) or local is not None
            besides = [file.name for file in (target, *others)] if shared else []
            (drafter,) = fetch_files(drafter_repo_id or repo_id, [drafter_filename], folders, besides=besides)
            drafter_path = drafter.path
        return cls(target.path, drafter_path, **kwargs)

    @staticmethod
    def _default_depth(spec: DrafterSpec, llama_kwargs: dict[str, Any]) -> int:
        """As many drafts as the block has and the batch allows; llama.cpp wants all rows of a step back in one."""
        n_batch: int = llama_kwargs.get("n_batch", _N_BATCH)
        n_ctx: int = llama_kwargs.get("n_ctx", _N_BATCH) or n_batch  # 0 is the model's own
        most = min(spec.block_size, n_batch, n_ctx) - 1
        if not spec.target_keeps_snapshots:
            return most
        n_ubatch: int = min(n_batch, llama_kwargs.get("n_ubatch", _N_BATCH))
        return max(0, min(most, n_ubatch - 2))

    @property
    def model_params(self) -> Any:
        """Parameters of the target's model, completed while `Llama.__init__` makes them."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.use_extra_bufts = native.repacking_is_safe()
        self._model_params = params

    @property
    def context_params(self) -> Any:
        """Parameters of the target's context, completed while `Llama.__init__` makes them."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        # Llama takes no such argument: snapshots for stepping back a recurrent state.
        params.n_rs_seq = self._n_rs_seq
        self._context_params = params

    def target_context(self, *, observer: native.Observer | None = None) -> native.Context:
        """A context of its own on the target's weights, made as this object's but without drafter and snapshots.

        What it computes is the target's word on a text, whatever the cycles do. Close it before this object.
        """
        given = {name: getattr(self.context_params, name) for name in native.ContextOptions.__dataclass_fields__}
        options = native.ContextOptions(**{**given, "n_rs_seq": 0})
        return native.Context(self._ctx.ctx).beside(options, observer)

    @property
    def block_size(self) -> int:
        """Rows of a whole draft pass, the anchor's included."""
        return self._session.spec.block_size

    def lattices(self, tokens: Sequence[int], anchors: Sequence[int]) -> list[Lattice]:
        """What the drafter offers behind each of `anchors`, ascending positions of `tokens`; memories are emptied.

        Raises ContextLimitError if no block fits behind an anchor, Dflash2Error for other anchors that cannot be and if
        drafting is off, and NativeError.
        """
        session = self._session
        if not session.injecting:
            raise Dflash2Error("drafting is switched off; set depth before asking for lattices.")
        if any(not 0 < anchor < len(tokens) for anchor in anchors) or list(anchors) != sorted(set(anchors)):
            raise Dflash2Error(f"anchors must be ascending positions in 1..{len(tokens) - 1}, without repetition.")
        if anchors and anchors[-1] + session.spec.block_size > session.n_ctx:
            raise ContextLimitError(
                f"a block of {session.spec.block_size} behind position {anchors[-1]} does not fit the context of "
                f"{session.n_ctx}; raise n_ctx."
            )
        with self._turns.hold(supersede=True):
            self.reset()
            try:
                return list(lattices(session, np.asarray(tokens, np.int32), anchors))
            finally:
                self.reset()

    @property
    def depth(self) -> Depth:
        """Draft tokens verified per cycle, or "auto"; may be set between requests, 0 switches drafting off."""
        return self._session.depth

    @depth.setter
    def depth(self, depth: Depth) -> None:
        with self._turns.hold(supersede=False):
            self._break_off()
            self._session.depth = depth

    @property
    def verify(self) -> Verify:
        """How sampled requests are verified; may be set between requests."""
        return self._sampling.verify

    @verify.setter
    def verify(self, verify: Verify) -> None:
        self._sampling.verify = verify

    @property
    def stats(self) -> DraftStats:
        """What drafting did so far; a snapshot."""
        return self._session.recorder.snapshot()

    def reset_stats(self) -> None:
        """Count from zero."""
        self._session.recorder.reset()

    @property
    def on_cycle(self) -> Callable[[CycleRecord], None] | None:
        """Called after every cycle, if set."""
        return self._on_cycle

    @on_cycle.setter
    def on_cycle(self, callback: Callable[[CycleRecord], None] | None) -> None:
        self._on_cycle = callback
        self._session.on_cycle = None if callback is None else partial(self._turns.call, callback)

    def __getstate__(self) -> dict[str, Any]:
        """Arguments that make an equal object: models are loaded again, memories start empty."""
        state: dict[str, Any] = super().__getstate__()
        own = {
            "drafter_path": self.drafter_path,
            "depth": self.depth,
            "verify": self.verify,
            "auto_disable": self._session.planner.auto_disable,
            "rpc_servers": self._rpc_servers,
            **self._drafter_options,
        }
        return {**state, **own}


def _add_rpc_servers(endpoints: str | Sequence[str] | None, llama_kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The endpoints, whose devices are there now; layers go to them unless `llama_kwargs` say otherwise."""
    named = tuple(endpoints.split(",") if isinstance(endpoints, str) else endpoints or ())
    native.check_distinct(named)
    for endpoint in named:
        native.add_rpc_server(endpoint)
    if named:
        llama_kwargs.setdefault("n_gpu_layers", -1)
    return named


def _pieces(model: Any, n_vocab: int) -> Callable[[int], bytes]:
    """The text of a token of `model`."""

    def piece(token: int) -> bytes:
        if not 0 <= token < n_vocab:
            raise NativeError(f"token ids must lie in 0..{n_vocab - 1}, got {token}.")
        return bytes(model.detokenize([token]))

    return piece


def _clear_together(context: Any, session: Session) -> None:
    """Chat handlers for images clear the target's memory through `Llama`'s context: the session hears of it."""
    clear = context.kv_cache_clear

    def clear_both() -> None:
        clear()
        session.forget()

    context.kv_cache_clear = clear_both
