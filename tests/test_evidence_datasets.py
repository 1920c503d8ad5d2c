"""Prompts from files, and from data sets of a Hub on loopback in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from hub_server import HubServer, Repository

from dflash2.errors import EvidenceError
from dflash2.evidence import Prompt, file_prompts

CALL = """
import json, sys
from dataclasses import asdict
from dflash2.errors import Dflash2Error
from dflash2.evidence import dataset_prompts
try:
    print(json.dumps([asdict(prompt) for prompt in dataset_prompts(sys.argv[1], most=2)]))
except Dflash2Error as error:
    print(json.dumps(str(error)))
"""


def lines(*entries):
    return "".join(json.dumps(entry) + "\n" for entry in entries)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "one\n\ntwo\n", [("one", ()), ("two", ())]),
        ("a.jsonl", lines({"question": "q", "answer": "a"}), [("q", ())]),
        ("a.jsonl", lines({"turns": ["first", "second"]}), [("first", ("second",))]),
        ("a.json", json.dumps([{"id": 3, "text": "t"}, "plain"]), [("t", ()), ("plain", ())]),
        ("a.jsonl", lines({"input": "context", "instruction": "do"}), [("do", ())]),
    ],
)
def test_files_are_read_by_their_suffix(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text)
    found = file_prompts(tmp_path / name)
    assert found == tuple(Prompt(f"own-{n}", "own", *pair) for n, pair in enumerate(expected, 1))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"x": 1}\n', "none of the fields prompt, question"),
        ("a.jsonl", "{", "cannot be read as .jsonl"),
        ("a.json", '[{"prompt": 3}]', "not a text or a list of texts"),
        ("a.json", "[" * 100_000, "cannot be read as .json"),
        ("a.txt", "\n\n", "holds no prompt"),
    ],
)
def test_what_holds_no_prompts_is_one_sentence(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(EvidenceError, match=said):
        file_prompts(tmp_path / name)
    with pytest.raises(EvidenceError, match="Cannot read"):
        file_prompts(tmp_path / "missing.txt")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("org/set", ["t1", "t2"]),
        ("org/set:train", ["r1"]),
        ("org/set:data/train.jsonl", ["r1"]),
        ("org/set:dev", "org/set has no JSON or Parquet file for dev; it has"),
        ("org/several", "has several files for test; name one: a/test.jsonl, b/test.jsonl"),
        ("org/parquet", "needs pyarrow"),
        ("no id", "is no Hub id"),
    ],
)
def test_data_sets_come_through_the_gate(spec, expected, tmp_path):
    if expected == "needs pyarrow" and _has_pyarrow():
        pytest.skip("pyarrow is installed")
    sets = {
        "org/set": {
            "README.md": b"card",
            "data/test.jsonl": lines({"question": "t1"}, {"question": "t2"}, {"question": "t3"}).encode(),
            "data/train.jsonl": lines({"question": "r1"}).encode(),
        },
        "org/several": {"a/test.jsonl": b"", "b/test.jsonl": b""},
        "org/parquet": {"main/test-00000-of-00001.parquet": b"PAR1"},
    }
    with HubServer({name: Repository(files) for name, files in sets.items()}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", CALL, spec]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        asked = [request.path for request in hub.requests if "/resolve/" in request.path]
    assert all(path.startswith("/datasets/org/") for path in asked)
    assert bool(asked) is isinstance(expected, list) or "pyarrow" in expected
    found = json.loads(done.stdout)
    if isinstance(expected, str):
        assert expected in found
    else:
        assert [prompt["text"] for prompt in found] == expected


def _has_pyarrow():
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return False
    return True
