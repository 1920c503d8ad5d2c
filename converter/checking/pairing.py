"""Do this drafter and this target belong together, and can the llama.cpp at hand run them? No weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash2 import native
from dflash2.constants import DRAFTER_ARCHITECTURE, LLAMA_CPP_PYTHON_VERSION
from dflash2.converter.checking.checkpoint_facts import read_checkpoint_facts
from dflash2.converter.checking.drafter_checks import drafter_findings
from dflash2.converter.checking.drafter_facts import DrafterFacts, drafter_facts
from dflash2.converter.checking.findings import Fact, Finding, error, ok, problems, warning
from dflash2.converter.checking.forks import is_drafter, read_spelling
from dflash2.converter.checking.registry import require_local
from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects.overrides import NO_OVERRIDES, Overrides
from dflash2.converter.targets.pair import Target, check_tokens, read_target
from dflash2.errors import CheckpointError, GGUFError, NativeError, TargetMismatchError
from dflash2.gguf_info import GGUFInfo, read_gguf_info
from dflash2.regular_file import system_errors

SCHEMA = "dflash2.check/1"
# Tokenizer versions differ in a few reserved names; more than this share is another tokenizer.
_RENAMED_SHARE = 0.01


@dataclass(frozen=True)
class Report:
    """All findings about one pair, ok ones included, in the order they were made."""

    drafter: Path
    target: Path
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What keeps the pair from working."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What makes it work worse, or only here and there."""
        return tuple(finding for finding in self.findings if finding.level == "warning")

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Errors and warnings, in order."""
        return problems(self.findings)

    def passes(self, *, strict: bool = False) -> bool:
        """Whether there are no errors, and with `strict` no warnings either."""
        return not (self.problems if strict else self.errors)

    def to_dict(self) -> dict[str, object]:
        """JSON values; the schema is in docs/inspect.md."""
        return {
            "schema": SCHEMA,
            "drafter": str(self.drafter),
            "target": str(self.target),
            "passes": self.passes(),
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class _Side:
    """What the pair's checks need of a drafter, wherever it comes from.

    `taps` are GGUF ids; `tokens` None and `sections` None mean that conversion takes them from the target;
    `has_factors` says that llama3 rope factors are kept, `target_layers` what the checkpoint says of its target.
    """

    version: int
    hidden_size: int
    taps: tuple[int, ...]
    mask_token_id: int | None
    vocab_size: int | None
    tokens: tuple[str, ...] | None
    sections: tuple[int, ...] | None
    head_dim: int
    has_factors: bool
    target_layers: int | None = None


@system_errors(GGUFError)
def check(drafter: Path, target: Path, *, overrides: Overrides = NO_OVERRIDES, library: bool = True) -> Report:
    """Check a pair without loading it.

    Args:
        drafter: a drafter GGUF, or the folder of a drafter checkpoint.
        target: GGUF of the target (of a split one: its first file), or its Hugging Face folder.
        overrides: what goes before the values of a checkpoint's config, as in `convert`.
        library: whether llama-cpp-python's library has to run them; not so if another program will.

    Raises:
        GGUFError: one of them cannot be read, or is no drafter or no target.
    """
    drafter, target = Path(drafter), Path(target)
    require_local(drafter)
    require_local(target, target=True)
    facts = read_target(target)
    findings, side = _checkpoint_side(drafter, overrides) if drafter.is_dir() else _gguf_side(drafter)
    if side is not None:
        for pair_check in _PAIR_CHECKS:
            findings += pair_check(side, facts)
    if drafter.is_dir():
        findings += _own_tokenizer(drafter, facts)
    if library:
        findings += _runtime(side, facts)
    return Report(drafter, target, tuple(findings))


def _gguf_side(path: Path) -> tuple[list[Finding], _Side]:
    info = read_gguf_info(path)
    if not is_drafter(info):
        raise GGUFError(
            f"{path} is a {info.architecture or 'nameless'} model, no DFlash drafter; give the drafter first."
        )
    if (info.integer("split.count") or 1) > 1:
        raise GGUFError(f"{path} is one part of a split GGUF; join the parts with llama-gguf-split --merge first.")
    spelling = read_spelling(info)
    facts = drafter_facts(spelling.info)
    return drafter_findings(spelling, facts), _side_of_gguf(spelling.info, facts)


def _side_of_gguf(info: GGUFInfo, facts: DrafterFacts) -> _Side:
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    texts = tuple(map(str, tokens)) if isinstance(tokens, tuple) else None
    return _Side(
        version=facts.version,
        hidden_size=info.integer(info.own("embedding_length")) or 0,
        taps=facts.taps,
        mask_token_id=facts.mask_token_id,
        vocab_size=len(texts) if texts is not None else None,
        tokens=texts if texts is not None else (),
        sections=facts.rope.sections,
        head_dim=info.integer(info.own("attention.key_length")) or 0,
        has_factors="rope_freqs.weight" in info.tensor_names,
    )


def _checkpoint_side(folder: Path, overrides: Overrides) -> tuple[list[Finding], _Side | None]:
    """A folder is checked as conversion would: what it refuses is an error here."""
    try:
        facts = read_checkpoint_facts(folder, overrides)
    except CheckpointError as problem:
        return [_refused(str(problem))], None
    config = facts.config
    if config is None or facts.reason is not None:
        return [_refused(facts.reason)], None
    findings = [ok("checkpoint", config.architecture), ok("tensors", len(facts.tensors))]
    if config.attention.mixed_causality:
        findings.append(
            warning(
                "causality",
                expected="one rule for all layers",
                found="sliding layers causal, full layers not",
                fix="use a patched llama.cpp: stock reads one flag and drafts worse",
            )
        )
    return findings, _side_of_config(config)


def _refused(reason: str | None) -> Finding:
    return error("checkpoint", expected="convertible", found=reason, fix="settle what the reason names")


def _side_of_config(config: DrafterConfig) -> _Side:
    return _Side(
        version=2 if config.selector else 1,
        hidden_size=config.hidden_size,
        taps=tuple(tap + 1 for tap in config.taps),
        mask_token_id=config.mask_token_id,
        vocab_size=config.vocab_size,
        tokens=None,
        sections=None,
        head_dim=config.head_dim,
        has_factors=bool(config.rope.frequency_factors),
        target_layers=config.target_layers,
    )


def _hidden_size(side: _Side, target: Target) -> Iterator[Finding]:
    if side.hidden_size != target.hidden_size:
        yield error(
            "hidden_size",
            expected=side.hidden_size,
            found=target.hidden_size,
            fix="use the target the drafter was trained for",
        )
    else:
        yield ok("hidden_size", target.hidden_size)


def _tap_range(side: _Side, target: Target) -> Iterator[Finding]:
    if not side.taps:
        return
    if max(side.taps) > target.layers or min(side.taps) < 0:
        yield error(
            "tap_range",
            expected=f"1 to {target.layers}",
            found=list(side.taps),
            fix="use the target the drafter was trained for",
        )
    elif max(side.taps) == target.layers and target.architecture not in native.final_tap_architectures():
        yield error(
            "tap_range",
            expected=f"1 to {target.layers - 1}: llama.cpp does not publish the last layer's output of "
            f"{target.architecture} models",
            found=list(side.taps),
            fix=f"only {', '.join(sorted(native.final_tap_architectures()))} targets publish it",
        )
    else:
        yield ok("tap_range", list(side.taps), f"1 to {target.layers}")
    if side.target_layers is not None and side.target_layers != target.layers:
        yield warning(
            "target_layers", expected=side.target_layers, found=target.layers, fix="check that this is the right target"
        )


def _tappable(_side: _Side, target: Target) -> Iterator[Finding]:
    tappable = native.tappable_architectures()
    if target.architecture in tappable:
        yield ok("tappable", target.architecture)
    else:
        yield error(
            "tappable",
            expected=sorted(tappable),
            found=target.architecture,
            fix="stock llama.cpp publishes no layer inputs for this architecture; run the pair in another engine",
        )


def _vocabulary(side: _Side, target: Target) -> Iterator[Finding]:
    if side.vocab_size != target.vocab_size:
        yield error(
            "vocab_size",
            expected=target.vocab_size,
            found=side.vocab_size,
            fix="convert the drafter with this target, or use the target it was trained for",
        )
        return
    yield ok("vocab_size", target.vocab_size)
    own, others = side.tokens, target.tokens
    if own is None or others is None:
        return
    if own == others:
        yield ok("tokens", "equal")
        return
    different = [token_id for token_id, pair in enumerate(zip(own, others, strict=True)) if pair[0] != pair[1]]
    first = different[0]
    make = error if len(different) > _RENAMED_SHARE * len(own) else warning
    yield make(
        "tokens",
        expected=f"id {first} is {others[first]!r}",
        found=f"id {first} is {own[first]!r}; {len(different)} of {len(own)} ids differ",
        fix="convert the drafter with this target; if the tokenizer is another model's, use its own target",
    )


def _own_tokenizer(folder: Path, target: Target) -> Iterator[Finding]:
    """A checkpoint that brings a tokenizer file, compared with the target's."""
    try:
        check_tokens(folder, target)
    except TargetMismatchError as problem:
        yield error("tokens", expected="the target's tokenizer", found=str(problem), fix="use its own target")
    else:
        yield ok("tokens", "not in contradiction")


