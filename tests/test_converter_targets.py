"""Targets as the source of the tokenizer: split GGUF files and Hugging Face folders, checked against llama.cpp."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
from factories import MASK_TOKEN, VOCAB, make_drafter, make_target
from factories_tokenizers import (
    BYTE,
    CONTROL,
    DEEPSEEK3_PATTERN,
    LLAMA3_PATTERN,
    NORMAL,
    QWEN2_PATTERN,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    folder_of,
    sentencepiece_model,
    train_byte_fallback,
    train_byte_level,
    write_target_config,
    write_tokenizer_config,
)
from gguf.constants import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2.constants import HF_ARCHITECTURES, PRE_TOKENIZERS, TAPPABLE_ARCHITECTURES
from dflash2.converter import convert
from dflash2.converter.header import header
from dflash2.converter.targets.pair import Target, read_target
from dflash2.errors import CheckpointError, Dflash2Error, GGUFError, TargetMismatchError, UnsupportedCheckpointError
from dflash2.gguf_info import GGUFInfo, read_gguf_info

pytest.importorskip("tokenizers")

PIECES = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("▁own", 0.0, USER_DEFINED)]
PIECES += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
PIECES += [("▁", -1.0, NORMAL), ("a", -2.0, NORMAL), ("▁a", -3.5, NORMAL), ("b", -4.0, UNUSED)]


@pytest.fixture
def qwen_folder(tmp_path) -> Path:
    folder = train_byte_level(tmp_path / "target")
    write_tokenizer_config(folder)
    return write_target_config(folder)


@pytest.fixture
def llama_folder(tmp_path) -> Path:
    folder = write_target_config(tmp_path / "target", "LlamaForCausalLM", bos_token_id=1, eos_token_id=2)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(PIECES))
    return folder


def as_gguf(target: Target, path: Path) -> GGUFInfo:
    """The target's tokenizer keys as a file."""
    path.write_bytes(header("dflash", target.tokenizer, []))
    return read_gguf_info(path)


def tokenizer_keys(info: GGUFInfo) -> dict[str, object]:
    return {key: info.metadata[key] for key in info.metadata if key.startswith("tokenizer.")}


def loaded_texts(path: Path) -> list[str]:
    """Token texts as llama.cpp has them after loading the whole drafter."""
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
    assert model
    vocab = llama_cpp.llama_model_get_vocab(model)
    texts = [llama_cpp.llama_vocab_get_text(vocab, i).decode() for i in range(llama_cpp.llama_vocab_n_tokens(vocab))]
    llama_cpp.llama_model_free(model)
    return texts


# --- Hugging Face folders, through llama.cpp


def test_a_byte_level_tokenizer_loads_with_the_texts_of_its_own_library(tmp_path, qwen_folder):
    from tokenizers import Tokenizer

    convert(make_drafter(tmp_path / "drafter"), qwen_folder, tmp_path / "out.gguf")
    original = Tokenizer.from_file(str(qwen_folder / "tokenizer.json"))
    size = original.get_vocab_size()
    assert size < VOCAB
    expected = [original.id_to_token(i) for i in range(size)] + [f"[PAD{i}]" for i in range(size, VOCAB)]
    assert loaded_texts(tmp_path / "out.gguf") == expected
    keys = tokenizer_keys(read_gguf_info(tmp_path / "out.gguf"))
    assert keys["tokenizer.ggml.pre"] == "qwen2"
    assert keys["tokenizer.ggml.mask_token_id"] == MASK_TOKEN
    assert keys["tokenizer.ggml.eos_token_id"] == 0
    types = keys["tokenizer.ggml.token_type"]
    assert (types[0], types[2], types[size - 1], types[-1]) == (CONTROL, NORMAL, USER_DEFINED, UNUSED)


