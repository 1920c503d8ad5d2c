"""Models with a draft on an Ollama server: what is sent, what is asked for, and what is refused."""

import os

import pytest
from factories import make_drafter, make_target
from factories_check import make_fork
from gguf.constants import GGUFValueType
from ollama_server import Model, digest_of

from dflash2.converter import convert
from dflash2.errors import GGUFError, ModelfileError, OllamaError, OptionError
from dflash2.modelfiles import Pair, resolve_pair
from dflash2.modelfiles.ollama import Plan, create, plan_of_modelfile, plan_of_pair, with_settings

U16, U64 = GGUFValueType.UINT16, GGUFValueType.UINT64


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target and its drafter of block size 4."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(folder / "target.gguf")
    return target, convert(make_drafter(folder / "drafter"), target, folder / "drafter.gguf").output


@pytest.fixture
def pair(files) -> Pair:
    return resolve_pair(*map(str, files))


def digest(path) -> str:
    return digest_of(path.read_bytes())


def test_a_pair_arrives_with_its_draft_and_is_not_sent_again(ollama, server, pair, files):
    target, drafter = files
    made = create(server, "fast", plan_of_pair(pair))
    size = target.stat().st_size + drafter.stat().st_size
    assert (made.name, made.version, made.draft, made.draft_num_predict) == ("fast", "0.40.0", digest(drafter), 3)
    assert (made.sent_bytes, made.kept_bytes) == (size, 0)
    assert ollama.created == [
        {
            "model": "fast",
            "stream": True,
            "files": {"target.gguf": digest(target)},
            "draft_files": {"drafter.gguf": digest(drafter)},
            "parameters": {"draft_num_predict": 3},
        }
    ]
    assert ollama.models["fast:latest"].draft == digest(drafter)
    again = create(server, "other", plan_of_pair(pair))
    assert (again.sent_bytes, again.kept_bytes) == (0, size)
    assert ollama.uploads() == [digest(drafter), digest(target)]


def test_progress_tells_of_hashing_sending_and_what_the_server_does(ollama, server, pair):
    steps = []
    create(server, "fast", plan_of_pair(pair), draft_quantize="q8_0", progress=lambda *step: steps.append(step))
    assert ollama.created[0]["draft_quantize"] == "Q8_0"
    told = list(dict.fromkeys(step[0] for step in steps))
    assert told[:4] == ["hashing drafter.gguf", "hashing target.gguf", "sending drafter.gguf", "sending target.gguf"]
    assert told[4:] == ["parsing GGUF", "quantizing F16 model to Q8_0", "writing manifest", "success"]
    assert ("quantizing F16 model to Q8_0", 50, 100) in steps


def test_an_upload_that_broke_is_made_up_for_by_the_next_run(ollama, server, pair, files):
    ollama.cuts = [None] + [100] * 4
    with pytest.raises(OllamaError, match=r"broke 4 times while .*target\.gguf was sent"):
        create(server, "fast", plan_of_pair(pair))
    create(server, "fast", plan_of_pair(pair))
    target, drafter = map(digest, files)
    assert ollama.uploads() == [drafter, *[target] * 5]


def test_a_server_without_draft_files_is_found_out(ollama, server, pair):
    ollama.knows_drafts, ollama.version = False, "0.12.3"
    with pytest.raises(OllamaError, match=r"without its draft: Ollama 0\.12\.3 .* upgrade it .* `ollama rm fast`\.$"):
        create(server, "fast", plan_of_pair(pair))


def test_another_draft_than_ours_is_found_out(ollama, server, pair, files):
    ollama.attaches_another = True
    with pytest.raises(OllamaError, match=rf"is not {files[1]} \({digest(files[1])}\)"):
        create(server, "fast", plan_of_pair(pair))


def test_another_number_of_draft_tokens_than_ours_is_found_out(ollama, server, pair):
    ollama.drops_parameters = True
    with pytest.raises(OllamaError, match=r"it drafts 4 tokens where 3 were asked for: Ollama 0\.40\.0"):
        create(server, "fast", plan_of_pair(pair))


