"""The patched llama-server: coupled verification, a draft block of its own width, greedy verification, statistics."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList
from server_pair import BLOCK, EXACT_CACHES, as_the_server_cuts, generate, open_llama, server_arguments

import dflash2.patches
from dflash2.runtime.noise import Noise

N_TOKENS = 100
COUPLED, MATCH = ("--spec-draft-verify", "coupled"), ("--spec-draft-verify", "match")
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
TRUNCATED = {**NEUTRAL, "top_k": 20, "top_p": 0.95}
WORDS = 'root ::= ("self" | "return" | "if" | " " | "\\n" | "(" | ")" | [a-z])+'
PENALTIES = {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1}
CHAINS = {
    "T 0.3": {**NEUTRAL, "temperature": 0.3},
    "T 1.0": NEUTRAL,
    "T 1.5": {**NEUTRAL, "temperature": 1.5},
    "T 0.6, top-k, top-p": {**TRUNCATED, "temperature": 0.6},
    "T 1.0, top-k, top-p": TRUNCATED,
    "min-p": {**NEUTRAL, "min_p": 0.05},
    "typical": {**NEUTRAL, "typical_p": 0.9},
    "defaults": {},
    "grammar": {**NEUTRAL, "grammar": WORDS},
    "grammar, top-k, top-p": {**TRUNCATED, "grammar": WORDS},
    "grammar, typical": {**NEUTRAL, "typical_p": 0.9, "grammar": WORDS},
    "penalties": {**NEUTRAL, "temperature": 0.7, **PENALTIES},
}
# Samplers that keep random numbers or a state of their own are not coupled.
STATEFUL = {
    "xtc": {**NEUTRAL, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "mirostat": {**NEUTRAL, "mirostat": 2},
}
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def tokens_of(target_path, exact_drafters, prompts):
    llm = open_llama(target_path, exact_drafters["v2"], **EXACT_CACHES)
    yield [llm.tokenize(text.encode()) for text in prompts]
    llm.close()


def tokens(server, prompt, n=N_TOKENS, **options):
    return server.answer(prompt, n, **options)["tokens"]


def penalised(input_ids, scores):
    """llama-server's penalties, which count the prompt's tokens; those of `Llama` do not."""
    scores = scores.copy()
    ids, counts = np.unique(input_ids[-64:], return_counts=True)
    repeated = scores[ids]
    repeated = np.where(repeated <= 0, repeated * np.float32(1.3), repeated / np.float32(1.3))
    scores[ids] = repeated - (counts.astype(np.float32) * np.float32(0.2) + np.float32(0.1))
    return scores


def of_the_runtime(llm, prompt, n, chain, seed):
    """The same request to DFlashLlama: what `generate` gives."""
    options = {name: value for name, value in chain.items() if name not in PENALTIES}
    options["temp"] = options.pop("temperature", 0.8)
    if "grammar" in options:
        options["grammar"] = LlamaGrammar.from_string(options["grammar"], verbose=False)
    if PENALTIES.keys() & chain.keys():
        options["logits_processor"] = LogitsProcessorList([penalised])
    llm.set_seed(seed)
    return generate(llm, prompt, n, **options)


@pytest.mark.parametrize("version", ["v2", "v1"])
def test_a_seed_gives_the_text_of_the_python_runtime(serve, target_path, exact_drafters, tokens_of, version):
    llm = open_llama(target_path, exact_drafters[version], **EXACT_CACHES)
    accepted = dict.fromkeys(CHAINS, 0)
    with serve(exact_drafters[version]) as drafting:
        for seed, prompt in enumerate(tokens_of[:6]):
            for name, chain in CHAINS.items():
                theirs = drafting.answer(prompt, N_TOKENS, seed=seed, **chain)
                expected, cycles = of_the_runtime(llm, prompt, len(theirs["tokens"]), chain, seed)
                assert theirs["tokens"] == expected, name
                accepted[name] += theirs["timings"]["draft_n_accepted"]
                if theirs["stop_type"] == "limit" and version == "v2":  # of v1, the server looks at 10 candidates
                    counts = [theirs["timings"][key] for key in ("draft_n", "draft_n_accepted")]
                    assert counts == [sum(column) for column in zip(*as_the_server_cuts(cycles, N_TOKENS), strict=True)]
    llm.close()
    assert all(accepted.values()), accepted


def test_a_seed_gives_the_same_text_without_drafting(serve, exact_drafters, tokens_of):
    with serve(None, *COUPLED) as plain, serve(exact_drafters["v2"]) as drafting:
        for name, chain in CHAINS.items():
            for seed, prompt in enumerate(tokens_of[6:10]):
                assert tokens(drafting, prompt, seed=seed, **chain) == tokens(plain, prompt, seed=seed, **chain), name


def test_match_gives_the_text_of_a_server_without_drafter(serve, exact_drafters, tokens_of):
    with serve() as plain, serve(exact_drafters["v2"], *MATCH) as matching, serve(exact_drafters["v2"]) as coupled:
        differing = 0
        for chain in (NEUTRAL, TRUNCATED, {**NEUTRAL, "grammar": WORDS}):
            for seed, prompt in enumerate(tokens_of[:4]):
                expected = tokens(plain, prompt, seed=seed, **chain)
                assert tokens(matching, prompt, seed=seed, **chain) == expected
                differing += tokens(coupled, prompt, seed=seed, **chain) != expected
        assert differing > 0
        for name, chain in STATEFUL.items():
            expected = tokens(plain, tokens_of[0], seed=1, **chain)
            assert tokens(coupled, tokens_of[0], seed=1, **chain) == expected, name


def test_without_a_seed_every_request_draws_anew(serve, exact_drafters, tokens_of):
    with serve(exact_drafters["v2"]) as server:
        assert len({tuple(tokens(server, tokens_of[0], 30, **NEUTRAL)) for _ in range(3)}) == 3


def test_slots_share_a_batch_and_not_their_noise(serve, exact_drafters, tokens_of):
    """Each in a cache of its own: in a unified one attention adds up in the order in which the slots came."""
    chains = [NEUTRAL, TRUNCATED, {**TRUNCATED, "temperature": 0.6}, GREEDY, {**NEUTRAL, "grammar": WORDS}]
    requests = [
        {"prompt": prompt, "n_predict": 20 + 11 * (n % 8), "seed": n, **chains[n % len(chains)]}
        for n, prompt in enumerate(tokens_of[:16])
    ]
    with serve(None, *COUPLED) as plain:
        expected = [plain.answer(**request)["tokens"] for request in requests]
    with (
        serve(exact_drafters["v2"], "--parallel", "4", "--ctx-size", "2048") as server,
        ThreadPoolExecutor(8) as threads,
    ):
        answers = list(threads.map(lambda request: server.answer(**request), requests))
    assert [answer["tokens"] for answer in answers] == expected
    assert len({answer["id_slot"] for answer in answers}) == 4


def test_coupled_accepts_more_than_match(serve, exact_drafters, tokens_of):
    lengths = []
    for rule in (COUPLED, MATCH):
        with serve(exact_drafters["v2"], *rule) as server:
            timings = [
                server.answer(prompt, N_TOKENS, seed=seed, **TRUNCATED)["timings"]
                for seed, prompt in enumerate(tokens_of[:16])
            ]
        lengths.append(1 + sum(t["draft_n_accepted"] for t in timings) / sum(t["draft_n_cycles"] for t in timings))
    assert lengths[0] > 1.05 * lengths[1]


def test_an_unknown_rule_is_refused(patched, target_path):
    command = [str(patched.server), *server_arguments(target_path), "--spec-draft-verify", "exact"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode != 0
    assert "must be coupled or match" in result.stderr + result.stdout


def test_statistics_say_how_many_drafts_were_accepted_at_each_position(serve, exact_drafters, tokens_of):
    with serve(exact_drafters["v2"]) as server:
        timings = server.answer(tokens_of[0], N_TOKENS, **GREEDY)["timings"]
        cycles = server.complete(tokens_of[0], N_TOKENS).cycles
    accepted = [count for _, count in cycles]
    assert timings["draft_n_cycles"] == len(cycles)
    assert timings["draft_n"] == sum(drafted for drafted, _ in cycles)
    assert timings["draft_n_accepted"] == sum(accepted) > 0
    assert timings["draft_n_accepted_per_pos"] == [sum(n > at for n in accepted) for at in range(BLOCK - 1)]
    assert timings["accepted_length"] == pytest.approx(1 + sum(accepted) / len(cycles))


@pytest.mark.parametrize("version", ["v2", "v1"])
@pytest.mark.parametrize(("n_max", "block"), [(3, 8), (3, 4), (3, 6), (5, 99)])
def test_the_draft_block_is_as_wide_as_asked_and_n_max_bounds_what_is_verified(
    serve, target_path, exact_drafters, tokens_of, version, n_max, block
):
    llm = open_llama(target_path, exact_drafters[version], depth=n_max, draft_block=min(block, BLOCK), **EXACT_CACHES)
    widths = ("--spec-draft-n-max", str(n_max), "--spec-draft-block", str(block))
    with serve(exact_drafters[version], *widths) as server:
        for prompt in tokens_of[:4]:
            theirs = server.complete(prompt, N_TOKENS)
            expected, cycles = generate(llm, prompt, len(theirs.tokens))
            assert theirs.tokens == expected
            if theirs.stop_type == "limit":
                assert theirs.cycles == as_the_server_cuts(cycles, N_TOKENS, n_max)
    llm.close()


def test_slots_that_draft_wide_blocks_share_a_micro_batch(serve, exact_drafters, tokens_of):
    """Four blocks of 8 do not fit 16 rows, and a pass that is not causal cannot be split: the drafter gets more."""
    requests = [(prompt, 30 + 9 * n) for n, prompt in enumerate(tokens_of[:8])]
    with serve() as plain:
        expected = [tokens(plain, *request, **GREEDY) for request in requests]
    options = ("--parallel", "4", "--ctx-size", "2048", "--batch-size", "16", "--ubatch-size", "16")
    with (
        serve(exact_drafters["v2"], *options, "--spec-draft-n-max", "3", "--spec-draft-block", "8") as server,
        ThreadPoolExecutor(8) as threads,
    ):
        assert list(threads.map(lambda request: tokens(server, *request, **GREEDY), requests)) == expected


@pytest.mark.parametrize("where", [(), ("--backend-sampling",)], ids=["host", "backend"])
def test_greedy_requests_choose_the_tokens_of_the_whole_chain(serve, exact_drafters, tokens_of, where):
    """Penalties, biases and probabilities to report need the candidates; a bare argmax does not."""
    biased = {**GREEDY, "logit_bias": [[tokens_of[0][0], -5.0]]}
    with serve(environment={"DFLASH2_NO_GREEDY": "yes"}) as plain, serve(exact_drafters["v2"], *where) as server:
        for chain in (GREEDY, {**GREEDY, **PENALTIES}, biased, {**GREEDY, "n_probs": 2}, {**GREEDY, "grammar": WORDS}):
            for prompt in tokens_of[:2]:
                assert tokens(server, prompt, 60, **chain) == tokens(plain, prompt, 60, **chain), chain


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_server_stopped_as_soon_as_it_listens_ends(serve):
    """On one CPU the signal comes before the server's loop."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        for _ in range(3):
            with serve() as server:
                pass
            assert server.exit_code == 0
    finally:
        os.sched_setaffinity(0, cpus)


