"""docs/inspect.md names every JSON field and every check."""

import re
from pathlib import Path

import pytest
from factories import make_drafter, make_target

from dflash2.converter import availability, check, inspect, list_dict

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "inspect.md").read_text()
NAMED = set(re.findall(r"`([a-z0-9_]+)`", DOCS))


def keys_of(value) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


@pytest.fixture
def pair(tmp_path):
    return make_drafter(tmp_path / "drafter"), make_target(tmp_path / "target.gguf")


def test_every_json_field_is_documented(pair):
    drafter, target = pair
    documents = [inspect(path).to_dict(tensors=True) for path in pair]
    documents += [check(drafter, target).to_dict(), list_dict(availability())]
    assert keys_of(documents) - NAMED == set()


def test_every_check_is_documented():
    sources = [(ROOT / "converter" / "checking" / name).read_text() for name in ("drafter_checks.py", "pairing.py")]
    made = set(re.findall(r"\b(?:ok|error|warning|make)\(\s*\"([a-z0-9_]+)\"", "\n".join(sources)))
    documented = set(re.findall(r"`([a-z0-9_]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", DOCS, re.M))))
    assert len(made) > 25
    assert made <= documented
