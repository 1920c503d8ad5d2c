"""The list of target architectures that can be tapped, derived again from the pinned source."""

import re
from pathlib import Path

from dflash2.constants import FINAL_TAP_ARCHITECTURES, SNAPSHOT_ARCHITECTURES, TAPPABLE_ARCHITECTURES


def model_classes(models: Path, marker: str) -> set[str]:
    """Model classes whose graph contains `marker`, and those that say `using graph = ` one of them."""
    found: set[str] = set()
    for path in models.glob("*.cpp"):
        text = path.read_text()
        if marker in text:
            found |= set(re.findall(r"void llama_model_(\w+)::load_arch_hparams", text))
    current = ""
    for line in (models / "models.h").read_text().splitlines():
        if match := re.match(r"struct llama_model_(\w+) :", line):
            current = match[1]
        elif (match := re.match(r"\s+using graph = llama_model_(\w+)::graph", line)) and match[1] in found:
            found.add(current)
    return found


def architectures(source: Path, marker: str) -> set[str]:
    """GGUF names of the architectures whose model class contains `marker`."""
    classes = model_classes(source / "src" / "models", marker)
    names = dict(re.findall(r"\{ (LLM_ARCH_\w+),\s*\"([^\"]+)\"", (source / "src" / "llama-arch.cpp").read_text()))
    factory = (source / "src" / "llama-model.cpp").read_text()
    cases = re.findall(r"((?:case LLM_ARCH_\w+:\s*)+)return new llama_model_(\w+)\(", factory)
    assert len(cases) > 100
    return {names[arch] for labels, name in cases if name in classes for arch in re.findall(r"LLM_ARCH_\w+", labels)}


def test_tappable_architectures_are_those_of_the_pinned_source(llama_cpp_source):
    assert architectures(llama_cpp_source, "t_layer_inp[") == TAPPABLE_ARCHITECTURES


def test_architectures_with_a_final_tap_are_those_of_the_pinned_source(llama_cpp_source):
    assert architectures(llama_cpp_source, "t_layer_inp[n_layer]") == FINAL_TAP_ARCHITECTURES


def test_architectures_with_snapshots_are_those_of_the_pinned_source(llama_cpp_source):
    source = (llama_cpp_source / "src" / "llama-arch.cpp").read_text()
    names = dict(re.findall(r"\{ (LLM_ARCH_\w+),\s*\"([^\"]+)\"", source))
    body = re.search(r"bool llm_arch_supports_rs_rollback\(.*?\n}", source, re.DOTALL)[0]
    listed = {names[arch] for arch in re.findall(r"case (LLM_ARCH_\w+):", body)}
    assert listed == SNAPSHOT_ARCHITECTURES
