"""`DFlashLlama`: the one module that knows how `llama_cpp.Llama` works inside (tested against the pinned version)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from dflash2 import native  # first: it may choose the library that llama_cpp loads at import
from dflash2.errors import ContextLimitError, Dflash2Error, NativeError
from dflash2.runtime.checkpoints import CheckpointLimits
from dflash2.runtime.checks import check_devices, check_options, check_ubatch
from dflash2.runtime.cycle import cycles
from dflash2.runtime.pair import DrafterSpec, read_pair
from dflash2.runtime.session import Session
from dflash2.runtime.stats import CycleRecord, DraftStats

native.library()

from llama_cpp import Llama, LlamaState, LogitsProcessorList, StoppingCriteriaList  # noqa: E402
from llama_cpp.llama_grammar import LlamaGrammar  # noqa: E402

_REFUSED = {
    "draft_model": "DFlashLlama drafts with its own drafter; leave draft_model out, or use llama_cpp.Llama.",
    "embedding": "DFlashLlama generates text; use llama_cpp.Llama(embedding=True) for embeddings.",
    "vocab_only": "DFlashLlama needs the weights; use llama_cpp.Llama(vocab_only=True).",
}


_LAST_ROW = -1
_N_BATCH = 512  # Llama's default of n_batch, n_ubatch and n_ctx


class DFlashState(LlamaState):
    """A `LlamaState` with the drafter's memory, which reaches to position `injected`."""

    def __init__(self, *, drafter_memory: bytes, injected: int, **target_state: Any) -> None:
        super().__init__(**target_state)
        self.drafter_memory = drafter_memory
        self.injected = injected


