"""A model with its draft, made on an Ollama server: checked, sent, created, and seen to have the draft."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash2 import converter
from dflash2.converter import DrafterFacts, Inspection
from dflash2.errors import OllamaError
from dflash2.gguf_info import read_gguf_info
from dflash2.modelfiles.ollama.blobs import Blob, Progress, read_blob, send
from dflash2.modelfiles.ollama.plan import Plan
from dflash2.modelfiles.ollama.server import Server
from dflash2.modelfiles.ollama.shown import check_name, full_name, show
from dflash2.modelfiles.ollama_create import DRAFT_QUANTIZATIONS, check_draft_quantization
from dflash2.modelfiles.parameters import DRAFT_NUM_PREDICT

# What the server refuses in the name of a file, or might take for a path.
_NO_NAME = re.compile(r"[^\w.+ ()\[\]-]")


@dataclass(frozen=True)
class Created:
    """A model that the server has, its draft confirmed.

    `version` is Ollama's, `draft` the digest of the draft's blob, `drafter_version` 2 for DFlash 2 and else 1,
    `draft_num_predict` the number of draft tokens; `sent_bytes` went over the line, `kept_bytes` the server had.
    """

    name: str
    version: str
    draft: str
    drafter_version: int
    draft_num_predict: int
    sent_bytes: int
    kept_bytes: int


def create(
    server: Server,
    name: str,
    plan: Plan,
    *,
    quantize: str | None = None,
    draft_quantize: str | None = None,
    progress: Progress | None = None,
) -> Created:
    """Make `name` on `server`; a model of that name is replaced.

    Args:
        server: the server.
        name: the model's name there.
        plan: what it is made of; `draft_num_predict` is the drafter's block size less 1 where the plan has none.
        quantize: type that the server converts the target to, as "Q4_K_M".
        draft_quantize: the same of the draft, which must be F16 or BF16.
        progress: called with (what is being done, bytes done, bytes in all or None); what the server reports of its
            own is among it.

    Raises OptionError for a drafter that cannot be quantised, and OllamaError for a bad name, a server that does not
    answer or refuses, files that cannot be sent, a drafter that Ollama would not take for one, and a model that came
    without its draft.
    """
    check_name(name)
    report = progress or _no_progress
    found, facts, block_size = _drafter(plan.drafter)
    parameters = _parameters(plan, block_size)
    request: dict[str, object] = {"parameters": parameters, **plan.settings}
    if quantize:
        request["quantize"] = _type(quantize)
    if draft_quantize:
        request["draft_quantize"] = check_draft_quantization("gguf", draft_quantize, found.file_type)
    version = server.version()
    if plan.base is not None:
        _check_base(server, plan)
    blobs = {path: read_blob(path, report) for path in plan.paths}
    different = {blob.digest: blob for blob in blobs.values()}.values()
    sent_bytes = sum(blob.n_bytes for blob in different if send(server, blob, report))
    for step in server.create(name, {**request, **_files(plan, blobs)}):
        report(step.status, step.completed, step.total)
    shown = show(server, name)
    if shown.draft is None:
        raise OllamaError(
            f"{name} was made, but without its draft: Ollama {version} at {server.url} does not know `draft_files`;"
            f" upgrade it and run this again (what was sent is kept), or remove the model with `ollama rm {name}`."
        )
    if not draft_quantize and shown.draft != blobs[plan.drafter].digest:
        raise OllamaError(
            f"{name} was made, but the draft it has ({shown.draft}) is not {plan.drafter}"
            f" ({blobs[plan.drafter].digest}); remove it with `ollama rm {name}`, then run this again."
        )
    asked = parameters[DRAFT_NUM_PREDICT]
    if shown.draft_num_predict != asked:
        raise OllamaError(
            f"{name} was made, but it drafts {shown.draft_num_predict} tokens where {asked} were asked for: Ollama"
            f" {version} at {server.url} does not keep {DRAFT_NUM_PREDICT}; upgrade it and run this again."
        )
    kept_bytes = sum(blob.n_bytes for blob in different) - sent_bytes
    return Created(name, version, shown.draft, facts.version, shown.draft_num_predict, sent_bytes, kept_bytes)


def _files(plan: Plan, blobs: Mapping[Path, Blob]) -> dict[str, object]:
    """The part of the request that names blobs."""

    def named(paths: Iterable[Path]) -> dict[str, str]:
        return _named(blobs[path] for path in paths)

    # `from` beats `files` without a word: never both.
    target = {"from": plan.base} if plan.base else {"files": named(plan.files)}
    adapters = {"adapters": named(plan.adapters)} if plan.adapters else {}
    return {**target, "draft_files": named([plan.drafter]), **adapters}


def _parameters(plan: Plan, block_size: int) -> dict[str, object]:
    """Those of the plan, with as many draft tokens as the drafter can make if it does not say how many."""
    parameters = {DRAFT_NUM_PREDICT: block_size - 1, **plan.parameters}
    wanted = parameters[DRAFT_NUM_PREDICT]
    if isinstance(wanted, int) and wanted >= block_size:
        raise OllamaError(
            f"{DRAFT_NUM_PREDICT} is {wanted}, and {plan.drafter} drafts at most {block_size - 1}; give that or fewer."
        )
    for name, value in parameters.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise OllamaError(f"The parameter {name} is {value}, which cannot be sent; give a number.")
    return parameters


def _type(wanted: str) -> str:
    spelled = wanted.upper()
    if spelled not in DRAFT_QUANTIZATIONS["gguf"]:
        known = ", ".join(DRAFT_QUANTIZATIONS["gguf"])
        raise OllamaError(f"Ollama does not quantise to {wanted}; give one of {known}.")
    return spelled


def _drafter(path: Path) -> tuple[Inspection, DrafterFacts, int]:
    """The drafter's facts and its block size; the server looks at nothing but the architecture, all but one are MTP."""
    found = converter.inspect(path)
    if found.kind == "fork drafter":
        raise OllamaError(f"{path} is a fork's drafter, which Ollama would take for MTP; run `dflash2 upgrade` on it.")
    if found.kind != "drafter" or found.drafter is None or found.shard is not None:
        raise OllamaError(f"{path} is no DFlash drafter in one GGUF file; give the target first, then the drafter.")
    for finding in found.problems:
        if finding.level == "error":
            raise OllamaError(f"{path} cannot draft: {finding.key} is {finding.found}; {finding.fix}.")
    if not found.drafter.block_size:
        raise OllamaError(f"{path} names no block size; convert it again with --block-size.")
    return found, found.drafter, found.drafter.block_size


