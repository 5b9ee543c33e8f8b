"""docs/reference/flags.md from the table of settings: `python -m dpi_engine.config.docs [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from dpi_engine.config.fields import Field
from dpi_engine.config.loading import default_text, metavar
from dpi_engine.config.settings import FIELDS, GROUPS

_HEAD = """# Flags of `dpi serve`

<!-- Generated from the table of settings by `python -m dpi_engine.config.docs`; edit the table. -->

Every setting can be given as a flag, as an environment variable, or as a key of the YAML file that `--config FILE`
(or `DPI_CONFIG`) names. A flag wins over the environment, the environment over the file, the file over the default.

* Flags: names are those of vLLM where it has the same setting; underscores may stand for dashes. A switch has a
  `--no-` form. A flag that takes several values may also be given several times.
* Environment: `DPI_` and the name in capitals. Several values are separated by commas; switches are `true` or `false`.
  An empty variable is refused, as an empty flag is; only an empty `DPI_CONFIG` is the same as none.
* YAML: the name without the leading dashes, with dashes or underscores; several values are a list.
* Sizes in bytes are plain numbers or carry a unit: `KiB`, `MiB`, `GiB`, `TiB` (also `Ki` ...) count in 1024, `KB`,
  `MB`, `GB`, `TB` (also `K` ...) in 1000.

The variables `DPI_POD_IP`, `DPI_POD_NAME` and `DPI_POD_NAMESPACE` say which pod this is; they are no settings.
Settings marked ● must be equal on all launches of one service: they are part of the declared fingerprint.
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    for group in GROUPS:
        parts.append(f"\n## {group}\n")
        parts.append("| flag | environment | default | meaning |\n|---|---|---|---|")
        parts += [_row(field) for field in FIELDS if field.flag.group == group]
    return "\n".join(parts) + "\n"


def _row(field: Field) -> str:
    if field.name == "model":
        spellings, default = "`MODEL` or `--model MODEL`", "required"
    else:
        value = "" if field.kind is bool else " " + metavar(field)
        spellings = " ".join([f"`{field.option}{value}`", *(f"`{o}`" for o in field.options[1:])])
        default = f"`{default_text(field)}`"
    mark = " ●" if field.flag.shared else ""
    meaning = f"{field.flag.help[0].upper()}{field.flag.help[1:]}"
    if field.kind in (int, float) and not field.flag.size:
        meaning += f"; {field.expected}"
    return f"| {spellings.replace('|', chr(92) + '|')}{mark} | `{field.env}` | {default} | {meaning}. |"


if __name__ == "__main__":
    text = render()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        sys.stdout.write(text)
