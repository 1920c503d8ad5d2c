"""Errors of huggingface_hub, of its HTTP library and of the disk below, as one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dflash2.errors import HubError

# What releases of huggingface_hub talk through; their errors come through it as they are.
_HTTP_LIBRARIES = ("httpx", "httpx2", "requests", "urllib3")


@contextmanager
def translated(repo_id: str, revision: str | None) -> Iterator[None]:
    """Our one sentence for what goes wrong inside."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        translated = _translate(error, repo_id, revision)
        if translated is None:
            raise
        raise translated from error


def _translate(error: Exception, repo_id: str, revision: str | None) -> HubError | None:
    """Our one sentence for an error of the library; None for one that is not about the Hub."""
    from huggingface_hub import constants, errors

    where = f"{repo_id} at revision {revision!r}" if revision else repo_id
    cached = f"Nothing of {where} is in the cache {constants.HF_HUB_CACHE}; run once without --offline and"
    # The order matters: the later classes are bases of the earlier ones.
    sentences: tuple[tuple[type[Exception], str], ...] = (
        (
            errors.GatedRepoError,
            f"{repo_id} is gated; accept its terms on the Hub, then log in with `hf auth login` or set HF_TOKEN.",
        ),
        (errors.DisabledRepoError, f"The Hub has disabled {repo_id}; use another source of this model."),
        (
            errors.RepositoryNotFoundError,
            f"The Hub has no model {repo_id}, or it is private; check the spelling, or log in with `hf auth login`.",
        ),
        (errors.RevisionNotFoundError, f"{repo_id} has no revision {revision!r}; give a branch, tag or commit of it."),
        (errors.OfflineModeIsEnabled, f"{cached} with HF_HUB_OFFLINE unset."),
    )
    for kind, sentence in sentences:
        if isinstance(error, kind):
            return HubError(sentence)
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__
        inner = _translate(cause, repo_id, revision) if isinstance(cause, Exception) else None
        return inner or HubError(f"{cached} with HF_HUB_OFFLINE unset.")
    if isinstance(error, errors.HfHubHTTPError):
        return HubError(_status_sentence(error.response.status_code, repo_id))
    if type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES or isinstance(
        error, (ConnectionError, TimeoutError)
    ):
        return HubError(
            f"The connection to the Hub ({constants.ENDPOINT}) failed ({type(error).__name__}); check the network and"
            " run it again, or use what is in the cache with --offline."
        )
    if isinstance(error, OSError) and error.strerror:
        return HubError(
            f"Cannot keep the download of {repo_id} in {constants.HF_HUB_CACHE}: {error.strerror}; make room and run it"
            " again, or set HF_HUB_CACHE to another folder."
        )
    return HubError(f"A file of {repo_id} arrived incomplete; run it again.") if isinstance(error, OSError) else None


def _status_sentence(status: int, repo_id: str) -> str:
    if status in (401, 403):
        return f"The Hub refused access to {repo_id} (status {status}); log in with `hf auth login` or set HF_TOKEN."
    if status == 429:
        return f"The Hub limits requests (status 429) and did not give {repo_id}; wait a few minutes and run it again."
    return f"The Hub answered with status {status} for {repo_id}; run it again later, or use --offline."