def _check_base(server: Server, plan: Plan) -> None:
    """What can be known of a target that the server has; the rest of `dflash2 check` needs its file.

    One that it has yet to pull is left unchecked.
    """
    if full_name(str(plan.base)) not in map(full_name, server.models()):
        return
    base = show(server, str(plan.base))
    info = read_gguf_info(plan.drafter)
    taps = info.metadata.get(info.own("target_layers"))
    hidden_size = info.integer(info.own("embedding_length"))
    if base.embedding_length not in (None, hidden_size):
        raise OllamaError(
            f"{plan.drafter} is for targets of hidden size {hidden_size}, and {base.name} has {base.embedding_length};"
            " use the target that the drafter was trained for."
        )
    if base.block_count and isinstance(taps, tuple) and max(map(int, taps), default=0) > base.block_count:
        raise OllamaError(
            f"{plan.drafter} reads layer {max(map(int, taps))} of its target, and {base.name} has {base.block_count}"
            " layers; use the target that the drafter was trained for."
        )


def _named(blobs: Iterable[Blob]) -> dict[str, str]:
    """Digests by file name, with nothing in it that the server refuses; parts of a split model keep their numbers."""
    named: dict[str, str] = {}
    for blob in blobs:
        name = _NO_NAME.sub("_", blob.path.name)
        while name in named:
            name = f"_{name}"
        named[name] = blob.digest
    return named


def _no_progress(what: str, done: int, total: int | None) -> None:
    """For callers that do not ask."""
