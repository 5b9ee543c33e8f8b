"""What the machine is, and how fast its memory copies: the yardstick of the bench."""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import subprocess
import sys
import time

import torch

REPEATS = 10


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a large copy on `device`, the median of some."""
    place = torch.device(device)
    size = (1 << 30) if place.type == "cuda" else (1 << 26)
    source = torch.ones(size, dtype=torch.uint8, device=place)
    target = torch.zeros_like(source)
    rates = []
    for _ in range(REPEATS + 2):
        if place.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        if place.type == "cuda":
            torch.cuda.synchronize()
        rates.append(2 * size / (time.perf_counter() - began))
    del source, target
    if place.type == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(rates[2:])


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (no nvidia-smi)"
    try:
        asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=15, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return answer[0] if answer else "unknown (nvidia-smi says nothing)"


def describe(device: str) -> list[tuple[str, str]]:
    """(what, value) lines."""
    lines = [
        ("python", platform.python_version()),
        ("torch", torch.__version__),
    ]
    if device == "cpu":
        lines.append(("processor", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"))
    else:
        seen = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        lines += [
            ("GPU", f"{seen.name}, {torch.cuda.device_count()} of them"),
            ("memory", f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"),
            ("compute capability", f"{seen.major}.{seen.minor}, {seen.multi_processor_count} multiprocessors"),
            ("CUDA", f"{torch.version.cuda}, driver {_driver()}"),
            ("bfloat16", "computed" if torch.cuda.is_bf16_supported(including_emulation=False) else "not computed"),
        ]
    lines.append(("copy", f"{copy_bandwidth(device) / 1e9:.0f} GB/s read and written"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for what, value in describe(parser.parse_args().device):
        print(f"{what:20}{value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
