"""docs/reference.md is what the commands say of themselves."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRITER = runpy.run_path(str(ROOT / "docs" / "reference.py"))


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def test_the_reference_is_not_stale(page):
    assert page == WRITER["reference"](), "run `make docs`"


@pytest.mark.parametrize("command", ["dflash2 convert", "dflash2 ollama runner install", "dflash2 verify"])
def test_commands_of_every_depth_are_there(page, command):
    assert f"## `{command}`\n" in page


def test_no_default_of_this_machine_is_written_down(page):
    assert str(Path.home()) not in page and str(ROOT) not in page
