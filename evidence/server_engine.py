"""A running llama-server as an engine, by its URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

import httpx

from dflash2.errors import EvidenceError
from dflash2.evidence.engines import GREEDY, Run, Sampling
from dflash2.evidence.prompts import Prompt
from dflash2.runtime import Depth, DraftStats

_SECONDS = 600.0  # for one answer
_CONNECT_SECONDS = 10.0
_SLOT = 0


class LlamaServerEngine:
    """The llama-server at `url`; its drafter and its depth were chosen when it was started.

    No field of a request switches drafting off. What does is a request for a single token, which leaves no room for a
    draft: with depth 0 an answer is asked for token by token, each continuing the slot's memory by one row.
    """

    def __init__(self, url: str) -> None:
        """Raises EvidenceError unless a llama-server answers there."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise EvidenceError(f"{url!r} is no URL of a server; give one such as http://127.0.0.1:8080.")
        self.url = url.rstrip("/")
        self._client = httpx.Client(base_url=self.url, timeout=httpx.Timeout(_SECONDS, connect=_CONNECT_SECONDS))
        self._props = self._ask("GET", "/props")
        self.n_ctx = int(self._props.get("default_generation_settings", {}).get("n_ctx", 0))

    def about(self) -> Mapping[str, str]:
        """As in `Engine`."""
        model = PurePath(str(self._props.get("model_path", ""))).name
        return {"engine": "llama-server", "build": str(self._props.get("build_info", "")), "target": model}

    def tokens_of(self, prompt: Prompt, *, chat: bool) -> list[int]:
        """As in `Engine`; where the target has no template, the server uses one of its own."""
        text = prompt.text
        if chat:
            message = {"role": "user", "content": prompt.text}
            text = str(self._ask("POST", "/apply-template", {"messages": [message]})["prompt"])
        request = {"content": text, "add_special": True, "parse_special": chat}
        return [int(token) for token in self._ask("POST", "/tokenize", request)["tokens"]]

    def text_of(self, tokens: Sequence[int]) -> str:
        """As in `Engine`."""
        return str(self._ask("POST", "/detokenize", {"tokens": list(tokens)})["content"])

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
        """As in `Engine`; `depth` is None or 0.

        With depth 0, `seconds` are those of many requests, and a seed means something only if `seeds_by_position`.
        """
        if depth not in (None, 0):
            raise EvidenceError(
                f"A server's depth is chosen when it is started; {self.url} cannot change it to {depth}."
            )
        request = {
            "n_predict": n_tokens,
            "temperature": sampling.temperature,
            **{name: getattr(sampling, name) for name in Sampling.__dataclass_fields__ if name != "temperature"},
            "seed": seed,
            "ignore_eos": past_end,
            "cache_prompt": False,
            "return_tokens": True,
            "id_slot": _SLOT,
        }
        if depth is None:
            return _run(self._ask("POST", "/completion", {**request, "prompt": list(prompt)}))
        return self._step_by_step(list(prompt), n_tokens, request)

    def _step_by_step(self, prompt: list[int], n_tokens: int, request: dict[str, Any]) -> Run:
        request["n_predict"] = 1
        tokens: list[int] = []
        seconds = prompt_ms = 0.0
        while len(tokens) < n_tokens:
            answer = self._ask("POST", "/completion", {**request, "prompt": prompt + tokens})
            request["cache_prompt"] = True
            step = _run(answer)
            if step.stats.drafted:
                raise EvidenceError(f"{self.url} drafts even where a single token is asked for; give a reference URL.")
            if tokens:
                seconds += step.stats.prompt_seconds
            else:
                prompt_ms = step.stats.prompt_seconds
            tokens += step.tokens
            if answer.get("stop_type") == "eos":
                break
        return Run(tuple(tokens), seconds, _stats(len(tokens), 0, 0, 0, (), len(prompt), prompt_ms))

    def seeds_by_position(self, prompt: Sequence[int], n_seeds: int = 8) -> bool:
        """Whether a seed decides each token by its position (coupled sampling), so that steps can be compared.

        Otherwise llama.cpp draws the n-th token with its n-th random number, and every step would begin anew.
        """
        flat = Sampling(temperature=1.5)
        for seed in range(n_seeds):
            both = self.generate(prompt, 2, sampling=flat, seed=seed, past_end=True)  # too short to draft
            steps = self.generate(prompt, 2, sampling=flat, seed=seed, depth=0, past_end=True)
            if both.tokens != steps.tokens:
                return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _ask(self, method: str, path: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=request)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EvidenceError(f"No llama-server answers at {self.url}{path} ({error}); is it running?") from error
        if response.is_error:
            reason = answer.get("error", answer) if isinstance(answer, dict) else answer
            message = reason.get("message", reason) if isinstance(reason, dict) else reason
            raise EvidenceError(f"{self.url}{path} refused the request: {message}.")
        if not isinstance(answer, dict):
            raise EvidenceError(f"{self.url}{path} does not answer as a llama-server does; check the URL.")
        return answer


def _run(answer: Mapping[str, Any]) -> Run:
    try:
        timings = answer["timings"]
        tokens = tuple(int(token) for token in answer["tokens"])
        drafted, accepted = int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
        # Stock servers do not tell; every pass behind the first token yields one token more than it accepts.
        cycles = int(timings.get("draft_n_cycles", len(tokens) - 1 - accepted if drafted else 0))
        accepted_at = tuple(int(n) for n in timings.get("draft_n_accepted_per_pos", ())) if drafted else ()
        stats = _stats(
            len(tokens), cycles, drafted, accepted, accepted_at, timings["prompt_n"], timings["prompt_ms"] / 1000
        )
        return Run(tokens, timings["predicted_ms"] / 1000, stats)
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"The server's answer lacks what llama-server tells ({error}); check the URL.") from error


def _stats(
    emitted: int,
    cycles: int,
    drafted: int,
    accepted: int,
    accepted_at: tuple[int, ...],
    prompt_tokens: int,
    prompt_seconds: float,
) -> DraftStats:
    return DraftStats(
        cycles=cycles,
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        accepted_at=accepted_at,
        drafted_at=(cycles,) * len(accepted_at),  # near an answer's end fewer are drafted: not told
        reached_at=(cycles, *accepted_at[:-1]) if accepted_at else (),
        seconds={},
        prompt_tokens=prompt_tokens,
        prompt_seconds=prompt_seconds,
    )
