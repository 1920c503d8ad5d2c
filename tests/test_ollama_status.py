"""Is the draft of a model on an Ollama server used? Asked of a server, and of real llama-server processes."""

import pytest
from llama_server import LlamaServer
from ollama_server import Model, digest_of
from server_pair import server_arguments

from dflash2.errors import OllamaError
from dflash2.modelfiles.ollama import predates_dflash2, status
from dflash2.modelfiles.ollama.runners import Runner, read_runner
from dflash2.modelfiles.ollama.server_log import Acceptance, last_acceptance

BASE, DRAFT, OTHER = ("sha256:" + digit * 64 for digit in "0ab")


def blob(folder, path):
    """A link to `path` that is named as Ollama names its blobs, and the blob's digest."""
    digest = digest_of(path.read_bytes())
    link = folder / digest.replace(":", "-")
    if not link.exists():
        link.symlink_to(path)
    return link, digest


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("0.33.0-rc2", True),
        ("0.32.14", True),
        ("0.33.0-rc3", False),
        ("0.33.0", False),
        ("0.40.1", False),
        ("0.0.0", False),
        ("0.33.0-rc2-3-gabcdef", False),
        ("", False),
        ("\x1b[31m", False),
    ],
)
def test_only_versions_that_are_known_to_be_older_than_dflash_2_are_called_so(ollama, server, version, old):
    assert predates_dflash2(version) is old
    ollama.version = version
    found = status(server)
    assert (found.version, found.knows_dflash2) == (version, False if old else None)
    assert (found.advice != ()) is old


def test_nothing_loaded_is_no_error(ollama, server):
    found = status(server)
    assert (found.url, found.models, found.last_acceptance) == (f"http://{ollama.host}", (), None)


def test_a_model_that_the_server_lacks_is_an_error(server):
    with pytest.raises(OllamaError, match="model 'gone:latest' not found"):
        status(server, "gone")


@pytest.mark.parametrize(
    ("model", "loaded", "engaged", "because", "advice"),
    [
        (Model(BASE), False, "no", "it has no draft", "`dflash2 ollama create NAME TARGET DRAFTER`"),
        (Model(BASE, DRAFT), False, "unknown", "it is not loaded", "as with `ollama run mine`"),
        (Model(BASE, DRAFT), True, "unknown", "no llama-server process of it can be seen", "ask on the machine"),
        (
            Model(BASE, DRAFT, {"draft_num_predict": 0}),
            True,
            "no",
            "is 0, which turns drafting off",
            "block size less 1",
        ),
        (Model(BASE, DRAFT, {"draft_num_predict": -1}), True, "no", "is -1, which turns", "block size less 1"),
    ],
)
def test_what_can_be_known_without_a_process(ollama, server, model, loaded, engaged, because, advice):
    ollama.models["mine:latest"] = model
    ollama.running = ["mine:latest"] if loaded else []
    (one,) = status(server, "mine").models
    assert (one.loaded, one.base, one.draft, one.engaged) == (loaded, BASE, model.draft, engaged)
    assert because in one.because
    assert advice in one.advice[0]
    assert one.draft_num_predict == model.parameters.get("draft_num_predict", 4)


def test_models_that_would_share_a_runner_are_named(ollama, server):
    ollama.models = {
        "mine:latest": Model(BASE, DRAFT),
        "same:latest": Model(BASE, DRAFT),
        "plain:7b": Model(BASE),
        "rival:latest": Model(BASE, OTHER),
        "elsewhere:latest": Model(OTHER, OTHER),
    }
    (one,) = status(server, "mine").models
    hazards = [advice.partition(":")[0] for advice in one.advice if "same base" in advice]
    assert one.advice[1].startswith("plain:7b has the same base and no draft: whichever is loaded first decides")
    assert len(hazards) == 2
    assert one.advice[2].startswith("rival:latest has the same base and another draft")
    assert status(server, "elsewhere").models[0].advice[1:] == ()
    ollama.models["damaged:latest"] = None
    assert status(server, "mine").models[0] == one


