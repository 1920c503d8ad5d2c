"""Sampled requests: one seed, one text, with drafting on or off; and no way to kill the interpreter."""

import warnings

import numpy as np
import pytest
from factories_sampling import CHARACTERS, END, make_small_pair
from generation import EXACT, take
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList
from llama_cpp._internals import LlamaSampler
from numpy_chain import Chain

from dflash2 import Dflash2Error, DFlashLlama
from dflash2.errors import NativeError, SamplingError
from dflash2.evidence import scaled_target
from dflash2.native import SamplerChain, TokenArray, top_candidates
from dflash2.runtime.noise import Noise
from dflash2.runtime.sampling import Sampling
from dflash2.runtime.select import Chance, select

NEUTRAL = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
WORDS = 'root ::= ("self" | "return" | "if" | " " | "\\n" | "(" | ")" | [a-z])+'
MODES = ("coupled", "rejection", "match")


def discourage(input_ids, scores):
    """Depends on every token so far, so it sees whether they are handed over one by one."""
    scores = scores.copy()
    scores[input_ids[-8:]] -= 2.0
    scores[len(input_ids) % 5 :: 5] += 0.5
    return scores


CHAINS = {
    "T 0.3": {**NEUTRAL, "temp": 0.3},
    "T 0.7": {**NEUTRAL, "temp": 0.7},
    "T 1.0": NEUTRAL,
    "T 1.5": {**NEUTRAL, "temp": 1.5},
    "top-k": {**NEUTRAL, "top_k": 20},
    "top-p": {**NEUTRAL, "top_p": 0.9},
    "min-p": {**NEUTRAL, "min_p": 0.05},
    "typical": {**NEUTRAL, "typical_p": 0.9},
    "defaults": {},
    "no temperature": {**NEUTRAL, "temp": -1.0},
    "penalties": {"temp": 0.7, "repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "grammar": {"temp": 1.0, "grammar": WORDS},
    "grammar and typical": {"temp": 1.0, "grammar": WORDS, "typical_p": 0.9},
    "logits processor": {"temp": 0.7, "logits_processor": LogitsProcessorList([discourage])},
    "argmax with penalties": {"temp": 0.0, "repeat_penalty": 1.3},
}


def arguments_of(chain):
    grammar = chain.get("grammar")
    return {**chain, "grammar": grammar and LlamaGrammar.from_string(grammar, verbose=False)}


def seeded(llama, tokens, n, chain, *, depth, seed=77):
    llama.depth = depth
    llama.reset()
    llama.set_seed(seed)
    return take(llama, tokens, n, **arguments_of(chain))


@pytest.fixture(scope="module", params=["v2 q8_0", "v2 q4_0", "v1 q8_0"])
def llama(request, target_path, drafter_gguf, drafter_v1_gguf):
    version, weights = request.param.split()
    target = scaled_target(target_path, parameters=0, weights=weights) if weights == "q4_0" else target_path
    made = DFlashLlama(
        target, {"v2": drafter_gguf, "v1": drafter_v1_gguf}[version], depth=None, auto_disable=False, **EXACT
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokens_of(target_path, prompts):
    plain = Llama(str(target_path), vocab_only=True, verbose=False)
    yield [plain.tokenize(prompt.encode()) for prompt in prompts]
    plain.close()


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_coupled_text_of_a_seed_is_the_same_at_every_depth(llama, tokens_of, chain):
    accepted = 0
    for prompt in tokens_of[:2]:
        expected = seeded(llama, prompt, 60, chain, depth=0)
        llama.reset_stats()
        assert seeded(llama, prompt, 60, chain, depth=7) == expected
        accepted += llama.stats.accepted
        assert seeded(llama, prompt, 60, chain, depth=3) == expected
    assert accepted > 0


@pytest.mark.parametrize("verify", MODES)
def test_a_seed_repeats_its_text_and_another_gives_another(fresh, tokens_of, verify):
    llama = fresh(verify=verify)
    first, again, other = (seeded(llama, tokens_of[0], 40, NEUTRAL, depth=7, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("verify", MODES)
def test_without_a_seed_every_request_draws_anew(fresh, tokens_of, verify):
    llama = fresh(verify=verify)
    texts = {tuple(take(llama, tokens_of[0], 30, **NEUTRAL)) for _ in range(3)}
    assert len(texts) == 3


def test_completions_take_their_seed_as_in_plain_llama(fresh, prompts):
    llama, other = fresh(), fresh(depth=0)
    texts = [
        one.create_completion(prompts[0], max_tokens=30, temperature=1.0, seed=11)["choices"][0]["text"]
        for one in (llama, other, llama)
    ]
    assert len(set(texts)) == 1
    unseeded = [llama.create_completion(prompts[0], max_tokens=30, temperature=1.0) for _ in range(2)]
    assert unseeded[0]["choices"][0]["text"] != unseeded[1]["choices"][0]["text"]


def test_logit_bias_holds_in_every_mode(fresh, prompts):
    llama = fresh()
    banned = llama.tokenize(b"e", add_bos=False)[0]
    for llama.verify in MODES:
        answer = llama.create_completion(prompts[1], max_tokens=40, temperature=1.0, seed=3, logit_bias={banned: -1e9})
        assert banned not in llama.tokenize(answer["choices"][0]["text"].encode(), add_bos=False)


def test_coupled_and_rejection_accept_more_than_matching(fresh, tokens_of):
    llama = fresh()
    lengths = {}
    for verify in MODES:
        llama.verify = verify
        llama.reset_stats()
        for seed, tokens in enumerate(tokens_of[:30]):  # over 6 prompts chance may turn it round
            seeded(llama, tokens, 100, NEUTRAL, depth=7, seed=seed)
        lengths[verify] = llama.stats.accepted_length
    assert lengths["coupled"] > lengths["match"]
    assert lengths["rejection"] > lengths["match"]


@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_is_matched_to_llama_cpps_sampler_which_is_said_once(fresh, target_path, tokens_of, mode):
    llama = fresh()
    plain = Llama(str(target_path), **EXACT)
    chain = {"temp": 0.8, "mirostat_mode": mode}
    plain.set_seed(77)
    with pytest.warns(RuntimeWarning, match="mirostat.*verify='match'"):
        assert seeded(llama, tokens_of[0], 40, chain, depth=7) == take(plain, tokens_of[0], 40, **chain)
    plain.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seeded(llama, tokens_of[0], 4, chain, depth=7)


def test_other_samplers_with_random_numbers_are_matched():
    sampler = LlamaSampler()
    sampler.add_xtc(0.5, 0.1, 1, 7)
    sampler.add_dist(7)
    with pytest.warns(RuntimeWarning, match="xtc"):
        rule = Sampling("coupled").rule(sampler, 50, 7, 1.0)
    assert rule.chance is None
    assert not rule.fixes_depth


def test_verify_is_checked(fresh):
    with pytest.raises(Dflash2Error, match="coupled, rejection, match"):
        fresh(verify="exact")
    llama = fresh(verify="rejection")
    assert llama.verify == "rejection"
    with pytest.raises(Dflash2Error, match="got None"):
        llama.verify = None


def whole_chain(arguments, n_vocab, temp):
    sampler = LlamaSampler()
    sampler.add_penalties(n_vocab, 64, 1.0, 0.0, 0.0)
    sampler.add_top_k(arguments.top_k)
    sampler.add_typical(1.0, 1)
    sampler.add_top_p(arguments.top_p, 1)
    sampler.add_min_p(arguments.min_p, 1)
    sampler.add_temp(temp)
    sampler.add_dist(1)
    return sampler


@pytest.mark.parametrize("n_vocab", [300, 30_000])
@pytest.mark.parametrize(
    "arguments",
    [
        Chain(top_k=20, top_p=0.9),
        Chain(top_k=1),
        Chain(top_k=20, min_p=0.1, temp=0.7),
        Chain(top_p=0.7, temp=1.3),
        Chain(min_p=0.05),
        Chain(),
    ],
    ids=str,
)
def test_what_the_chain_leaves_is_what_its_samplers_are_documented_to_leave(n_vocab, arguments):
    logits = (np.random.default_rng(n_vocab).normal(size=n_vocab) * 3).astype(np.float32)
    chain = SamplerChain(whole_chain(arguments, n_vocab, arguments.temp), TokenArray(n_vocab))
    ids, left = chain.candidates(logits)
    p = np.zeros(n_vocab)
    p[ids] = np.exp(left - left.max(), dtype=np.float64)
    np.testing.assert_allclose(p / p.sum(), arguments.probabilities(logits, ()), atol=1e-6)


@pytest.mark.parametrize("k", [1, 20, 100])
@pytest.mark.parametrize("n", [10, 5_000, 151_936])
def test_top_candidates_hold_the_k_best_and_their_ties(n, k):
    random = np.random.default_rng(n + k)
    for logits in (random.normal(size=n).astype(np.float32), random.integers(0, 50, n).astype(np.float32)):
        found = set(top_candidates(logits, min(k, n)).tolist())
        bound = np.sort(logits)[-min(k, n)]
        assert set(np.flatnonzero(logits >= bound).tolist()) <= found
    assert len(top_candidates(random.normal(size=151_936).astype(np.float32), 20)) < 1000


def test_select_walks_the_lattice_with_noise():
    random = np.random.default_rng(5)
    n, k, position, chance = 6, 8, 40, Chance(Noise(3), 0.7, coupled=True)
    ids = np.array([random.choice(1000, k, replace=False) for _ in range(n)])
    scores = random.normal(size=(n, k, k)).astype(np.float32)
    rows = np.concatenate([ids.astype(np.float32), scores.reshape(n, -1), np.zeros((n, 5), np.float32)], axis=1)
    proposal = select(rows, k, position, chance)
    at = 0
    for row in range(n):
        s = scores[row, at] / 0.7
        at = int(np.argmax(s + chance.noise.gumbel(position + row, ids[row])))
        assert proposal.tokens[row] == ids[row, at]
        rivals, q = proposal.draft(row).q
        assert rivals.tolist() == ids[row].tolist()
        np.testing.assert_allclose(q, np.exp(s) / np.exp(s).sum(), rtol=1e-5)


def test_a_drafter_without_selector_drafts_with_the_noise_only_where_the_target_draws_with_it():
    logits = np.random.default_rng(0).normal(size=(5, 3_000)).astype(np.float32) * 2
    noise = Noise(8)
    coupled = select(logits, 0, 30, Chance(noise, 1.5, coupled=True)).tokens
    for row, token in enumerate(coupled):
        ids = top_candidates(logits[row], 16)
        keys = logits[row][ids] / 1.5 + noise.gumbel(30 + row, ids)
        assert token == ids[keys.argmax()]
    apart = select(logits, 0, 30, Chance(noise, 1.5, coupled=False))
    assert apart.tokens.tolist() == logits.argmax(axis=1).tolist()
    rivals, q = apart.draft(2).q
    assert (rivals.tolist(), q.tolist()) == ([apart.tokens[2]], [1.0])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    made = DFlashLlama(*make_small_pair(tmp_path_factory.mktemp("pair")), depth=None, auto_disable=False, **EXACT)
    yield made
    made.close()


@pytest.mark.parametrize("verify", MODES)
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_grammar_that_the_vocabulary_cannot_follow_is_an_error(small, verify, temp):
    small.verify = verify
    grammar = LlamaGrammar.from_string('root ::= "AB" "\u00e9"', verbose=False)
    got = []
    with pytest.raises(SamplingError, match="forbids the whole vocabulary"):
        for token in small.generate([5, 6, 7], temp=temp, grammar=grammar):
            got.append(CHARACTERS[token - 2])
    assert got == ["A", "B"]
    assert len(take(small, [5, 6, 7], 5)) == 5


@pytest.mark.parametrize("verify", MODES)
def test_a_grammar_that_has_ended_gives_the_end_token_for_ever(small, verify):
    small.verify = verify
    grammar = LlamaGrammar.from_string('root ::= "AB"', verbose=False)
    tokens = take(small, [5, 6, 7], 12, grammar=grammar)
    assert tokens == [2 + CHARACTERS.index("A"), 2 + CHARACTERS.index("B")] + [END] * 10


@pytest.mark.parametrize("verify", MODES)
def test_a_processor_that_forbids_everything_is_an_error(small, verify):
    small.verify = verify

    def forbid(input_ids, scores):
        return np.full_like(scores, -np.inf if len(input_ids) > 8 else 0.0)

    with pytest.raises(SamplingError, match="logits processor"):
        take(small, [5, 6, 7], 30, logits_processor=LogitsProcessorList([forbid]))


@pytest.mark.parametrize("verify", MODES)
def test_an_exception_of_a_processor_reaches_the_caller(small, verify):
    small.verify = verify

    def fail(input_ids, scores):
        if len(input_ids) > 8:
            raise KeyError("from the processor")
        return scores

    with pytest.raises(KeyError, match="from the processor"):
        take(small, [5, 6, 7], 30, logits_processor=LogitsProcessorList([fail]))


def test_low_level_sampling_checks_too(small):
    small.reset()
    small._sampler = None
    with pytest.raises(NativeError, match="are not kept"):
        small.eval([5, 6, 7])
        small.sample(idx=0)
    with pytest.raises(SamplingError):
        small.sample(grammar=LlamaGrammar.from_string('root ::= "\u00e9"', verbose=False))