def test_a_folder_and_a_gguf_of_the_same_target_give_the_same_drafter(tmp_path, qwen_folder):
    drafter = make_drafter(tmp_path / "drafter")
    convert(drafter, qwen_folder, tmp_path / "folder.gguf")
    keys = {
        entry.key: (entry.value if entry.type.element is None else list(entry.value), *_kinds(entry.type))
        for entry in read_target(qwen_folder).tokenizer
    }
    gguf = make_target(
        tmp_path / "target.gguf", metadata=keys | {"tokenizer.ggml.bos_token_id": keys["tokenizer.ggml.eos_token_id"]}
    )
    convert(drafter, gguf, tmp_path / "gguf.gguf")
    folder, file = read_gguf_info(tmp_path / "folder.gguf"), read_gguf_info(tmp_path / "gguf.gguf")
    assert {**tokenizer_keys(folder), "tokenizer.ggml.bos_token_id": 0} == tokenizer_keys(file)
    assert loaded_texts(tmp_path / "folder.gguf") == loaded_texts(tmp_path / "gguf.gguf")


def _kinds(kind) -> tuple[GGUFValueType, GGUFValueType | None]:
    return kind.kind, kind.element


def test_a_sentencepiece_model_loads_with_its_texts_scores_and_types(tmp_path, llama_folder):
    convert(make_drafter(tmp_path / "drafter"), llama_folder, tmp_path / "out.gguf")
    texts = [text for text, _, _ in PIECES]
    assert loaded_texts(tmp_path / "out.gguf") == texts + [f"[PAD{i}]" for i in range(len(texts), VOCAB)]
    keys = tokenizer_keys(read_gguf_info(tmp_path / "out.gguf"))
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("llama", "default")
    n = len(PIECES)
    assert keys["tokenizer.ggml.scores"][n - 4 :] == (-1.0, -2.0, -3.5, -4.0, *[-10000.0] * (VOCAB - n))
    assert keys["tokenizer.ggml.token_type"][:5] == (UNKNOWN, CONTROL, CONTROL, NORMAL, BYTE)
    assert keys["tokenizer.ggml.token_type"][n - 2 : n + 1] == (NORMAL, UNUSED, UNUSED)
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)


def test_added_tokens_replace_pieces(tmp_path, llama_folder):
    (llama_folder / "added_tokens.json").write_text(json.dumps({"<extra>": 270}))
    write_tokenizer_config(
        llama_folder,
        added_tokens_decoder={"271": {"content": "▁x", "special": False}, "272": {"content": "<t>", "special": True}},
        add_prefix_space=True,
    )
    keys = tokenizer_keys(as_gguf(read_target(llama_folder), tmp_path / "keys.gguf"))
    assert keys["tokenizer.ggml.tokens"][270:273] == ("<extra>", " x", "<t>")
    assert keys["tokenizer.ggml.token_type"][270:273] == (USER_DEFINED, USER_DEFINED, CONTROL)
    assert keys["tokenizer.ggml.scores"][270:273] == (-1000.0,) * 3
    assert keys["tokenizer.ggml.add_space_prefix"] is True


@pytest.mark.parametrize(("architecture", "model"), [("Gemma4ForCausalLM", "gemma4"), ("LlamaForCausalLM", "llama")])
def test_byte_fallback_tokenizers_load(tmp_path, architecture, model):
    folder = train_byte_fallback(tmp_path / "target")
    write_target_config(folder, architecture, bos_token_id=2, eos_token_id=1)
    convert(make_drafter(tmp_path / "drafter"), folder, tmp_path / "out.gguf")
    keys = tokenizer_keys(read_gguf_info(tmp_path / "out.gguf"))
    assert keys["tokenizer.ggml.model"] == model
    assert loaded_texts(tmp_path / "out.gguf")[:6] == ["<pad>", "<eos>", "<bos>", "<unk>", "<0x00>", "<0x01>"]
    assert keys["tokenizer.ggml.token_type"][3:6] == (CONTROL, BYTE, BYTE)
    assert ("tokenizer.ggml.merges" in keys) == (model == "gemma4")