def test_a_base_of_the_server_is_named_and_its_files_are_not(ollama, server, files):
    ollama.models["base:latest"] = Model("sha256:" + "5" * 64, info=sizes(64, 5))
    made = create(server, "fast", Plan(files[1], base="base"))
    assert made.draft == digest(files[1])
    assert ollama.created[0]["from"] == "base"
    assert "files" not in ollama.created[0]
    assert ollama.models["fast:latest"].base == "sha256:" + "5" * 64


def sizes(hidden: int, layers: int) -> dict:
    return {"general.architecture": "qwen3", "qwen3.embedding_length": hidden, "qwen3.block_count": layers}


@pytest.mark.parametrize(
    ("info", "says"),
    [
        (sizes(128, 5), "is for targets of hidden size 64, and base has 128"),
        (sizes(64, 3), "reads layer 4 of its target, and base has 3 layers"),
    ],
)
def test_a_base_that_does_not_fit_is_refused_before_anything_is_sent(ollama, server, files, info, says):
    ollama.models["base:latest"] = Model("sha256:" + "5" * 64, info=info)
    with pytest.raises(OllamaError, match=says):
        create(server, "fast", Plan(files[1], base="base"))
    assert (ollama.uploads(), ollama.created) == ([], [])


def test_a_base_that_the_server_cannot_get_is_its_own_words(server, files):
    with pytest.raises(OllamaError, match="refused the creation of fast: pull model manifest: file does not exist"):
        create(server, "fast", Plan(files[1], base="gone"))


def test_what_is_no_dflash_drafter_is_refused_before_anything_is_sent(ollama, server, files, tmp_path):
    target, drafter = files
    for path, says in {
        make_fork(drafter, tmp_path / "fork.gguf"): "is a fork's drafter, which Ollama would take for MTP",
        target: "is no DFlash drafter in one GGUF file; give the target first",
    }.items():
        with pytest.raises(OllamaError, match=says):
            create(server, "fast", Plan(path, (target,)))
    assert ollama.requests == []


@pytest.mark.parametrize(("outtype", "allowed"), [("bf16", True), ("f16", True), ("f32", False), ("q8_0", False)])
def test_only_half_precision_drafts_are_quantised(ollama, server, files, tmp_path, outtype, allowed):
    target = files[0]
    drafter = convert(make_drafter(tmp_path / "d"), target, tmp_path / "d.gguf", outtype=outtype).output
    plan = Plan(drafter, (target,))
    if allowed:
        made = create(server, "fast", plan, draft_quantize="Q4_K_M")
        assert made.draft not in (None, digest(drafter))
    else:
        with pytest.raises(OptionError, match="needs a drafter in F16 or BF16, and this one is"):
            create(server, "fast", plan, draft_quantize="Q4_K_M")
        assert ollama.requests == []


def test_types_that_ollama_does_not_know_are_refused(ollama, server, pair):
    for option, kind in {"quantize": OllamaError, "draft_quantize": OptionError}.items():
        with pytest.raises(kind, match=r"q2_k.*; give one of F32, .*, Q4_K_M\."):
            create(server, "fast", plan_of_pair(pair), **{option: "q2_k"})
    assert ollama.requests == []


def split_target(folder, n_parts: int, named: str = "big-{:05d}-of-{:05d}.gguf"):
    """Headers of a split target: the first part is a whole one, as far as these tests go."""
    paths = [folder / named.format(number + 1, n_parts) for number in range(n_parts)]
    for number, path in enumerate(paths):
        split = {"split.no": (number, U16, None), "split.count": (n_parts, U16, None)}
        make_target(path, metadata=split, seed=number)
    return paths


def test_all_parts_of_a_split_target_are_sent_under_their_names(ollama, server, files, tmp_path):
    parts = split_target(tmp_path, 3)
    pair = resolve_pair(str(parts[0]), str(files[1]))
    create(server, "fast", plan_of_pair(pair))
    assert ollama.created[0]["files"] == {path.name: digest(path) for path in parts}


