"""docs/engines.md has every recipe and every JSON field."""

import re
from pathlib import Path

from dflash2.modelfiles import RECIPES, launch, pair_names

DOCS = (Path(__file__).parents[1] / "docs" / "engines.md").read_text()


def test_table_is_that_of_the_recipes():
    rows = [
        f"| `{one.key}` | {one.title} | {one.runs_on} | {one.version} | "
        f"{one.tokens(8)}{' at most' if one.counts == 'by itself' else ''} | {one.proof} |"
        for one in RECIPES
    ]
    assert "\n".join(rows) in DOCS


def test_every_json_field_is_documented():
    named = set(re.findall(r"`(\w+)`", DOCS))
    for one in RECIPES:
        said = launch(one, pair_names("qwen3-4b")).to_dict()
        steps = {key for step in said["steps"] for key in step}
        kinds = {step["kind"] for step in said["steps"]}
        assert set(said) | steps | kinds <= named
