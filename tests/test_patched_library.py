"""The library that the patches make: found, used, and equal in what it generates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash2.constants import GGML_VERSION, LLAMA_CPP_COMMIT, PATCHED_ABI_VERSION
from dflash2.patches import build, locate, read_series

_GENERATE = """
import json, sys
from dflash2 import DFlashLlama, native
from generation import EXACT, take
target, drafter, prompts = json.loads(sys.argv[1])
llm = DFlashLlama(target, drafter, **EXACT, depth=None, auto_disable=False)
texts = []
for prompt in prompts:
    for temperature in (0.0, 1.0):
        tokens = llm.tokenize(prompt.encode())
        llm.set_seed(7)
        texts.append(take(llm, tokens, 60, temp=temperature))
found = native.support()
print(json.dumps([texts, found.library.patched, found.missing, found.drafters, native.lattice_layout()]))
"""


def run(code: str, *arguments: str, library: str) -> str:
    environment = {**os.environ, "DFLASH2_LIBRARY": library, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_the_runtime_generates_the_same_tokens_with_the_patched_library(patched, demo, drafter_gguf):
    job = json.dumps([str(demo.target), str(drafter_gguf), list(demo.prompts[:3])])
    stock = json.loads(run(_GENERATE, job, library="stock"))
    ours = json.loads(run(_GENERATE, job, library=str(patched.libraries)))
    assert stock[1:] == [False, [], 2, 1]
    assert ours[1:4] == [True, [], 2]
    assert ours[0] == stock[0]
    assert all(len(tokens) == 60 for tokens in ours[0])


def test_the_runtime_finds_the_patched_build_by_itself(patched):
    code = "from dflash2 import native; l = native.library(); print(l.path, l.patched, l.reason, sep='\\n')"
    path, is_patched, reason = run(code, library="").splitlines()
    found = locate()
    assert found is not None
    assert found.finished >= patched.finished
    assert Path(path).parent == found.libraries
    assert (is_patched, reason) == ("True", f"it is the best patched build here ({found.backend}, key {found.key})")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_second_llama_is_in_a_process_that_uses_the_patched_one(patched):
    """llama_cpp loads libmtmd and libggml from its own folder all the same."""
    code = """
from dflash2 import native
native.device_names()
import llama_cpp._ggml, llama_cpp.mtmd_cpp
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps}
print(*sorted(f for f in files if any(part in f for part in ("libllama.so", "libggml-base.so", "libggml-cpu.so"))))
"""
    files = run(code, library=str(patched.libraries)).split()
    assert len(files) == 3
    assert {Path(file).parent for file in files} == {patched.libraries.resolve()}


def test_a_patched_library_says_what_it_is(patched):
    code = "import ctypes, sys; l = ctypes.CDLL(sys.argv[1]); print(l.dflash2_abi_version())"
    library = patched.libraries / "libllama.so"
    assert run(code, str(library), library="stock").strip() == str(PATCHED_ABI_VERSION)
    manifest = json.loads((patched.folder / "manifest.json").read_text())
    assert manifest["series"] == read_series().digest
    version = subprocess.run([patched.server, "--version"], capture_output=True, text=True, check=True)
    assert f"{LLAMA_CPP_COMMIT}+dflash2.{read_series().digest[:8]}" in version.stdout + version.stderr


def test_the_c_interface_refuses_layers_that_there_are_not(patched, target_path):
    code = """
import ctypes, sys
from dflash2 import native
from dflash2.native.loader import llama
native.silence()
module, _ = llama()
model = module.llama_model_load_from_file(sys.argv[1].encode(), module.llama_model_default_params())
context = module.llama_init_from_model(model, module.llama_context_default_params())
library = module._lib
switch, read = library.dflash2_set_embeddings_layer_inp, library.dflash2_get_embeddings_layer_inp
switch.restype, switch.argtypes = ctypes.c_bool, [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool]
read.restype, read.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_uint32]
print([switch(context, layer, True) for layer in (6, 7, 2**32 - 1)], read(context, 2), read(context, 99))
"""
    assert run(code, str(target_path), library=str(patched.libraries)).strip() == "[True, False, False] None None"


def test_the_c_interface_takes_null_for_nothing(patched):
    code = """
import ctypes, sys
from dflash2 import native
native.library()
from llama_cpp import llama_cpp
library = llama_cpp._lib
kept, rows = library.dflash2_get_embeddings_layer_inp, library.dflash2_get_embeddings_nextn
kept.restype = rows.restype = ctypes.c_void_p
print(library.dflash2_model_selector_top_k(None), library.dflash2_set_embeddings_layer_inp(None, 0, True) & 1)
library.dflash2_set_embeddings_nextn(None, True, False)
print(kept(None, 0), rows(None))
"""
    assert run(code, library=str(patched.libraries)).split() == ["0", "0", "None", "None"]


def test_the_stock_build_is_another_one(patched):
    stock = build(stock=True)
    assert stock.key != patched.key
    assert (stock.stock, stock.series, stock.abi) == (True, "", 0)


_INNER = """
#include "ggml-cpu.h"
extern "C" ggml_backend_reg_t dflash2_unchecked_init(void) { return ggml_backend_cpu_reg(); }
"""


@pytest.mark.parametrize(
    ("host", "version", "commit", "said"),
    [
        ("stock", GGML_VERSION, "unknown", ""),
        ("stock", GGML_VERSION, LLAMA_CPP_COMMIT, ""),
        ("stock", "0.25.4", "unknown", "it has another version of ggml"),
        ("patched", GGML_VERSION, f"{LLAMA_CPP_COMMIT[:7]}+dflash2.0123", ""),
        ("patched", GGML_VERSION, "1c1e57098", "it is of another commit"),
    ],
)
def test_a_loadable_backend_refuses_a_program_of_another_ggml(patched, tmp_path, host, version, commit, said):
    """The entry point of a module, compiled with the CPU backend of the library behind it."""
    root = read_series().folder / "src" / "ggml" / "src"
    tree = patched.folder / "llama.cpp" / "ggml"
    (tmp_path / "inner.cpp").write_text(_INNER)
    subprocess.run(
        [
            *(
                "c++",
                "-std=c++17",
                "-shared",
                "-fPIC",
                "-DGGML_BACKEND_SHARED",
                "-DGGML_BACKEND_BUILD",
                "-DGGML_SHARED",
            ),
            *(f'-DDFLASH2_GGML_VERSION="{version}"', f'-DDFLASH2_GGML_COMMIT="{commit}"'),
            *(f"-I{tree / 'include'}", f"-I{tree / 'src'}", root / "dflash2-module.cpp", tmp_path / "inner.cpp"),
            *("-o", tmp_path / "libggml-module.so", f"-L{patched.libraries}", "-lggml-cpu", "-lggml-base"),
        ],
        check=True,
    )
    code = """
import ctypes, os, sys
from dflash2 import native
from dflash2.native.loader import llama
native.device_names()
ggml = llama()[0]._lib
ggml.ggml_backend_load.restype, ggml.ggml_backend_load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
print(bool(ggml.ggml_backend_load(os.fsencode(sys.argv[1]))))
"""
    environment = {**os.environ, "DFLASH2_LIBRARY": "stock" if host == "stock" else str(patched.libraries)}
    command = [sys.executable, "-c", code, str(tmp_path / "libggml-module.so")]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == str(not said)
    assert said in result.stderr
