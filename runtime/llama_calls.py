"""What `llama_cpp.Llama` does with tokens, done with a drafter: evaluate, choose, generate, complete, save, close.

With `llama_compat` the one place that knows how `Llama` works inside (tested against the pinned version).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from time import perf_counter
from typing import Any

import numpy as np

from dflash2 import native  # first: it may choose the library that llama_cpp loads at import
from dflash2.errors import ContextLimitError, NativeError, UnsupportedCallError
from dflash2.runtime.detokenize import Detokenizer
from dflash2.runtime.generation import generation
from dflash2.runtime.request import Request
from dflash2.runtime.sampling import Sampling
from dflash2.runtime.scores import KeptScores
from dflash2.runtime.session import Session
from dflash2.runtime.state import DFlashState, with_scores
from dflash2.runtime.turns import Turns

native.library()

from llama_cpp import Llama, LlamaState, LlamaTokenizer, LogitsProcessorList, StoppingCriteriaList  # noqa: E402
from llama_cpp.llama_grammar import LlamaGrammar  # noqa: E402

_NEUTRAL = {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


class LlamaCalls(Llama):
    """The methods of `Llama` that reach both models; `DFlashLlama` opens them."""

    n_tokens: int
    input_ids: native.IntArray
    scores: native.FloatArray | KeptScores
    _logits_all: bool
    _requires_eval: bool
    _session: Session
    _sampling: Sampling
    _turns: Turns
    _drafted: Generator[int, None, None] | None
    _detokenizer: Detokenizer

    def eval(self, tokens: Sequence[int]) -> None:
        """Process `tokens` behind the current ones, injecting them into the drafter.

        Raises ContextLimitError if they do not fit, and NativeError.
        """
        with self._turns.hold(supersede=True):
            self._break_off()
            self._adopt()
            self._eval(_as_tokens(tokens))

    def _eval(self, tokens: native.IntArray) -> None:
        start = self.n_tokens
        stop = start + len(tokens)
        if stop > self._session.n_ctx:
            raise ContextLimitError(f"{stop} tokens do not fit the context of {self._session.n_ctx}; raise n_ctx.")
        begun = perf_counter()
        self._requires_eval = self._requires_eval or len(tokens) > 0
        first = self.scores.first if isinstance(self.scores, KeptScores) else 0
        several = self._logits_all and stop - max(first, start) > 1
        for end in self._session.evaluate(tokens, start, all_logits=several):
            self.input_ids[self.n_tokens : end] = tokens[self.n_tokens - start : end - start]
            if several:
                self.scores[self.n_tokens : end] = self._session.target.logits()
            elif self._logits_all and end == stop:
                self.scores[end - 1 : end] = self._session.target.logits()[-1:]
            self.n_tokens = end
            self._requires_eval = False
        self._session.recorder.prompt_tokens += len(tokens)
        self._session.recorder.prompt_seconds += perf_counter() - begun

    def _adopt(self) -> None:
        """Notice tokens or images that a chat handler evaluated in the target's context by itself."""
        if self.n_tokens > self._session.length:
            self._requires_eval = not self._session.adopt(self.n_tokens)

    def _break_off(self) -> None:
        """Bring both memories to where the caller is, in the middle of a block; the generation alive goes on.

        Raises Dflash2Error within a callback.
        """
        self._turns.refuse_callbacks()
        if self._drafted is not None:
            self._drafted.close()
        self._session.recover(self.n_tokens)

    def reset(self) -> None:
        """Forget everything that was evaluated."""
        with self._turns.hold(supersede=True):
            self._break_off()
            super().reset()
            self._session.reset()

    def embed(self, *_: Any, **__: Any) -> Any:
        """Not offered: raises UnsupportedCallError, as `Llama` without `embedding=True` raises RuntimeError."""
        raise UnsupportedCallError(
            "embeddings are not offered with a drafter; use llama_cpp.Llama(embedding=True) for them."
        )

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As in `Llama`; a list that grows token by token is not detokenised anew each time."""
        if special or type(self.tokenizer_) is not LlamaTokenizer:
            return bytes(super().detokenize(tokens, prev_tokens=prev_tokens, special=special))
        # Only within a step is there one growing list, and one thread.
        return self._detokenizer.text(tokens) if self._turns.inside() else self._detokenizer.joined(tokens)

    def close(self) -> None:
        """Free both models; harmless when construction failed."""
        if hasattr(self, "_stack"):
            with self._turns.hold(supersede=True):
                self._turns.refuse_callbacks()
                super().close()
                closed: Any = _Closed()
                self._model = self._ctx = self._batch = self.tokenizer_ = self._detokenizer = closed

    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        """As in `Llama`: llama.cpp's own sampler; counts from the last token kept, not from the last one verified.

        Raises SamplingError if no token may be chosen, and NativeError if the row was not computed.
        """
        with self._turns.hold(supersede=False):
            self._turns.refuse_callbacks()
            if not self._turns.inside():
                self._break_off()
                self._adopt()
            row = (self.n_tokens - 1 if idx is None else idx) - self.n_tokens - self._session.surplus
            logits = self._session.target.logits()
            if not -len(logits) <= row < 0:
                raise NativeError(f"the logits after token {idx} are not kept; logits_all=True keeps those of prompts.")
            sampler = self._sampler or self._init_sampler(*args, **kwargs)
            chained = self._sampling.chain(sampler, self._n_vocab)
            token = chained.sample(logits[row])
            chained.accept(token)
            return token

    def save_state(self) -> DFlashState:
        """Copy of both models' memories and the tokens in them; also while a generation is alive."""
        with self._turns.hold(supersede=False):
            self._break_off()
            memory, injected = self._session.save()
            with self._scores_of_states():
                return DFlashState(drafter_memory=memory, injected=injected, **vars(super().save_state()))

    def load_state(self, state: LlamaState) -> None:
        """Restore what `save_state` returned; with a plain `LlamaState` the next request evaluates its prompt again.

        Raises NativeError if the drafter's part does not fit.
        """
        with self._turns.hold(supersede=True):
            self._break_off()
            with self._scores_of_states() as all_scores:
                super().load_state(state if all_scores else with_scores(state, 1))
            if isinstance(state, DFlashState):
                self._session.restore(state.drafter_memory, state.injected, self.n_tokens)
            else:
                self._session.forget(self.n_tokens)

    @contextmanager
    def _scores_of_states(self) -> Iterator[bool]:
        """`scores` as states hold them: all, or one row in the place of them; yields which."""
        kept = self.scores
        if isinstance(kept, KeptScores):
            self.scores = np.zeros((1, self._n_vocab), np.float32)
        try:
            yield self._logits_all and self.scores is kept
        finally:
            self.scores = kept

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Llama`; nobody comes between what a handler evaluates by itself (images) and the answer to it."""
        with self._turns.hold(supersede=False):
            before = self._turns.superseded
            answer = super().create_chat_completion(*args, **kwargs)
            if isinstance(answer, dict) or self._turns.superseded == before:
                return answer
            first = list(islice(answer, 1))  # the memories are the handler's only now
            return chain(first, answer)

    def _create_completion(self, *args: Any, **kwargs: Any) -> Generator[Any, Any, None]:
        return self._turns.drive(self._completion(*args, **kwargs))

    def _completion(self, *args: Any, **kwargs: Any) -> Generator[Any, Any, None]:
        """`Llama`'s own completion; for logprobs without `logits_all` it keeps the rows that will be read."""
        if kwargs.get("logprobs") is None or self._logits_all:
            yield from super()._create_completion(*args, **kwargs)
            return
        kept = KeptScores(self._n_vocab, prompt=bool(kwargs.get("echo")))
        plain, self.scores, self._logits_all = self.scores, kept, True
        try:
            if kwargs.get("echo"):
                self.reset()  # the logits of a prompt taken from the cache are gone
            yield from super()._create_completion(*args, **kwargs)
        finally:
            self.scores, self._logits_all = plain, False

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
        steps = self._generate(
            tokens,
            reset,
            stopping_criteria,
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
        return steps if self._turns.inside() else self._turns.drive(steps)

    def _generate(
        self, tokens: Sequence[int], reset: bool, criteria: StoppingCriteriaList | None, **sampling: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        self._turns.refuse_callbacks()
        self._sampler = self._init_sampler(**sampling)
        penalties = any(sampling[name] != value for name, value in _NEUTRAL.items())
        greedy = sampling["temp"] == 0.0 and not penalties
        greedy = greedy and not sampling["logits_processor"] and sampling["grammar"] is None
        rule = None if greedy else self._sampling.rule(self._sampler, self._n_vocab, self._seed, sampling["temp"])
        if isinstance(self.scores, KeptScores):
            self.scores.begin(len(tokens))
        request = Request(self, rule, calls_user=bool(sampling["logits_processor"]))
        yield from generation(self, tokens, request, reset=reset, criteria=criteria)


def _as_tokens(tokens: Sequence[int]) -> native.IntArray:
    try:
        return np.asarray(tokens, dtype=np.int32)
    except OverflowError as error:
        raise NativeError(f"token ids must fit 32 bits: {error}.") from error


class _Closed:
    """In the place of what was freed: `Llama` would hand its null pointers to llama.cpp."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NativeError("this model is closed; make a new object.")
