"""`dflash2 ollama create`: a model with its draft on an Ollama server."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash2.commands.pair import pair_options, ready_pair
from dflash2.commands.settings import setting_options, settings_of
from dflash2.commands.terminal import FILE, HELP, HOST, console, errors, progress_display
from dflash2.modelfiles import DRAFT_NUM_PREDICT, DRAFT_QUANTIZATIONS, check_settings

if TYPE_CHECKING:
    from dflash2.modelfiles.ollama import Plan

# A target that the server has: other names are those of the Hub and of published pairs.
_OF_THE_SERVER = "ollama:"
_CREATED_SCHEMA = "dflash2.ollama-create/1"
_TYPES = ", ".join(DRAFT_QUANTIZATIONS["gguf"])


@click.command(context_settings=HELP)
@click.argument("name")
@pair_options
@click.option("-f", "--file", "modelfile", type=FILE, help="A Modelfile with FROM and DRAFT, instead of TARGET.")
@click.option(
    "--draft-num-predict", type=click.IntRange(min=1), help="Draft tokens a cycle. Default: the block size less 1."
)
@click.option("--quantize", metavar="TYPE", help=f"What the server converts the target to: {_TYPES}.")
@click.option("--draft-quantize", metavar="TYPE", help="The same of the draft, which must be F16 or BF16.")
@setting_options
@HOST
@click.option("--json", "as_json", is_flag=True, help="The result as JSON (docs/ollama.md has the schema).")
def create(
    name: str,
    target: str | None,
    drafter: str | None,
    modelfile: Path | None,
    draft_num_predict: int | None,
    quantize: str | None,
    draft_quantize: str | None,
    host: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Make the model NAME on an Ollama server, of TARGET with the draft DRAFTER, and see that the draft is attached.

    TARGET is a GGUF file, a Hub id (owner/name[:QUANT]), the name of a published pair (`dflash2 list`), which names
    its drafter too, or ollama:MODEL, a model that the server has. Files that the server has are not sent again.
    """
    from dflash2.modelfiles import ollama as on_server

    if (target is None) == (modelfile is None):
        raise click.UsageError("Give either TARGET and DRAFTER, or a Modelfile with -f.")
    settings = settings_of(options)
    check_settings(settings)
    if draft_num_predict is not None:
        settings[DRAFT_NUM_PREDICT] = (str(draft_num_predict),)
    how = {key: options[key] for key in ("revision", "drafter_revision", "offline", "outtype", "no_check")}
    with on_server.Server(host) as server:
        server.version()  # before anything is fetched or hashed
        plan = on_server.with_settings(_plan(target, drafter, modelfile, how), settings)
        with progress_display() as progress:
            made = on_server.create(
                server, name, plan, quantize=quantize, draft_quantize=draft_quantize, progress=progress
            )
    if made.drafter_version == 2 and on_server.predates_dflash2(made.version):
        errors.print(
            f"note: the llama.cpp of Ollama {made.version} is older than DFlash 2; `dflash2 ollama runner install` "
            "gives it one that knows it",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    if as_json:
        click.echo(json.dumps({"schema": _CREATED_SCHEMA, **asdict(made)}, indent=2))
        return
    console.print(
        f"{made.name}: the draft is attached ({made.draft}), {made.draft_num_predict} draft tokens; "
        f"sent {made.sent_bytes / 1e6:.1f} MB, {made.kept_bytes / 1e6:.1f} MB were there",
        markup=False,
        soft_wrap=True,
    )


# With -f there is no TARGET.
next(parameter for parameter in create.params if parameter.name == "target").required = False


def _plan(target: str | None, drafter: str | None, modelfile: Path | None, how: dict[str, Any]) -> Plan:
    """What the command line asks for, files fetched and converted, the pair checked."""
    from dflash2.modelfiles import ollama as on_server

    if modelfile is not None:
        plan = on_server.plan_of_modelfile(modelfile)
        if plan.files:
            ready_pair(str(plan.files[0]), str(plan.drafter), **how)
        return plan
    assert target is not None
    if not target.startswith(_OF_THE_SERVER):
        return on_server.plan_of_pair(ready_pair(target, drafter, **how))
    if drafter is None or how["revision"] or how["drafter_revision"]:
        raise click.UsageError(f"{target} needs a DRAFTER that is a GGUF file, and no revision.")
    return on_server.Plan(Path(drafter), base=target.removeprefix(_OF_THE_SERVER))