# --- against upstream's converter and the vocabularies that come with it

UPSTREAM_CASES = {
    "Qwen3ForCausalLM": ("byte level", "qwen2", {}),
    "Qwen3_5ForCausalLM": ("byte level", "qwen35", {}),
    "MiMoV2ForCausalLM": ("byte level", "qwen2", {}),
    "MiniMaxM2ForCausalLM": ("byte level", "minimax-m2", {}),
    "HunYuanDenseV1ForCausalLM": ("byte level", "hunyuan-dense", {"pad_token_id": -1}),
    "Lfm2ForCausalLM": ("byte level", "lfm2", {}),
    "GptOssForCausalLM": ("byte level", "gpt-4o", {}),
    "LlamaForCausalLM": ("byte level", "llama-bpe", {"bos_token_id": 1}),
    "NemotronHForCausalLM": ("byte level", "pixtral", {}),
    "BailingMoeV3ForCausalLM": ("byte level", "bailingmoe2", {}),
    "DeepseekV4ForCausalLM": ("byte level", "joyai-llm", {}),
    "DeepseekV3ForCausalLM": ("byte level", "deepseek-v3", {}),
    "Glm4MoeForCausalLM": ("glm", "glm4", {}),
    "Glm5NextForConditionalGeneration": ("glm", "glm4", {}),
    "Glm4ForCausalLM": ("glm", "glm4", {}),
    "GlmMoeDsaForCausalLM": ("glm", "glm4", {}),
    "MuseGlimmerForConditionalGeneration": ("muse", "llama4", {}),
    "Qwen3MoeForCausalLM": ("byte level", "qwen2", {}),
    "Qwen3NextForCausalLM": ("byte level", "qwen2", {}),
    "Qwen4ExpForCausalLM": ("byte level", "qwen35", {}),
    "Lfm2MoeForCausalLM": ("byte level", "lfm2", {}),
    "HunYuanVLForConditionalGeneration": ("byte level", "hunyuan-dense", {}),
    "NanbeigeForCausalLM": ("pieces", "default", {"bos_token_id": 1, "eos_token_id": 2}),
    "MistralForCausalLM": ("pieces", "default", {"bos_token_id": 1, "eos_token_id": 2}),
    "Gemma4ForConditionalGeneration": ("byte fallback", "", {"bos_token_id": 2, "eos_token_id": 1}),
}


