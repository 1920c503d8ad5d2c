"""Models with a draft on an Ollama server: made over its API, and looked at."""

from dflash2.modelfiles.ollama.create import Created, create
from dflash2.modelfiles.ollama.plan import Plan, plan_of_modelfile, plan_of_pair, with_settings
from dflash2.modelfiles.ollama.server import Server
from dflash2.modelfiles.ollama.status import ModelStatus, Status, predates_dflash2, status

__all__ = [
    "Created",
    "ModelStatus",
    "Plan",
    "Server",
    "Status",
    "create",
    "plan_of_modelfile",
    "plan_of_pair",
    "predates_dflash2",
    "status",
    "with_settings",
]
