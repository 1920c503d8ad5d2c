"""What `dflash2 verify` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from dflash2.commands.terminal import cell, console

if TYPE_CHECKING:
    from dflash2.evidence import Comparison, Difference, DistributionTest, Engine, Exactness, Verification

_LITTLE = 1.3  # tokens per verify pass; a pass over several rows with its draft hardly ever costs less


def show_comparisons(outcome: Verification, engine: Engine) -> None:
    """How many texts and tokens are equal under each setting, and every difference with its judgement."""
    table = Table("", "texts", "equal tokens", "accepted", "length", "ties", "differ")
    groups: dict[str, list[Comparison]] = {}
    for one in outcome.comparisons:
        depth = "" if one.depth is None else f", depth {one.depth}"
        groups.setdefault(f"{one.setting}{depth}", []).append(one)
    for name, members in groups.items():
        cycles, accepted = (sum(getattr(one.run.stats, count) for one in members) for count in ("cycles", "accepted"))
        table.add_row(
            cell(name),
            str(len(members)),
            str(sum(one.n_equal for one in members)),
            str(accepted),
            f"{1 + accepted / cycles:.2f}" if cycles else "-",
            str(sum(one in outcome.ties for one in members)),
            str(sum(one in outcome.differences for one in members)),
        )
    console.print(table)
    for one in (*outcome.differences, *outcome.ties):
        if one.difference is not None:
            _show_difference(one, one.difference, engine)
    if outcome.left_out:
        console.print(f"left out, longer than the context: {', '.join(outcome.left_out)}", markup=False)
    if not outcome.comparisons:
        console.print("nothing was compared: no prompt fits the context; raise it with -c.")
    elif outcome.unchanged:
        console.print(
            f"The output is unchanged: {outcome.n_equal} tokens are equal with drafting and without. At 95% confidence "
            f"less than one accepted draft in {1 / outcome.most_errors:.0f} is wrong."
        )
        if outcome.accepted_length < _LITTLE:
            console.print(
                f"Acceptance is low: {outcome.accepted_length:.2f} tokens per verify pass. The drafter is of no use "
                "here; it may belong to another target."
            )
    else:
        console.print(f"The output CHANGES with drafting: {len(outcome.differences)} texts differ.", style="red")


def _show_difference(one: Comparison, difference: Difference, engine: Engine) -> None:
    from dflash2.evidence import END

    kind = "near-tie" if difference.is_tie else "DIFFERENT"
    tokens = (difference.without_drafting, difference.with_drafting)
    words = ("the end of the text" if token == END else f"{token} {engine.text_of([token])!r}" for token in tokens)
    without, drafted = words
    console.print(
        f"{kind}: {one.prompt}, {one.setting}, token {difference.position}: {without} without drafting, {drafted} with",
        markup=False,
        soft_wrap=True,
    )
    if difference.judgement is None:
        return
    console.print(f"  {difference.judgement.reason}", markup=False, soft_wrap=True)
    table = Table("logit of", *(f"{candidate.token}" for candidate in difference.judgement.candidates))
    table.add_row("", *(cell(repr(candidate.text)) for candidate in difference.judgement.candidates))
    for at, label in enumerate(difference.judgement.evaluations):
        table.add_row(label, *(f"{candidate.logits[at]:.6f}" for candidate in difference.judgement.candidates))
    console.print(table)


def show_distribution(tests: Sequence[DistributionTest]) -> None:
    """One line a test, and the verdict."""
    table = Table("in distribution", "chain", "prompt", "draws", "freedom", "p", "finds w of (90%)", "")
    for test in tests:
        table.add_row(
            test.question,
            str(test.sampling),
            cell(test.prompt or "all"),
            str(test.n),
            str(test.freedom),
            f"{test.p:.3g}",
            f"{test.detectable:.3f}",
            "DIFFERENT" if test.fallen else "",
        )
    console.print(table)
    verdict = "differs from" if any(test.fallen for test in tests) else "fits"
    console.print(f"What is drawn {verdict} the target's distribution (level 0.001 for all tests together, Holm).")


def show_exactness(outcome: Exactness) -> None:
    """One line a width, and the operation that breaks it."""
    table = Table("rows together", "compared", "equal bit for bit", "largest difference", "argmax changes", "first at")
    for one in outcome.widths:
        first = "-" if one.first is None else str(one.first)
        table.add_row(str(one.width), str(one.n_rows), str(one.n_equal), f"{one.most:.2e}", str(one.n_flips), first)
    console.print(table)
    if outcome.exact:
        console.print("Row-invariant: a row does not depend, bit for bit, on how many are evaluated with it.")
        return
    broken = outcome.broken_by
    if broken is None:
        console.print("Not row-invariant; operations computed one at a time all are, so a fused kernel is to blame.")
        return
    inputs = " x ".join(f"{name} ({kind})" for name, kind in zip(broken.inputs, broken.types, strict=True))
    where = "" if broken.layer is None else f" of layer {broken.layer}"
    console.print(
        f"Not row-invariant: {broken.operation} {broken.name}{where}, {inputs}, is the first operation that depends on "
        f"the number of rows (row {broken.row} of {broken.width}, by up to {broken.most:.2e}; the {broken.place} "
        "operations before it do not).",
        markup=False,
        soft_wrap=True,
    )