class UpstreamVocabulary:
    """Upstream's tokenizer code in one process for all cases: its imports take seconds."""

    def __init__(self, source: Path):
        script = Path(__file__).with_name("upstream_vocab.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def keys(self, folder: Path, pre: str, output: Path) -> dict[str, object]:
        self._process.stdin.write(json.dumps([str(folder), pre, str(output)]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n"
        return tokenizer_keys(read_gguf_info(output))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@pytest.fixture(scope="module")
def upstream(llama_cpp_source):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    service = UpstreamVocabulary(llama_cpp_source)
    yield service
    service.close()


PATTERNS = {"llama-bpe": LLAMA3_PATTERN, "deepseek-v3": DEEPSEEK3_PATTERN}
EXTRA_SPECIAL = {"glm": ("[gMASK]", "<|user|>", "<|observation|>"), "muse": ("<|eot|>",)}


def write_tokenizer(folder: Path, kind: str, pre: str) -> int:
    """A tokenizer of the kind in `folder`; returns a size of the vocabulary that suits it."""
    if kind == "byte fallback":
        train_byte_fallback(folder)
        write_tokenizer_config(folder, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>", unk_token="<unk>")
        return len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 1
    if kind == "pieces":
        pytest.importorskip("sentencepiece")
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(PIECES))
        added = {"270": {"content": "▁x", "special": False}, "271": {"content": "<t>", "special": True}}
        write_tokenizer_config(folder, added_tokens_decoder=added, add_prefix_space=True)
        return VOCAB
    special = ("<|endoftext|>", "<|mask|>", *EXTRA_SPECIAL.get(kind, ()))
    train_byte_level(folder, pattern=PATTERNS.get(pre, QWEN2_PATTERN), special=special)
    write_tokenizer_config(folder)
    return VOCAB


@pytest.mark.parametrize("architecture", UPSTREAM_CASES)
def test_keys_are_those_of_upstream(tmp_path, upstream, architecture):
    kind, pre, config = UPSTREAM_CASES[architecture]
    folder = tmp_path / "target"
    write_target_config(folder, architecture, vocab_size=write_tokenizer(folder, kind, pre), **config)
    ours = tokenizer_keys(as_gguf(read_target(folder), tmp_path / "ours.gguf"))
    assert ours == upstream.keys(folder, pre, tmp_path / "theirs.gguf")


REAL = {
    "qwen2": ("Qwen3ForCausalLM", QWEN2_PATTERN),
    "llama-bpe": ("LlamaForCausalLM", LLAMA3_PATTERN),
    "gemma-4": ("Gemma4ForConditionalGeneration", ""),
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_vocabulary_comes_back_as_it_was(tmp_path, llama_cpp_source, name):
    """Vocabularies that upstream converted from the originals."""
    architecture, pattern = REAL[name]
    info = read_gguf_info(llama_cpp_source / "models" / f"ggml-vocab-{name}.gguf")
    folder = folder_of(info, tmp_path / "target", architecture, pattern)
    theirs, ours = tokenizer_keys(info), tokenizer_keys(as_gguf(read_target(folder), tmp_path / "keys.gguf"))
    theirs.pop("tokenizer.chat_template", None)
    # Older files mark padding as user defined.
    n_real = sum(text != f"[PAD{i}]" for i, text in enumerate(theirs["tokenizer.ggml.tokens"]))
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        theirs[key], ours[key] = theirs[key][:n_real], ours[key][:n_real]
    assert ours == theirs


def test_a_real_sentencepiece_vocabulary_comes_back_as_it_was(tmp_path, llama_cpp_source):
    info = read_gguf_info(llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf")
    columns = [info.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    folder = write_target_config(tmp_path / "target", "LlamaForCausalLM", vocab_size=len(columns[0]))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(zip(*columns, strict=True)))
    ours = as_gguf(read_target(folder), tmp_path / "keys.gguf")
    assert [ours.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")] == columns


def test_every_pre_tokenizer_name_is_one_that_the_loader_knows(llama_cpp_source):
    """An unknown one fails the load."""
    known = set(re.findall(r'tokenizer_pre == "([^"]+)"', (llama_cpp_source / "src" / "llama-vocab.cpp").read_text()))
    assert set(PRE_TOKENIZERS.values()) <= known


def test_every_class_has_the_architecture_that_upstream_registers(llama_cpp_source):
    """Class, base classes and `model_arch` of upstream's converter, and the names of its architectures."""
    sources = [path.read_text() for path in (llama_cpp_source / "conversion").glob("*.py")]
    blocks = [block for text in sources for block in re.split(r"\n(?=@|class )", text)]
    registered, arch, bases = {}, {}, {}
    pending: list[str] = []
    for block in blocks:
        if block.startswith("@ModelBase.register("):
            pending += re.findall(r'"([^"]+)"', block)
        elif match := re.match(r"class (\w+)\(([^)]*)\)", block):
            bases[match[1]] = match[2].split(", ")
            if found := re.search(r"model_arch\s*(?::.*)?=\s*gguf\.MODEL_ARCH\.(\w+)", block):
                arch[match[1]] = found[1]
            for name in pending:
                registered.setdefault(name, []).append(match[1])
            pending = []

    def architecture(cls: str) -> str | None:
        return arch.get(cls) or next((a for base in bases.get(cls, ()) if (a := architecture(base))), None)

    names = dict(
        re.findall(r'MODEL_ARCH\.(\w+):\s+"([^"]+)"', (llama_cpp_source / "gguf-py/gguf/constants.py").read_text())
    )
    # The same names are registered for the vision part.
    theirs = {name: {names[architecture(cls)] for cls in registered[name]} - {"clip"} for name in HF_ARCHITECTURES}
    assert theirs == {name: {known} for name, known in HF_ARCHITECTURES.items()}


def test_every_tappable_architecture_has_a_class_to_come_from():
    known = {*HF_ARCHITECTURES.values(), "nemotron_h_moe"}
    assert known >= TAPPABLE_ARCHITECTURES - {"llama-embed"}


# --- sizes and rope of a folder


def test_sizes_come_from_the_language_models_own_config(tmp_path):
    folder = train_byte_level(tmp_path / "target")
    text = {"hidden_size": 96, "num_hidden_layers": 7, "vocab_size": 300}
    write_target_config(folder, "Qwen3_5ForConditionalGeneration", text_config=text, vocab_size=1, hidden_size=1)
    target = read_target(folder, label="org/model")
    assert (target.label, target.architecture) == ("org/model", "qwen35")
    assert (target.hidden_size, target.layers, target.vocab_size) == (96, 7, 300)
    assert target.tokens[-1] == "[PAD299]"
    assert target.uses_mrope


MROPE = {
    "none": ({}, False),
    "parameters": ({"rope_parameters": {"mrope_section": [2, 3, 3]}}, True),
    "scaling": ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, True),
    "text config": ({"text_config": {"rope_scaling": {"mrope_section": [2, 3, 3]}}}, True),
    "no sections": ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, False),
}


@pytest.mark.parametrize("case", MROPE)
def test_mrope_is_seen_wherever_its_sections_stand(qwen_folder, case):
    changes, expected = MROPE[case]
    assert read_target(write_target_config(qwen_folder, **changes)).uses_mrope is expected


def test_nemotron_with_experts_is_another_architecture(tmp_path):
    folder = train_byte_level(tmp_path / "target")
    assert read_target(write_target_config(folder, "NemotronHForCausalLM")).architecture == "nemotron_h"
    write_target_config(folder, "NemotronHForCausalLM", num_experts_per_tok=6)
    assert read_target(folder).architecture == "nemotron_h_moe"


def test_an_architecture_that_cannot_be_tapped_converts_with_a_note(tmp_path):
    folder = train_byte_level(tmp_path / "target")
    write_target_config(folder, "LagunaForCausalLM")
    done = convert(make_drafter(tmp_path / "drafter"), folder, tmp_path / "out.gguf")
    assert done.notes == ("Stock llama.cpp publishes no layer inputs for laguna targets: this pair cannot run on it.",)


# --- vocabularies that do not belong together


def test_the_first_token_that_differs_is_named(tmp_path, qwen_folder):
    drafter = make_drafter(tmp_path / "drafter")
    content = json.loads((qwen_folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    texts = {token_id: text for text, token_id in vocab.items()}
    for token_id in (40, 50):
        vocab[f"other{token_id}"] = vocab.pop(texts[token_id])
    (drafter / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TargetMismatchError) as caught:
        convert(drafter, qwen_folder, tmp_path / "out.gguf")
    assert str(caught.value) == (
        f"{qwen_folder} is not the target of this drafter: token 40 is 'other40' in {drafter / 'tokenizer.json'}, and"
        f" {texts[40]!r} there; if the drafter was trained with the target's tokenizer, remove that file."
    )


def test_added_tokens_of_the_drafter_may_differ(tmp_path, qwen_folder):
    drafter = make_drafter(tmp_path / "drafter")
    train_byte_level(drafter, added=("<MASK>", "<another>"))
    convert(drafter, qwen_folder, tmp_path / "out.gguf")
    assert read_gguf_info(tmp_path / "out.gguf").metadata["tokenizer.ggml.tokens"] == read_target(qwen_folder).tokens


def test_a_vocabulary_of_another_length_is_refused(tmp_path, qwen_folder):
    write_target_config(qwen_folder, vocab_size=VOCAB + 1)
    with pytest.raises(TargetMismatchError) as caught:
        convert(make_drafter(tmp_path / "drafter"), qwen_folder, tmp_path / "out.gguf")
    assert str(caught.value) == (
        f"{qwen_folder} is not the target of this drafter: its vocabulary has {VOCAB + 1} tokens, the drafter's"
        f" 'vocab_size' is {VOCAB}."
    )


# --- split GGUF files


def test_the_first_part_of_a_split_target_is_enough(tmp_path):
    parts = {"split.no": (0, GGUFValueType.UINT16, None), "split.count": (3, GGUFValueType.UINT16, None)}
    first = make_target(tmp_path / "big-00001-of-00003.gguf", metadata=parts)
    convert(make_drafter(tmp_path / "drafter"), first, tmp_path / "out.gguf")
    assert len(read_gguf_info(tmp_path / "out.gguf").metadata["tokenizer.ggml.tokens"]) == VOCAB


def test_a_later_part_of_a_split_target_names_the_first(tmp_path):
    path = make_target(tmp_path / "big-00003-of-00003.gguf", metadata={"split.no": (2, GGUFValueType.UINT16, None)})
    with pytest.raises(GGUFError) as caught:
        read_target(path)
    first = tmp_path / "big-00001-of-00003.gguf"
    assert str(caught.value) == f"{path} is part 3 of a split GGUF; give the first part, {first}."


# --- folders that cannot serve

GIVE = "give a GGUF of the target."


def refused(folder: Path, error: type[Dflash2Error]) -> str:
    with pytest.raises(error) as caught:
        read_target(folder)
    assert type(caught.value) is error
    return str(caught.value).replace(str(folder), "FOLDER")


def test_folder_without_config(tmp_path):
    hint = "give the folder or the GGUF of the target"
    assert refused(tmp_path, CheckpointError) == f"FOLDER has no config.json; {hint}."
    (tmp_path / "m.gguf").write_bytes(b"")
    hint = "give the path of its GGUF file, FOLDER/m.gguf"
    assert refused(tmp_path, CheckpointError) == f"FOLDER has no config.json; {hint}."


def test_unknown_architecture(tmp_path):
    write_target_config(tmp_path, "PhiForCausalLM")
    sentence = f"FOLDER/config.json: the target's architecture (PhiForCausalLM) is not known here; {GIVE}"
    assert refused(tmp_path, UnsupportedCheckpointError) == sentence


def test_drafter_as_target(tmp_path):
    sentence = "FOLDER is a drafter itself; give the folder or the GGUF of the model it drafts for."
    assert refused(make_drafter(tmp_path / "drafter"), CheckpointError) == sentence


def test_no_tokenizer_file(tmp_path):
    write_target_config(tmp_path)
    sentence = "FOLDER has no tokenizer.json to take the tokenizer from; " + GIVE
    assert refused(tmp_path, UnsupportedCheckpointError) == sentence
    (tmp_path / "qwen.tiktoken").write_bytes(b"")
    sentence = "FOLDER has no tokenizer.json, only qwen.tiktoken, to take the tokenizer from; " + GIVE
    assert refused(tmp_path, UnsupportedCheckpointError) == sentence


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "WordLevel"])
def test_other_kinds_of_tokenizer(tmp_path, kind):
    vocab = [["a", 0.0]] if kind == "Unigram" else {"a": 0}
    write_target_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": kind, "vocab": vocab}}))
    sentence = f"FOLDER/tokenizer.json is a {kind} tokenizer, and only BPE ones are converted; {GIVE}"
    assert refused(tmp_path, UnsupportedCheckpointError) == sentence


def test_unknown_splitting_rules(tmp_path):
    train_byte_level(tmp_path, pattern=r"\d+|\D+")
    write_target_config(tmp_path, "LlamaForCausalLM")
    sentence = f"FOLDER/tokenizer.json splits text by rules that are not known here; {GIVE}"
    assert refused(tmp_path, UnsupportedCheckpointError) == sentence


def test_more_tokens_than_the_config_says(qwen_folder):
    write_target_config(qwen_folder, vocab_size=100)
    sentence = "FOLDER/tokenizer.json has token 280, but 'vocab_size' in config.json is 100; download both."
    assert refused(qwen_folder, CheckpointError) == sentence


@pytest.mark.parametrize(
    "content",
    [
        {"model": []},
        {"model": {"type": "BPE"}},
        {"model": {"type": "BPE", "vocab": {}}},
        {"model": {"type": "BPE", "vocab": {"a": -1}}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": {"b": 1}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
    ],
)
def test_damaged_tokenizer_json(tmp_path, content):
    write_target_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    sentence = "FOLDER/tokenizer.json is not a tokenizer file of the known form; download it again."
    assert refused(tmp_path, CheckpointError) == sentence


def test_no_merge_rules(tmp_path):
    write_target_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}}}')
    sentence = "FOLDER/tokenizer.json has no merge rules; download it again, or give a GGUF of the target."
    assert refused(tmp_path, CheckpointError) == sentence


def test_half_a_character_is_no_token(tmp_path):
    write_target_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"\\ud800": 0}, "merges": []}}')
    sentence = "FOLDER/tokenizer.json: the key '\\ud800' is not text (a lone surrogate); correct or remove it."
    assert refused(tmp_path, CheckpointError) == sentence


