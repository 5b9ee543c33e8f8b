"""What a rank's device is called on its machine, and which variables of other platforms do nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from dpi_engine.launch.engine_loading import place_beside
from dpi_engine.worker.placement import VISIBLE, ignored_variables, visible_device


@pytest.mark.parametrize(
    ("value", "index", "hip", "words"),
    [
        ("3,1", 0, False, "cuda:0, which is 3 of CUDA_VISIBLE_DEVICES"),
        ("3, GPU-12ab", 1, False, "cuda:1, which is GPU-12ab of CUDA_VISIBLE_DEVICES"),
        ("", 0, False, "cuda:0"),
        (None, 2, False, "cuda:2"),
        ("7", 0, True, "cuda:0, which is 7 of HIP_VISIBLE_DEVICES"),
    ],
)
def test_a_device_is_called_as_the_launch_lists_it(value: str | None, index: int, hip: bool, words: str) -> None:
    environ = {} if value is None else {VISIBLE["hip" if hip else "cuda"]: value}
    assert visible_device(index, environ, hip) == words


def test_variables_of_other_platforms_do_nothing() -> None:
    everything = dict.fromkeys(VISIBLE.values(), "0")
    assert ignored_variables(everything) == [name for key, name in VISIBLE.items() if key != "cuda"]
    assert "HIP_VISIBLE_DEVICES" not in ignored_variables(everything, hip=True)
    assert ignored_variables({"CUDA_VISIBLE_DEVICES": "0"}) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the GPU's node would be pinned to")
def test_the_log_says_where_a_rank_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0")
    with caplog.at_level(logging.INFO):
        place_beside("cuda:1", 3)
    assert "rank 3 computes on cuda:1, which is 6 of CUDA_VISIBLE_DEVICES" in caplog.text
    assert "ZE_AFFINITY_MASK: of another kind of device, without effect here" in caplog.text
