"""The stock llama-server, built from the same source, runs the converted drafter and does what we do."""

import pytest
from llama_server import LlamaServer

from dflash2 import DFlashLlama, native
from dflash2.converter import convert
from dflash2.patches import build

N_PROMPTS = 20
N_TOKENS = 200
BLOCK = 8
# Everything that decides the numbers, the same on both sides; Llama's defaults differ from llama-server's.
CONTEXT, BATCH, THREADS = 512, 512, 1


@pytest.fixture(scope="module")
def stock_server():
    return build(stock=True).server


def server_arguments(target, drafter):
    return [
        *("--model", str(target), "--ctx-size", str(CONTEXT), "--parallel", "1", "--no-kv-unified", "--fit", "off"),
        *("--batch-size", str(BATCH), "--ubatch-size", str(BATCH), "--flash-attn", "on"),
        *("--threads", str(THREADS), "--threads-batch", str(THREADS), "--cache-ram", "0"),
        *("--spec-type", "draft-dflash", "--spec-draft-model", str(drafter), "--spec-draft-n-max", str(BLOCK - 1)),
        "--repack" if native.repacking_is_safe() else "--no-repack",
    ]


def open_llama(target, drafter):
    return DFlashLlama(
        target,
        drafter,
        n_ctx=CONTEXT,
        n_batch=BATCH,
        n_ubatch=BATCH,
        flash_attn=True,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        depth=None,
        auto_disable=False,
        verbose=False,
    )


def generate(llm, prompt, n_tokens):
    """Token ids, and the cycles that made them as (tokens generated before the cycle, accepted drafts)."""
    cycles = []
    llm.reset()
    llm.on_cycle = lambda cycle: cycles.append((cycle.position - len(prompt) + 1, cycle.accepted))
    stream = llm.generate(prompt, temp=0.0)
    tokens = [next(stream) for _ in range(n_tokens)]
    stream.close()
    return tokens, cycles


def as_the_server_cuts(cycles, n_tokens):
    """(drafted, accepted) as llama-server counts them: it never drafts more than the tokens still wanted but one."""
    cut = [(min(BLOCK - 1, n_tokens - before - 1), accepted) for before, accepted in cycles]
    return [(drafted, min(drafted, accepted)) for drafted, accepted in cut if drafted > 0]


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
