"""How rotary position embeddings are stretched, read from the old (`rope_scaling`) and new (`rope_parameters`) form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from dpi_engine.config.errors import ModelSpecError, near
from dpi_engine.config.keys import Keys

DEFAULT_THETA = 10000.0
_KNOWN = ("default", "linear", "llama3", "yarn")


class LinearRope(msgspec.Struct, frozen=True, tag_field="kind", tag="linear"):
    """Positions are divided by `factor`."""

    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, tag_field="kind", tag="llama3"):
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated.

    `original_max_position`: tokens the model was first trained on; the bounds are wavelengths in units of it.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class YarnRope(msgspec.Struct, frozen=True, tag_field="kind", tag="yarn"):
    """Interpolation ramped between `beta_fast` and `beta_slow` rotations within `original_max_position` tokens.

    `attention_factor` multiplies cos and sin; None: 0.1 ln(factor) + 1, or the ratio of the two mscale terms where
    both are set. `truncate` rounds the ramp's ends to whole dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RopeScaling: TypeAlias = LinearRope | Llama3Rope | YarnRope


def read_rope(
    config: Keys, max_position: int, default_theta: float = DEFAULT_THETA
) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of config.json. The newer `rope_parameters` wins over `rope_theta` and `rope_scaling`.

    Raises ModelSpecError for a kind that is not known or a field that is missing or of the wrong type.
    """
    theta = config.number("rope_theta", default_theta, above=0.0)
    where = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    raw = config.mapping(where)
    if not raw:
        return theta, None
    if where == "rope_parameters" and any(isinstance(v, Mapping) for v in raw.values()):
        raise ModelSpecError(
            f"{config.where}: rope_parameters holds one entry per kind of layer ({', '.join(sorted(raw))}); "
            "only one set of rotary parameters for all layers can be run"
        )
    keys = config.inside(where)
    if where == "rope_parameters":
        theta = keys.number("rope_theta", theta, above=0.0)
    if keys.number("partial_rotary_factor", 1.0) != 1.0:
        raise keys.wrong("partial_rotary_factor", "1.0 (the whole head is rotated)", raw["partial_rotary_factor"])
    return theta, read_scaling(keys, max_position)


def read_scaling(keys: Keys, max_position: int) -> RopeScaling | None:
    """The scaling that `keys` (with `rope_type`, or `type` in old files) describes; None for the default."""
    kind = keys.text("rope_type", "") or keys.text("type", "") or "default"
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRope(keys.number("factor", above=0.0))
        case "llama3":
            return Llama3Rope(
                factor=keys.number("factor", above=0.0),
                low_freq_factor=keys.number("low_freq_factor", above=0.0),
                high_freq_factor=keys.number("high_freq_factor", above=0.0),
                original_max_position=keys.integer("original_max_position_embeddings", low=1),
            )
        case "yarn":
            return YarnRope(
                factor=keys.number("factor", above=0.0),
                original_max_position=keys.integer("original_max_position_embeddings", max_position, low=1),
                beta_fast=keys.number("beta_fast", 32.0, above=0.0),
                beta_slow=keys.number("beta_slow", 1.0, above=0.0),
                attention_factor=keys.optional_number("attention_factor"),
                mscale=keys.optional_number("mscale"),
                mscale_all_dim=keys.optional_number("mscale_all_dim"),
                truncate=keys.flag("truncate", True),
            )
    raise ModelSpecError(
        f"{keys.where}: rope_type {kind!r} is not known; known: {', '.join(_KNOWN)}.{near(kind, _KNOWN)}"
    )


def gguf_scaling(metadata: Mapping[str, Any], arch: str, max_position: int, where: str) -> RopeScaling | None:
    """Scaling from GGUF metadata keys `<arch>.rope.scaling.*`; None for none."""
    keys = Keys(metadata, where)
    kind = keys.text(f"{arch}.rope.scaling.type", "none")
    factor = f"{arch}.rope.scaling.factor"
    if kind == "none":
        return None
    if kind == "linear":
        return LinearRope(keys.number(factor, above=0.0))
    if kind == "yarn":
        return YarnRope(
            factor=keys.number(factor, above=0.0),
            original_max_position=keys.integer(f"{arch}.rope.scaling.original_context_length", max_position, low=1),
            beta_fast=keys.number(f"{arch}.rope.scaling.yarn_beta_fast", 32.0, above=0.0),
            beta_slow=keys.number(f"{arch}.rope.scaling.yarn_beta_slow", 1.0, above=0.0),
        )
    raise ModelSpecError(f"{where}: {arch}.rope.scaling.type {kind!r} is not known; known: none, linear, yarn")
