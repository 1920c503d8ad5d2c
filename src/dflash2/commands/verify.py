"""`dflash2 verify`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash2.commands.measuring import chosen_prompts, depths, llama_options, pair_options, prompt_options, save
from dflash2.commands.terminal import FILE, counting, errors
from dflash2.commands.verify_tables import show_comparisons, show_distribution, show_exactness

if TYPE_CHECKING:
    from dflash2.evidence import Comparison, Engine, LlamaServerEngine, Prompt, PythonEngine, Setting

_Found = tuple[bool, dict[str, Any]]  # whether it passed, and what the result file holds
_EXACT_PROMPTS, _EXACT_TOKENS = 3, 400  # beyond 256 positions llama.cpp may split a row's attention among threads


@click.command()
@click.argument("target", type=FILE, required=False)
@click.argument("drafter", type=FILE, required=False)
@click.option("--url", help="A running llama-server that drafts, in the place of TARGET and DRAFTER.")
@click.option("--reference-url", help="Another one without a drafter, to compare it with.")
@click.option("--exact", is_flag=True, help="Ask only whether rows do not depend on how many are evaluated together.")
@click.option(
    "--verify",
    "modes",
    type=click.Choice(["coupled", "match", "rejection"]),
    multiple=True,
    default=("coupled", "match"),
    show_default=True,
    help="Ways to verify sampled requests; rejection is tested in distribution.",
)
@prompt_options
@click.option("-n", "--tokens", type=click.IntRange(min=1), default=100, show_default=True, help="Per text.")
@click.option("--depth", "depths", callback=depths, multiple=True, default=("most",), show_default=True)
@click.option("--every-setting", is_flag=True, help="Every prompt under every sampler chain, not one of them in turn.")
@click.option("--draws", type=click.IntRange(min=100), default=2000, show_default=True, help="For rejection.")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=1, show_default=True)
@click.option("--strict", is_flag=True, help="Near-ties count as differences.")
@pair_options
@click.option("--json", "output", type=FILE, help="Also write the result as JSON.")
def verify(target: Path | None, drafter: Path | None, url: str | None, **options: Any) -> None:
    """Is the output of the pair TARGET, DRAFTER (GGUF) that of the target alone? Exit status 1 if not."""
    from dflash2 import evidence

    if (url is None) == (target is None or drafter is None):
        raise click.UsageError("give TARGET and DRAFTER, or --url of a running llama-server.")
    if url is not None and (options["exact"] or "rejection" in options["modes"]):
        raise click.UsageError("--exact and --verify rejection need the files TARGET and DRAFTER.")
    prompts = chosen_prompts(options)
    models: dict[str, Path] = {}
    if url is not None:
        with closing(evidence.LlamaServerEngine(url)) as server:
            passed, found = _over_url(server, prompts, options)
            about = server.about()
    else:
        assert target is not None and drafter is not None
        with evidence.opened(target, drafter, llama_options(target, options)) as engine:
            passed, found = (_exact if options["exact"] else _in_process)(engine, prompts, options)
            about, models = engine.about(), {"target": target, "drafter": drafter}
    rows = found.pop("rows")
    save("verify", options, engine=about, models=models, rows=rows, summary={"passed": passed, **found})
    if not passed:
        sys.exit(1)


def _in_process(engine: PythonEngine, prompts: Sequence[Prompt], options: dict[str, Any]) -> _Found:
    """Token for token under the ways that a seed decides, in distribution under the other."""
    from dflash2 import evidence

    seeded = tuple(setting for setting in evidence.IN_PROCESS if setting.verify in (None, *options["modes"]))
    passed, found = True, dict[str, Any](rows=[])
    if seeded:
        settings = (*evidence.GREEDILY, *seeded)
        passed, found = _compare(engine, prompts, options, settings, n_ctx=engine.llm.n_ctx())
    if "rejection" in options["modes"]:
        engine.llm.verify = "rejection"
        with counting("testing distributions") as tick:
            tests = evidence.check_distribution(
                engine,
                prompts,
                depth=options["depths"][0],
                n_draws=options["draws"],
                n_tokens=options["tokens"],
                n_ctx=engine.llm.n_ctx(),
                chat=options["chat"],
                seed=options["seed"],
                progress=tick,
            )
        show_distribution(tests)
        found["rows"] += [{"kind": "distribution", **asdict(test)} for test in tests]
        passed &= bool(tests) and not any(test.fallen for test in tests)
    return passed, found


def _over_url(server: LlamaServerEngine, prompts: Sequence[Prompt], options: dict[str, Any]) -> _Found:
    from dflash2 import evidence

    if options["reference_url"]:
        with closing(evidence.LlamaServerEngine(options["reference_url"])) as reference:
            settings = (*evidence.GREEDILY, *evidence.OVER_URL)
            return _compare(server, prompts, options, settings, n_ctx=server.n_ctx, reference=reference)
    settings = evidence.GREEDILY
    if server.seeds_by_position(server.tokens_of(prompts[0], chat=options["chat"])):
        settings += evidence.OVER_URL
    else:
        errors.print(
            "Sampled texts are left out: this server draws the n-th token with its n-th random number, so they can be "
            "compared with those of a server without a drafter alone (--reference-url).",
            markup=False,
        )
    return _compare(server, prompts, options, settings, n_ctx=server.n_ctx)


def _compare(
    engine: Engine, prompts: Sequence[Prompt], options: dict[str, Any], settings: Sequence[Setting], **more: Any
) -> _Found:
    from dflash2 import evidence

    with counting("comparing texts") as tick:
        outcome = evidence.verify(
            engine,
            prompts,
            settings=settings,
            every_setting=options["every_setting"],
            depths=options["depths"],
            n_tokens=options["tokens"],
            chat=options["chat"],
            seed=options["seed"],
            progress=tick,
            **more,
        )
    show_comparisons(outcome, engine)
    passed = bool(outcome.comparisons) and outcome.unchanged and not (options["strict"] and outcome.ties)
    summary = {
        "tokens_equal": outcome.n_equal,
        "differences": len(outcome.differences),
        "near_ties": len(outcome.ties),
        "accepted": outcome.n_accepted,
        "accepted_length": outcome.accepted_length,
        "most_errors": outcome.most_errors,
        "left_out": list(outcome.left_out),
    }
    return passed, {"rows": [_row(one) for one in outcome.comparisons], **summary}


def _row(one: Comparison) -> dict[str, Any]:
    stats = one.run.stats
    return {
        "kind": "text",
        "prompt": one.prompt,
        "category": one.category,
        "setting": str(one.setting),
        "depth": "most" if one.depth is None else one.depth,
        "prompt_tokens": one.n_prompt,
        "tokens_equal": one.n_equal,
        "cycles": stats.cycles,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "difference": None if one.difference is None else {**asdict(one.difference), "is_tie": one.difference.is_tie},
    }


def _exact(engine: PythonEngine, prompts: Sequence[Prompt], options: dict[str, Any]) -> _Found:
    from dflash2 import evidence

    texts, n_ctx = _exact_texts(engine, prompts, options["chat"]), engine.llm.n_ctx()
    most = engine.most if isinstance(engine.most, int) else 1
    with counting("comparing rows") as tick:
        outcome = evidence.exactness(engine.llm, [text[:n_ctx] for text in texts], range(2, most + 2), progress=tick)
    show_exactness(outcome)
    broken = None if outcome.broken_by is None else asdict(outcome.broken_by)
    return outcome.exact, {"rows": [{"kind": "width", **asdict(one)} for one in outcome.widths], "broken_by": broken}


def _exact_texts(engine: PythonEngine, prompts: Sequence[Prompt], chat: bool) -> list[list[int]]:
    """A few texts of several prompts each, since what happens may depend on their length."""
    texts: list[list[int]] = [[]]
    for prompt in prompts:
        texts[-1] += engine.tokens_of(prompt, chat=chat)
        if len(texts[-1]) >= _EXACT_TOKENS:
            texts[-1] = texts[-1][:_EXACT_TOKENS]
            if len(texts) == _EXACT_PROMPTS:
                break
            texts.append([])
    return [text for text in texts if text]
