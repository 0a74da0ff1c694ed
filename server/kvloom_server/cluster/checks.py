"""What can be told from the arguments alone, before anything starts."""

from pathlib import Path

from kvloom.protocol import ClusterKeyError, CurveSide, curve_secret

from .model import ModelUnavailableError

_PATH_STARTS = ("/", "./", "../", "~")


def check_model(model: str | None) -> None:
    """A model that is given as a path must be there; hub ids are vLLM's business.

    Raises:
        ModelUnavailableError: there is nothing at the path.
    """
    if model is None or not model.startswith(_PATH_STARTS) or Path(model).exists():
        return
    raise ModelUnavailableError(
        f"there is no model at {model}: --model takes a folder that exists, or a hub id"
    )


def is_from_hub(model: str | None) -> bool:
    """Whether vLLM will look for the model on a hub."""
    return model is not None and not Path(model).exists()


def read_cluster_key(path: Path | None) -> bytes | None:
    """The key in ``path``; ``None`` where no file is named.

    Raises:
        ClusterKeyError: the file can't be read, or the key is too short.
    """
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ClusterKeyError(
            f"the cluster key file {path} can't be read ({error.strerror}): "
            "--cluster-key-file takes a file that `openssl rand -hex 32` can make"
        ) from error
    try:
        curve_secret(key, CurveSide.PEER)
    except ClusterKeyError as error:
        raise ClusterKeyError(f"{path}: {error}") from error
    return key
