"""What a build is asked for, in CMake's words: options of the backends, programs of the targets."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash2.errors import BuildError
from dflash2.patches.toolchain import Toolchain, backend_compiler

# ggml's own options stay at their defaults, as in llama-cpp-python's build: the numbers of both are then equal.
COMMON = {
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    # Neither built nor downloaded: a build needs no network.
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
BACKENDS = {
    "cpu": {},
    "cuda": {"GGML_CUDA": "ON"},
    "metal": {"GGML_METAL": "ON"},
    "vulkan": {"GGML_VULKAN": "ON"},
    "hip": {"GGML_HIP": "ON"},
}
# By the compiler's macro: GGML_NATIVE, which would find these out, is not to be had for a loadable CPU backend.
_X86_FEATURES = {
    "__AVX_VNNI__": "GGML_AVX_VNNI",
    "__AVXVNNI__": "GGML_AVX_VNNI",
    "__AVX512BW__": "GGML_AVX512",
    "__AVX512VBMI__": "GGML_AVX512_VBMI",
    "__AVX512VNNI__": "GGML_AVX512_VNNI",
    "__AVX512BF16__": "GGML_AVX512_BF16",
}


@dataclass(frozen=True)
class Target:
    """Something to build: CMake's names of it, the programs that prove it finished, and the options it needs.

    The options only add to a build, so that targets can follow one another in one folder.
    """

    cmake: tuple[str, ...]
    programs: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)


_TEST_PROGRAMS = ("test-backend-ops", "test-batch-alloc", "test-llama-archs")
TARGETS = {
    "libs": Target(("llama",)),
    "server": Target(("llama-server",), ("llama-server",)),
    "quantize": Target(("llama-quantize",), ("llama-quantize",)),
    # The client is in libggml, which is built for the server too: a libllama that is there already gets it that way.
    "rpc": Target(("ggml-rpc-server",), ("ggml-rpc-server",), {"GGML_RPC": "ON"}),
    "tests": Target(_TEST_PROGRAMS, _TEST_PROGRAMS, {"LLAMA_BUILD_TESTS": "ON"}),
    # What `dispatch.measure` runs; there is none without the patches.
    "measure": Target(("dflash2-measure",), ("dflash2-measure",)),
}
MODULE = "module"


def check_request(backend: str, targets: Sequence[str], stock: bool) -> None:
    """Raise BuildError for a backend or a target that there is not, or that this machine cannot build."""
    if backend not in BACKENDS:
        raise BuildError(f"There is no backend {backend!r}; choose from {', '.join(BACKENDS)}.")
    unknown = [name for name in targets if name not in TARGETS]
    if unknown or not targets:
        raise BuildError(
            f"There is no target {', '.join(unknown) or '(none given)'}; choose from {', '.join(TARGETS)}."
        )
    if stock and "measure" in targets:
        raise BuildError("A stock llama.cpp has no kernel table to measure; leave out either of the two.")
    if backend == "metal" and sys.platform != "darwin":
        raise BuildError("The backend metal can be built on macOS only.")


@dataclass(frozen=True)
class Extra:
    """What comes to the common options: for the backend, its compiler with version, and the user's own arguments."""

    options: dict[str, str]
    compiler: str | None
    arguments: tuple[str, ...]

    def identity(self) -> dict[str, object]:
        """What it adds to a build's identity: nothing for the plain CPU."""
        parts = {"backend_options": self.options, "backend_compiler": self.compiler, "cmake_args": list(self.arguments)}
        return {name: value for name, value in parts.items() if value}


def extra_options(backend: str, module: bool, toolchain: Toolchain) -> Extra:
    """Options for the backend, alone as a `module` or with all the rest; raises BuildError without its compiler."""
    options = dict(BACKENDS[backend])
    if backend == "cpu" and sys.platform == "darwin":
        options["GGML_METAL"] = "OFF"
    if module:
        options["GGML_BACKEND_DL"] = "ON"
        if backend != "cpu":
            options["GGML_CPU"] = "OFF"  # not wanted, and it would not have GGML_NATIVE, which a GPU's code needs
        elif "__x86_64__" in toolchain.macros:
            found = {option for macro, option in _X86_FEATURES.items() if macro in toolchain.macros}
            options.update({"GGML_NATIVE": "OFF", **dict.fromkeys(sorted(found), "ON")})
    return Extra(options, backend_compiler(backend), _cmake_arguments())


def _cmake_arguments() -> tuple[str, ...]:
    """The words of CMAKE_ARGS; raises BuildError for one that is no option, which CMake would ignore."""
    text = os.environ.get("CMAKE_ARGS", "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BuildError(f"CMAKE_ARGS is {text!r}, which cannot be read ({error}); quote it as for a shell.") from error
    for before, word in zip(["", *words], words, strict=False):
        takes_value = before.startswith("--") or before in {"-C", "-D", "-U", "-G", "-T", "-A"}
        if not word.startswith("-") and not takes_value:
            raise BuildError(f"CMAKE_ARGS has {word!r}, which is no option of CMake; write -DNAME=VALUE.")
    return tuple(words)
