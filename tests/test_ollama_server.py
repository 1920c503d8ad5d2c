"""A connection to Ollama: what else may answer, refuse or break, as one sentence each."""

import json
import socket

import pytest
from ollama_server import Model

from dflash2.errors import OllamaBrokenError, OllamaError
from dflash2.modelfiles.ollama.server import Server, Step

JSON = "application/json"
PAGE = b"<html><body>nginx \x1b[31m</body></html>"


@pytest.mark.parametrize(
    ("host", "url", "local"),
    [
        ("", "http://127.0.0.1:11434", True),
        ("localhost:1", "http://localhost:1", True),
        ("[::1]:5", "http://[::1]:5", True),
        ("0.0.0.0", "http://0.0.0.0:11434", True),
        ("https://box.example/ollama/", "https://box.example:443/ollama", False),
        ("10.0.0.7", "http://10.0.0.7:11434", False),
        ("::1", "http://[::1]:11434", True),
        ("http://::1/", "http://[::1]", True),
        (' "127.0.0.2:7" ', "http://127.0.0.2:7", True),
    ],
)
def test_hosts_are_read_as_the_client_reads_them(monkeypatch, host, url, local):
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    with Server(host) as server:
        assert (server.url.replace(":443", ""), server.is_local) == (url.replace(":443", ""), local)
    monkeypatch.setenv("OLLAMA_HOST", host)
    with Server() as server:
        assert server.url.replace(":443", "") == url.replace(":443", "")


@pytest.mark.parametrize("host", ["localhost:port", "http://[::1", "ftp://box", "a\x00b", "host:99999", "http://a b"])
def test_what_is_no_address_is_said_so(host):
    with pytest.raises(OllamaError, match=r"--host or OLLAMA_HOST\.$"), Server(host) as server:
        server.version()


def test_nothing_listening_says_what_to_start():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    says = f"No Ollama answers at http://127.0.0.1:{port}; start it with `ollama serve`"
    with Server(f"127.0.0.1:{port}") as server:
        for call in (server.version, server.running, server.models, lambda: server.show("m")):
            with pytest.raises(OllamaBrokenError, match=says):
                call()


def test_a_loopback_server_is_not_asked_of_a_proxy(ollama, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with Server(ollama.host) as server:
        assert server.version() == "0.40.0"


def test_it_is_asked_for_version_models_and_what_runs(ollama, server):
    ollama.models = {"a:latest": Model("sha256:" + "0" * 64), "b:7b": Model("sha256:" + "1" * 64)}
    ollama.running = ["b:7b"]
    assert (server.version(), server.models(), server.running()) == ("0.40.0", ["a:latest", "b:7b"], ["b:7b"])
    assert server.show("b:7b").modelfile.splitlines()[1].endswith("sha256-" + "1" * 64)


@pytest.mark.parametrize(
    "answer",
    [
        (200, "text/html", PAGE),
        (502, "text/html", PAGE),
        (404, "text/plain", b"404 page not found"),
        (200, JSON, b"[]"),
        (200, JSON, b'"0.40.0"'),
        (200, JSON, b'{"version": 4}'),
        (200, JSON, b'{"version": null}'),
        (200, JSON, b"{}"),
        (200, JSON, b""),
        (200, JSON, b"\xff\xfe"),
        (200, JSON, b"[" * 100_000),
        (200, JSON, b" " * 5_000_000),
        (500, JSON, b'{"version": "0.40.0"}'),
    ],
    ids=range(13),
)
def test_what_is_no_ollama_is_said_so(ollama, server, answer):
    ollama.answers["/api/version"] = answer
    with pytest.raises(OllamaError, match=rf"What answers at http://{ollama.host} does not speak as Ollama does"):
        server.version()


def test_a_redirect_says_where_it_leads(ollama, server):
    ollama.answers["/api/version"] = (301, "text/plain", b"https://elsewhere.example/")
    with pytest.raises(OllamaError, match=r"redirects to https://elsewhere\.example/; give that address"):
        server.version()


@pytest.mark.parametrize(
    "place", [b"http://[::1", b"http://a:b:c/", b"//host:port", b"", b"http://xn--a/", b"http://a b"]
)
def test_a_redirect_to_no_address_is_one_sentence(ollama, server, place):
    for path in ("/api/version", "/api/show"):
        ollama.answers[path] = (301, "text/plain", place)
    for call in (server.version, lambda: server.show("m")):
        with pytest.raises(OllamaError) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [PAGE, b"[]", b"null", b'{"models": 3}', b'{"models": [3]}', b"{}"])
