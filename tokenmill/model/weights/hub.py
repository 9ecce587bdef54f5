"""Downloads models by hub name through huggingface_hub: weights, configuration and tokenizer, never code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenmill.cache import cannot_keep, is_about_disk
from tokenmill.errors import ModelError

Progress = Callable[[int, int, str], None]

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights


def download_model(repo: str, progress: Progress, cache_dir: Path) -> Path:
    """The directory of a model's files; without a network, as they were downloaded before."""
    hub = _package()
    options = {"cache_dir": cache_dir, "tqdm_class": _reporter(hub, progress)}
    with _explained(repo, cache_dir):
        return Path(hub.snapshot_download(repo, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, **options))


def download_file(repo: str, file: str, progress: Progress, cache_dir: Path) -> Path:
    """One file of a model, as it was downloaded before if it was."""
    hub = _package()
    cached = hub.try_to_load_from_cache(repo, file, cache_dir=cache_dir)
    if isinstance(cached, str):  # weights do not change under a name; asking the network would only cost time
        return Path(cached)
    with _explained(repo, cache_dir):
        # Asked once here, because the download itself asks an unreachable hub again and again for half a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(repo, file))
        return Path(hub.hf_hub_download(repo, file, cache_dir=cache_dir, tqdm_class=_reporter(hub, progress)))


def list_cached(cache_dir: Path) -> Iterator[tuple[str, Path, int]]:
    """Name, directory and size of every model in the hub's cache."""
    for repo in _cached_repos(cache_dir):
        yield repo.repo_id, Path(repo.repo_path), int(repo.size_on_disk)


def remove(name: str, cache_dir: Path) -> bool:
    """Deletes a model from the hub's cache; False if it is not there."""
    for repo in _cached_repos(cache_dir):
        if repo.repo_id == name:
            revisions = [revision.commit_hash for revision in repo.revisions]
            _package().scan_cache_dir(cache_dir).delete_revisions(*revisions).execute()
            return True
    return False


def _cached_repos(cache_dir: Path) -> list[Any]:
    try:
        hub = _package()
    except ModelError:
        return []  # without the package nothing can have been downloaded through it
    try:
        repos = hub.scan_cache_dir(cache_dir).repos
    except (hub.errors.CacheNotFound, ValueError):
        return []
    return sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: str(repo.repo_id))


def _package() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise ModelError(
            "hub names need the huggingface_hub package; run `pip install huggingface_hub`, or pass a local path"
        ) from None
    return huggingface_hub


@contextmanager
def _explained(repo: str, cache_dir: Path) -> Iterator[None]:
    """Says in one sentence what went wrong between this machine and the hub."""
    hub = _package()
    errors = hub.errors
    try:
        yield
    except errors.GatedRepoError:
        advice = "accept its terms there, and set HF_TOKEN or run `hf auth login`"
        raise ModelError(f"{repo} is gated on the hub; {advice}") from None
    except (errors.RepositoryNotFoundError, errors.RemoteEntryNotFoundError, errors.HFValidationError):
        raise ModelError(f"{repo} (or the file named in it) is not on the hub; check the spelling") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        if status == 401:
            raise ModelError(f"the model hub refused the token that it was sent for {repo}; check HF_TOKEN") from None
        raise ModelError(f"the model hub answered {status} when asked for {repo}; try again later") from None
    except Exception as error:  # many kinds of network trouble, from several libraries
        if isinstance(error, OSError) and is_about_disk(error):
            raise ModelError(cannot_keep(repo, cache_dir, error)) from None
        missing = f"{repo} is not on this machine"
        if hub.constants.HF_HUB_OFFLINE:
            advice = "unset it, or pass the path of a model"
            raise ModelError(f"{missing} and HF_HUB_OFFLINE forbids to ask the model hub; {advice}") from None
        advice = "check the network, or pass the path of a model"
        raise ModelError(f"{missing} and the model hub cannot be reached; {advice}") from None


def _reporter(hub: Any, progress: Progress) -> type[Any]:
    """A silent progress bar that tells `progress` about bytes, in the form in which huggingface_hub wants one."""

    class Reporter(hub.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                progress(int(self.n), int(self.total or 0), "downloading")

    return Reporter