def _mask_range(side: _Side, target: Target) -> Iterator[Finding]:
    if side.mask_token_id is None:
        return
    if not 0 <= side.mask_token_id < target.vocab_size:
        yield error(
            "mask_range",
            expected=f"below {target.vocab_size}",
            found=side.mask_token_id,
            fix="use the target the drafter was trained for",
        )
    else:
        yield ok("mask_range", side.mask_token_id, f"below {target.vocab_size}")


def _rope(side: _Side, target: Target) -> Iterator[Finding]:
    if target.uses_mrope and side.has_factors:
        yield error(
            "rope_factors",
            expected="no llama3 rope factors",
            found="rope_freqs.weight",
            fix="llama.cpp ignores them with an M-RoPE target; use another engine",
        )
    if side.sections is None:
        yield ok("rope_sections", "written when converting")
    elif target.uses_mrope and not side.sections:
        yield error(
            "rope_sections",
            expected=[side.head_dim // 2, 0, 0, 0],
            found=[],
            fix="run dflash2 upgrade --target: images break the drafter's positions without them",
        )
    elif side.sections and not target.uses_mrope:
        yield warning(
            "rope_sections",
            expected=[],
            found=list(side.sections),
            fix="convert the drafter with this target, which has no M-RoPE",
        )
    else:
        yield ok("rope_sections", list(side.sections))


_PAIR_CHECKS: tuple[Callable[[_Side, Target], Iterator[Finding]], ...] = (
    _hidden_size,
    _tap_range,
    _tappable,
    _vocabulary,
    _mask_range,
    _rope,
)


def _runtime(side: _Side | None, target: Target) -> Iterator[Finding]:
    """What the library at hand says, by asking it; without one that is a warning, since the files may be fine."""
    install = f"install llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}"
    try:
        support = native.support()
        knows_target = native.knows_architecture(target.architecture)
    except NativeError as problem:
        yield warning("library", expected="llama-cpp-python", found=str(problem), fix=install)
        return
    where = f"{support.version}, {support.library.path}{' (patched)' if support.library.patched else ''}"
    yield ok("library", where, where)
    if support.missing:
        yield error("library_functions", expected="all", found=list(support.missing), fix=install)
    else:
        yield ok("library_functions", "all")
    needed = side.version if side else 1
    if support.drafters < needed:
        yield error("library_drafter", expected=_name(needed), found=_name(support.drafters), fix=install)
    else:
        yield ok("library_drafter", _name(support.drafters), _name(needed))
    known: Fact = target.architecture if knows_target else None
    if knows_target:
        yield ok("library_target", known)
    else:
        yield error("library_target", expected=target.architecture, found=known, fix=install)


def _name(version: int) -> str:
    return {0: f"no {DRAFTER_ARCHITECTURE}", 1: "DFlash", 2: "DFlash 2"}[version]
