"""`make gpu-check`: what it says without a GPU, how it judges its steps, and the check itself where a GPU is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Outcome, Step, install, main, missing_wheels, run_all, run_step

SCRIPT = Path(gpu_check.__file__)


@pytest.mark.timeout(400)
def test_the_check_passes_on_this_machines_gpu() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=390)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    skipped = next((line for line in done.stdout.splitlines() if line.startswith("SKIPPED gpu-check:")), None)
    if skipped is not None:
        assert "no CUDA device (torch " in skipped
        pytest.skip(skipped)
    assert done.stdout.splitlines()[-1] == "PASS gpu-check", output


class FakeTime:
    """A clock that steps move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.limits: dict[str, float] = {}

    def run(self, codes: dict[str, tuple[int | None, float]]) -> Callable[[Step, float], tuple[int | None, float]]:
        def run(step: Step, limit_s: float) -> tuple[int | None, float]:
            self.limits[step.name] = limit_s
            code, seconds = codes[step.name]
            self.now += seconds
            return code, seconds

        return run


def step(name: str, limit_s: float = 60, least_s: float = 10) -> Step:
    return Step(name, ("-c", "pass"), limit_s, least_s)


def verdicts(outcomes: list[Outcome]) -> dict[str, str]:
    return {o.step: o.verdict for o in outcomes}


def test_a_failed_step_does_not_keep_the_others_from_running() -> None:
    clock = FakeTime()
    run = clock.run({"a": (0, 5), "b": (1, 5), "c": (None, 60), "d": (0, 1)})
    outcomes = run_all([step(n) for n in "abcd"], 230, run, lambda: clock.now)
    assert verdicts(outcomes) == {"a": "PASS", "b": "FAIL", "c": "FAIL", "d": "PASS"}
    assert outcomes[1].why == "exit code 1" and "killed" in outcomes[2].why


def test_what_does_not_fit_the_budget_is_skipped_and_what_starts_is_cut_by_it() -> None:
    clock = FakeTime()
    run = clock.run({"a": (0, 50), "b": (0, 30), "d": (0, 4)})
    plan = [step("a"), step("b"), step("c", least_s=25), step("d", least_s=5)]
    outcomes = run_all(plan, 100, run, lambda: clock.now)
    assert verdicts(outcomes) == {"a": "PASS", "b": "PASS", "c": "SKIP", "d": "PASS"}
    assert "SKIPPED (budget): 20 s are left" in outcomes[2].line()
    assert clock.limits == {"a": 60, "b": 50, "d": 20}


def ends(pid: int, within_s: float = 60) -> bool:
    """Whether a killed process is gone, or nobody's zombie, before the deadline."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_step_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(300)\n"
    )
    ended, seconds = run_step(Step("hang", ("-c", code), 8, 1), os.environ, 8)
    assert ended is None and 8 <= seconds < 120
    assert ends(int(pid.read_text()))


def test_the_exit_code_and_environment_of_a_step() -> None:
    code = "import os, sys; sys.exit(int(os.environ['A']) + int(os.environ['B']))"
    wanted = Step("code", ("-c", code), 30, 1, {"B": "4"})
    assert run_step(wanted, {**os.environ, "A": "3", "B": "9"}, 30)[0] == 7


def test_the_script_ends_with_one_when_a_step_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [Step("good", ("-c", "pass"), 30, 1), Step("bad", ("-c", "raise SystemExit(3)"), 30, 1)]
    monkeypatch.setattr(gpu_check, "steps", lambda device: plan)
    monkeypatch.setattr(gpu_check, "WHEELS", Path("/nonexistent"))
    assert main(["--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "FAIL gpu-check (dry run)" and lines[-2].startswith("FAIL bad") and "exit code 3" in lines[-2]
    assert main(["--device", "cpu", "--only", "good"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "PASS gpu-check (dry run)"
    assert main(["--device", "cpu", "--budget", "0"]) == 0
    assert "SKIPPED (budget)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--only", "worse"])
    assert "no step worse; there are good, bad" in capsys.readouterr().err


def make_wheel(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", "ANSWER = 42\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_only_packages_that_are_not_there_come_from_wheels(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "pytest")
    made = make_wheel(wheels, "dpi_gpu_check_sample")
    assert missing_wheels(wheels) == [made]
    assert missing_wheels(tmp_path / "none") == []
    install([made], tmp_path / "site")
    code = "import dpi_gpu_check_sample as m; raise SystemExit(m.ANSWER)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert run_step(Step("import", ("-c", code), 30, 1), environment, 30)[0] == 42


def test_the_first_stage_is_short_and_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    plan = gpu_check.steps("cuda")
    first = [step.name for step in plan if step.first]
    assert first == [step.name for step in plan][: len(first)] == ["machine", "kernels", "draws", "graphs"]
    assert main(["--device", "cpu", "--stage", "first", "--list"]) == 0
    assert capsys.readouterr().out.split() == first
    assert main(["--device", "cpu", "--list"]) == 0
    assert capsys.readouterr().out.split() == [step.name for step in plan]
    for step in plan:
        files = [part for part in step.command if part.startswith("tests/")]
        assert all((SCRIPT.parents[1] / file).is_file() for file in files)
    assert sum(step.least_s for step in plan) <= gpu_check.BUDGET_S
