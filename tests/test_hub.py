"""The gate to the Hub, against a real server on loopback, in processes of their own (HF_ENDPOINT is read at import)."""

import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from factories import make_drafter
from factories_tokenizers import train_byte_level, write_target_config
from hub_server import HubServer, Repository

from dflash2.gguf_info import read_gguf_info
from dflash2.hub import is_repo_id, read_license, resolve_drafter, resolve_target

COMMIT = "c" * 40
CARD = b"---\nlicense: apache-2.0\nbase_model: org/big\n---\n# Drafter\n"
WEIGHTS = bytes(range(256)) * 8
CALL = """
import json, sys
from dflash2 import hub
from dflash2.errors import HubError
function, spec, options = json.loads(sys.argv[1])
steps = []
try:
    found = getattr(hub, function)(spec, progress=lambda *step: steps.append(step), **options)
except HubError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({
        "path": str(found.path), "repo_id": found.repo_id, "revision": found.revision, "license": found.license,
        "files": {file.name: file.sha256 for file in found.files}, "steps": steps,
    }))
"""


def drafter_files() -> dict[str, bytes]:
    return {
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "README.md": CARD,
        "config.json": b'{"architectures": ["DFlash2DraftModel"]}',
        "model-00001-of-00002.safetensors": WEIGHTS,
        "model-00002-of-00002.safetensors": WEIGHTS[::-1],
        "model.safetensors.index.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "figures/speed.png": b"png",
    }


