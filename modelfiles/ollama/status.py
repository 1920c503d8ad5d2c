"""Is the draft of a model on an Ollama server used? What can be known of it, and what to do if not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from packaging.version import InvalidVersion, Version

from dflash2.errors import OllamaError
from dflash2.modelfiles.ollama import runners
from dflash2.modelfiles.ollama.runners import Runner
from dflash2.modelfiles.ollama.server import Server
from dflash2.modelfiles.ollama.server_log import Acceptance, last_acceptance
from dflash2.modelfiles.ollama.shown import Shown, full_name, show
from dflash2.modelfiles.runner import RunnerStatus
from dflash2.modelfiles.server_probe import probe_server

SCHEMA = "dflash2.ollama-status/1"
# The newest release that was looked at: its llama.cpp, b10488, is older than DFlash 2 there.
LAST_WITHOUT_DFLASH2 = "0.33.0-rc2"

_INSTALL = "run `dflash2 ollama runner install` where the server is: it gets a llama-server that knows DFlash 2"

Engaged = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class ModelStatus:
    """How one model stands.

    `base` and `draft` are digests of blobs, `draft_num_predict` the number of draft tokens that it asks for.
    `engaged` says whether drafting is in use, `because` how that is known; `advice` is what to do or to beware of.
    """

    name: str
    loaded: bool
    base: str | None
    draft: str | None
    draft_num_predict: int
    engaged: Engaged
    because: str
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Status:
    """How a server stands: `knows_dflash2` is None if that cannot be known, `because` says how it is known."""

    url: str
    version: str
    knows_dflash2: bool | None
    because: str
    models: tuple[ModelStatus, ...]
    last_acceptance: Acceptance | None
    advice: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """JSON values; the schema is in docs/ollama.md."""
        return {"schema": SCHEMA, **asdict(self)}


def status(server: Server, model: str | None = None, *, runner: RunnerStatus | None = None) -> Status:
    """Ask `server` about `model`, or about all that it has loaded.

    Args:
        server: the server.
        model: a model that it has.
        runner: how its folder of programs stands; None if that is not on this machine, or was not found.

    Raises OllamaError if it does not answer, or has no such model.
    """
    version = server.version()
    loaded = server.running()
    asked = [show(server, name) for name in (loaded if model is None else [model])]
    here = runners.running() if server.is_local else ()
    others = _others(server, asked)
    models = tuple(_model_status(one, _is_loaded(one.name, loaded), here, others, server.is_local) for one in asked)
    drafting = any(one.engaged == "yes" for one in models)
    knows, because = _knows_dflash2(version, runner)
    return Status(
        server.url,
        version,
        knows,
        because,
        models,
        last_acceptance() if drafting else None,
        ()
        if knows is not False
        else (_INSTALL if runner is None or runner.state == "not installed" else runner.message,),
    )


def _knows_dflash2(version: str, runner: RunnerStatus | None) -> tuple[bool | None, str]:
    """Seen by running the program that drafts, else known by the version; and how."""
    program = None if runner is None else runner.server if runner.state == "installed" else runner.original
    if program is not None:
        probe = probe_server(program)
        return probe.dflash2, f"{program} {probe.reason or 'drafted with a DFlash 2 drafter'}"
    if predates_dflash2(version):
        return False, f"releases up to {LAST_WITHOUT_DFLASH2} have a llama.cpp older than DFlash 2"
    return None, "its llama-server is not on this machine, or was not found, and the version does not tell"


def predates_dflash2(version: str) -> bool:
    """Whether an Ollama of this version is known to come with a llama.cpp without DFlash 2."""
    try:
        # 0.0.0 is what builds from source say.
        return Version("0.0.0") < Version(version) <= Version(LAST_WITHOUT_DFLASH2)
    except InvalidVersion:
        return False


def _others(server: Server, asked: Sequence[Shown]) -> list[Shown]:
    """The other models with a base of those that have a draft: they would share a runner."""
    bases = {one.base for one in asked if one.draft and one.base}
    if not bases:
        return []
    names = {full_name(one.name) for one in asked}
    found = []
    for name in server.models():
        # A damaged model that nobody asked about is no reason to fail.
        with contextlib.suppress(OllamaError):
            if full_name(name) not in names and (one := show(server, name)).base in bases:
                found.append(one)
    return found


def _model_status(
    model: Shown, loaded: bool, here: Iterable[Runner], others: Iterable[Shown], is_local: bool
) -> ModelStatus:
    process = next((runner for runner in here if model.base and runner.base == model.base), None)
    engaged, because, advice = _engagement(model, loaded, process, is_local)
    beware = [*advice, *_hazards(model, process, others)]
    return ModelStatus(
        model.name, loaded, model.base, model.draft, model.draft_num_predict, engaged, because, tuple(beware)
    )


def _engagement(
    model: Shown, loaded: bool, process: Runner | None, is_local: bool
) -> tuple[Engaged, str, tuple[str, ...]]:
    """Whether it drafts, how that is known, and what to do if not."""
    if model.draft is None:
        return "no", "it has no draft", ("make one that has: `dflash2 ollama create NAME TARGET DRAFTER`",)
    if model.draft_num_predict <= 0:
        advice = "set it to the drafter's block size less 1, by creating the model again"
        return "no", f"draft_num_predict is {model.draft_num_predict}, which turns drafting off", (advice,)
    if not loaded:
        return "unknown", "it is not loaded", (f"load it, as with `ollama run {model.name}`, and ask again",)
    if process is None:
        why = "no llama-server process of it can be seen" if is_local else "the server is on another machine"
        return "unknown", why, ("ask on the machine of the server, as a user who sees its processes",)
    return _engagement_of(process, model)


def _engagement_of(process: Runner, model: Shown) -> tuple[Engaged, str, tuple[str, ...]]:
    """The same by what its process was started with and says."""
    stop = f"stop what shares its base (`ollama stop NAME`, {model.name} too), then use {model.name} first"
    if process.draft is None:
        return "no", "its llama-server was started without a draft", (stop,)
    if process.draft != model.draft:
        return "no", "the draft of another model with the same base is loaded", (stop,)
    if process.speculates() is False:
        return "no", "its llama-server has the draft but says that it does not use it", ("look into the server's log",)
    n_tokens = "" if process.n_max is None else f", {process.n_max} tokens a cycle"
    return "yes", f"its llama-server runs with this draft as {process.spec_type}{n_tokens}", ()


def _hazards(model: Shown, process: Runner | None, others: Iterable[Shown]) -> Iterable[str]:
    if model.draft is None:
        return
    for other in others:
        if other.base == model.base and other.draft != model.draft:
            what = "another draft" if other.draft else "no draft"
            yield (
                f"{other.name} has the same base and {what}: whichever is loaded first decides for both, until it is"
                " unloaded"
            )
    if process is not None and process.n_parallel > 1:
        yield (
            f"it serves {process.n_parallel} requests at once (OLLAMA_NUM_PARALLEL): drafting gains less with each,"
            " 1 is its case"
        )


def _is_loaded(name: str, loaded: Iterable[str]) -> bool:
    return full_name(name) in map(full_name, loaded)
