"""Rooms import one way only (DESIGN: each room names what it may use)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "root": ROOT / "src" / "dflash2",
    "converter": ROOT / "converter",
    "runtime": ROOT / "runtime",
    "patches": ROOT / "patches",
    "modelfiles": ROOT / "modelfiles",
    "evidence": ROOT / "evidence",
}
ALLOWED = {
    "root": set(),
    "converter": {"root"},
    "runtime": {"root"},
    "patches": {"root"},
    "modelfiles": {"root", "converter"},
    "evidence": {"root", "runtime", "patches"},
}
# The commands alone may import every room; __init__.py names the runtime for type checkers and loads it lazily.
DOORS = {ROOMS["root"] / "__init__.py", *(ROOMS["root"] / "commands").glob("*.py")}


def room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "dflash2":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "root"


def imported_modules(path: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; rooms import each other as dflash2.*"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may_use(room):
    sources = [p for p in ROOMS[room].rglob("*.py") if p not in DOORS]
    assert sources
    for path in sources:
        for module in imported_modules(path):
            other = room_of(module)
            assert other is None or other == room or other in ALLOWED[room], f"{path.name} imports {module}"


@pytest.mark.parametrize("room", [r for r in ROOMS if r != "root"])
def test_other_rooms_come_in_by_the_door(room):
    """A name of another room is imported from its package, never from a private module of it."""
    for path in ROOMS[room].rglob("*.py"):
        for module in imported_modules(path):
            other = room_of(module)
            if other not in (None, room, "root"):
                assert len(module.split(".")) <= 3, f"{path.name} reaches into {module}"


def test_ctypes_lives_in_native_alone():
    native = ROOMS["root"] / "native"
    for folder in ROOMS.values():
        for path in folder.rglob("*.py"):
            if native not in path.parents:
                assert not any(m.split(".")[0] == "ctypes" for m in imported_modules(path)), path


def test_importing_the_package_loads_nothing_native():
    code = "import sys, dflash2; assert 'llama_cpp' not in sys.modules and 'dflash2.runtime' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
