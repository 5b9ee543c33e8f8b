"""What a file holds, told from its bytes: read once, and again only when the file is another or was written to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path


def content_digest(path: Path, notes: Path) -> str:
    """SHA-256 (hex) of the file at `path`, from a note below `notes` where there is one of this very file: of the same
    inode, size and times. The time of change counts too, which a program cannot set back.

    Raises OSError when the file cannot be read. Where `notes` cannot be written, the file is read each time.
    """
    note = notes / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]}.json"
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        identity = [about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(note.read_text("utf-8"))
            if known["identity"] == identity and isinstance(known["sha256"], str):
                return str(known["sha256"])
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):
        notes.mkdir(parents=True, exist_ok=True)
        write_whole(note, json.dumps({"file": str(path), "identity": identity, "sha256": digest}))
    return digest


def write_whole(path: Path, text: str) -> None:
    """Put `text` into `path`: a reader sees what was there before, or all of it. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
