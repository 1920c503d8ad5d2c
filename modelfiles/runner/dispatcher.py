"""The dispatcher: a POSIX shell script in the place of Ollama's `llama-server`, which needs nothing of ours to run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

_MARK = b"# Dispatcher of llama-dflash2."

# Variables are prefixed: assigning to one that came with the environment would change it for the original.
_SCRIPT = """\
#!/bin/sh
{mark} It stands in the place of Ollama's llama-server and runs the one of llama-dflash2 for
# `--spec-type draft-dflash`, Ollama's own for everything else. `dflash2 ollama runner restore` takes it away again.
dflash2_program={program}
dflash2_original={original}
dflash2_server={server}

dflash2_run_original() {{
    if [ -x "$dflash2_original" ]; then
        exec "$dflash2_original" "$@"
    fi
    # It may have been put back while this script was starting.
    dflash2_line=
    {{ read -r dflash2_line; read -r dflash2_line; }} <"$dflash2_program"
    case $dflash2_line in
        '{mark}'*) ;;
        *) exec "$dflash2_program" "$@" ;;
    esac
    printf '%s\\n' "dflash2: Ollama's own llama-server, $dflash2_original, is gone: install Ollama again." >&2
    exit 127
}}

dflash2_types=
dflash2_previous=
for dflash2_word do
    case $dflash2_previous in --spec-type) dflash2_types=$dflash2_types,$dflash2_word ;; esac
    case $dflash2_word in --spec-type=*) dflash2_types=$dflash2_types,${{dflash2_word#*=}} ;; esac
    dflash2_previous=$dflash2_word
done
case $dflash2_types, in
    *,draft-dflash,*) ;;
    *) dflash2_run_original "$@" ;;
esac
if [ ! -x "$dflash2_server" ]; then
    printf '%s\\n' "dflash2: $dflash2_server is gone, so Ollama's own llama-server runs, which may not know this \\
drafter; 'dflash2 ollama runner install' puts it back." >&2
    dflash2_run_original "$@"
fi

# Into dflash2_list: the folders of $1, which colons separate, without Ollama's.
dflash2_without_ollama() {{
    dflash2_list=
    dflash2_rest=$1:
    while [ -n "$dflash2_rest" ]; do
        dflash2_entry=${{dflash2_rest%%:*}}
        dflash2_rest=${{dflash2_rest#*:}}
        case $dflash2_entry in
            ''|{ollama}|{ollama}/*) continue ;;
        esac
        # Ollama may call its folder by a symbolic link.
        if [ "$dflash2_entry" -ef {ollama} ] || [ "${{dflash2_entry%/*}}" -ef {ollama} ]; then
            continue
        fi
        dflash2_list=$dflash2_list${{dflash2_list:+:}}$dflash2_entry
    done
}}

# Ollama puts its own libraries before those that a program was built with.
dflash2_without_ollama "${{LD_LIBRARY_PATH-}}"
LD_LIBRARY_PATH={libraries}${{dflash2_list:+:}}$dflash2_list
dflash2_without_ollama "${{DYLD_LIBRARY_PATH-}}"
DYLD_LIBRARY_PATH={libraries}${{dflash2_list:+:}}$dflash2_list
dflash2_without_ollama "${{PATH-}}"
PATH=$dflash2_list
export LD_LIBRARY_PATH DYLD_LIBRARY_PATH PATH
unset GGML_BACKEND_PATH
exec "$dflash2_server" "$@"
"""


def dispatcher(program: Path, original: Path, server: Path) -> bytes:
    """The script at `program` that chooses between `original` beside it and `server`; no path has links."""
    text = _SCRIPT.format(
        mark=_MARK.decode(),
        program=shlex.quote(str(program)),
        original=shlex.quote(str(original)),
        server=shlex.quote(str(server)),
        libraries=shlex.quote(str(server.parent)),
        ollama=shlex.quote(str(program.parent)),
    )
    return os.fsencode(text)


def is_dispatcher(path: Path) -> bool:
    """Whether the file at `path` is a dispatcher of any version; raises OSError if it cannot be read."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline() == b"#!/bin/sh\n" and file.readline().startswith(_MARK)
