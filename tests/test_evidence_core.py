"""What all evidence is made of: prompts, engines, results."""

import json

import pytest
from generation import EXACT
from llama_server import LlamaServer
from server_pair import server_arguments

from dflash2.errors import EvidenceError, OptionError
from dflash2.evidence import (
    CATEGORIES,
    GREEDY,
    STYLES,
    LlamaServerEngine,
    PythonEngine,
    Result,
    Sampling,
    builtin_prompts,
    model_files,
    read_result,
    texts,
    write_result,
)
from dflash2.patches import build

N_TOKENS = 40


@pytest.fixture(scope="module")
def engine(target_path, drafter_gguf):
    options = {name: value for name, value in EXACT.items() if name != "verbose"}
    engine = PythonEngine(target_path, drafter_gguf, **options)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(target_path, exact_drafters, tmp_path_factory):
    program = build(stock=True, targets=("server",)).server
    log = tmp_path_factory.mktemp("server") / "log"
    with LlamaServer(program, server_arguments(target_path, exact_drafters["v2"]), log) as server:
        yield server


def test_every_set_has_prompts_of_its_own_and_of_several_lengths():
    prompts = builtin_prompts((*CATEGORIES, *STYLES))
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == len(prompts)
    counts = {name: len(builtin_prompts([name])) for name in (*CATEGORIES, *STYLES)}
    assert all(8 <= n <= 12 for n in counts.values()), counts
    assert max(len(prompt.text.split()) for prompt in prompts) > 1_300
    assert all(len(prompt.turns) == 1 for prompt in builtin_prompts(["mt-bench-style"]))
    assert [prompt.id for prompt in builtin_prompts(["json", "code"], most=2)] == [
        "json-1",
        "json-2",
        "code-1",
        "code-2",
    ]


def test_an_unknown_set_is_refused_by_name():
    with pytest.raises(OptionError, match="'poems'; choose among code"):
        builtin_prompts(["poems"])


def test_python_engine_gives_the_tokens_of_the_runtime(engine, prompts):
    (prompt,) = texts(prompts[:1])
    tokens = engine.tokens_of(prompt, chat=True)  # the demo target has no template
    assert tokens == engine.llm.tokenize(prompt.text.encode())
    runs = {depth: engine.generate(tokens, N_TOKENS, depth=depth, past_end=True) for depth in (0, 3, None)}
    assert len(runs[0].tokens) == N_TOKENS
    assert runs[0].tokens == runs[3].tokens == runs[None].tokens
    assert runs[0].stats.drafted == 0 and runs[3].stats.at_depth[3] == runs[3].stats.cycles > 0
    engine.llm.reset()
    stream = engine.llm.generate(tokens, temp=0.0)
    assert list(runs[0].tokens) == [next(stream) for _ in range(N_TOKENS)]
    stream.close()


def test_a_seed_decides_a_sampled_run(engine, prompts):
    tokens = engine.tokens_of(texts(prompts)[1], chat=False)
    flat = Sampling(temperature=1.0, top_k=20)
    first, again, other = (engine.generate(tokens, 30, sampling=flat, seed=seed).tokens for seed in (3, 3, 4))
    assert first == again != other
    assert str(flat) == "T=1, top-k 20" and str(GREEDY) == "greedy"


def test_server_engine_drafts_and_with_depth_0_does_not(server, engine, prompts):
    remote = LlamaServerEngine(server.url)
    assert remote.about()["target"] == "target-q8_0.gguf"
    prompt = texts(prompts)[2]
    tokens = remote.tokens_of(prompt, chat=False)
    assert tokens == engine.tokens_of(prompt, chat=False)
    assert remote.text_of(tokens) == prompt.text
    drafted = remote.generate(tokens, N_TOKENS, past_end=True)
    stepwise = remote.generate(tokens, N_TOKENS, depth=0, past_end=True)
    assert drafted.tokens == stepwise.tokens == engine.generate(tokens, N_TOKENS, depth=0, past_end=True).tokens
    assert stepwise.stats.drafted == 0 < drafted.stats.accepted
    assert 1 < drafted.stats.accepted_length < 8
    assert remote.seeds_by_position(tokens) is False  # stock: the n-th token takes the n-th random number
    with pytest.raises(EvidenceError, match="cannot change it to 3"):
        remote.generate(tokens, 5, depth=3)
    with pytest.raises(EvidenceError, match="refused the request"):
        remote.generate([10**6], 5)
    remote.close()


def test_a_server_that_is_not_there_is_one_sentence():
    with pytest.raises(EvidenceError, match=r"No llama-server answers at http://127\.0\.0\.1:1/props"):
        LlamaServerEngine("http://127.0.0.1:1")


def test_a_result_is_read_back_as_it_was_written(target_path, drafter_gguf, tmp_path):
    models = model_files(target=target_path, drafter=drafter_gguf)
    assert [model.role for model in models] == ["target", "drafter"] and models[1].architecture == "dflash"
    result = Result("verify", {"engine": "python"}, models, {"tokens": 3}, ({"prompt": "code-1"},), {"equal": True})
    path = tmp_path / "result.json"
    write_result(result, path)
    assert read_result(path, "verify") == result
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    assert result.machine.cores >= 1 and result.machine.memory_bytes > 1 << 30
    with pytest.raises(EvidenceError, match="result of dflash2 verify, not of bench"):
        read_result(path, "bench")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1, "machine": 3}', json.dumps({"schema": 99})])
def test_what_is_no_result_is_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(EvidenceError, match=r"other\.json"):
        read_result(path)
