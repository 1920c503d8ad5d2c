"""Nothing that a user can do ends the interpreter: every case of the table ends with one of our errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
from abort_cases import CASES, HARMLESS
from factories_targets import make_kind, random_drafter
from gguf_edit import edit_gguf
from llama_asserts import ANSWERS, FILES

from dflash2.converter import convert
from dflash2.errors import Dflash2Error
from dflash2.runtime.checks import check_devices

RUNNER = Path(__file__).with_name("abort_runner.py")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A sound target of each kind needed, and a drafter that fits them all."""
    folder = tmp_path_factory.mktemp("sound")
    kinds = {"qwen3", *(case.target["kind"] for case in CASES.values() if "kind" in case.target)}
    targets = {kind: make_kind(folder / f"{kind}.gguf", kind) for kind in kinds}
    drafter = folder / "drafter.gguf"
    convert(random_drafter(folder / "checkpoint"), targets["qwen3"], drafter, outtype="f32")
    return targets, drafter


def damaged(sound, path, changes):
    if "bytes" in changes:
        path.write_bytes(sound.read_bytes()[: changes["bytes"]])
        return path
    return edit_gguf(sound, path, **changes) if changes else sound


def job(pairs, case, folder, number):
    targets, drafter = pairs
    changes = dict(case.target)
    target = targets[changes.pop("kind", "qwen3")]
    return {
        "target": str(damaged(target, folder / f"{number}-target.gguf", changes)),
        "drafter": str(damaged(drafter, folder / f"{number}-drafter.gguf", case.drafter)),
        "options": case.options,
        "call": case.call,
        "before": case.before,
    }


def run(jobs, folder, name, **environment):
    (folder / f"{name}.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(RUNNER), str(folder / f"{name}.json"), str(folder / f"{name}-results.json")]
    subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True, timeout=300)
    return json.loads((folder / f"{name}-results.json").read_text())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Folders with libraries that are not what they should be."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "empty").mkdir()
    stock = Path(llama_cpp.__file__).parent / "lib"
    shutil.copytree(stock, folder / "bare")
    for library in (folder / "bare").glob("libllama.*"):
        library.write_bytes(library.read_bytes().replace(b"llama_set_embeddings_nextn", b"llama_set_embeddings_nXXXn"))
    return folder


@pytest.fixture(scope="module")
def outcomes(pairs, libraries, tmp_path_factory):
    """(exit status, error) of every case."""
    folder = tmp_path_factory.mktemp("jobs")
    cases = {**CASES, **HARMLESS}
    jobs = {name: job(pairs, case, folder, number) for number, (name, case) in enumerate(cases.items())}
    alone = [name for name, case in cases.items() if case.environment or case.before]
    results = run({name: job for name, job in jobs.items() if name not in alone}, folder, "shared")
    for number, name in enumerate(alone):
        environment = {key: str(libraries / value) for key, value in cases[name].environment.items()}
        results |= run({name: jobs[name]}, folder, f"alone-{number}", **environment)
    return results


@pytest.mark.parametrize("name", CASES)
def test_ends_with_our_error(outcomes, name):
    status, said = outcomes[name]
    case = CASES[name]
    assert status == 0, f"ended by signal {-status}"
    assert said.startswith(f"{case.error}: "), said
    assert case.says in said
    assert "\n" not in said


@pytest.mark.parametrize("name", HARMLESS)
def test_does_no_harm(outcomes, name):
    assert outcomes[name] == [0, ""]


def assertions(source):
    """(file, line) of every assertion in the files of `FILES`."""
    for entry in FILES:
        name, _, function = entry.partition("::")
        text = (source / name).read_text()
        if function:
            text = text[text.index(f"::{function}(") :]
            text = text[: text.index("\n}\n")]
        for line in text.splitlines():
            if "GGML_ASSERT(" in line or "GGML_ABORT(" in line:
                yield entry, line.strip()


def answer(line):
    return next((said for part, said in ANSWERS if part in line), None)


def test_every_assertion_on_the_way_has_an_answer(llama_cpp_source):
    found = list(assertions(llama_cpp_source))
    assert len(found) > 100
    assert [(name, line) for name, line in found if answer(line) is None] == []
    assert {part for part, _ in ANSWERS if not any(part in line for _, line in found)} == set()


def test_answers_that_name_a_case_name_one_that_is_run():
    named = {said for _, said in ANSWERS if not said.startswith(("checked:", "internal:", "unused:"))}
    assert named <= CASES.keys()


def test_a_drafter_must_reach_every_device_that_may_hold_what_it_shares():
    check_devices(("CUDA0", "CUDA1"), ("CUDA0",), shares_head=True)
    check_devices(("CUDA1",), ("CUDA0",), shares_head=False)
    check_devices((), (), shares_head=True)
    with pytest.raises(Dflash2Error, match="device_draft leaves out CUDA0"):
        check_devices(("CUDA1",), ("CUDA0", "CUDA1"), shares_head=True)