def test_answers_of_another_shape_are_no_ollama(ollama, server, body):
    for path in ("/api/ps", "/api/tags", "/api/show"):
        ollama.answers[path] = (200, JSON, body)
    for call in (server.running, server.models, lambda: server.show("m")):
        with pytest.raises(OllamaError, match="does not speak as Ollama does"):
            call()


@pytest.mark.parametrize("body", [b'"text"', b"[]", b"{}", b"3", b'{"error": {"a": 1}}', b'{"error": null}'])
def test_refusals_of_another_shape_are_still_one_sentence(ollama, server, body):
    ollama.answers["/api/show"] = (500, JSON, body)
    with pytest.raises(OllamaError, match=r"does not speak as Ollama does|refused the request for m: .*status 500"):
        server.show("m")


def test_a_model_that_it_lacks_is_named(server):
    with pytest.raises(
        OllamaError, match=r"refused the request for gone: model 'gone:latest' not found \(status 404\)\."
    ):
        server.show("gone")


def test_a_long_refusal_is_cut_to_one_line(ollama, server):
    ollama.answers["/api/create"] = (500, JSON, json.dumps({"error": "no\nroom " * 1_000_000}).encode())
    with pytest.raises(OllamaError) as caught:
        list(server.create("m", {}))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ([b'{"status": "parsing"}\n', b"not JSON\n"], "does not speak as Ollama does"),
        ([b"[1]\n"], "does not speak as Ollama does"),
        ([b'{"status": "x", "total": "many"}\n'], "does not speak as Ollama does"),
        ([b'{"status": "x", "total": 1e400}\n'], "does not speak as Ollama does"),
        ([b'{"status": "x", "completed": NaN}\n'], "does not speak as Ollama does"),
        ([b'{"status": "x", "completed": -Infinity}\n'], "does not speak as Ollama does"),
        ([b'{"status": "x", "completed": 1' + b"0" * 400 + b', "total": 1}\n'], "does not speak as Ollama does"),
        ([b'{"status": "x", "total": -1}\n'], "does not speak as Ollama does"),
        ([b"\xff\n"], "does not speak as Ollama does"),
        ([b"x" * 3_000_000], "does not speak as Ollama does"),
        ([], r"ended before m was made; look into the server's log"),
        ([b'{"status": "parsing"}\n'], r"ended before m was made"),
        ([b'{"error": "unexpected EOF"}\n'], r"refused the creation of m: unexpected EOF\."),
        ([b'{"status": "x"}\n', b'{"error": "no space left on device", "status": 500}'], "make room where the server"),
    ],
    ids=range(14),
)
def test_a_creation_that_goes_wrong_midway_is_one_sentence(ollama, server, reports, says):
    ollama.reports = reports
    with pytest.raises(OllamaError, match=says):
        list(server.create("m", {}))


def test_a_creation_reports_what_it_does_and_how_far_it_is(ollama, server):
    ollama.reports = [
        b'{"status": "pulling", "total": 10, "completed": 3}\n\n{"status": "wri',
        b'ting manifest"}\n',
        b'{"status": "success"}',
    ]
    steps = list(server.create("m", {}))
    assert steps == [Step("pulling", 3, 10), Step("writing manifest", 0, None), Step("success", 0, None)]
    assert ollama.created == [{"model": "m", "stream": True}]
