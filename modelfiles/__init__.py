"""Ollama Modelfiles for a target and its drafter, and Ollama's runner."""

from dflash2.modelfiles.server_probe import ServerProbe, probe_server

__all__ = ["ServerProbe", "probe_server"]