def test_a_split_target_that_is_not_whole_is_refused(files, tmp_path):
    parts = split_target(tmp_path, 3)
    pair = resolve_pair(str(parts[0]), str(files[1]))
    parts[1].unlink()
    with pytest.raises(OllamaError, match=r"big-00002-of-00003\.gguf is missing, a part of big-00001-of-00003"):
        plan_of_pair(pair)
    renamed = parts[0].rename(tmp_path / "big.gguf")
    with pytest.raises(OllamaError, match=r"one of the 3 files of a split GGUF; give the first, named"):
        plan_of_pair(resolve_pair(str(renamed), str(files[1])))


def test_names_that_a_server_refuses_are_sent_as_others(ollama, server, files, tmp_path):
    awkward = tmp_path / os.fsdecode(b"a:b\\c \xff\x1b[31m\xe4\xbd\xa0.gguf")
    awkward.write_bytes(files[0].read_bytes())
    create(server, "fast", Plan(files[1], (awkward,)))
    assert list(ollama.created[0]["files"]) == ["a_b_c __[31m你.gguf"]


def test_files_of_one_name_are_both_sent(ollama, server, files, tmp_path):
    (tmp_path / "target.gguf").write_bytes(files[1].read_bytes())
    create(server, "fast", Plan(files[1], (files[0], tmp_path / "target.gguf")))
    assert ollama.created[0]["files"] == {"target.gguf": digest(files[0]), "_target.gguf": digest(files[1])}


def test_a_modelfile_is_sent_as_it_reads(ollama, server, files, tmp_path, monkeypatch):
    target, drafter = files
    monkeypatch.setenv("HOME", str(drafter.parent))
    (tmp_path / "target.gguf").write_bytes(target.read_bytes())
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(
        "# mine\nFROM ./target.gguf\nDRAFT ~/drafter.gguf\nTEMPLATE {{ .Prompt }}\nsystem Be brief.\n"
        'PARAMETER num_ctx 4096\nPARAMETER temperature 1\nPARAMETER use_mmap false\nPARAMETER stop "<|im_end|>"\n'
        "PARAMETER stop User:\nPARAMETER mirostat 1\nLICENSE MIT\nLICENSE Other\nRENDERER qwen3\nPARSER qwen3\n"
        "REQUIRES v0.14.0\nMESSAGE user Hi: you\nMESSAGE assistant Hello\n"
    )
    create(server, "fast", plan_of_modelfile(modelfile))
    request = ollama.created[0]
    assert request["parameters"] == {
        "draft_num_predict": 3,
        "num_ctx": 4096,
        "temperature": 1.0,
        "use_mmap": False,
        "stop": ["<|im_end|>", "User:"],
    }
    assert request["files"] == {"target.gguf": digest(target)}
    assert (request["template"], request["system"]) == ("{{ .Prompt }}", "Be brief.")
    assert (request["license"], request["requires"]) == (["MIT", "Other"], "0.14.0")
    assert (request["renderer"], request["parser"]) == ("qwen3", "qwen3")
    assert request["messages"] == [
        {"role": "user", "content": "Hi: you"},
        {"role": "assistant", "content": "Hello"},
    ]


