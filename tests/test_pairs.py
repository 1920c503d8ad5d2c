"""From names to a ready pair of GGUF files, against a Hub on loopback (in processes of their own: HF_ENDPOINT)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories import make_drafter, make_target
from hub_server import HubServer, Repository

from dflash2.converter import inspect
from dflash2.errors import GGUFError, HubError, OptionError, OutputError, TargetMismatchError
from dflash2.modelfiles import check_pair, resolve_pair
from dflash2.modelfiles.gguf_choice import choose_drafter, choose_target, split_quant

CALL = """
import json, sys
from dflash2.errors import Dflash2Error
from dflash2.modelfiles import resolve_pair
arguments, options = json.loads(sys.argv[1])
steps = []
try:
    pair = resolve_pair(*arguments, progress=lambda *step: steps.append(step), **options)
except Dflash2Error as error:
    print(json.dumps({"error": str(error)}))
else:
    models = {
        name: {"path": str(one.path), "real": str(one.real_path), "label": one.label, "repo_id": one.repo_id,
               "revision": one.revision, "n_parts": one.n_parts}
        for name, one in (("target", pair.target), ("drafter", pair.drafter))
    }
    print(json.dumps({**models, "block_size": pair.block_size, "steps": steps}))
"""
COMMIT = "c" * 40


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A target and its drafter, as a folder and as a GGUF file."""
    folder = tmp_path_factory.mktemp("models")
    target = make_target(folder / "target.gguf")
    pair = resolve_pair_in(folder / "cache", str(target), str(make_drafter(folder / "drafter")))
    (folder / "drafter.gguf").write_bytes(pair.drafter.path.read_bytes())
    return folder


