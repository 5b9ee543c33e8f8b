"""Check the engine on a CUDA machine, in under six minutes and without network or model files.

    python tools/gpu_check.py [--device cuda|cpu] [--stage first|all] [--only STEP,...] [--budget SECONDS]

The first stage takes two minutes and says whether the rest makes sense: the machine, our kernels, recorded steps.

Prints PASS, FAIL or SKIP for every step and its time; ends with 1 if a step failed. Where torch sees no CUDA device it
says so and ends with 0. `--device cpu` is a dry run: the same steps on small shapes, to try the script itself.
Packages that the machine lacks are taken from build/gpu-wheels (`make gpu-wheels` where there is a network).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "gpu-wheels"
BUDGET_S = 350.0
PYTEST = ("-m", "pytest", "-q", "--maxfail=8", "--tb=short", "-p", "no:cacheprovider", "--no-header")


@dataclass(frozen=True, slots=True)
class Step:
    """`command` follows the interpreter. It is killed after `limit_s` seconds, and not started where less than
    `least_s` of the budget are left."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    least_s: float
    environment: Mapping[str, str] | None = None
    first: bool = False
    """Belongs to the first stage."""


def steps(device: str) -> list[Step]:
    """In the order in which they run: what others rest on first."""
    one = {"OMP_NUM_THREADS": "1", "DPI_TEST_DEVICE": device, "NVIDIA_TF32_OVERRIDE": "0"}
    # The kernels' own tests run in Triton's interpreter where there is no GPU.
    kernels = {**one, "TRITON_INTERPRET": "1"} if device == "cpu" else one
    ours = {**one, "DPI_TEST_OPS": "cuda" if device == "cuda" else "torch"}
    folder, models = "tests/ops_cuda/test_cuda_", "tests/models/test_decoder_"
    at = ("--device", device)
    files = [f"{folder}{name}.py" for name in ("rows", "attention", "eight_bit", "experts", "models")]
    return [
        Step("machine", ("-m", "gpu_steps.machine", *at), 45, 10, first=True),
        Step("kernels", (*PYTEST, *files), 75, 20, kernels, first=True),
        Step("draws", (*PYTEST, f"{folder}sampling.py"), 45, 10, kernels, first=True),
        Step("graphs", ("-m", "gpu_steps.graphs", *at), 60, 15, first=True),
        Step("decode", ("-m", "gpu_steps.decode", *at), 80, 30),
        Step("experts", ("-m", "gpu_steps.decode", *at, "--shape", "qwen3-30b-a3b"), 110, 50),
        Step("transformers", ("-m", "gpu_steps.versus", *at), 100, 50),
        Step("models-float32", (*PYTEST, f"{models}oracle.py", "-k", "not -cpu"), 70, 20, ours),
        Step("two-ranks", ("-m", "gpu_steps.two_ranks", *at), 100, 30),
        Step("bench", ("-m", "gpu_steps.bench", *at), 110, 35),
        Step("models-bfloat16", (*PYTEST, f"{models}behaviour.py"), 60, 15, ours),
        Step("torch-ops", (*PYTEST, "tests/ops/test_ops_torch_ref.py"), 70, 15, one),
        Step("sampling", (*PYTEST, "tests/worker/test_worker_sampling.py"), 50, 15, one),
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`verdict` is PASS, FAIL or SKIP, `why` says more for the latter two."""

    step: str
    verdict: str
    seconds: float
    why: str = ""

    def line(self) -> str:
        return f"{self.verdict} {self.step:<16} {self.seconds:6.1f} s{'  ' + self.why if self.why else ''}"


def run_step(step: Step, environment: Mapping[str, str], limit_s: float) -> tuple[int | None, float]:
    """Exit code (None: killed at the limit) and seconds. Output goes to ours; nothing of the step outlives it."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *step.command],
        cwd=ROOT,
        env={**environment, **(step.environment or {})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, time.monotonic() - began


def run_all(
    plan: Sequence[Step],
    budget_s: float,
    run: Callable[[Step, float], tuple[int | None, float]],
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the steps of `plan` one after another within `budget_s` seconds, by `run(step, limit_s)`."""
    began = clock()
    outcomes = []
    for step in plan:
        left = budget_s - (clock() - began)
        if left < step.least_s:
            outcome = Outcome(step.name, "SKIP", 0.0, f"SKIPPED (budget): {max(0.0, left):.0f} s are left")
        else:
            limit = min(step.limit_s, left)
            print(f"== {step.name} (at most {limit:.0f} s)", flush=True)
            code, seconds = run(step, limit)
            if code == 0:
                outcome = Outcome(step.name, "PASS", seconds)
            else:
                why = f"not done after {limit:.0f} s, killed" if code is None else f"exit code {code}"
                outcome = Outcome(step.name, "FAIL", seconds, why)
        print(outcome.line(), flush=True)
        outcomes.append(outcome)
    return outcomes


def no_cuda() -> str | None:
    """Why there is no CUDA device to check, or None where there is one."""
    try:
        import torch
    except ImportError as error:
        return f"no CUDA device (torch does not import: {error})"
    return None if torch.cuda.is_available() else f"no CUDA device (torch {torch.__version__})"


def missing_wheels(folder: Path) -> list[Path]:
    """Wheels in `folder` of distributions that this interpreter lacks."""
    found = []
    for wheel in sorted(folder.glob("*.whl")):
        try:
            importlib.metadata.version(wheel.name.split("-")[0])
        except importlib.metadata.PackageNotFoundError:
            found.append(wheel)
    return found


def install(wheels: Sequence[Path], target: Path) -> None:
    """Put `wheels` into the folder `target`. Raises subprocess.CalledProcessError."""
    print(
        "from build/gpu-wheels: " + ", ".join(re.sub(r"^([^-]+-[^-]+)-.*", r"\1", w.name) for w in wheels), flush=True
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    command = [*pip, "--no-compile", "--target", str(target), *map(str, wheels)]
    subprocess.run(command, check=True, timeout=60, env=environment)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run on small shapes")
    parser.add_argument(
        "--stage", default="all", choices=("first", "all"), help="first: two minutes, our kernels alone"
    )
    parser.add_argument("--only", default="", metavar="STEP,...", help="only these steps")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help=f"in all ({BUDGET_S:.0f})")
    parser.add_argument("--list", action="store_true", help="name the steps and end")
    args = parser.parse_args(argv)
    began = time.monotonic()
    plan = [step for step in steps(args.device) if step.first or args.stage == "all"]
    if args.list:
        print("\n".join(step.name for step in plan))
        return 0
    wanted = [name for name in args.only.split(",") if name]
    unknown = sorted(set(wanted) - {step.name for step in plan})
    if unknown:
        parser.error(f"--only: no step {', '.join(unknown)}; there are {', '.join(s.name for s in plan)}")
    if args.device == "cuda" and (why := no_cuda()):
        print(f"SKIPPED gpu-check: {why}")
        return 0
    plan = [step for step in plan if not wanted or step.name in wanted]
    with tempfile.TemporaryDirectory(prefix="gpu-check-site-") as site:
        if wheels := missing_wheels(WHEELS):
            try:
                install(wheels, Path(site))
            except (subprocess.SubprocessError, OSError) as error:
                print(f"FAIL gpu-check: wheels of {WHEELS} cannot be installed here: {error}")
                return 1
        path = [str(ROOT / "engine"), str(ROOT / "operator"), str(ROOT / "tools"), site]
        path += [p for p in (os.environ.get("PYTHONPATH"),) if p]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        outcomes = run_all(plan, args.budget - (time.monotonic() - began), lambda s, t: run_step(s, environment, t))
    failed = [o for o in outcomes if o.verdict == "FAIL"]
    print(f"\ngpu-check on {args.device}, {time.monotonic() - began:.0f} s in all")
    print("\n".join(o.line() for o in outcomes))
    print(f"{'FAIL' if failed else 'PASS'} gpu-check" + (" (dry run)" if args.device == "cpu" else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
