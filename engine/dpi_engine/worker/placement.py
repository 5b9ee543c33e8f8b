"""Which device a rank computes on, and how many ranks of the launch share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpi_engine.config.errors import ConfigError

VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "hip": "HIP_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "tpu": "TPU_VISIBLE_CHIPS",
}
"""By platform the variable that says which devices a process sees, and in what order. Only the first two are devices
that torch calls cuda; the others are known so that a launch that sets one is told what it does here: nothing."""


def visible_device(index: int, environ: Mapping[str, str], hip: bool = False) -> str:
    """What `cuda:index` is on this machine, in words. `hip`: this torch is one for AMD's GPUs."""
    name = VISIBLE["hip" if hip else "cuda"]
    listed = [part.strip() for part in environ.get(name, "").split(",") if part.strip()]
    if index < len(listed):
        return f"cuda:{index}, which is {listed[index]} of {name}"
    return f"cuda:{index}"


def ignored_variables(environ: Mapping[str, str], hip: bool = False) -> list[str]:
    """Variables of other platforms that are set."""
    known = ("cuda", "hip") if hip else ("cuda",)
    return [name for platform, name in VISIBLE.items() if platform not in known and name in environ]


@dataclass(frozen=True, slots=True)
class Placement:
    """`device` as `select_ops` takes it; `sharers` counts the launch's ranks on it, this one included."""

    device: str
    sharers: int


def place_worker(device: str, local_rank: int, local_ranks: int, size: int, worker: int, gpus: int) -> Placement:
    """Where worker `worker` of `size` of a rank runs. On a CPU the workers of a rank count as one sharer; on GPUs each
    needs one that no other worker of its rank has. Raises ConfigError where there are too few.
    """
    if size == 1 or device == "cpu" or (device == "auto" and not gpus):
        return place(device, local_rank, local_ranks, gpus)
    if device not in ("auto", "cuda"):
        raise ConfigError(
            f"--device {device} is one device, --tensor-parallel-size {size} (-tp) needs as many: use cuda"
        )
    if gpus < size:
        raise ConfigError(f"--tensor-parallel-size {size} (-tp) needs as many GPUs, torch sees {gpus}")
    return place("cuda", local_rank * size + worker, local_ranks * size, gpus)


def place(device: str, local_rank: int, local_ranks: int, gpus: int) -> Placement:
    """Where the `local_rank`-th of `local_ranks` ranks runs, when `device` ('auto', 'cpu', 'cuda', 'cuda:1') is asked
    for and torch sees `gpus` GPUs.

    Ranks go round the GPUs, so that none has two before each has one. A numbered device is taken as it is, by all.
    """
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device != "cuda" or not gpus:
        return Placement(device, local_ranks)
    index = local_rank % gpus
    return Placement(f"cuda:{index}", len(range(index, local_ranks, gpus)))


def check_own_device(device: str, sharers: int, local_ranks: int) -> None:
    """Raise ConfigError where ranks that share experts would compute on one GPU. Those of other launches are found when
    the ranks are linked (wire/exchange/device_links.py).
    """
    if sharers > 1:
        raise ConfigError(
            f"--enable-expert-parallel (-ep): {sharers} of this launch's {local_ranks} ranks would compute on "
            f"{device}, and NCCL links one rank for each GPU. Give each rank a GPU of its own: at most as many ranks "
            "(--data-parallel-size-local) as GPUs, or leave --enable-expert-parallel out"
        )
