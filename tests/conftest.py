"""Fixtures shared by all tests: the demo pair, its drafters as GGUF, and llama.cpp's source and server."""

import os
from contextlib import contextmanager
from pathlib import Path

# What lies in the cache must not decide what is tested; a path here runs every test on that library.
os.environ["DFLASH2_LIBRARY"] = os.environ.get("DFLASH2_LIBRARY", "stock")

import pytest
from generation import EXACT
from llama_server import LlamaServer
from ollama_server import OllamaServer
from server_pair import EXACT_CACHE_OPTIONS, EXACT_DRAFT_CACHE_OPTIONS, server_arguments

from dflash2 import DFlashLlama
from dflash2.constants import LLAMA_CPP_COMMIT
from dflash2.converter import convert
from dflash2.demo import DemoPair, demo_pair
from dflash2.gguf_info import read_gguf_info
from dflash2.patches import Build, build, source


@pytest.fixture(scope="session")
def demo() -> DemoPair:
    return demo_pair()


@pytest.fixture(scope="session")
def target_path(demo) -> Path:
    return demo.target


@pytest.fixture(scope="session")
def n_vocab(target_path) -> int:
    return len(read_gguf_info(target_path).metadata["tokenizer.ggml.tokens"])


@pytest.fixture(scope="session")
def drafter_dir(demo) -> Path:
    return demo.drafter


@pytest.fixture(scope="session")
def drafter_v1_dir(demo) -> Path:
    return demo.drafter_v1


@pytest.fixture(scope="session")
def prompts(demo) -> list[str]:
    return list(demo.prompts)


@pytest.fixture(scope="session")
def drafter_gguf(demo, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("drafter") / "drafter-f32.gguf"
    convert(demo.drafter, demo.target, output, outtype="f32")
    return output


@pytest.fixture(scope="session")
def drafter_v1_gguf(demo, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("drafter-v1") / "drafter-v1-f32.gguf"
    convert(demo.drafter_v1, demo.target, output, outtype="f32")
    return output


@pytest.fixture(scope="session")
def llama_cpp_source() -> Path:
    """Upstream's source tree, from the pinned sdist."""
    return source()


@pytest.fixture(scope="session")
def patched() -> Build:
    """llama.cpp with the patches: its library and its server; DFLASH2_TEST_BASE names another base for the server."""
    return build(targets=("libs", "server"), base=os.environ.get("DFLASH2_TEST_BASE", LLAMA_CPP_COMMIT))


@pytest.fixture
def fresh(target_path, drafter_gguf):
    """Makes DFlashLlama objects that the test need not close."""
    made = []

    def make(**kwargs):
        options = {**EXACT, "depth": None, "auto_disable": False, **kwargs}
        made.append(DFlashLlama(target_path, drafter_gguf, **options))
        return made[-1]

    yield make
    for llama in made:
        llama.close()


@pytest.fixture(scope="session")
def exact_drafters(demo, tmp_path_factory):
    """In Q8_0, whose products do not depend on how many rows go together: the server injects other batches."""
    folder = tmp_path_factory.mktemp("drafters")
    for name, checkpoint in {"v2": demo.drafter, "v1": demo.drafter_v1}.items():
        convert(checkpoint, demo.target, folder / f"{name}.gguf", outtype="q8_0")
    return {name: folder / f"{name}.gguf" for name in ("v2", "v1")}


@pytest.fixture
def serve(patched, target_path, tmp_path):
    """Starts the patched server, with a drafter or without, as long as the `with` block lasts.

    `environment`: variables set for it besides those of this process.
    """

    @contextmanager
    def start(drafter=None, *extra, environment=None):
        caches = (*EXACT_CACHE_OPTIONS, *(EXACT_DRAFT_CACHE_OPTIONS if drafter else ()))
        options = [*server_arguments(target_path, drafter), *caches, *extra]
        log = tmp_path / f"server-{len(list(tmp_path.glob('server-*.log')))}.log"
        with LlamaServer(patched.server, options, log, environment) as server:
            yield server

    return start


@pytest.fixture
def ollama():
    """A server that answers as Ollama does."""
    with OllamaServer() as ollama:
        yield ollama


@pytest.fixture
def server(ollama):
    """A connection to it."""
    from dflash2.modelfiles.ollama.server import Server

    with Server(ollama.host) as server:
        yield server