def resolve_pair_in(cache: Path, *arguments: str, **options):
    """`resolve_pair` with a cache of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH2_CACHE", str(cache))
        return resolve_pair(*arguments, **options)


@pytest.fixture(scope="module")
def hub(models):
    target, drafter = (models / "target.gguf").read_bytes(), (models / "drafter.gguf").read_bytes()
    checkpoint = {path.name: path.read_bytes() for path in sorted((models / "drafter").iterdir())}
    repositories = {
        "org/target-GGUF": Repository({"README.md": b"-", "t-Q8_0.gguf": b"", "t-q4_k_m.gguf": target}),
        "org/split-GGUF": Repository(
            {"Q8_0/t-Q8_0-00001-of-00002.gguf": target, "Q8_0/t-Q8_0-00002-of-00002.gguf": b""}
        ),
        "org/drafter": Repository(checkpoint),
        "org/drafter-GGUF": Repository({"config.json": b"{}", "d-BF16.gguf": b"", "d-F16.gguf": drafter}),
        "org/weights": Repository({"config.json": b"{}", "model.safetensors": b""}),
        # The published pair of that size: its drafter's repository, and its target as GGUF at llama.cpp's.
        "z-lab/Qwen3-4B-DFlash-b16": Repository(checkpoint),
        "ggml-org/Qwen3-4B-GGUF": Repository({"t-Q4_K_M.gguf": target}),
    }
    with HubServer(repositories) as server:
        yield server


class Client:
    """Calls `resolve_pair` in a new process that knows the server as the Hub; both caches are the test's."""

    def __init__(self, hub: HubServer, home: Path):
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        self.environment = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
        self.environment["DFLASH2_CACHE"] = str(home / "cache")
        hub.requests.clear()

    def resolve(self, *arguments: object, **options: object) -> dict:
        done = subprocess.run(
            [sys.executable, "-c", CALL, json.dumps([[*map(str, arguments)], options])],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def client(hub, tmp_path) -> Client:
    return Client(hub, tmp_path)


def test_local_files_are_taken_as_they_are(models):
    target, drafter = models / "target.gguf", models / "drafter.gguf"
    pair = resolve_pair(str(target), str(drafter))
    assert (pair.target.path, pair.drafter.path, pair.block_size) == (target, drafter, 4)
    assert (pair.target.label, pair.target.repo_id, pair.target.revision) == (str(target), None, None)


def test_a_checkpoint_folder_is_converted_once_and_again_when_it_changes(models, tmp_path):
    target, folder = str(models / "target.gguf"), make_drafter(tmp_path / "dflash-mine")
    first = resolve_pair_in(tmp_path / "cache", target, str(folder))
    assert inspect(first.drafter.path).kind == "drafter"
    assert first.drafter.path.parent == tmp_path / "cache" / "drafters"
    assert first.drafter.path.name.startswith("dflash-mine-BF16-")
    written = first.drafter.path.stat().st_mtime_ns
    again = resolve_pair_in(tmp_path / "cache", target, str(folder))
    assert (again.drafter.path, again.drafter.path.stat().st_mtime_ns) == (first.drafter.path, written)
    other_type = resolve_pair_in(tmp_path / "cache", target, str(folder), outtype="f32")
    make_drafter(folder, seed=1)
    other_weights = resolve_pair_in(tmp_path / "cache", target, str(folder))
    other_target = make_target(tmp_path / "other.gguf", metadata={})
    renamed = resolve_pair_in(tmp_path / "cache", str(other_target), str(folder))
    assert len({one.drafter.path for one in (first, other_type, other_weights)}) == 3
    assert renamed.drafter.path == other_weights.drafter.path  # the same target elsewhere


def test_a_target_and_a_checkpoint_from_the_hub(client, hub):
    found = client.resolve("org/target-GGUF", "org/drafter")
    assert found["target"]["path"].endswith(f"/{COMMIT}/t-q4_k_m.gguf")
    assert found["target"] | {"path": "", "real": ""} == {
        "path": "", "real": "", "label": "org/target-GGUF", "repo_id": "org/target-GGUF", "revision": COMMIT,
        "n_parts": 1,
    }  # fmt: skip
    assert (found["drafter"]["repo_id"], found["drafter"]["revision"]) == ("org/drafter", COMMIT)
    assert Path(found["drafter"]["path"]).name.startswith("dflash-drafter-BF16-")
    assert {step[0] for step in found["steps"]} == {
        "fetching the drafter", "fetching the target", "converting the drafter"
    }  # fmt: skip
    assert found["steps"][-1][1] == found["steps"][-1][2] > 0
    assert "t-Q8_0.gguf" not in hub.downloaded()
    hub.requests.clear()
    offline = client.resolve("org/target-GGUF", "org/drafter", offline=True)
    assert hub.requests == []
    assert {**offline, "steps": []} == {**found, "steps": []}


def test_the_real_file_is_none_of_the_cache_s_links(client):
    found = client.resolve("org/target-GGUF", "org/drafter-GGUF:F16")
    for one in (found["target"], found["drafter"]):
        assert Path(one["path"]).is_symlink()
        assert not Path(one["real"]).is_symlink()
        assert Path(one["real"]).read_bytes()[:4] == b"GGUF"


def test_a_quantisation_chooses_files_of_a_drafter_repository(client, hub):
    found = client.resolve("org/target-GGUF", "org/drafter-GGUF:f16")
    assert found["block_size"] == 4
    assert hub.downloaded() == ["d-F16.gguf", "t-q4_k_m.gguf"]


def test_all_parts_of_a_split_target_are_fetched(client):
    found = client.resolve("org/split-GGUF:Q8_0", "org/drafter-GGUF:F16")
    assert found["target"]["path"].endswith("/Q8_0/t-Q8_0-00001-of-00002.gguf")
    assert found["target"]["n_parts"] == 2
    assert Path(found["target"]["path"].replace("00001-of", "00002-of")).is_file()


def test_the_name_of_a_published_pair_gives_both(client):
    found = client.resolve("qwen3-4b")
    assert found["target"]["label"] == "ggml-org/Qwen3-4B-GGUF"
    assert found["drafter"]["label"] == "z-lab/Qwen3-4B-DFlash-b16"
    assert client.resolve("Qwen3-4B:Q4_K_M", "org/drafter-GGUF:F16")["target"] == found["target"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["org/target-GGUF"], "'org/target-GGUF' is no published pair, so its drafter must be named too;"),
        (
            ["qwen3.8-27"],
            "'qwen3.8-27' is no file or folder here, no Hub id (owner/name) and no published pair; did you",
        ),
        (["org/target-GGUF", "nothing"], "'nothing' is no file or folder here, no Hub id"),
        (["org/target-GGUF", ""], "The name of a model is empty;"),
        (["org/target-GGUF:Q2_K", "org/drafter"], "org/target-GGUF has no GGUF file of quantisation 'Q2_K'; it has t-"),
        (["org/weights", "org/drafter"], "org/weights has no GGUF file of a model;"),
        (["org/absent", "org/drafter"], "The Hub has no model org/absent"),
        (["qwen3-8b"], "The Hub has no model z-lab/Qwen3-8B-DFlash-b16"),
        (["qwen3-8b", "org/drafter"], "No GGUF of Qwen/Qwen3-8B is at hand; give one as TARGET. The Hub has no model"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(client, arguments, sentence):
    assert sentence in client.resolve(*arguments)["error"]


def test_nothing_is_fetched_before_both_names_make_sense(client, hub):
    client.resolve("org/target-GGUF", "nothing")
    assert hub.requests == []


def test_a_checkpoint_that_is_not_converted_is_refused_before_the_target_is_fetched(client, hub, tmp_path):
    config = make_drafter(tmp_path / "nameless") / "config.json"
    config.write_text(config.read_text().replace('"block_size"', '"size_of_block"'))
    found = client.resolve("org/target-GGUF", tmp_path / "nameless")
    assert "nameless is not converted as it is:" in found["error"]
    assert "--block-size" in found["error"]
    assert "run dflash2-convert with it and give the GGUF file." in found["error"]
    assert hub.requests == []


def test_names_and_types_that_do_not_fit_into_a_file_s_name(models, tmp_path):
    folder = make_drafter(tmp_path / ("漢" * 80))
    pair = resolve_pair_in(tmp_path / "cache", str(models / "target.gguf"), str(folder))
    assert pair.drafter.path.name.startswith("dflash-" + "漢" * 33 + "-BF16-")
    with pytest.raises(OptionError, match=r"'\.\./x' is no type of a drafter; give one of f32, f16"):
        resolve_pair(str(models / "target.gguf"), str(folder), outtype="../x")


def test_a_wrong_file_is_told_from_a_drafter(models, tmp_path):
    target = str(models / "target.gguf")
    with pytest.raises(GGUFError, match="is no DFlash drafter; give the target first"):
        resolve_pair(target, target)
    with pytest.raises(GGUFError, match="is a folder; give the target's GGUF file"):
        resolve_pair(str(models / "drafter"), target)
    with pytest.raises(HubError, match=r"A revision \(main\) is given, but .* is a local path"):
        resolve_pair(target, target, revision="main")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="Cannot make the cache folder"):
        resolve_pair_in(tmp_path / "file", target, str(models / "drafter"))


def test_a_pair_that_does_not_fit_is_refused_or_reported(models, tmp_path):
    other = make_target(tmp_path / "other.gguf", vocab=300)
    pair = resolve_pair(str(other), str(models / "drafter.gguf"))
    with pytest.raises(TargetMismatchError, match=r"does not work with .*other.gguf: vocab_size is 288"):
        check_pair(pair)
    assert [finding.key for finding in check_pair(pair, warn_only=True).errors] == ["vocab_size"]
    assert check_pair(resolve_pair(str(models / "target.gguf"), str(models / "drafter.gguf"))).passes()


NAMES = [
    "README.md", "mmproj-x-Q4_K_M.gguf", "dflash-x-Q4_K_M.gguf", "x-BF16.gguf", "x-F16.gguf", "x-IQ4_0.gguf",
    "x-Q4_0.gguf", "big/x-Q6_K-00001-of-00002.gguf", "big/x-Q6_K-00002-of-00002.gguf", "x-UD-Q4_K_XL.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [
        ("f16", ["x-F16.gguf"]),
        ("Q4_0", ["x-Q4_0.gguf"]),
        ("Q4_K_XL", ["x-UD-Q4_K_XL.gguf"]),
        ("Q6_K", ["big/x-Q6_K-00001-of-00002.gguf", "big/x-Q6_K-00002-of-00002.gguf"]),
        (None, ["x-BF16.gguf"]),
    ],
)
def test_a_target_is_chosen_as_llama_cpp_does(quant, chosen):
    assert choose_target("org/x", NAMES, quant) == chosen


def test_q4_k_m_goes_first_and_q8_0_next():
    assert choose_target("org/x", ["a-F16.gguf", "a-Q8_0.gguf", "a-Q4_K_M.gguf"], None) == ["a-Q4_K_M.gguf"]
    assert choose_target("org/x", ["a-F16.gguf", "a-Q8_0.gguf"], None) == ["a-Q8_0.gguf"]


def test_a_drafter_beside_targets_is_the_file_named_so():
    assert choose_drafter("org/x", NAMES, None) == ["dflash-x-Q4_K_M.gguf"]
    with pytest.raises(HubError, match=r"no GGUF file of quantisation 'F16'; it has dflash-x-Q4_K_M"):
        choose_drafter("org/x", NAMES, "F16")
    with pytest.raises(HubError, match=r"lacks x-00002-of-00002.gguf, a part of x-00001-of-00002.gguf"):
        choose_target("org/x", ["x-00001-of-00002.gguf"], None)


@pytest.mark.parametrize(("spec", "parts"), [("a/b", ("a/b", None)), ("a/b:Q4", ("a/b", "Q4")), ("a/b:", ("a/b", ""))])
def test_a_quantisation_follows_a_colon(spec, parts):
    assert split_quant(spec) == parts
