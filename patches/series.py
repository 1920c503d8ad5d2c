"""The patch series: its order, the header of every patch, and the sources of ours that each of them needs.

`series` lists the patches in the order in which they apply, one path a line, `#` before a comment. A patch begins with
a header in the manner of DEP-3, which ends at the line `---`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path

from dflash2.errors import PatchError

GROUPS = ("backend", "llama")
_FIELDS = ("Description", "Author", "Forwarded", "Bases", "Switch")
_NAME = re.compile(r"(backend|llama)/\d{4}-[a-z0-9-]+\.patch")
_OURS = "dflash2"
_DIFF = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_REASON = re.compile(r"\(.+\)", re.DOTALL)
_HEADER_END = re.compile(r"^---$", re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """One patch: `name` is its path in the series, `bases` are those it is verified on, `sources` our files it needs.

    `touched` are the upstream files it changes, `text` is the whole file. Paths are relative to llama.cpp's root.
    """

    name: str
    description: str
    author: str
    forwarded: str
    bases: tuple[str, ...]
    switch: str
    sources: tuple[str, ...]
    touched: tuple[str, ...]
    text: str

    @property
    def group(self) -> str:
        """`backend`, which a loadable module can hold, or `llama`."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Series:
    """Patches in the order in which they apply; `folder` holds them and, below `src`, our own sources."""

    folder: Path
    patches: tuple[Patch, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Our own files, relative to llama.cpp's root."""
        return tuple(sorted({name for patch in self.patches for name in patch.sources}))

    @property
    def touched(self) -> tuple[str, ...]:
        """Upstream files that any patch changes."""
        return tuple(sorted({name for patch in self.patches for name in patch.touched}))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the patches in order and the sources they need."""
        digest = hashlib.sha256()
        for patch in self.patches:
            digest.update(f"{patch.name}\0{patch.text}\0".encode())
        for name in self.sources:
            digest.update(f"{name}\0".encode() + self.source_path(name).read_bytes() + b"\0")
        return digest.hexdigest()

    def source_path(self, name: str) -> Path:
        """Where our file `name` lies before it is copied into a tree."""
        return self.folder / "src" / name

    def only(self, group: str) -> Series:
        """The patches of one group."""
        return Series(self.folder, tuple(patch for patch in self.patches if patch.group == group))


def read_series(folder: Path | None = None) -> Series:
    """Read the series in `folder` (default: the one that comes with this package).

    Raises PatchError for a patch that is missing, has no complete header, or is not what `check` asks for.
    """
    folder = folder or Path(__file__).parent
    names = [line.partition("#")[0].strip() for line in (folder / "series").read_text().splitlines()]
    series = Series(folder, tuple(_read_patch(folder, name) for name in names if name))
    problems = list(check(series))
    if problems:
        raise PatchError(f"The patch series in {folder} is not in order: {'; '.join(problems)}.")
    return series


def _read_patch(folder: Path, name: str) -> Patch:
    try:
        text = (folder / name).read_bytes().decode()
    except OSError as error:
        raise PatchError(f"The patch {name} of the series in {folder} cannot be read: {error.strerror}.") from error
    end = _HEADER_END.search(text)
    header = HeaderParser().parsestr(text[: end.start()] if end else "")
    fields = {field: _unfolded(header.get(field, "")) for field in (*_FIELDS, "Sources")}
    return Patch(
        name=name,
        description=fields["Description"],
        author=fields["Author"],
        forwarded=fields["Forwarded"],
        bases=tuple(fields["Bases"].replace(",", " ").split()),
        switch=fields["Switch"],
        sources=tuple(fields["Sources"].replace(",", " ").split()),
        touched=tuple(dict.fromkeys(new for _, new in _DIFF.findall(text))),
        text=text,
    )


def _unfolded(value: str) -> str:
    """The text of a field; " ." stands for an empty line, as DEP-3 has it."""
    lines = [line.strip() for line in value.splitlines()]
    return "\n".join("" if line == "." else line for line in lines).strip()


def check(series: Series) -> Iterator[str]:
    """What is wrong with the series, one sentence each: names, headers, files that nothing names."""
    for name, count in Counter(patch.name for patch in series.patches).items():
        if count > 1:
            yield f"{name} is listed {count} times"
    listed = {patch.name for patch in series.patches}
    for group in GROUPS:
        names = sorted(f"{group}/{path.name}" for path in (series.folder / group).glob("*.patch"))
        yield from (f"{name} is not listed" for name in names if name not in listed)
    for patch in series.patches:
        yield from (f"{patch.name} {problem}" for problem in _check_patch(series, patch))
    root = series.folder / "src"
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    yield from (f"src/{name} is named by no patch" for name in sorted(found - set(series.sources)))


def _check_patch(series: Series, patch: Patch) -> Iterator[str]:
    if not _NAME.fullmatch(patch.name):
        yield f"is not named like {GROUPS[0]}/0001-what-it-does.patch"
    for field in _FIELDS:
        if not getattr(patch, field.lower()):
            yield f"has no {field} in its header"
    if patch.forwarded.partition(" ")[0] in ("no", "not-needed") and not _REASON.search(patch.forwarded):
        yield "gives no reason in its Forwarded"
    if not patch.touched:
        yield "changes no file"
    if "\n--- /dev/null\n" in patch.text or "\n+++ /dev/null\n" in patch.text:
        yield "adds or deletes a file; new files belong to src/"
    for name in patch.sources:
        if not series.source_path(name).is_file():
            yield f"needs src/{name}, which is not there"
        if not Path(name).name.startswith(_OURS):
            yield f"has the source {name}, whose name does not begin with {_OURS}"