def test_a_modelfile_s_own_number_of_draft_tokens_stays(ollama, server, files, tmp_path):
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM qwen3.8:27b\nDRAFT {files[1]}\nPARAMETER draft_num_predict 2\n")
    ollama.models["qwen3.8:27b"] = Model("sha256:" + "5" * 64)
    assert create(server, "fast", plan_of_modelfile(modelfile)).draft_num_predict == 2
    assert ollama.created[0]["from"] == "qwen3.8:27b"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("FROM {target}\n", OllamaError, "has 0 DRAFT lines; one is needed"),
        ("FROM {target}\nDRAFT {drafter}\nDRAFT {drafter}\n", OllamaError, "has 2 DRAFT lines"),
        ("FROM {target}\nFROM other\nDRAFT {drafter}\n", OllamaError, "FROM names other, no file here, beside another"),
        ("FROM a\nFROM b\nDRAFT {drafter}\n", OllamaError, "FROM names a, b, no file here"),
        ("FROM a\nDRAFT gone.gguf\n", GGUFError, "gone.gguf: No such file"),
        ("FROM .\nDRAFT {drafter}\n", GGUFError, "Is a directory"),
        ("FROM a\nDRAFT ~nobody-here/d\n", OllamaError, "names no home folder that there is"),
        (
            "FROM a\nDRAFT {drafter}\nPARAMETER num_ctx many\n",
            ModelfileError,
            r"would refuse it: invalid int value \[many\]\.",
        ),
        ("FROM a\nDRAFT {drafter}\nPARAMETER nonsense 1\n", ModelfileError, "unknown parameter 'nonsense'"),
        ("FROM a\nDRAFT {drafter}\nPARAMETER top_p nan\n", OllamaError, "top_p is nan, which cannot be sent"),
        ("FROM a\nDRAFT {drafter}\nREQUIRES new\n", ModelfileError, "requires must be a valid semver"),
        ("DRAFT {drafter}\n", ModelfileError, r"Modelfile is refused as Ollama would refuse it: no FROM line\."),
    ],
    ids=range(12),
)
def test_modelfiles_that_cannot_be_sent_are_refused(server, files, tmp_path, text, error, says):
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(text.format(target=files[0], drafter=files[1]))
    with pytest.raises(error, match=says):
        create(server, "fast", plan_of_modelfile(modelfile))


def test_settings_go_before_those_of_a_plan(files):
    plan = Plan(files[1], (files[0],), parameters={"seed": 1, "num_ctx": 1}, settings={"system": "no", "parser": "x"})
    given = {"num_ctx": ["+5"], "top_p": [".5"], "use_mmap": ["T"], "stop": [" ", "b"], "system": ["yes"]}
    found = with_settings(plan, given)
    assert found.parameters == {"seed": 1, "num_ctx": 5, "top_p": 0.5, "use_mmap": True, "stop": (" ", "b")}
    assert found.settings == {"system": "yes", "parser": "x"}
    with pytest.raises(ModelfileError, match="unknown parameter 'Num_ctx'"):
        with_settings(plan, {"Num_ctx": ["5"]})


@pytest.mark.parametrize("wanted", [4, 5, 1000])
def test_more_draft_tokens_than_the_block_has_are_refused(ollama, server, files, wanted):
    plan = Plan(files[1], (files[0],), parameters={"draft_num_predict": wanted})
    with pytest.raises(
        OllamaError, match=rf"draft_num_predict is {wanted}, and .*drafts at most 3; give that or fewer"
    ):
        create(server, "fast", plan)
    assert ollama.requests == []


def test_the_draft_is_asked_of_the_modelfile_not_of_a_licence_in_it(ollama, server, files):
    ollama.knows_drafts = False
    forged = f"MIT\nDRAFT /blobs/{digest(files[1]).replace(':', '-')}\n"
    plan = Plan(files[1], (files[0],), settings={"license": [forged]})
    with pytest.raises(OllamaError, match="was made, but without its draft"):
        create(server, "fast", plan)


def test_a_shown_modelfile_that_does_not_parse_still_names_the_draft(server, files):
    plan = Plan(files[1], (files[0],), settings={"license": ['he said "no"', 'x"""y\n', '"']})
    assert create(server, "fast", plan).draft == digest(files[1])


@pytest.mark.parametrize("name", ["", "a b", "-a", "a:", "a/", "n.s/a", "a:b:c", "a/b/c/d", "\u00e9", "a" * 81, "a\n"])
def test_a_name_that_ollama_cannot_take_is_refused_before_anything_is_sent(ollama, server, pair, name):
    with pytest.raises(OllamaError, match="is no name that Ollama takes"):
        create(server, name, plan_of_pair(pair))
    assert ollama.requests == []


@pytest.mark.parametrize("name", ["a", "_a.B-1", "n-s/a:7b-q4_K.M", "localhost:5000/n/a:b", "http://box/n/a"])
def test_names_that_ollama_takes_are_asked_for(ollama, server, pair, name):
    create(server, name, plan_of_pair(pair))
    assert ollama.created[0]["model"] == name
