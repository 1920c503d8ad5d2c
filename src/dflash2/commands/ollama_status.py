"""`dflash2 ollama status`: can an Ollama server draft, and does it?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dflash2.commands.terminal import HELP, HOST, console
from dflash2.errors import RunnerError

if TYPE_CHECKING:
    from dflash2.modelfiles.ollama import ModelStatus
    from dflash2.modelfiles.runner import RunnerStatus


@click.command(context_settings=HELP)
@click.argument("model", required=False)
@HOST
@click.option("--json", "as_json", is_flag=True, help="All facts as JSON (docs/ollama.md has the schema).")
def status(model: str | None, host: str | None, as_json: bool) -> None:
    """Say whether an Ollama server can draft, and whether MODEL, or each model that it has loaded, does."""
    from dflash2.modelfiles import ollama as on_server

    with on_server.Server(host) as server:
        found = on_server.status(server, model, runner=_runner() if server.is_local else None)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
        return
    knows = {True: "yes", False: "no", None: "unknown"}[found.knows_dflash2]
    _say(f"Ollama {found.version} at {found.url}")
    _say(f"its llama.cpp knows DFlash 2: {knows} ({found.because})")
    for advice in found.advice:
        _say(f"  {advice}", style="yellow")
    if not found.models:
        _say("no model is loaded")
    for one in found.models:
        _say_model(one)
    if found.last_acceptance is not None:
        last = found.last_acceptance
        length = "" if last.mean_length is None else f", accepted length {last.mean_length}"
        _say(f"last request that drafted, by the server's log: {last.accepted} of {last.drafted} accepted{length}")


def _runner() -> RunnerStatus | None:
    """How the folder of this machine's Ollama stands; None if it has none that is known."""
    from dflash2.modelfiles import runner

    try:
        return runner.runner_status(runner.find_folder())
    except (RunnerError, OSError):
        return None


_STYLES = {"yes": "green", "no": "yellow", "unknown": ""}


def _say_model(model: ModelStatus) -> None:
    drafts = f"draft {model.draft}, {model.draft_num_predict} draft tokens" if model.draft else "no draft"
    _say(f"{model.name}: {'loaded' if model.loaded else 'not loaded'}, {drafts}")
    _say(
        f"  drafting: {model.engaged} ({model.because})", style={"yes": "green", "no": "yellow"}.get(model.engaged, "")
    )
    for advice in model.advice:
        _say(f"  {advice}", style="yellow")


def _say(line: str, style: str = "") -> None:
    console.print(line, style=style, markup=False, soft_wrap=True)
