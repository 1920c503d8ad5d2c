"""Fetching llama.cpp's pinned source and building it."""

import io
import os
import subprocess
import sys
import tarfile

import pytest

from dflash2.cache import cache_folder
from dflash2.constants import LLAMA_CPP_COMMIT, SDIST_SOURCE_FOLDER
from dflash2.errors import BuildError, OutputError
from dflash2.patches import build, locate, source
from dflash2.patches.source import source_files, unpack


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cache_with_source(tmp_path, monkeypatch):
    """An otherwise empty cache that shares the real one's source."""
    sources = source().parent
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "sources").symlink_to(sources)
    monkeypatch.setenv("DFLASH2_CACHE", str(cache))
    return cache


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch):
    """A compiler that answers questions about itself and compiles nothing."""
    script = tmp_path / "broken-c++"
    script.write_text('#!/bin/sh\ncase " $* " in *" -dM "*) exec c++ "$@";; esac\necho out of order >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def test_source_is_the_pinned_llama_cpp():
    folder = source()
    assert LLAMA_CPP_COMMIT in folder.name
    assert (folder / "CMakeLists.txt").is_file()
    assert "draft-dflash" in (folder / "common" / "speculative.cpp").read_text()


def test_source_at_hand_needs_no_package_index(monkeypatch):
    folder = source()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    assert source() == folder


def test_unreachable_index_leaves_nothing_behind(empty_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty_cache))
    with pytest.raises(BuildError, match="pip could not fetch"):
        source()
    assert [path.name for path in (empty_cache / "sources").iterdir()] == [f"llama.cpp-{LLAMA_CPP_COMMIT}.lock"]


def test_two_processes_fetch_the_source_once(empty_cache):
    program = "from dflash2.patches import source; print(source())"
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate()[0].strip() for process in processes]
    assert answers == [str(empty_cache / "sources" / f"llama.cpp-{LLAMA_CPP_COMMIT}")] * 2
    assert [process.returncode for process in processes] == [0, 0]


def test_another_sdist_is_refused(tmp_path):
    sdist = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    sdist.write_bytes(b"not the pinned one")
    with pytest.raises(BuildError, match="SHA-256"):
        unpack(sdist, tmp_path)


def test_only_regular_files_of_llama_cpp_are_unpacked(tmp_path):
    names = [f"{SDIST_SOURCE_FOLDER}/{name}" for name in ("CMakeLists.txt", "../../../evil", ".git")]
    path = tmp_path / "sdist.tar"
    with tarfile.open(path, "w") as archive:
        for name in [*names, "llama_cpp_python-0.3.36/setup.py"]:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo(f"{SDIST_SOURCE_FOLDER}/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with tarfile.open(path) as archive:
        assert [member.name for member in source_files(archive)] == [names[0]]


def test_there_are_no_patches_to_build_yet():
    with pytest.raises(BuildError, match=r"has no llama\.cpp patches"):
        build(stock=False)


def test_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="'no-such-compiler' cannot be run"):
        build(stock=True)


@pytest.mark.usefixtures("broken_compiler")
def test_failed_build_shows_the_end_of_its_log_and_counts_as_none(cache_with_source):
    with pytest.raises(BuildError, match="out of order"):
        build(stock=True)
    assert locate(stock=True) is None
    (log,) = (cache_with_source / "builds").glob("*/build.log")
    assert "out of order" in log.read_text()


def test_stock_server_is_built_once():
    made = build(stock=True, progress=lambda *_: None)
    assert made.base == LLAMA_CPP_COMMIT
    version = subprocess.run([made.server, "--version"], capture_output=True, text=True, check=True)
    assert "version" in version.stderr + version.stdout
    written = (made.folder / "manifest.json").stat().st_mtime_ns
    assert build(stock=True) == made == locate(stock=True)
    assert (made.folder / "manifest.json").stat().st_mtime_ns == written


def test_other_compiler_flags_are_another_build(monkeypatch):
    made = build(stock=True)
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert locate(stock=True) is None
    monkeypatch.delenv("CXXFLAGS")
    assert locate(stock=True) == made


def test_cache_folder_that_cannot_be_made_is_one_clear_sentence(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("DFLASH2_CACHE", os.fspath(blocked))
    with pytest.raises(OutputError, match="DFLASH2_CACHE"):
        cache_folder("builds")
