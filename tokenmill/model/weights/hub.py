"""Downloads models by hub name through huggingface_hub: weights, configuration and tokenizer, never code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenmill.errors import ModelError

Progress = Callable[[int, int, str], None]

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights


def download_model(repo: str, progress: Progress, cache_dir: Path | None) -> Path:
    """The directory of a model's files; without a network, as they were downloaded before."""
    hub = _package()
    return _call(
        repo,
        hub.snapshot_download,
        repo,
        allow_patterns=_WANTED,
        ignore_patterns=_UNWANTED,
        cache_dir=cache_dir,
        tqdm_class=_reporter(hub, progress),
    )


def download_file(repo: str, file: str, progress: Progress, cache_dir: Path | None) -> Path:
    """One file of a model, as it was downloaded before if it was."""
    hub = _package()
    cached = hub.try_to_load_from_cache(repo, file, cache_dir=cache_dir)
    if isinstance(cached, str):  # weights do not change under a name; asking the network would only cost time
        return Path(cached)
    # Asked for once here: the download itself would ask an unreachable hub again and again for half a minute.
    _call(repo, lambda: hub.get_hf_file_metadata(hub.hf_hub_url(repo, file)).location)
    return _call(repo, hub.hf_hub_download, repo, file, cache_dir=cache_dir, tqdm_class=_reporter(hub, progress))


def list_cached(cache_dir: Path | None) -> Iterator[tuple[str, Path, int]]:
    """Name, directory and size of every model in the hub's cache."""
    for repo in _cached_repos(cache_dir):
        yield repo.repo_id, Path(repo.repo_path), int(repo.size_on_disk)


def remove(name: str, cache_dir: Path | None) -> bool:
    """Deletes a model from the hub's cache; False if it is not there."""
    for repo in _cached_repos(cache_dir):
        if repo.repo_id == name:
            revisions = [revision.commit_hash for revision in repo.revisions]
            _package().scan_cache_dir(cache_dir).delete_revisions(*revisions).execute()
            return True
    return False


def _cached_repos(cache_dir: Path | None) -> list[Any]:
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
    except ImportError:
        raise ModelError(
            "hub names need the huggingface_hub package; run `pip install huggingface_hub`, or pass a local path"
        ) from None
    return huggingface_hub


def _call(repo: str, download: Callable[..., str], *arguments: Any, **options: Any) -> Path:
    errors = _package().errors
    try:
        return Path(download(*arguments, **options))
    except errors.GatedRepoError:
        raise ModelError(f"{repo} is gated on the hub; accept its terms there and run `hf auth login`") from None
    except (errors.RepositoryNotFoundError, errors.RemoteEntryNotFoundError, errors.HFValidationError):
        raise ModelError(f"{repo} (or the file named in it) is not on the hub; check the spelling") from None
    except OSError as error:
        if error.errno is None:  # not the disk, but one of the many kinds of network trouble
            raise ModelError(_unreachable(repo)) from None
        raise ModelError(f"{repo} cannot be kept in the hub's cache ({error.strerror}); make room there") from None
    except Exception:  # network trouble of other libraries
        raise ModelError(_unreachable(repo)) from None


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
