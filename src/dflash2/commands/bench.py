"""`dflash2 bench`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash2.commands.bench_tables import show_change, show_measured
from dflash2.commands.measuring import chosen_prompts, depths, llama_options, pair_options, prompt_options, save
from dflash2.commands.terminal import FILE, counting, errors

if TYPE_CHECKING:
    from dflash2.evidence import Measured, Prompt, Variant


class _WithDefault(click.Group):
    """A group whose first argument need not be a command: `run` is meant then."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As a group does it."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_WithDefault)
def bench() -> None:
    """How much faster is it? `dflash2 bench TARGET DRAFTER` measures; `compare` compares two saved measurements.

    See `dflash2 bench run --help` for the options of measuring.
    """


@dataclass(frozen=True)
class _Pair:
    """What is measured, open: the run without drafting, the others, the files by role, and tokens of the context."""

    reference: Variant
    variants: tuple[Variant, ...]
    models: dict[str, Path]
    n_ctx: int


@bench.command()
@click.argument("target", type=FILE, required=False)
@click.argument("drafter", type=FILE, required=False)
@click.option("--also", type=FILE, multiple=True, help="Another drafter of TARGET; may be given several times.")
@click.option("--url", help="A running llama-server that drafts, in the place of TARGET and DRAFTER.")
@click.option("--reference-url", help="Another one without a drafter. Default: single-token requests to --url.")
@prompt_options
@click.option("-n", "--tokens", type=click.IntRange(min=2), default=200, show_default=True, help="Most per text.")
@click.option("--past-end", is_flag=True, help="Go on behind the end of a text, to -n tokens.")
@click.option("--depth", "depths", callback=depths, multiple=True, default=("most",), show_default=True)
@pair_options
@click.option("--json", "output", type=FILE, help="Also write every run as JSON.")
def run(target: Path | None, drafter: Path | None, url: str | None, **options: Any) -> None:
    """Measure the pair TARGET, DRAFTER (GGUF) against TARGET alone: tokens/s, accepted length, cost of a cycle."""
    from dflash2 import evidence
    from dflash2.native import device_bytes_in_use

    if (url is None) == (target is None or drafter is None):
        raise click.UsageError("give TARGET and DRAFTER, or --url of a running llama-server.")
    if url is None and options["reference_url"]:
        raise click.UsageError("--reference-url needs --url.")
    if url is not None and (options["also"] or options["depths"] != (None,)):
        raise click.UsageError("a server's drafter and depth are chosen when it is started: no --also, no --depth.")
    prompts, before = chosen_prompts(options), device_bytes_in_use()
    opened = _files(target, drafter, options) if url is None else _servers(url, options)
    with opened as pair:
        measured = _measure(pair, prompts, options)
        about = pair.reference.engine.about() if url is None else pair.variants[0].engine.about()
        memory = evidence.memory_taken(before) if url is None else None
    show_measured(measured, memory)
    summary = {"left_out": list(measured.left_out), "memory": None if memory is None else asdict(memory)}
    rows = evidence.bench_rows(measured, prompts)
    save("bench", options, engine=about, models=pair.models, rows=rows, summary=summary)


def _measure(pair: _Pair, prompts: tuple[Prompt, ...], options: dict[str, Any]) -> Measured:
    from dflash2 import evidence

    with counting("generating") as tick:
        return evidence.measure(
            pair.reference,
            pair.variants,
            prompts,
            n_tokens=options["tokens"],
            chat=options["chat"],
            past_end=options["past_end"],
            n_ctx=pair.n_ctx,
            progress=tick,
        )


@contextmanager
def _files(target: Path | None, drafter: Path | None, options: dict[str, Any]) -> Iterator[_Pair]:
    """Every drafter beside a copy of the target of its own; the first one's generates without drafting."""
    from dflash2 import evidence

    assert target is not None and drafter is not None
    drafters = [drafter, *options["also"]]
    with ExitStack() as stack:
        given = llama_options(target, options)
        engines = [stack.enter_context(evidence.opened(target, one, given)) for one in drafters]
        variants = []
        for path, engine in zip(drafters, engines, strict=True):
            name = path.name if [one.name for one in drafters].count(path.name) == 1 else str(path)
            for depth in dict.fromkeys(options["depths"]):
                shown = f"depth {engine.most if depth is None else depth}"
                variants.append(evidence.Variant(f"{name}, {shown}", engine, depth))
        models = {"target": target, "drafter": drafter}
        models |= {f"drafter {number}": path for number, path in enumerate(options["also"], 2)}
        reference = evidence.Variant(evidence.PLAIN, engines[0], 0)
        yield _Pair(reference, tuple(variants), models, engines[0].llm.n_ctx())


@contextmanager
def _servers(url: str, options: dict[str, Any]) -> Iterator[_Pair]:
    from dflash2 import evidence

    with ExitStack() as stack:
        server = stack.enter_context(closing(evidence.LlamaServerEngine(url)))
        if options["reference_url"]:
            other = stack.enter_context(closing(evidence.LlamaServerEngine(options["reference_url"])))
            reference = evidence.Variant(evidence.PLAIN, other)
        else:
            reference = evidence.Variant(evidence.PLAIN, server, 0)
            errors.print(
                "Without --reference-url the time of a token without drafting is that of a request for one token, "
                "which costs the server more than a token within a text does.",
                markup=False,
            )
        yield _Pair(reference, (evidence.Variant("llama-server", server),), {}, server.n_ctx)


@bench.command()
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
def compare(first: Path, second: Path) -> None:
    """Ratios of the saved measurement SECOND to FIRST, prompt by prompt."""
    from dflash2 import evidence

    before, after = (evidence.read_result(path, "bench") for path in (first, second))
    show_change(evidence.compare_benches(before, after))