class DFlashLlama(Llama):
    """`llama_cpp.Llama` that generates faster with a DFlash drafter, with unchanged output.

    Every method of `Llama` works as documented there. Greedy requests (temperature 0) are verified by argmax; any
    other request walks llama.cpp's own sampler once per token, so a seed gives the same text as without drafting.
    """

    n_tokens: int
    input_ids: native.IntArray
    scores: native.FloatArray

    def __init__(
        self,
        model_path: str | Path,
        drafter_path: str | Path,
        *,
        depth: int | None = None,
        auto_disable: bool = True,
        n_gpu_layers_draft: int | None = None,
        device_draft: Sequence[str] | None = None,
        type_k_draft: int | None = None,
        type_v_draft: int | None = None,
        ctx_checkpoints: int = 8,
        checkpoint_min_step: int = 2048,
        **llama_kwargs: Any,
    ) -> None:
        """Load a target and its drafter, both GGUF.

        Args:
            model_path: the target.
            drafter_path: the drafter, converted for this target.
            depth: draft tokens verified per cycle, 0 (no drafting) to block size - 1; by default as many as `n_batch`
                allows.
            auto_disable: switch drafting off, with a warning, when next to no draft token is accepted.
            n_gpu_layers_draft: the drafter's layers on devices, as `n_gpu_layers`; by default as many as the target's.
            device_draft: names of the devices for them (CUDA0, RPC0[...]), () for the CPU; by default all there are.
            type_k_draft, type_v_draft: types of the drafter's KV cache, as `type_k`; by default the target's.
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
        spec = read_pair(Path(model_path), Path(drafter_path))
        native.require_symbols()
        own = {"type_k_draft": type_k_draft, "type_v_draft": type_v_draft}
        check_options({**llama_kwargs, **own}, shares_head=spec.shares_head)
        if device_draft is not None:
            on_devices = llama_kwargs.get("n_gpu_layers", 0) != 0
            check_devices(tuple(device_draft), native.gpu_names() if on_devices else (), shares_head=spec.shares_head)
        if depth is None:
            depth = self._default_depth(spec, llama_kwargs)
        check_ubatch(llama_kwargs, depth, snapshots=spec.target_keeps_snapshots)
        self._n_rs_seq = max(depth, 0) if spec.target_keeps_snapshots else 0
        llama_kwargs.setdefault("flash_attn", True)
        try:
            super().__init__(model_path=str(model_path), **llama_kwargs)
        except (ValueError, RuntimeError) as error:
            raise NativeError(f"llama.cpp cannot load {model_path}: {error} (verbose=True shows its log).") from error
        if len(self.input_ids) < self._n_ctx:  # llama.cpp rounds the context up; one figure is the limit everywhere
            self.input_ids = np.zeros(self._n_ctx, np.int32)
            if self._logits_all:
                self.scores = np.zeros((self._n_ctx, self._n_vocab), np.float32)
        self.drafter_path = str(drafter_path)
        self._drafter_options = {
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
            depth=depth,
            n_ctx=self._n_ctx,
            auto_disable=auto_disable,
            swa_full=self.context_params.swa_full,
            checkpoints=CheckpointLimits(ctx_checkpoints, checkpoint_min_step),
        )
        self._stack.callback(self._session.close)  # last in, first out: the drafter goes before the target

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

    @property
    def depth(self) -> int:
        """Draft tokens verified per cycle; may be set between requests, 0 switches drafting off."""
        return self._session.depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._session.depth = depth

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
        return self._session.on_cycle

    @on_cycle.setter
    def on_cycle(self, callback: Callable[[CycleRecord], None] | None) -> None:
        self._session.on_cycle = callback

    def eval(self, tokens: Sequence[int]) -> None:
        """Process `tokens` behind the current ones, injecting them into the drafter.

        Raises ContextLimitError if they do not fit, and NativeError.
        """
        array = np.asarray(tokens, dtype=np.int32)
        start = self.n_tokens
        if start + len(array) > self._session.n_ctx:
            raise ContextLimitError(
                f"{start + len(array)} tokens do not fit the context of {self._session.n_ctx}; raise n_ctx."
            )
        begun = perf_counter()
        for end in self._session.evaluate(array, start, all_logits=self._logits_all):
            self.input_ids[self.n_tokens : end] = array[self.n_tokens - start : end - start]
            if self._logits_all:
                self.scores[self.n_tokens : end] = self._session.target.logits()
            self.n_tokens = end
            self._requires_eval = False
        self._session.recorder.prompt_tokens += len(array)
        self._session.recorder.prompt_seconds += perf_counter() - begun

    def close(self) -> None:
        """Free both models; harmless when construction failed."""
        if hasattr(self, "_stack"):
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        """Arguments that make an equal object: models are loaded again, memories start empty."""
        state: dict[str, Any] = super().__getstate__()
        own = {
            "drafter_path": self.drafter_path,
            "depth": self.depth,
            "auto_disable": self._session.auto_disable,
            **self._drafter_options,
        }
        return {**state, **own}

    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        """As in `Llama`; counts from the last token kept, not from the last one verified."""
        kwargs["idx"] = (self.n_tokens - 1 if idx is None else idx) - self._session.surplus
        return int(super().sample(*args, **kwargs))

    def save_state(self) -> DFlashState:
        """Copy of both models' memories and the tokens in them."""
        memory, injected = self._session.save()
        return DFlashState(drafter_memory=memory, injected=injected, **vars(super().save_state()))

    def load_state(self, state: LlamaState) -> None:
        """Restore what `save_state` returned; with a plain `LlamaState` the next request evaluates its prompt again.

        Raises NativeError if the drafter's part does not fit.
        """
        super().load_state(state)
        if isinstance(state, DFlashState):
            self._session.restore(state.drafter_memory, state.injected, self.n_tokens)
        else:
            self._session.forget(self.n_tokens)

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that follow `tokens` until closed; arguments as in `llama_cpp.Llama.generate`.

        Tokens sent into the generator are processed behind the one just yielded. Raises ContextLimitError when
        the context is full, and NativeError.
        """
        self._sampler = self._init_sampler(
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            temp=temp,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            tfs_z=tfs_z,
            mirostat_mode=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            penalize_nl=penalize_nl,
            logits_processor=logits_processor,
            grammar=grammar,
        )
        penalties = repeat_penalty != 1.0 or frequency_penalty != 0.0 or presence_penalty != 0.0
        greedy = temp == 0.0 and not penalties and not logits_processor and grammar is None
        request = _Request(self, greedy)
        pending = self._reuse_prefix(list(tokens)) if reset else list(tokens)
        while pending:
            pending = yield from self._continue(pending, request, stopping_criteria)

    def _reuse_prefix(self, tokens: list[int]) -> list[int]:
        """Keep what the memories share with `tokens`; returns the rest, at least one token."""
        n = min(self.n_tokens, len(tokens) - 1)
        differs = np.flatnonzero(self.input_ids[: max(n, 0)] != np.asarray(tokens[: max(n, 0)], np.int32))
        prefix = self._session.reuse(int(differs[0]) if len(differs) else max(n, 0))
        if prefix > 0:
            self.n_tokens = prefix
            self._requires_eval = True
            return tokens[prefix:]
        self.reset()
        return tokens

    def _continue(
        self, tokens: list[int], request: _Request, stopping_criteria: StoppingCriteriaList | None
    ) -> Generator[int, Sequence[int] | None, list[int]]:
        """Process `tokens` and generate; returns what to process next, nothing once a criterion stops."""
        self.eval(tokens)
        request.evaluated()
        token = request.choose()
        drafted = cycles(self._session, token, request)
        try:
            while True:
                if stopping_criteria is not None and stopping_criteria(self._input_ids, request.logits()):
                    return []
                self._session.recorder.emitted += 1
                sent = yield token
                if sent is not None:
                    return [token, *sent]
                following = next(drafted, None)
                if following is None:  # drafting is off
                    return [token]
                token = following
        finally:
            drafted.close()


class _Request:
    """How one call of `generate` chooses tokens (`dflash2.runtime.accept.Request`)."""

    def __init__(self, llama: DFlashLlama, greedy: bool) -> None:
        self._llama = llama
        self._row = _LAST_ROW
        self.greedy = greedy

    @property
    def position(self) -> int:
        return int(self._llama.n_tokens)

    def advance(self, token: int, row: int) -> None:
        llama = self._llama
        self._row = row
        llama.input_ids[llama.n_tokens] = token
        if llama._logits_all:
            llama.scores[llama.n_tokens] = self.logits()
        llama.n_tokens += 1

    def evaluated(self) -> None:
        """The next choice follows the last token of a prompt."""
        self._row = _LAST_ROW

    def choose(self) -> int:
        if self.greedy:
            return int(self.logits().argmax())
        sampler: Any = self._llama._sampler
        return int(sampler.sample(self._llama._ctx, self._row))

    def logits(self) -> native.FloatArray:
        """The row that decides the next token, [vocabulary]."""
        row: native.FloatArray = self._llama._session.target.logits()[self._row]
        return row