NOISE = """
#include "dflash2-noise.h"
#include <cstdio>
#include <initializer_list>
int main() {
    for (unsigned seed : {0u, 7u, 4294967294u})
        for (long long position : {0ll, 12ll, 100000ll})
            for (int token : {0, 1, 383, 248319}) {
                const auto bits = dflash2_noise(seed, position).bits(token);
                std::printf("%a %a\\n", dflash2_noise::uniform(bits), dflash2_noise::gumbel(bits));
            }
}
"""


def test_the_noise_is_that_of_the_python_runtime_bit_for_bit(tmp_path):
    sources = Path(dflash2.patches.__file__).parent / "src" / "common"
    (tmp_path / "noise.cpp").write_text(NOISE)
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-O2", "-I", str(sources), "-o", str(tmp_path / "noise"), "noise.cpp"]
    try:
        subprocess.run(command, cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip(f"no C++ compiler: {compiler}")
    lines = subprocess.run([tmp_path / "noise"], capture_output=True, text=True, check=True).stdout.splitlines()
    ids = np.array([0, 1, 383, 248319], np.int32)
    keys = [(seed, position) for seed in (0, 7, 2**32 - 2) for position in (0, 12, 100_000)]
    uniform = [u for seed, position in keys for u in Noise(seed).uniform(position, ids)]
    gumbel = [g for seed, position in keys for g in Noise(seed).gumbel(position, ids)]
    assert [float.fromhex(line.split()[0]) for line in lines] == uniform
    np.testing.assert_allclose([float.fromhex(line.split()[1]) for line in lines], gumbel, rtol=1e-13)
