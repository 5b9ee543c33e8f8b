"""Pods of runtime vllm have command lines that vLLM 0.32 takes: held to what its own parser lists."""

from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
GOLDEN = sorted(HERE.glob("golden/vllm-*.yaml"))


def known() -> dict[str, str]:
    """Option -> flag, value, or nargs with a number of values."""
    options = {}
    for line in (HERE / "vllm_arguments.txt").read_text().splitlines():
        if not line.startswith("#"):
            names, _, follows = line.partition(" | ")
            options |= dict.fromkeys(names.split(), follows)
    return options


def parsed(args: list[str]) -> dict[str, list[str]]:
    """Options with their values; fails for what vLLM would not take."""
    options, found, current = known(), {"model": [args[0]]}, ""
    for arg in args[1:]:
        if arg.startswith("-"):
            assert arg in options, f"vLLM knows no {arg}"
            current = arg
            found[current] = []
        else:
            assert current, f"{arg} follows nothing"
            found[current].append(arg)
    for option, values in found.items():
        follows = options.get(option, "value")
        wanted = {"flag": 0, "value": 1}.get(follows)
        assert wanted is None or len(values) == wanted, f"{option} takes {follows}, got {values}"
    return found


@pytest.mark.parametrize("file", GOLDEN, ids=lambda f: f.stem)
def test_every_flag_is_one_of_vllms_with_as_many_values(file: Path) -> None:
    pods = [m for m in yaml.safe_load_all(file.read_text()) if m["kind"] == "Pod"]
    assert pods
    for pod in pods:
        flags = parsed(pod["spec"]["containers"][0]["args"])
        assert not flags["model"][0].startswith("-")
        for needed in ("--served-model-name", "--host", "--shutdown-timeout"):
            assert needed in flags


@pytest.mark.parametrize(
    ("name", "mode_flags"),
    [
        ("vllm-dense-internal", {"--data-parallel-size-local"}),
        ("vllm-moe-internal", {"--data-parallel-size-local", "--enable-expert-parallel"}),
        (
            "vllm-moe-hybrid",
            {
                "--data-parallel-size-local",
                "--data-parallel-start-rank",
                "--data-parallel-hybrid-lb",
                "--enable-expert-parallel",
            },
        ),
        ("vllm-moe-external", {"--data-parallel-rank", "--data-parallel-external-lb", "--enable-expert-parallel"}),
        (
            "vllm-moe-multiport",
            {
                "--data-parallel-size-local",
                "--data-parallel-start-rank",
                "--data-parallel-multi-port-external-lb",
                "--data-parallel-supervisor-port",
                "--enable-expert-parallel",
            },
        ),
        ("vllm-dense-external", None),
    ],
)
def test_the_mode_is_said_by_its_own_flags_and_by_no_others(name: str, mode_flags: set[str] | None) -> None:
    (head, *_) = [m for m in yaml.safe_load_all((HERE / f"golden/{name}.yaml").read_text()) if m["kind"] == "Pod"]
    flags = parsed(head["spec"]["containers"][0]["args"]).keys()
    found = {f for f in flags if "parallel" in f}
    always = {"--data-parallel-size", "--data-parallel-address", "--data-parallel-rpc-port"}
    assert found == (set() if mode_flags is None else always | mode_flags)