def target_files() -> dict[str, bytes]:
    return {
        "README.md": CARD,
        "config.json": b'{"model_type": "qwen3"}',
        "generation_config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "original/params.json": b"{}",
        "tokenizer.json": b'{"model": {}}',
        "tokenizer_config.json": b"{ }",
        "tokenizer.model": b"spm",
        "merges.txt": b"a b\n",
        "chat_template.jinja": b"{{ messages }}",
        "big.gguf": b"GGUF",
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Client:
    """Calls the gate in a new process that knows the server as the Hub; the cache is a folder of the test."""

    def __init__(self, url: str, home: Path):
        self.home = home
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
        self.environment = {**kept, "HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        self.environment["HF_HUB_DISABLE_TELEMETRY"] = "1"

    def call(self, function: str, spec: str, environment=None, preexec_fn=None, **options) -> dict:
        done = subprocess.run(
            [sys.executable, "-c", CALL, json.dumps([function, spec, options])],
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=preexec_fn,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def drafter(self, spec: str = "org/drafter", **options) -> dict:
        return self.call("resolve_drafter", spec, **options)

    def target(self, spec: str = "org/big", **options) -> dict:
        return self.call("resolve_target", spec, **options)


@pytest.fixture
def hub():
    with HubServer({"org/drafter": Repository(drafter_files()), "org/big": Repository(target_files())}) as server:
        yield server


@pytest.fixture
def client(hub, tmp_path) -> Client:
    return Client(hub.url, tmp_path / "hf")


def test_a_drafter_comes_with_card_config_and_safetensors_only(hub, client):
    found = client.drafter()
    wanted = [
        "README.md",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert hub.downloaded() == wanted
    assert list(found["files"]) == wanted
    folder = Path(found["path"])
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == WEIGHTS[::-1]
    assert found["repo_id"] == "org/drafter"
    assert found["revision"] == folder.name == COMMIT
    assert found["license"] == "apache-2.0"


def test_large_files_carry_the_stated_sha256(client):
    files = client.drafter()["files"]
    assert files["model-00001-of-00002.safetensors"] == _sha256(WEIGHTS)
    assert files["config.json"] is None


def test_a_target_comes_without_weights(hub, client):
    found = client.target()
    wanted = {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    }
    assert set(hub.downloaded()) == set(found["files"]) == wanted


def test_a_drafter_in_a_folder_of_its_own_leaves_the_weights_at_the_top(hub, client):
    files = {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "dflash/config.json": b"{ }",
        "dflash/model.safetensors": WEIGHTS[1:],
        "dflash/mask_embedding.pt": b"zip",
        "dflash/optimizer.bin": b"",
    }
    hub.repositories["org/mimo"] = Repository(files)
    client.drafter("org/mimo")
    assert hub.downloaded() == [
        "config.json",
        "dflash/config.json",
        "dflash/model.safetensors",
        "dflash/mask_embedding.pt",
    ]


def test_a_training_step_comes_from_its_consolidated_folder(hub, client):
    files = {
        "README.md": CARD,
        "model/shard-00001-model-00001-of-00001.safetensors": WEIGHTS,
        "model/.hf_metadata/config.json": b"{ }",
        "model/consolidated/config.json": b"{}",
        "model/consolidated/model-00001-of-00001.safetensors": WEIGHTS[1:],
        "optim/state.pt": b"pickle",
    }
    hub.repositories["org/step"] = Repository(files)
    assert set(client.drafter("org/step")["files"]) == {
        "README.md",
        "model/consolidated/config.json",
        "model/consolidated/model-00001-of-00001.safetensors",
    }
    del files["model/consolidated/config.json"], files["model/consolidated/model-00001-of-00001.safetensors"]
    assert set(client.drafter("org/step")["files"]) == {
        "README.md",
        "model/shard-00001-model-00001-of-00001.safetensors",
        "model/.hf_metadata/config.json",
    }


def test_progress_ends_at_the_size_of_what_was_needed(client):
    steps = client.drafter()["steps"]
    needed = [data for name, data in drafter_files().items() if name.startswith(("README", "config", "model"))]
    total = sum(map(len, needed))
    assert steps[-1] == [total, total]
    assert all(before[0] <= after[0] for before, after in pairwise(steps))
    assert {step[1] for step in steps} == {total}


def test_what_is_in_the_cache_is_not_downloaded_again(hub, client):
    first = client.drafter()
    before = hub.downloaded()
    second = client.drafter()
    assert hub.downloaded() == before
    assert {**second, "steps": []} == {**first, "steps": []}


def test_a_broken_download_goes_on_where_it_stopped(hub, client):
    # The library keeps what came in pieces of 10 MB.
    large = os.urandom(24 << 20)
    hub.repositories["org/large"] = Repository(
        {"config.json": b"{}", "model.safetensors": large}, cuts={"model.safetensors": 15 << 20}
    )
    found = client.drafter("org/large")
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == large
    ranges = [r.range for r in hub.requests if r.method == "GET" and r.path.endswith("model.safetensors")]
    assert ranges == [None, f"bytes={10 << 20}-"]
    assert found["steps"][-1] == [len(large) + 2, len(large) + 2]


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, client):
    hub.repositories["org/drafter"].branches = ("main", "v2")
    assert client.drafter(revision="v2")["revision"] == COMMIT
    assert client.drafter(revision=COMMIT)["revision"] == COMMIT
    assert any(request.path.endswith("/revision/v2") for request in hub.requests)


def test_offline_takes_the_cache_and_asks_nobody(hub, client):
    online = client.drafter()
    asked = len(hub.requests)
    for offline in (
        client.drafter(offline=True),
        client.drafter(environment={"HF_HUB_OFFLINE": "1"}),
        client.drafter(offline=True, revision=COMMIT),
    ):
        assert {**offline, "steps": []} == {**online, "steps": []} | {"files": dict(sorted(online["files"].items()))}
    assert len(hub.requests) == asked


def test_the_token_is_sent_from_the_usual_place(hub, client):
    hub.repositories["org/drafter"].token = "hf_secret"
    assert client.drafter(environment={"HF_TOKEN": "hf_secret"})["revision"] == COMMIT
    client.home.mkdir(exist_ok=True)
    (client.home / "token").write_text("hf_secret")
    hub.repositories["org/drafter"].commit = "d" * 40
    assert client.drafter()["revision"] == "d" * 40


REFUSALS = {
    "no such repository": (
        (404, "RepoNotFound"),
        "The Hub has no model org/drafter, or it is private; check the spelling, or log in with `hf auth login`.",
    ),
    "no such repository, not logged in": (
        (401, "RepoNotFound"),
        "The Hub has no model org/drafter, or it is private; check the spelling, or log in with `hf auth login`.",
    ),
    "token not valid": (
        (401, ""),
        "The Hub refused access to org/drafter (status 401); log in with `hf auth login` or set HF_TOKEN.",
    ),
    "gated": (
        (403, "GatedRepo"),
        "org/drafter is gated; accept its terms on the Hub, then log in with `hf auth login` or set HF_TOKEN.",
    ),
    "forbidden": (
        (403, ""),
        "The Hub refused access to org/drafter (status 403); log in with `hf auth login` or set HF_TOKEN.",
    ),
    "too many requests": (
        (429, ""),
        "The Hub limits requests (status 429) and did not give org/drafter; wait a few minutes and run it again.",
    ),
    "server error": (
        (500, ""),
        "The Hub answered with status 500 for org/drafter; run it again later, or use --offline.",
    ),
    "unavailable": (
        (503, ""),
        "The Hub answered with status 503 for org/drafter; run it again later, or use --offline.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_refusal_is_one_sentence(hub, client, case):
    hub.repositories["org/drafter"].refusal, sentence = REFUSALS[case]
    assert client.drafter() == {"error": sentence}


def test_an_unknown_revision_is_named(client):
    sentence = "org/drafter has no revision 'v9'; give a branch, tag or commit of it."
    assert client.drafter(revision="v9") == {"error": sentence}


def test_offline_without_a_copy_says_so(client):
    cache = client.home / "hub"
    tail = f"is in the cache {cache}; run once without --offline and with HF_HUB_OFFLINE unset."
    assert client.drafter(offline=True) == {"error": f"Nothing of org/drafter {tail}"}
    client.drafter()
    sentence = f"Nothing of org/drafter at revision 'v9' {tail}"
    assert client.drafter(offline=True, revision="v9") == {"error": sentence}


def test_no_connection_names_the_address(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    error = Client(url, tmp_path).drafter()["error"]
    assert error == (
        f"The connection to the Hub ({url}) failed (ConnectError); check the network and run it again, or use what"
        " is in the cache with --offline."
    )


def test_another_sha256_than_stated_is_refused_and_not_kept(hub, client):
    name = "model-00001-of-00002.safetensors"
    hub.repositories["org/drafter"].corrupt = frozenset({name})
    sentence = f"{name} of org/drafter arrived with another SHA-256 than the Hub states ({_sha256(WEIGHTS)}); it was"
    assert client.drafter() == {"error": f"{sentence} removed, run it again."}
    assert not list(client.home.rglob(name))
    hub.repositories["org/drafter"].corrupt = frozenset()
    assert (Path(client.drafter()["path"]) / name).read_bytes() == WEIGHTS


def test_a_full_disk_is_one_sentence(hub, client):
    hub.repositories["org/drafter"].files["model-00001-of-00002.safetensors"] = bytes(1 << 20)

    def allow_small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    error = client.drafter(preexec_fn=allow_small_files)["error"]
    assert error == (
        f"Cannot keep the download of org/drafter in {client.home / 'hub'}: File too large; make room and run it"
        " again, or set HF_HUB_CACHE to another folder."
    )


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a\\..\\b.safetensors", "C:x.safetensors"]
)
def test_names_that_lead_out_of_the_folder_stop_the_download(hub, client, name):
    hub.repositories["org/drafter"].files[name] = b"x"
    error = client.drafter()["error"]
    assert error == f"org/drafter holds a file named {name!r}, which could leave its folder; nothing was downloaded."
    assert hub.downloaded() == []


def test_a_colon_in_a_name_is_harmless(hub, client):
    hub.repositories["org/drafter"].files["figures/speed:old.png"] = b"x"
    assert client.drafter()["revision"] == COMMIT


def test_a_repository_of_gguf_files_is_no_tokenizer_folder(hub, client):
    hub.repositories["org/quants"] = Repository({"README.md": CARD, "big-Q4_K_M.gguf": b"GGUF"})
    sentence = "org/quants has GGUF files and no config.json; download one of them and give its path."
    assert client.target("org/quants") == {"error": sentence}
    assert hub.downloaded() == []


def test_a_local_path_wins_over_an_id_of_the_same_spelling(hub, client, tmp_path, monkeypatch):
    (tmp_path / "org" / "drafter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = client.drafter()
    assert (found["path"], found["repo_id"], found["revision"]) == ("org/drafter", None, None)
    sentence = "A revision (main) is given, but org/drafter is a local path; leave it out."
    assert client.drafter(revision="main") == {"error": sentence}
    assert hub.requests == []


CONVERT = """
import sys
from dflash2 import hub
from dflash2.converter import convert
drafter, target = hub.resolve_drafter("org/drafter"), hub.resolve_target("org/big")
print(*convert(drafter, target, sys.argv[1]).notes, sep="\\n")
"""


def test_a_pair_of_hub_ids_converts(hub, client, tmp_path):
    pytest.importorskip("tokenizers")
    make_drafter(tmp_path / "drafter")
    folder = write_target_config(train_byte_level(tmp_path / "target"))
    files = dict(_contents(tmp_path / "drafter"))
    hub.repositories["org/drafter"] = Repository({"README.md": CARD, **files})
    hub.repositories["org/big"] = Repository({"model.safetensors": WEIGHTS, **dict(_contents(folder))}, commit="d" * 40)
    output = tmp_path / "out.gguf"
    command = [sys.executable, "-c", CONVERT, str(output)]
    done = subprocess.run(command, env=client.environment, capture_output=True, text=True, check=True)
    assert done.stdout == "Licence of the drafter: apache-2.0.\n"
    metadata = read_gguf_info(output).metadata
    assert metadata["general.name"] == "Drafter"
    assert metadata["general.source.revision"] == COMMIT
    assert metadata["dflash2.source.target.revision"] == "d" * 40
    inputs = [metadata[f"dflash2.input.{n}.name"] for n in range(metadata["dflash2.input.count"])]
    assert inputs == [
        "drafter/README.md",
        "drafter/config.json",
        "drafter/model.safetensors",
        "target/config.json",
        "target/tokenizer.json",
    ]


def test_the_name_of_a_published_pair_is_all_the_command_needs(hub, client, tmp_path):
    pytest.importorskip("tokenizers")
    make_drafter(tmp_path / "drafter")
    folder = write_target_config(train_byte_level(tmp_path / "target"))
    hub.repositories["incoai/Qwen3.8-27B-DFlash2"] = Repository(dict(_contents(tmp_path / "drafter")))
    hub.repositories["Qwen/Qwen3.8-27B"] = Repository({"model.safetensors": WEIGHTS, **dict(_contents(folder))})
    program = Path(sys.executable).with_name("dflash2-convert")
    command = [program, "qwen3.8-27b", "--outtype", "Q8_0"]
    done = subprocess.run(
        command, env=client.environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.startswith("dflash-Qwen3.8-27B-DFlash2-Q8_0.gguf: 36 tensors")
    metadata = read_gguf_info(tmp_path / "dflash-Qwen3.8-27B-DFlash2-Q8_0.gguf").metadata
    assert metadata["general.source.huggingface.repository"] == "incoai/Qwen3.8-27B-DFlash2"
    assert not [
        request for request in hub.requests if request.path.startswith("/Qwen/") and "safetensors" in request.path
    ]


def _contents(folder: Path) -> list[tuple[str, bytes]]:
    return [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]


BAD_IDS = [
    "qwen",
    "a/b/c",
    "org/",
    "/abs",
    "../up",
    "org/..",
    "org/a b",
    "org/na--me",
    "org/x.git",
    "o" * 60 + "/" + "n" * 60,
]


@pytest.mark.parametrize(
    "text", [*BAD_IDS, "", "org/é", "org/name\n", "https://hub/org/name", ".org/name", "org/name-"]
)
def test_ill_formed_ids_are_refused_before_any_request(text):
    assert not is_repo_id(text)


def test_something_that_is_neither_path_nor_id_is_named(hub, client):
    sentence = "'qwen3.safetensors' is neither a path that exists nor a Hub id; give a path, or an id such as org/name."
    assert client.target("qwen3.safetensors") == {"error": sentence}
    assert hub.requests == []


def test_local_paths_need_no_library(tmp_path):
    assert resolve_drafter(tmp_path).path == tmp_path
    assert resolve_target(str(tmp_path)).repo_id is None


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: cc-by-nc-nd-4.0\n---\n", "cc-by-nc-nd-4.0"),
        ("---\nlicense: other\nlicense_name: lab-terms\n---\n", "lab-terms"),
        ("---\nlicense: other\n---\n", "other"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ("---\nlicense: {\n---\n", None),
        ("no front matter", None),
    ],
)
def test_the_licence_is_that_of_the_card(tmp_path, card, license):
    (tmp_path / "README.md").write_text(card)
    assert read_license(tmp_path) == license
