"""The program that Ollama runs models with: ours for DFlash drafting, its own for everything else.

`install` puts a dispatcher where Ollama looks for `llama-server`, `restore` takes it away, `runner_status` tells how an
Ollama's folder stands. Unix only: the dispatcher is a script of the POSIX shell.
"""

from dflash2.modelfiles.runner.install import install, restore
from dflash2.modelfiles.runner.places import find_folder, ollama_version
from dflash2.modelfiles.runner.status import RunnerStatus, runner_status

__all__ = ["RunnerStatus", "find_folder", "install", "ollama_version", "restore", "runner_status"]
