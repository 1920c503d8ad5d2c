"""The patch series: complete headers, and trees that take it or refuse it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash2.errors import PatchError
from dflash2.native.symbols import COUNTERS
from dflash2.patches import BASES, apply, read_series, remove, source, status
from dflash2.patches.apply import patched_files
from dflash2.patches.bases import identity_files
from dflash2.patches.record import record

SERIES = read_series()
ROOT = SERIES.folder
NAMES = [patch.name for patch in SERIES.patches]


def copy_of_tree(base: str, folder: Path) -> Path:
    """The files of a base that the series has to do with."""
    original = source(BASES[base])
    for name in (*identity_files(SERIES), "CMakeLists.txt", "ggml/CMakeLists.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original / name, folder / name)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=BASES)
def tree(request, tmp_path) -> Path:
    return copy_of_tree(request.param, tmp_path / "llama.cpp")


@pytest.fixture
def pinned_tree(tmp_path) -> Path:
    return copy_of_tree(next(iter(BASES)), tmp_path / "llama.cpp")


@pytest.fixture
def copied_series(tmp_path) -> Path:
    """The series in a folder of its own, to be spoilt."""
    folder = tmp_path / "patches"
    folder.mkdir()
    for name in ("series", "backend", "llama", "src"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, folder / name)
    return folder


@pytest.fixture
def only_programs(tmp_path, monkeypatch):
    """Leaves no program on PATH but those named."""

    def leave(*names: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(shutil.which(name))
        monkeypatch.setenv("PATH", str(folder))

    return leave


def test_the_series_goes_on_and_comes_off_every_base_without_a_trace(tree):
    before = contents(tree)
    base = apply(tree)
    for name in SERIES.sources:
        assert (tree / name).read_bytes() == (ROOT / "src" / name).read_bytes()
    for name in SERIES.touched:
        assert (tree / name).read_bytes() != before[name]
    now = status(tree)
    assert (now.base, now.patched, now.complete, now.current, now.changed) == (base.name, True, True, True, ())
    remove(tree)
    assert contents(tree) == before
    assert not status(tree).patched


def test_applying_twice_and_removing_twice_change_nothing_more(pinned_tree):
    before = contents(pinned_tree)
    apply(pinned_tree)
    once = contents(pinned_tree)
    apply(pinned_tree)
    assert contents(pinned_tree) == once
    remove(pinned_tree)
    remove(pinned_tree)
    assert contents(pinned_tree) == before


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", NAMES)
def test_every_patch_applies_alone(name, base):
    (patch,) = [patch for patch in SERIES.patches if patch.name == name]
    assert base in patch.bases
    alone = type(SERIES)(ROOT, (patch,))
    assert set(patched_files(source(BASES[base]), alone)) == set(patch.touched)


@pytest.mark.parametrize("program", ["git", "patch"])
def test_either_program_gives_the_same_tree(pinned_tree, only_programs, program):
    expected = patched_files(pinned_tree, SERIES)
    only_programs(program)
    assert patched_files(pinned_tree, SERIES) == expected


def test_without_git_and_patch_nothing_is_changed(pinned_tree, only_programs):
    before = contents(pinned_tree)
    only_programs()
    with pytest.raises(PatchError, match="git or patch is needed"):
        apply(pinned_tree)
    assert contents(pinned_tree) == before


def test_a_checkout_of_git_around_the_tree_does_not_matter(pinned_tree):
    subprocess.run(["git", "init", "-q", pinned_tree.parent], check=True)
    apply(pinned_tree)
    seen = subprocess.run(
        ["git", "-C", pinned_tree, "ls-files", "-o", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    assert not [line for line in seen.stdout.splitlines() if ".dflash2-patches" in line]
    assert status(pinned_tree).patched


def test_a_foreign_tree_is_refused_by_name(pinned_tree):
    changed = pinned_tree / SERIES.touched[0]
    changed.write_text(changed.read_text() + "\n")
    before = contents(pinned_tree)
    with pytest.raises(PatchError, match=re.escape("holds llama.cpp (ggml 0.25.3), which is no base")) as caught:
        apply(pinned_tree)
    assert SERIES.touched[0] in str(caught.value)
    assert all(name in str(caught.value) for name in BASES)
    assert contents(pinned_tree) == before


def test_a_foreign_checkout_is_refused_by_its_commit(pinned_tree):
    changed = pinned_tree / SERIES.touched[0]
    changed.write_text(changed.read_text() + "\n")
    git = ["git", "-C", str(pinned_tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "b99999"]):
        subprocess.run([*git, *command], check=True)
    with pytest.raises(PatchError, match=r"holds llama\.cpp b99999 \(ggml 0\.25\.3\)"):
        apply(pinned_tree)


def test_a_folder_that_is_no_source_tree_is_refused(tmp_path):
    with pytest.raises(PatchError, match=r"is no source tree of llama\.cpp"):
        status(tmp_path)


def test_a_patched_file_that_somebody_changed_is_kept_and_named(pinned_tree):
    apply(pinned_tree)
    changed = pinned_tree / SERIES.touched[0]
    changed.write_text("mine")
    before = contents(pinned_tree)
    assert status(pinned_tree).changed == (SERIES.touched[0],)
    for call in (remove, apply):
        with pytest.raises(PatchError, match=re.escape(SERIES.touched[0])):
            call(pinned_tree)
    assert contents(pinned_tree) == before


def test_a_file_of_our_name_is_not_overwritten(pinned_tree):
    (pinned_tree / SERIES.sources[0]).parent.mkdir(parents=True, exist_ok=True)
    (pinned_tree / SERIES.sources[0]).write_text("mine")
    with pytest.raises(PatchError, match=f"{SERIES.sources[0]} is in the way"):
        apply(pinned_tree)
    assert not status(pinned_tree).patched


def test_an_interrupted_call_is_finished_by_the_next(pinned_tree):
    original = (pinned_tree / SERIES.touched[0]).read_bytes()
    apply(pinned_tree)
    expected = contents(pinned_tree)
    # As it stands when the process ends between two files.
    (pinned_tree / SERIES.touched[0]).write_bytes(original)
    (pinned_tree / SERIES.sources[0]).unlink()
    assert not status(pinned_tree).complete
    apply(pinned_tree)
    assert contents(pinned_tree) == expected


def test_a_series_of_which_one_patch_fails_leaves_the_tree_alone(pinned_tree, copied_series):
    before = contents(pinned_tree)
    path = copied_series / NAMES[-1]
    path.write_text(re.sub(r"^ (\S)", r" changed \1", path.read_text(), flags=re.MULTILINE))
    header_kept = path.read_text().replace(
        " changed ", " ", path.read_text().partition("\n---\n")[0].count(" changed ")
    )
    path.write_text(header_kept)
    with pytest.raises(PatchError, match=f"{NAMES[-1]} does not apply"):
        apply(pinned_tree, read_series(copied_series))
    assert contents(pinned_tree) == before


def test_the_series_of_another_version_gives_way_to_this_one(pinned_tree, copied_series):
    (copied_series / "src" / SERIES.sources[0]).write_text("// an older version\n")
    apply(pinned_tree, read_series(copied_series))
    assert not status(pinned_tree).current
    apply(pinned_tree)
    assert status(pinned_tree).current
    assert (pinned_tree / SERIES.sources[0]).read_bytes() == (ROOT / "src" / SERIES.sources[0]).read_bytes()


def test_a_patch_that_is_not_verified_on_a_base_is_refused_there(pinned_tree, copied_series):
    path = copied_series / NAMES[0]
    path.write_text(re.sub(r"^Bases: .*$", "Bases: b1", path.read_text(), flags=re.MULTILINE))
    with pytest.raises(PatchError, match=f"{NAMES[0]} is verified on b1, not on"):
        apply(pinned_tree, read_series(copied_series))


@pytest.mark.parametrize("field", ["Description", "Author", "Forwarded", "Bases", "Switch"])
def test_a_header_without_one_of_its_fields_is_an_error(copied_series, field):
    path = copied_series / NAMES[0]
    path.write_text(re.sub(rf"^{field}:.*\n(?: .*\n)*", "", path.read_text(), flags=re.MULTILINE))
    with pytest.raises(PatchError, match=f"{NAMES[0]} has no {field} in its header"):
        read_series(copied_series)


@pytest.mark.parametrize("forwarded", ["no", "not-needed", "no (soon"])
def test_a_patch_that_upstream_does_not_have_says_why(copied_series, forwarded):
    path = copied_series / NAMES[0]
    path.write_text(re.sub(r"^Forwarded: .*$", f"Forwarded: {forwarded}", path.read_text(), flags=re.MULTILINE))
    with pytest.raises(PatchError, match=f"{NAMES[0]} gives no reason in its Forwarded"):
        read_series(copied_series)


def test_files_that_nothing_names_are_an_error(copied_series):
    (copied_series / "src" / "ggml" / "dflash2-orphan.h").write_text("")
    shutil.copyfile(copied_series / NAMES[0], copied_series / "llama" / "0099-unlisted.patch")
    with pytest.raises(PatchError) as caught:
        read_series(copied_series)
    assert "src/ggml/dflash2-orphan.h is named by no patch" in str(caught.value)
    assert "llama/0099-unlisted.patch is not listed" in str(caught.value)


def test_a_source_that_is_missing_or_a_patch_that_adds_a_file_is_an_error(copied_series):
    (copied_series / "src" / SERIES.sources[0]).unlink()
    path = copied_series / NAMES[0]
    new = "diff --git a/new.c b/new.c\nnew file mode 100644\n--- /dev/null\n+++ b/new.c\n@@ -0,0 +1 @@\n+int x;\n"
    path.write_text(path.read_text() + new)
    with pytest.raises(PatchError) as caught:
        read_series(copied_series)
    assert f"needs src/{SERIES.sources[0]}, which is not there" in str(caught.value)
    assert f"{NAMES[0]} adds or deletes a file" in str(caught.value)


def test_the_digest_changes_with_a_patch_a_source_and_the_order(copied_series):
    assert read_series(copied_series).digest == SERIES.digest
    digests = {SERIES.digest, SERIES.only("backend").digest}
    (copied_series / "src" / SERIES.sources[-1]).write_text("// another\n")
    digests.add(read_series(copied_series).digest)
    (copied_series / "series").write_text("\n".join(reversed(NAMES)))
    digests.add(read_series(copied_series).digest)
    assert len(digests) == 4


def test_every_patch_names_the_sources_that_its_sources_include():
    """As a series without the others would lack them."""
    for patch in SERIES.patches:
        for name in patch.sources:
            for found in re.findall(r'^#include "([^"]*dflash2-switch\.h)"', (ROOT / "src" / name).read_text(), re.M):
                assert os.path.normpath(Path(name).parent / found) in patch.sources, f"{patch.name}: {name}"


def test_every_switch_is_read_by_the_one_rule():
    """Set to anything but the empty text or 0."""
    reading = {name for name in SERIES.sources if "getenv(" in (ROOT / "src" / name).read_text()}
    assert reading == {"ggml/src/dflash2-switch.h", "ggml/src/dflash2-dispatch.h"}
    assert (ROOT / "src" / "ggml" / "src" / "dflash2-dispatch.h").read_text().count("getenv(") == 1


def test_hooks_in_upstream_files_are_few_lines():
    for patch in SERIES.patches:
        for part in re.split(r"^diff --git ", patch.text.partition("\n---\n")[2], flags=re.MULTILINE)[1:]:
            added = re.findall(r"^\+(?!\+\+)", part, re.MULTILINE)
            assert len(added) <= 20, f"{patch.name}: {part.split()[0]}"


def test_the_readme_says_what_every_hook_is_for():
    readme = (Path(__file__).parents[1] / "patches" / "README.md").read_text()
    assert [name for name in NAMES if f"| {name.removesuffix('.patch')} |" not in readme] == []


def test_every_counter_of_the_sources_is_one_that_doctor_reads():
    text = "".join((ROOT / "src" / name).read_text() for name in SERIES.sources)
    found = set(re.findall(r"_API uint64_t (\w+_count)\(void\);", text))
    assert found <= set(COUNTERS)


def test_the_recorded_bases_are_those_of_the_series():
    assert (ROOT / "bases.json").read_text() == record(), "run: python -m dflash2.patches.record"


def test_hard_links_of_a_tree_are_not_written_through(tmp_path, pinned_tree):
    linked = tmp_path / "linked"
    shutil.copytree(pinned_tree, linked, copy_function=os.link)
    before = contents(pinned_tree)
    apply(linked)
    assert contents(pinned_tree) == before
