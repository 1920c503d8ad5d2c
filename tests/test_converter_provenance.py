"""What a drafter file says of its origin: repository, commit, licence, base model, hash of every input."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from factories import drafter_config, drafter_tensors, make_drafter, make_target, write_checkpoint
from factories_tokenizers import train_byte_level, write_target_config, write_tokenizer_config

from dflash2.converter import convert
from dflash2.errors import CheckpointError
from dflash2.gguf_info import read_gguf_info
from dflash2.hub import HubFile, Snapshot

COMMIT, OTHER_COMMIT = "c" * 40, "d" * 40
PROVENANCE = "dflash2.input."


@pytest.fixture
def target(tmp_path) -> Path:
    return make_target(tmp_path / "target.gguf")


def metadata_of(path: Path) -> dict[str, object]:
    return dict(read_gguf_info(path).metadata)


def recorded_inputs(path: Path) -> dict[str, str]:
    metadata = metadata_of(path)
    numbers = range(metadata["dflash2.input.count"])
    return {metadata[f"{PROVENANCE}{n}.name"]: metadata[f"{PROVENANCE}{n}.sha256"] for n in numbers}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_card(folder: Path, front: str) -> None:
    (folder / "README.md").write_text(f"---\n{front}\n---\ntext\n")


def test_every_input_has_its_sha256(tmp_path, target):
    drafter = make_drafter(tmp_path / "drafter")
    write_card(drafter, "license: mit")
    convert(drafter, target, tmp_path / "out.gguf")
    names = ("README.md", "config.json", "model.safetensors")
    assert recorded_inputs(tmp_path / "out.gguf") == {f"drafter/{name}": sha256(drafter / name) for name in names}


def test_large_inputs_are_hashed_while_the_tensors_are_written(tmp_path, target):
    """More than a megabyte: the header is written twice, with and without the hash."""
    config = drafter_config(intermediate_size=4096)
    drafter = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config), shards=2)
    shards = sorted(drafter.glob("*.safetensors"))
    assert shards[0].stat().st_size > 1 << 20
    convert(drafter, target, tmp_path / "out.gguf")
    files = [*shards, drafter / "config.json", drafter / "model.safetensors.index.json"]
    assert recorded_inputs(tmp_path / "out.gguf") == {f"drafter/{file.name}": sha256(file) for file in files}


@pytest.mark.parametrize("size", [96, 4096])
def test_a_file_that_changed_in_the_cache_is_refused(tmp_path, target, size):
    """Small ones are hashed before the tensors are written, large ones meanwhile."""
    drafter = make_drafter(tmp_path / COMMIT, intermediate_size=size)
    weights = drafter / "model.safetensors"
    assert (weights.stat().st_size > 1 << 20) == (size == 4096)
    good, bad = sha256(weights), "0" * 64
    source = Snapshot(drafter, "org/Tiny", COMMIT, files=(HubFile("model.safetensors", weights, good),))
    convert(source, target, tmp_path / "out.gguf")
    assert recorded_inputs(tmp_path / "out.gguf")["drafter/model.safetensors"] == good
    source = replace(source, files=(HubFile("model.safetensors", weights, bad),))
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, tmp_path / "other.gguf")
    assert str(caught.value) == (
        f"{weights} is damaged: its SHA-256 is {good}, the Hub states {bad}; remove {weights.resolve()} and run it"
        " again."
    )
    assert not (tmp_path / "other.gguf").exists()


def test_files_of_a_target_folder_are_inputs_too(tmp_path):
    folder = train_byte_level(tmp_path / "target")
    write_tokenizer_config(folder)
    write_target_config(folder)
    (folder / "model.safetensors").write_bytes(b"not read")
    convert(make_drafter(tmp_path / "drafter"), folder, tmp_path / "out.gguf")
    found = recorded_inputs(tmp_path / "out.gguf")
    theirs = {name: digest for name, digest in found.items() if name.startswith("target/")}
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    assert theirs == {f"target/{name}": sha256(folder / name) for name in names}


def test_repository_and_commit_are_recorded(tmp_path):
    tokenizer = write_target_config(train_byte_level(tmp_path / OTHER_COMMIT))
    drafter = make_drafter(tmp_path / COMMIT)
    convert(
        Snapshot(drafter, "incoai/Tiny-4B-DFlash2", COMMIT),
        Snapshot(tokenizer, "org/Tiny-4B", OTHER_COMMIT),
        tmp_path / "out.gguf",
    )
    metadata = metadata_of(tmp_path / "out.gguf")
    assert metadata["general.source.huggingface.repository"] == "incoai/Tiny-4B-DFlash2"
    assert metadata["general.source.revision"] == COMMIT
    assert metadata["dflash2.source.target.repository"] == "org/Tiny-4B"
    assert metadata["dflash2.source.target.revision"] == OTHER_COMMIT
    # Not the name of the folder, which is the commit.
    assert metadata["general.name"] == "Tiny 4B DFlash2"
    assert metadata["general.organization"] == "Incoai"
    assert metadata["general.base_model.count"] == 1
    assert metadata["general.base_model.0.name"] == "Tiny 4B"
    assert metadata["general.base_model.0.organization"] == "Org"


def test_the_cards_base_model_goes_before_the_target(tmp_path):
    tokenizer = write_target_config(train_byte_level(tmp_path / "target"))
    drafter = make_drafter(tmp_path / "drafter")
    write_card(drafter, "base_model: Qwen/Qwen3-4B")
    convert(drafter, Snapshot(tokenizer, "org/Tiny-4B", COMMIT), tmp_path / "out.gguf")
    assert metadata_of(tmp_path / "out.gguf")["general.base_model.0.name"] == "Qwen3 4B"


def test_a_local_pair_has_no_repository(tmp_path, target):
    convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf")
    assert not [key for key in metadata_of(tmp_path / "out.gguf") if ".source." in key]


LICENSES = {
    "license: apache-2.0": ("apache-2.0", "Licence of the drafter: apache-2.0."),
    "license: cc-by-nc-nd-4.0": (
        "cc-by-nc-nd-4.0",
        "Licence of the drafter: cc-by-nc-nd-4.0. It allows no derivatives: convert for your own use, and do not pass"
        " the file on.",
    ),
    "license: cc-by-nd-4.0": (
        "cc-by-nd-4.0",
        "Licence of the drafter: cc-by-nd-4.0. It allows no derivatives: convert for your own use, and do not pass"
        " the file on.",
    ),
    "license: other\nlicense_name: lab-standard-terms": ("other", "Licence of the drafter: lab-standard-terms."),
}


@pytest.mark.parametrize("front", LICENSES)
def test_the_licence_is_written_and_said(tmp_path, target, front):
    identifier, note = LICENSES[front]
    drafter = make_drafter(tmp_path / "drafter")
    write_card(drafter, front)
    done = convert(drafter, target, tmp_path / "out.gguf")
    assert metadata_of(tmp_path / "out.gguf")["general.license"] == identifier
    assert done.notes == (note,)


def test_without_a_card_nothing_is_said_of_a_licence(tmp_path, target):
    done = convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf")
    assert done.notes == ()
    assert "general.license" not in metadata_of(tmp_path / "out.gguf")


def test_a_card_that_is_no_yaml_is_named(tmp_path, target):
    drafter = make_drafter(tmp_path / "drafter")
    write_card(drafter, "license: {")
    with pytest.raises(CheckpointError) as caught:
        convert(drafter, target, tmp_path / "out.gguf")
    assert str(caught.value) == f"{drafter / 'README.md'} has no readable model card; correct or remove it."


def test_the_same_inputs_give_the_same_bytes(tmp_path, target):
    drafter = make_drafter(tmp_path / "drafter")
    for name in ("one.gguf", "two.gguf"):
        convert(drafter, target, tmp_path / name)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_config_keys_of_the_inputs_do_not_leak_the_folders_path(tmp_path, target):
    convert(make_drafter(tmp_path / "secret-folder"), target, tmp_path / "out.gguf")
    assert str(tmp_path).encode() not in (tmp_path / "out.gguf").read_bytes()
    assert sorted(recorded_inputs(tmp_path / "out.gguf")) == ["drafter/config.json", "drafter/model.safetensors"]
