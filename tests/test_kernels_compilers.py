"""What the GPU compilers say: no kernel spills under nvcc, and clang finds every Metal pointer's address space kept."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_libraries import KERNELS, PATCHES, SOURCES, metal_headers

from dflash2.patches import source

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
METAL = SOURCES / "ggml-metal" / "kernels" / "dflash2.metal"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_no_kernel_spills_on_any_architecture(tmp_path):
    kernels = sorted((SOURCES / "ggml-cuda").glob("dflash2-*-kernel.cuh"))
    instances = "".join(
        f"template __global__ void dflash2_conv_kernel<{taps}>(const float *, const float *, const float *, float *,"
        " int, int, int, int, int, int, int);\n"
        for taps in (2, 4)
    )
    names = ("dflash2_top_k_scan", "dflash2_top_k_merge", "dflash2_selector_kernel")
    used = f"void * used[] = {{{', '.join(f'(void *) {name}' for name in names)}}};\n"
    unit = tmp_path / "kernels.cu"
    unit.write_text("".join(f'#include "{kernel}"\n' for kernel in kernels) + instances + used)
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    command = [
        "nvcc",
        "-std=c++17",
        "-O3",
        *codes,
        "-Xptxas",
        "-v",
        "-fatbin",
        str(unit),
        "-o",
        str(tmp_path / "kernels.fatbin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills == [("0", "0")] * (5 * len(ARCHITECTURES))


def check_address_spaces(kernels: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Parse the Metal source as C++ for OpenCL, whose address spaces are the same four."""
    flags = [
        "-x",
        "clcpp",
        "-cl-std=clc++",
        "-Xclang",
        "-finclude-default-header",
        "-fsyntax-only",
        "-Wno-unknown-attributes",
    ]
    include = [f"-I{KERNELS / 'metal'}", f"-I{metal_headers(folder)}"]
    return subprocess.run(["clang", *flags, *include, str(kernels)], capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
def test_metal_pointers_keep_their_address_space(tmp_path):
    done = check_address_spaces(METAL, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    # OpenCL would take an unqualified pointer as generic, Metal refuses it
    code = re.sub(r"//.*", "", METAL.read_text())
    pointers = re.findall(r"(\w+)\s+(?:const\s+)?(?:float|int|uint|ulong|atomic_uint)\s*\*(?=\s*\w+\s*[,;)=])", code)
    assert len(pointers) >= 20
    assert set(pointers) <= {"device", "threadgroup"}


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("threadgroup ulong *       largest;", "device ulong * largest;"),
        ("device ulong * out;", "threadgroup ulong * out;"),
        ("device const float * xr = x ", "threadgroup const float * xr = x "),
    ],
)
def test_a_lost_address_space_is_found(tmp_path, right, wrong):
    text = METAL.read_text()
    assert right in text
    changed = tmp_path / "changed.metal"
    changed.write_text(text.replace(right, wrong))
    assert check_address_spaces(changed, tmp_path).returncode == 1


def test_metal_host_code_compiles_with_its_hooks(tmp_path):
    """Everything but the Objective-C: the files that the patch hooks into, parsed with our sources beside them."""
    ggml = source() / "ggml"
    tree = tmp_path / "tree"
    shutil.copytree(ggml / "src" / "ggml-metal", tree / "ggml" / "src" / "ggml-metal")
    patch = PATCHES / "backend" / "0050-metal-kernels.patch"
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run(["git", "apply", str(patch)], cwd=tree, env=environment, check=True)
    shutil.copytree(PATCHES / "src" / "ggml", tree / "ggml", dirs_exist_ok=True)
    include = [f"-isystem{ggml / folder}" for folder in ("include", "src")]
    for name in ("dflash2-metal", "ggml-metal-fusion", "ggml-metal-ops", "ggml-metal"):
        # <memory> comes with Apple's other headers
        command = ["g++", "-std=c++17", "-fsyntax-only", "-include", "memory", *include, f"{name}.cpp"]
        done = subprocess.run(
            command, cwd=tree / "ggml" / "src" / "ggml-metal", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