def test_loaded_models_are_all_looked_at(ollama, server):
    ollama.models = {"a:latest": Model(BASE, DRAFT), "b:latest": Model(OTHER)}
    ollama.running = ["b:latest", "a:latest"]
    assert [(one.name, one.engaged) for one in status(server).models] == [("b:latest", "no"), ("a:latest", "unknown")]


def test_a_loaded_draft_is_engaged_if_its_process_says_so(ollama, server, patched, target_path, drafter_gguf, tmp_path):
    target, base = blob(tmp_path, target_path)
    drafter, draft = blob(tmp_path, drafter_gguf)
    ollama.models = {
        "fast:latest": Model(base, draft, {"draft_num_predict": 7}),
        "rival:latest": Model(base, DRAFT),
        "plain:latest": Model(base),
    }
    ollama.running = ["fast:latest", "rival:latest"]
    options = server_arguments(target, drafter)
    with LlamaServer(patched.server, [*options, "-np", "2", "--kv-unified"], tmp_path / "log") as process:
        port = process.url.rpartition(":")[2]
        assert Runner(base, draft, "draft-dflash", 7, 2, int(port)).speculates() is True
        fast, rival = status(server).models
    assert fast.engaged == "yes"
    assert fast.because == "its llama-server runs with this draft as draft-dflash, 7 tokens a cycle"
    assert any("serves 2 requests at once (OLLAMA_NUM_PARALLEL)" in advice for advice in fast.advice)
    assert (rival.engaged, rival.because) == ("no", "the draft of another model with the same base is loaded")
    assert "`ollama stop NAME`, rival:latest too" in rival.advice[0]


def test_a_process_without_the_draft_is_not_engaged(ollama, server, patched, target_path, tmp_path):
    target, base = blob(tmp_path, target_path)
    ollama.models = {"fast:latest": Model(base, DRAFT)}
    ollama.running = ["fast:latest"]
    with LlamaServer(patched.server, server_arguments(target), tmp_path / "log") as process:
        port = process.url.rpartition(":")[2]
        assert Runner(base, None, None, None, 1, int(port)).speculates() is False
        (one,) = status(server, "fast").models
    assert (one.engaged, one.because) == ("no", "its llama-server was started without a draft")


def test_a_command_line_is_read_as_ollama_writes_it():
    digest, draft = "1" * 64, "2" * 64
    words = (
        f"/lib/ollama/llama-server --model /m/blobs/sha256-{digest} --port 41234 --host 127.0.0.1 --no-webui -c 8192"
    )
    words += f" -np 3 --spec-type draft-dflash --spec-draft-n-max 7 --spec-draft-model /m/blobs/sha256-{draft}"
    found = read_runner(words.split())
    assert found == Runner(f"sha256:{digest}", f"sha256:{draft}", "draft-dflash", 7, 3, 41234)
    assert read_runner(["ollama", "runner", "--model", "/m/target.gguf"]) is None
    assert read_runner(["vim", "--model"]) is None


def test_the_last_line_of_a_log_about_drafts_counts():
    log = (
        "slot print_timing: draft acceptance = 0.50000 (   10 accepted /    20 generated), mean len =  2.11\n"
        "slot print_timing: draft acceptance = 0.76190 (   32 accepted /    42 generated), mean len =  5.57\n"
        "slot release: done\n"
    )
    assert last_acceptance(log) == Acceptance(32, 42, 5.57)
    assert last_acceptance("draft acceptance = 0.1 ( 1 accepted / 10 generated)\n") == Acceptance(1, 10, None)
    assert last_acceptance("") is None


def test_the_end_of_the_server_s_own_log_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    log = tmp_path / ".ollama" / "logs" / "server.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(
        b"\xff" * (3 << 20) + b"\ndraft acceptance = 0.5 (    1 accepted /     2 generated), mean len =  1.50\n"
    )
    assert last_acceptance() == Acceptance(1, 2, 1.5)
    log.write_text("")
    assert last_acceptance() is None