def test_half_a_character_in_the_chat_template(qwen_folder):
    (qwen_folder / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}')
    sentence = "FOLDER: 'chat_template' is not text (a lone surrogate); correct or remove it."
    assert refused(qwen_folder, CheckpointError).endswith(sentence.removeprefix("FOLDER"))


@pytest.mark.parametrize("size", [0, 1, 5, 40])
def test_cut_sentencepiece_model(llama_folder, size):
    path = llama_folder / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:size])
    sentence = "FOLDER/tokenizer.model is not a SentencePiece model; download it again."
    assert refused(llama_folder, CheckpointError) == sentence


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_sentencepiece_models_raise_nothing_else(llama_folder, edits):
    data = bytearray(sentencepiece_model(PIECES))
    for position, value in edits:
        data[position] = value
    (llama_folder / "tokenizer.model").write_bytes(data)
    try:
        read_target(llama_folder)
    except Dflash2Error as error:
        assert str(llama_folder) in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 400) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("added_tokens", "model", "pre_tokenizer", "post_processor", "normalizer", "decoder")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1), config=st.dictionaries(st.text(), JSON))
def test_odd_tokenizer_files_raise_nothing_else(qwen_folder, changes, config):
    path = qwen_folder / "tokenizer.json"
    good = path.read_text()
    path.write_text(json.dumps(json.loads(good) | changes))
    (qwen_folder / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        read_target(qwen_folder)
    except Dflash2Error as error:
        assert str(qwen_folder) in str(error)
    finally:
        path.write_text(good)


CONFIG_KEYS = ("architectures", "text_config", "rope_scaling", "rope_parameters", "vocab_size", "hidden_size")
SPECIAL_KEYS = ("bos_token_id", "pad_token_id", "num_hidden_layers", "num_experts_per_tok")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS + SPECIAL_KEYS), JSON | st.just(2**40), min_size=1))
def test_odd_target_configs_raise_nothing_else(qwen_folder, changes):
    write_target_config(qwen_folder, **changes)
    try:
        read_target(qwen_folder)
    except Dflash2Error as error:
        assert str(qwen_folder) in str(error)
