"""Fixtures shared by all tests: the demo pair, its drafters as GGUF, and llama.cpp's source and server."""

from pathlib import Path

import pytest

from dflash2.converter import convert
from dflash2.demo import DemoPair, demo_pair
from dflash2.patches import source


@pytest.fixture(scope="session")
def pair() -> DemoPair:
    return demo_pair()


@pytest.fixture(scope="session")
def target_path(pair) -> Path:
    return pair.target


@pytest.fixture(scope="session")
def drafter_dir(pair) -> Path:
    return pair.drafter


@pytest.fixture(scope="session")
def drafter_v1_dir(pair) -> Path:
    return pair.drafter_v1


@pytest.fixture(scope="session")
def prompts(pair) -> list[str]:
    return list(pair.prompts)


@pytest.fixture(scope="session")
def drafter_gguf(pair, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("drafter") / "drafter-f32.gguf"
    convert(pair.drafter, pair.target, output, outtype="f32")
    return output


@pytest.fixture(scope="session")
def drafter_v1_gguf(pair, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("drafter-v1") / "drafter-v1-f32.gguf"
    convert(pair.drafter_v1, pair.target, output, outtype="f32")
    return output


@pytest.fixture(scope="session")
def llama_cpp_source() -> Path:
    """Upstream's source tree, from the pinned sdist."""
    return source()
