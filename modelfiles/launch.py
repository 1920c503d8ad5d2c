"""The launch of one pair on one engine, ready to be shown."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2.errors import RecipeError
from dflash2.modelfiles.recipe_pair import PairNames
from dflash2.modelfiles.recipe_steps import Step, script
from dflash2.modelfiles.recipes import Recipe

SCHEMA = "dflash2.command/1"


@dataclass(frozen=True)
class Launch:
    """How `recipe` starts `pair`. `tokens` is the number of draft tokens as that engine counts them,
    None where the block size is not known to an engine that finds it by itself.
    """

    recipe: Recipe
    pair: PairNames
    tokens: int | None
    steps: tuple[Step, ...]
    notes: tuple[str, ...]

    @property
    def script(self) -> str:
        """The steps as a POSIX shell script."""
        return script(self.steps)

    def to_dict(self) -> dict[str, object]:
        """JSON values; the schema is in docs/engines.md."""
        return {
            "schema": SCHEMA,
            "engine": self.recipe.key,
            "version": self.recipe.version,
            "target": self.pair.target.text,
            "drafter": self.pair.drafter.text,
            "block_size": self.pair.block_size or None,
            "counts": self.recipe.counts,
            "tokens": self.tokens,
            "install": list(self.recipe.install),
            "steps": [step.to_dict() for step in self.steps],
            "script": self.script,
            "notes": list(self.notes),
            "source": self.recipe.source,
        }


def launch(recipe: Recipe, pair: PairNames) -> Launch:
    """How the engine of `recipe` starts `pair`; raises RecipeError if it cannot, with the reason."""
    reason = recipe.obstacle(pair)
    if reason is not None:
        raise RecipeError(f"{recipe.title} cannot run {pair.target.text} with {pair.drafter.text}: {reason}.")
    tokens = recipe.tokens(pair.block_size) if pair.block_size else 0
    notes = (*recipe.notes(pair), *recipe.limits, *_licence(pair))
    return Launch(recipe, pair, tokens or None, recipe.steps(pair, tokens), notes)


def _licence(pair: PairNames) -> tuple[str, ...]:
    if pair.entry is None:
        return ()
    if pair.entry.license is None:
        return ("No licence is on record for this drafter: look at its model card before you pass it on.",)
    terms = f" ({pair.entry.note})" if pair.entry.note else ""
    return (f"Licence of the drafter: {pair.entry.license}{terms}.",)
