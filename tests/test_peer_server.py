"""The stock llama-server, built from the same source, runs the converted drafter and does what we do."""

import pytest
from llama_server import LlamaServer
from server_pair import as_the_server_cuts, generate, open_llama, server_arguments

from dflash2.converter import convert
from dflash2.patches import build

N_PROMPTS = 20
N_TOKENS = 200


@pytest.fixture(scope="module")
def stock_server():
    return build(stock=True).server


@pytest.fixture(scope="module", params=["v2", "v1"])
def drafter(request, demo, tmp_path_factory):
    """In Q8_0, whose products do not depend on how many rows go together: the server injects other batches."""
    output = tmp_path_factory.mktemp("drafter") / f"{request.param}.gguf"
    convert({"v2": demo.drafter, "v1": demo.drafter_v1}[request.param], demo.target, output, outtype="q8_0")
    return output


def test_server_gives_the_same_tokens_and_counts(target_path, drafter, prompts, stock_server, tmp_path):
    llm = open_llama(target_path, drafter)
    accepted = 0
    with LlamaServer(stock_server, server_arguments(target_path, drafter), tmp_path / "server.log") as server:
        for text in prompts[:N_PROMPTS]:
            prompt = llm.tokenize(text.encode())
            theirs = server.complete(prompt, N_TOKENS)
            # The server ends at an end-of-text token; `generate` leaves that to its caller.
            tokens, cycles = generate(llm, prompt, len(theirs.tokens))
            assert tokens == theirs.tokens
            if theirs.stop_type == "limit":
                assert as_the_server_cuts(cycles, N_TOKENS) == theirs.cycles
            accepted += sum(count for _, count in theirs.cycles)
    llm.close()
    assert accepted > 0
