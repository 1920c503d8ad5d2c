"""Blobs of an Ollama server: what is sent, what is not sent again, and what breaks."""

import os
from itertools import pairwise

import pytest
from ollama_server import digest_of

from dflash2.errors import OllamaError
from dflash2.modelfiles.ollama.blobs import read_blob, send

DATA = bytes(range(256)) * 20_000


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(DATA)
    return path


def silent(*_):
    pass


def test_a_blob_is_sent_once_and_never_again(ollama, server, path):
    blob = read_blob(path, silent)
    assert blob.digest == digest_of(DATA)
    assert send(server, blob, silent) is True
    assert ollama.blobs == {blob.digest: DATA}
    assert send(server, blob, silent) is False
    assert ollama.uploads() == [blob.digest]


def test_progress_counts_the_bytes_that_are_hashed_then_those_that_are_sent(server, path):
    steps = []
    send(server, read_blob(path, lambda *step: steps.append(step)), lambda *step: steps.append(step))
    for what in ("hashing model.gguf", "sending model.gguf"):
        done = [step[1] for step in steps if step[0] == what]
        assert done[-1] == len(DATA)
        assert len(done) > 1
        assert all(before < after for before, after in pairwise(done))
    assert {step[2] for step in steps} == {len(DATA)}


def test_a_file_is_hashed_again_only_after_it_changed(path):
    hashed = []
    read_blob(path, lambda *step: hashed.append(step))
    n_steps = len(hashed)
    assert read_blob(path, lambda *step: hashed.append(step)).digest == digest_of(DATA)
    assert len(hashed) == n_steps
    before = path.stat()
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_blob(path, silent).digest == digest_of(DATA[::-1])


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{ not JSON", b'{"x": 1}'])
def test_a_damaged_list_of_digests_costs_only_the_hashing(path, tmp_path, content):
    digests = tmp_path / "cache" / "ollama" / "digests.json"
    digests.parent.mkdir(parents=True)
    digests.write_bytes(content)
    assert read_blob(path, silent).digest == digest_of(DATA)
    assert list(digests.parent.iterdir()) == [digests]


def test_a_cache_that_cannot_be_written_costs_only_the_hashing(path, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert read_blob(path, silent).digest == digest_of(DATA)


@pytest.mark.parametrize("cut", [0, 1, 100_000, len(DATA) - 1])
def test_a_connection_that_breaks_once_is_tried_again(ollama, server, path, cut):
    ollama.cuts = [cut]
    blob = read_blob(path, silent)
    assert send(server, blob, silent) is True
    assert ollama.blobs == {blob.digest: DATA}
    assert ollama.uploads() == [blob.digest] * 2


def test_a_lost_answer_does_not_send_a_blob_twice(ollama, server, path):
    ollama.lost_answers = 1
    blob = read_blob(path, silent)
    assert send(server, blob, silent) is True
    assert ollama.uploads() == [blob.digest]


def test_a_connection_that_always_breaks_ends_after_four_tries(ollama, server, path):
    ollama.broken_for_good = True
    with pytest.raises(OllamaError, match=rf"broke 4 times while {path} was sent.* is not sent again\.$"):
        send(server, read_blob(path, silent), silent)
    assert len(ollama.uploads()) == 4


def test_other_bytes_than_those_sent_are_not_the_files_fault(ollama, server, path):
    ollama.corrupts = True
    with pytest.raises(OllamaError, match=r"got other bytes than .*model\.gguf holds; check the network"):
        send(server, read_blob(path, silent), silent)
    assert len(ollama.uploads()) == 1


@pytest.mark.parametrize("content", [DATA[:1000], DATA[::-1], DATA[:-1] + b"x"], ids=["shorter", "other", "last byte"])
def test_a_file_that_changes_while_it_is_sent_is_said_so(ollama, server, path, content):
    blob = read_blob(path, silent)
    path.write_bytes(content)
    with pytest.raises(OllamaError, match=r"model\.gguf changed while it was sent; wait"):
        send(server, blob, silent)
    assert ollama.blobs == {}


def test_a_file_that_grows_has_changed_if_its_beginning_did(ollama, server, path):
    blob = read_blob(path, silent)
    path.write_bytes(DATA[::-1] + DATA)
    with pytest.raises(OllamaError, match="changed while it was sent"):
        send(server, blob, silent)
    assert ollama.blobs == {}


def test_a_full_disk_is_not_tried_again_and_names_the_remedy(ollama, server, path):
    ollama.disk_bytes = 1000
    with pytest.raises(OllamaError, match=r"refused the upload: .*no space left on device.*; make room where"):
        send(server, read_blob(path, silent), silent)
    assert len(ollama.uploads()) == 1


def test_what_is_no_file_or_empty_is_refused_before_anything_is_sent(tmp_path):
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, says in {
        "empty.gguf": "is empty; copy or convert it again",
        "pipe.gguf": "it is a pipe, socket or device; give a file",
        "gone.gguf": "No such file",
        ".": "Is a directory",
        "x" * 300: "File name too long",
    }.items():
        with pytest.raises(OllamaError, match=says):
            read_blob(tmp_path / name, silent)


def test_a_server_that_is_busy_in_the_middle_of_a_blob_is_tried_again(ollama, server, path):
    ollama.busy = 1
    blob = read_blob(path, silent)
    assert send(server, blob, silent) is True
    assert ollama.uploads() == [blob.digest] * 2


def test_a_refusal_without_a_body_says_what_its_status_means(ollama, server):
    ollama.head_status = 500
    with pytest.raises(OllamaError, match=r"refused the request for a blob: Internal Server Error \(status 500\)\."):
        server.has_blob("sha256:" + "0" * 64)
