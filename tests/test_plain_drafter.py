"""The plain drafter computes what the packages that define the dialects compute, to 1e-5, and each rule matters."""

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from factories import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MASK_TOKEN, VOCAB, drafter_config  # noqa: E402
from factories_dialects import lively_tensors  # noqa: E402
from plain_drafter import PlainDrafter, Rules  # noqa: E402

CONTEXT, BLOCK, TAPS, WINDOW = 50, 4, (0, 2, 3), 16
TOLERANCE = 2e-5
RULES = Rules(
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    taps=TAPS,
    block=BLOCK,
    mask_token=MASK_TOKEN,
    causal=(False, False),
    window=(WINDOW, None),
    top_k=4,
)


def tensors(version=2, seed=0):
    config = drafter_config(version)
    return {name: torch.from_numpy(values) for name, values in lively_tensors(config, seed).items()}


def block_inputs():
    random = torch.Generator().manual_seed(1)
    return (
        torch.randn(CONTEXT, len(TAPS) * HIDDEN, generator=random),
        torch.randn(BLOCK, HIDDEN, generator=random),
    )


def transformer_settings(**changes):
    settings = drafter_config(2, layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
    return {**settings, "use_sliding_window": True, **changes}


@pytest.fixture
def bare_package(monkeypatch):
    """Import modules of an installed package without running its `__init__` files, whose imports we do not need.

    `unused` names libraries that a module imports for other parts of it: (library, names taken from it).
    """

    def load(name, *modules, unused=()):
        spec = importlib.util.find_spec(name)
        if spec is None:
            pytest.skip(f"{name} is not installed")
        root = Path(spec.submodule_search_locations[0])
        for package in [root, *(file.parent for file in root.rglob("__init__.py"))]:
            dotted = ".".join([name, *package.relative_to(root).parts])
            skeleton = ModuleType(dotted)
            skeleton.__path__ = [str(package)]
            monkeypatch.setitem(sys.modules, dotted, skeleton)
        for library, names in unused:
            stand_in = ModuleType(library)
            vars(stand_in).update(dict.fromkeys(names, object))
            monkeypatch.setitem(sys.modules, library, stand_in)
        return [importlib.import_module(f"{name}.{module}") for module in modules]

    return load


def largest_difference(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize("is_causal", [None, False, True])
def test_plain_drafter_equals_the_dflash_package(is_causal):
    dflash = pytest.importorskip("dflash.model")
    config = transformers.Qwen3Config(**transformer_settings(is_causal=is_causal))
    model = dflash.DFlash2DraftModel(config).eval()
    weights = tensors()
    bare = ("predecessor_codebook", "successor_codebook")
    model.load_state_dict({f"{n}.weight" if n.endswith(bare) else n: v for n, v in weights.items()})
    causal = (True, False) if is_causal is None else (is_causal,) * 2
    plain = PlainDrafter(replace(RULES, causal=causal), weights)
    features, embeddings = block_inputs()
    with torch.inference_mode():
        expected = model(
            target_hidden=features[None],
            noise_embedding=embeddings[None],
            position_ids=torch.arange(CONTEXT + BLOCK)[None],
        )[0]
    rows = plain.rows(features, embeddings)
    assert largest_difference(rows, expected) < TOLERANCE
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    proposal = model.propose(expected[None, 1:].clone(), torch.tensor([5]), head, 0.0)[0][0].tolist()
    assert plain.propose(rows[1:], 5, head.weight) == proposal


def test_a_targets_own_embedding_factor_is_no_part_of_what_drafters_read():
    """The reference looks rows up in the bare table, as llama.cpp does, so such targets need no scale of ours."""
    dflash = pytest.importorskip("dflash.model")
    gemma3 = transformers.models.gemma3.modeling_gemma3
    table = gemma3.Gemma3TextScaledWordEmbedding(VOCAB, HIDDEN, padding_idx=0, embed_scale=HIDDEN**0.5)

    class Gemma(torch.nn.Module):
        def get_input_embeddings(self):
            return table

    ids = torch.tensor([[5, MASK_TOKEN]])
    raw = dflash._raw_input_embeddings(Gemma(), ids)
    assert torch.equal(raw, table.weight[ids])
    assert torch.equal(table(ids), raw * HIDDEN**0.5)


def test_plain_drafter_equals_the_muse_glimmer_assistant_of_transformers():
    """Its window is inclusive: keys up to `sliding_window` away are seen, one more than Qwen3's rule."""
    settings = transformer_settings(block_size=BLOCK, target_layer_ids=list(TAPS), mask_token_id=MASK_TOKEN)
    names = transformers.MuseGlimmerAssistantConfig.__dataclass_fields__
    config = transformers.MuseGlimmerAssistantConfig(
        **{key: value for key, value in settings.items() if key in names},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    weights = tensors(version=1)
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({renamed.get(name, name): value for name, value in weights.items()})
    features, embeddings = block_inputs()
    cache = transformers.cache_utils.DFlashCache(config=config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(CONTEXT)
    with torch.inference_mode():
        expected = model(
            embeddings[None], features[None], position_ids=torch.arange(CONTEXT + BLOCK)[None], cache=cache
        ).last_hidden_state[0]
    inclusive = PlainDrafter(replace(RULES, window=(WINDOW + 1, None), top_k=0), weights)
    exclusive = PlainDrafter(replace(RULES, top_k=0), weights)
    assert largest_difference(inclusive.rows(features, embeddings), expected) < TOLERANCE
    assert largest_difference(exclusive.rows(features, embeddings), expected) > 100 * TOLERANCE


def test_plain_drafter_equals_nemo_automodel(bare_package):
    """Its layers are not causal whatever their kind, and the mask of a sliding layer is symmetric."""
    (definitions,) = bare_package(
        "nemo_automodel",
        "components.speculative.dflash.draft_qwen3_dflash2",
        unused=[("datasets", ("Dataset", "DatasetDict"))],
    )
    settings = transformer_settings(attn_implementation="sdpa")
    settings.pop("is_causal")
    config = transformers.Qwen3Config(**settings)
    model = definitions.Qwen3DFlash2DraftModel(config).eval()
    model.load_state_dict(tensors())
    features, embeddings = block_inputs()
    with torch.inference_mode():
        expected = model(
            target_hidden=features[None],
            noise_embedding=embeddings[None],
            position_ids=torch.arange(CONTEXT + BLOCK)[None],
            conv_block_size=BLOCK,
        )[0]
    plain = PlainDrafter(RULES, tensors())
    rows = plain.rows(features, embeddings)
    assert largest_difference(rows, expected) < TOLERANCE
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    logits = (expected[1:] @ head.T)[None].clone()
    path = model.candidate_selector.walk(expected[None, 1:].clone(), logits, torch.tensor([5]), 0.0)[0]
    assert plain.propose(rows[1:], 5, head) == path[0].tolist()


@pytest.mark.parametrize("non_causal", [False, True])
def test_plain_drafter_equals_the_speculators_package(bare_package, non_causal):
    """Its layers, below the mask of its training; the window is left out, which that mask counts from the anchor."""
    second, attention = bare_package("speculators", "models.dflash2.model_definitions", "models.dflash.attention")
    config = transformers.Qwen3Config(**transformer_settings(attn_implementation="sdpa"))
    weights = tensors()
    layers = [
        second.Qwen3DFlash2DecoderLayer(config, i, block_size=BLOCK, conv_kernel_size=2, conv_group_size=16).eval()
        for i in range(2)
    ]
    features, embeddings = block_inputs()
    wide = CONTEXT + BLOCK
    plain = PlainDrafter(replace(RULES, causal=(not non_causal, False), window=(wide, None)), weights)
    rope = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)
    positions = torch.arange(wide)[None]
    with torch.inference_mode():
        context = plain._norm(features @ weights["fc.weight"].T, "hidden_norm")[None]
        hidden = embeddings[None]
        for index, layer in enumerate(layers):
            prefix = f"layers.{index}."
            layer.load_state_dict({n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)})
            mask_mod, n_queries, n_keys = attention.create_anchor_block_mask_mod(
                torch.zeros(CONTEXT + 1, dtype=torch.long),
                CONTEXT + 1,
                torch.tensor([CONTEXT]),
                BLOCK,
                sliding_window=wide if index == 0 else None,
                sliding_window_non_causal=non_causal,
            )
            queries, keys = torch.arange(n_queries)[:, None], torch.arange(n_keys)[None]
            visible = mask_mod(torch.tensor(0), torch.tensor(0), queries, keys)
            visible = torch.cat([visible[:, :CONTEXT], visible[:, CONTEXT + 1 :]], 1)[None, None]
            hidden = layer(
                hidden_states=hidden,
                target_hidden=context,
                attention_mask=visible,
                position_embeddings=rope(hidden, positions),
            )
        expected = plain._norm(hidden[0], "norm")
    assert largest_difference(plain.rows(features, embeddings), expected) < TOLERANCE
    selector = second.CandidateSelector(vocab_size=VOCAB, hidden_size=HIDDEN, rank=32, top_k=4)
    selector.load_state_dict({n.split(".", 1)[1]: v for n, v in weights.items() if n.startswith("candidate_selector.")})
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    before, path = 5, []
    with torch.inference_mode():
        for row in expected[1:]:
            candidates, scores = selector.select((row @ head.T)[None], row[None], torch.tensor([before]))
            before = int(candidates[0, scores.argmax()])
            path.append(before)
    assert plain.propose(expected[1:], 5, head) == path


def test_sinks_are_those_of_gpt_oss_in_transformers():
    """One more column in the softmax, dropped after it: the formulation that MiMo's and Nemotron's drafters cite."""
    weights = tensors(version=1)
    sinks = torch.linspace(-1, 3, HEADS)
    name = "layers.1.self_attn."
    plain = PlainDrafter(replace(RULES, top_k=0), weights | {f"{name}attention_sink_bias": sinks})
    features, x = block_inputs()
    context = plain._norm(features @ weights["fc.weight"].T, "hidden_norm")

    def heads(values, part, n):
        return (values @ weights[f"{name}{part}_proj.weight"].T).view(len(values), n, HEAD_DIM)

    everything = torch.cat([context, x])
    positions = torch.arange(CONTEXT + BLOCK)
    q = plain._rope(plain._norm(heads(x, "q", HEADS), f"{name}q_norm"), positions[CONTEXT:])
    k = plain._rope(plain._norm(heads(everything, "k", KV_HEADS), f"{name}k_norm"), positions)
    v = heads(everything, "v", KV_HEADS)
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, sinks=sinks, training=False)
    attend = transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    mixed = attend(module, q, k, v, None, scaling=HEAD_DIM**-0.5)[0][0].reshape(BLOCK, -1)
    expected = mixed @ weights[f"{name}o_proj.weight"].T
    assert largest_difference(plain._attention(1, context)(x), expected) < TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"causal": (True, False)},
        {"causal": (False, True)},
        {"window": (WINDOW + 1, None)},
        {"window": (None, None)},
        {"theta": 5000.0},
        {"rotated": HEAD_DIM // 2},
        {"value_scale": 0.612},
        {"embedding_scale": 8.0},
        {"activation": "gelu_pytorch_tanh"},
        {"eps": 1e-2},
    ],
    ids=lambda change: "-".join(f"{key}={value}" for key, value in change.items()),
)
def test_every_rule_changes_the_rows(change):
    """What a dialect says is not lost in noise: the comparisons with llama.cpp have teeth."""
    features, embeddings = block_inputs()
    weights = tensors()
    as_stated = PlainDrafter(RULES, weights).rows(features, embeddings)
    changed = PlainDrafter(replace(RULES, **change), weights).rows(features, embeddings)
    assert largest_difference(as_stated, changed) > 1e-3
