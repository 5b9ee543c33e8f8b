"""Throughput of one rank by `dpi bench`, and how much of the memory's speed its decode steps reach."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_steps.machine import copy_bandwidth
from gpu_steps.server import ServerFailed, serving
from gpu_steps.shapes import StepBytes, make_model


@dataclass(frozen=True, slots=True)
class Load:
    """What is served and asked for on a device."""

    shape: str
    dtype: str
    itemsize: int
    streams: tuple[int, ...]
    tokens_in: int
    tokens_out: int
    flags: tuple[str, ...]


LOADS = {
    "cuda": Load("qwen3-0.6b", "bfloat16", 2, (1, 32, 128), 128, 128, ("--max-num-batched-tokens", "4096")),
    "cpu": Load(
        "tiny", "float32", 4, (1, 4, 8), 32, 16, ("--ops", "torch", "--kv-cache-memory", "64MiB", "--cpu-threads", "1")
    ),
}


def measure(url: str, load: Load, streams: int) -> dict[str, Any]:
    """One round of `dpi bench`. Raises ServerFailed with what it said if a request failed."""
    command = [sys.executable, "-m", "dpi_engine", "bench", "--url", url, "--json", "--timeout", "60"]
    command += ["--streams", str(streams), "--requests", str(streams)]
    command += ["--input-tokens", str(load.tokens_in), "--output-tokens", str(load.tokens_out)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ServerFailed(f"dpi bench --streams {streams} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return result


def row(result: dict[str, Any], load: Load, streams: int, peak: float) -> str:
    """A line of the table. The step's time is the median gap between tokens of a stream, nearly all of them decodes."""
    sizes = StepBytes.of(load.shape, load.itemsize)
    step_s = result["itl_ms"]["p50"] / 1e3
    read = sizes.weights + streams * (load.tokens_in + load.tokens_out / 2) * sizes.token
    rate = read / step_s
    return (
        f"{streams:>7} {result['output_tok_s']:>10.1f} {result['ttft_ms']['p50']:>9.1f} {1e3 * step_s:>8.2f} "
        f"{read / 1e9:>8.3f} {rate / 1e9:>8.1f} {100 * rate / peak:>10.1f}%"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    load = LOADS[device]
    peak = copy_bandwidth(device)
    flags = ["--device", device, "--dtype", load.dtype, "--max-model-len", "2048", "--no-enable-prefix-caching"]
    flags += ["--max-num-seqs", str(max(load.streams)), "--api-server-count", "1", *load.flags]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        model = make_model(Path(folder) / load.shape, load.shape)
        try:
            with serving(model, flags, 75) as server:
                print(
                    f"{load.shape} shape, {load.dtype}, random weights, one rank ready in {server.ready_s:.1f} s; "
                    f"{load.tokens_in} tokens in, {load.tokens_out} out; copies run at {peak / 1e9:.0f} GB/s"
                )
                print(f"{'streams':>7} {'out tok/s':>10} {'TTFT ms':>9} {'step ms':>8} {'GB/step':>8} {'GB/s':>8} "
                      f"{'of copies':>11}")  # fmt: skip
                measure(server.url, load, load.streams[0])  # the first requests wait for set-up
                for streams in load.streams:
                    print(row(measure(server.url, load, streams), load, streams, peak), flush=True)
        except ServerFailed as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
