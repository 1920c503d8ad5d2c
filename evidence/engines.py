"""What generates: one protocol for every engine, and the one that runs a pair in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from dflash2.evidence.prompts import Prompt
from dflash2.native import Tokenizer, library
from dflash2.runtime import Depth, DFlashLlama, DraftStats


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; neutral values leave a sampler out. Temperature 0 takes the likeliest token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __str__(self) -> str:
        if self == GREEDY:
            return "greedy"
        named = (
            ("top-k", self.top_k, 0),
            ("top-p", self.top_p, 1.0),
            ("min-p", self.min_p, 0.0),
            ("repeat", self.repeat_penalty, 1.0),
            ("frequency", self.frequency_penalty, 0.0),
            ("presence", self.presence_penalty, 0.0),
        )
        chain = [f"{name} {value:g}" for name, value, neutral in named if value != neutral]
        return ", ".join([f"T={self.temperature:g}", *chain])


GREEDY = Sampling()


@dataclass(frozen=True)
class Run:
    """`tokens` generated after one prompt, and `seconds` from the first of them to the last (prefill left out).

    `stats` are this run's alone; of a server they hold what it tells: its counts, and the time of the prompt.
    """

    tokens: tuple[int, ...]
    seconds: float
    stats: DraftStats

    @property
    def passes(self) -> int:
        """Evaluations of the target behind the first token: cycles, and tokens that came without drafts."""
        plain = self.stats.at_depth[0] if self.stats.at_depth else 0
        return self.stats.cycles + plain or len(self.tokens) - 1


class Engine(Protocol):
    """A pair that generates, in this process or behind a URL; one request at a time."""

    def about(self) -> Mapping[str, str]:
        """What it is, for a result: kind, library or build, whether patched."""

    def tokens_of(self, prompt: Prompt, *, chat: bool) -> list[int]:
        """Token ids of a prompt; with `chat`, as the user's message in the target's chat template, if it has one."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""

    def generate(
        self,
        prompt: Sequence[int],
        n_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        depth: Depth | None = None,
        past_end: bool = False,
    ) -> Run:
        """Generate `n_tokens`, or fewer if the text ends before (never with `past_end`), from an empty memory.

        Args:
            prompt: token ids, at least one.
            n_tokens: at least 1.
            sampling: how tokens are drawn.
            seed: below 2^32 - 1; without meaning at temperature 0.
            depth: draft tokens verified per cycle, 0 for no drafting; None for as many as the engine was set up with.
            past_end: go on behind an end-of-text token, so that every run has `n_tokens`.

        Raises Dflash2Error.
        """

    def close(self) -> None:
        """Give back what it holds."""


class PythonEngine:
    """`DFlashLlama` in this process: the pair `target`, `drafter` (GGUF files).

    Attributes:
        llm: the object; its `verify` decides how sampled runs are verified.
        most: draft tokens per cycle that `depth=None` stands for.
    """

    def __init__(self, target: Path, drafter: Path, **llama_kwargs: Any) -> None:
        """`llama_kwargs` go to `DFlashLlama`, whose errors are raised.

        Drafting stays on however badly it does, since that is what is asked about.
        """
        options = {"verbose": False, "depth": None, "auto_disable": False, **llama_kwargs}
        self.llm = DFlashLlama(target, drafter, **options)
        self.most = self.llm.depth
        self._tokenizer = Tokenizer(target)
        self._ends: dict[int, bool] = {}

    def about(self) -> Mapping[str, str]:
        """As in `Engine`."""
        loaded = library()
        kind = "patched" if loaded.patched else "stock"
        return {"engine": "python", "library": kind, "why this library": loaded.reason, "verify": self.llm.verify}

    def tokens_of(self, prompt: Prompt, *, chat: bool) -> list[int]:
        """As in `Engine`; BOS is added where the vocabulary asks for it."""
        template = self.llm.metadata.get("tokenizer.chat_template") if chat else None
        if template is None:
            return list(self.llm.tokenize(prompt.text.encode()))
        return list(self.llm.tokenize(self._in_template(template, prompt).encode(), add_bos=False, special=True))

    def _in_template(self, template: str, prompt: Prompt) -> str:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        begin, end = (
            self.text_of([token]) if token >= 0 else "" for token in (self.llm.token_bos(), self.llm.token_eos())
        )
        formatter = Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)
        return str(formatter(messages=[{"role": "user", "content": prompt.text}]).prompt)

    def text_of(self, tokens: Sequence[int]) -> str:
        """As in `Engine`."""
        return self.llm.detokenize(list(tokens), special=True).decode("utf-8", "replace")

    def generate(
        self,
        prompt: Sequence[int],
        n_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        depth: Depth | None = None,
        past_end: bool = False,
    ) -> Run:
        """As in `Engine`."""
        llm = self.llm
        llm.reset()
        llm.depth = self.most if depth is None else depth
        llm.reset_stats()
        llm.set_seed(seed)
        stream = llm.generate(list(prompt), **self.arguments(sampling))
        tokens = [next(stream)]
        begin = perf_counter()
        while len(tokens) < n_tokens and (past_end or not self.is_end(tokens[-1])):
            tokens.append(next(stream))
        seconds = perf_counter() - begin
        stream.close()
        return Run(tuple(tokens), seconds, llm.stats)

    @staticmethod
    def arguments(sampling: Sampling) -> dict[str, Any]:
        """`sampling` as `generate` of `DFlashLlama` takes it."""
        named = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__ if name != "temperature"}
        return {"temp": sampling.temperature, **named}

    def is_end(self, token: int) -> bool:
        """Whether `token` ends a text."""
        if token not in self._ends:
            self._ends[token] = self._tokenizer.is_end(token)
        return self._ends[token]

    def close(self) -> None:
        """Free both models."""
        self.llm.close()
        self._tokenizer.close()


@contextmanager
def opened(target: Path, drafter: Path, llama_kwargs: Mapping[str, Any]) -> Iterator[PythonEngine]:
    """The pair as an engine, closed at the end."""
    engine = PythonEngine(target, drafter, **llama_kwargs)
    try:
        yield engine
    finally:
        engine.close()
