"""`DFlashLlama.from_pretrained`: both files of a pair from a Hub on loopback, by name or pattern."""

import os
import subprocess
import sys
from fnmatch import fnmatch

import huggingface_hub
import pytest
from hub_server import HubServer, Repository

from dflash2.errors import Dflash2Error, HubError, PretrainedError
from dflash2.hub import HubFolders, fetch_files

PROGRAM = """
import sys, warnings
from dflash2 import DFlashLlama
folder, local = sys.argv[1:]
options = dict(n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False, depth=None, auto_disable=False)
where = {"local_dir": folder} if local == "yes" else {"cache_dir": folder}
llama = DFlashLlama.from_pretrained("org/target", "*q8_0.gguf", "org/drafter", "sub/*.gguf", **where, **options)
text = llama("def f(", max_tokens=24, temperature=0.0)["choices"][0]["text"]
print(llama.model_path, llama.drafter_path, llama.stats.accepted > 0, len(text) > 10, sep="\\n")
llama.close()
again = DFlashLlama.from_pretrained("org/target", "*q8_0.gguf", drafter_path=llama.drafter_path, **where, **options)
print(again("def f(", max_tokens=24, temperature=0.0)["choices"][0]["text"] == text)
again.close()
"""


@pytest.fixture(scope="module")
def hub(target_path, drafter_gguf):
    repositories = {
        "org/target": Repository(
            {"target-q8_0.gguf": target_path.read_bytes(), "target-f16.gguf": b"", "README.md": b"-"}
        ),
        "org/drafter": Repository({"sub/drafter.gguf": drafter_gguf.read_bytes(), "README.md": b"-"}),
    }
    with HubServer(repositories) as server:
        yield server


def run(hub: HubServer, tmp_path, local: str, **environment: str) -> list[str]:
    hub.requests.clear()
    hub_variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "files"), local],
        env={**os.environ, **hub_variables, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("local", ["no", "yes"])
def test_a_pair_is_downloaded_once_and_drafts(hub, tmp_path, local):
    first = run(hub, tmp_path, local)
    target, drafter, *checks = first
    assert target.startswith(str(tmp_path / "files"))
    assert fnmatch(drafter, f"{tmp_path}/files/*sub/drafter.gguf")
    assert checks == ["True", "True", "True"]
    assert sorted(hub.downloaded()) == ["sub/drafter.gguf", "target-q8_0.gguf"]
    assert run(hub, tmp_path, local, HF_HUB_OFFLINE="1") == first
    assert hub.requests == []


def test_what_the_hub_lacks_is_one_sentence(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda api=huggingface_hub.HfApi: api(endpoint=hub.url))
    with pytest.raises(HubError, match=r"The Hub has no model org/nothing"):
        fetch_files("org/nothing", ["*.gguf"], HubFolders(cache_dir=tmp_path))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("*.bin", r"org/target: no file matches '\*\.bin'.*target-f16\.gguf"), ("*.gguf", "2 files match")],
)
def test_a_pattern_must_name_one_file(hub, tmp_path, monkeypatch, pattern, message):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda api=huggingface_hub.HfApi: api(endpoint=hub.url))
    with pytest.raises(PretrainedError, match=message) as refused:
        fetch_files("org/target", [pattern], HubFolders(cache_dir=tmp_path))
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, Dflash2Error)
