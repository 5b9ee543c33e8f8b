"""Put a CPU-only torch into the Python environment that runs this file.

    python tools/cpu_torch.py VERSION

PyPI's Linux wheel of torch is built for CUDA and asks for 2.5 GB of vendor libraries. Tests and CPU images need none of
them: this installs the wheel alone (0.5 GB) and, in place of the libraries it links to, small stubs with the same names
and symbols whose functions all answer "no such device". Where pip finds a CPU build of its own, that one is taken and
no stub is made. Users with a GPU install the `engine` extra without this step.
"""

from __future__ import annotations

import collections
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

MARK = b"cudaErrorNoDevice stub"
VENDOR = re.compile(r"lib(cu(?!da\.)|nv|nccl)")  # not libcuda, the driver: torch opens it only when there is a GPU
# Libraries without symbol versions, told apart by the prefix of their functions.
PREFIXES = (("cusparseLt", "libcusparseLt."), ("cuFile", "libcufile."), ("nccl", "libnccl."), ("pnccl", "libnccl."))
PURE_DEPENDENCIES = ("numpy", "filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wanted_symbols(lib: Path) -> dict[str, dict[str, str]]:
    """Vendor library -> {symbol that torch takes from it: symbol version or ""}."""
    files = [f for f in lib.glob("*.so*") if MARK not in f.read_bytes()[: 1 << 16]]
    own = {f.name for f in files}
    want: dict[str, dict[str, str]] = collections.defaultdict(dict)
    unversioned: set[str] = set()
    defined: set[str] = set()
    for file in files:
        owner: dict[str, str] = {}
        current = ""
        for line in run("readelf", "-dVW", str(file)).splitlines():
            if m := re.search(r"\(NEEDED\).*\[(.*?)\]", line):
                if m[1] not in own and VENDOR.match(m[1]):
                    _ = want[m[1]]  # even with no symbol, the file must be there
            elif m := re.search(r"File: (\S+)", line):
                current = m[1]
            elif m := re.search(r"Name: (\S+)  Flags", line):
                owner[m[1]] = current
        for line in run("nm", "-D", str(file)).splitlines():
            kind, name = line.split()[-2:]
            name, _, version = name.replace("@@", "@").partition("@")
            if kind != "U":
                defined.add(name)
            elif owner.get(version) in want:
                want[owner[version]][name] = version
            elif not version:
                unversioned.add(name)
    for name in unversioned - defined if want else ():
        for prefix, library in PREFIXES:
            if name.startswith(prefix):
                want[next(n for n in want if n.startswith(library))].setdefault(name, "")
    return want


def make_stub(path: Path, symbols: dict[str, str], tmp: Path) -> None:
    """One shared library whose every function returns 100, cudaErrorNoDevice."""
    versions: dict[str, list[str]] = collections.defaultdict(list)
    for symbol, version in symbols.items():
        versions[version].append(symbol)
    source, script = tmp / "stub.s", tmp / "stub.map"
    body = "".join(f".globl {s}\n.type {s},@function\n{s}:\n" for s in symbols)
    source.write_text(
        f'.text\n{body}mov $100,%eax\nret\n.section .rodata\n.asciz "{MARK.decode()}"\n'
        '.section .note.GNU-stack,"",@progbits\n'
    )
    script.write_text("".join(f"{v} {{ {' '.join(s + ';' for s in names)} }};\n" for v, names in versions.items() if v))
    extra = [f"-Wl,--version-script={script}"] if any(versions) else []
    run("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", str(path), str(source), *extra)


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python tools/cpu_torch.py VERSION", file=sys.stderr)
        return 2
    version = sys.argv[1]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        have = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        have = ""
    if have != version:
        print(f"torch {version}: downloading the wheel without its CUDA libraries (0.5 GB)", flush=True)
        subprocess.run([*pip, "--no-deps", f"torch=={version}"], check=True)
    site = Path(sysconfig.get_paths()["platlib"])
    want = wanted_symbols(site / "torch" / "lib")
    with tempfile.TemporaryDirectory() as tmp:
        for library, symbols in want.items():
            make_stub(site / "torch" / "lib" / library, symbols, Path(tmp))
    if want:  # else a later `pip install` brings the vendor wheels after all
        metadata = next(site.glob("torch-*.dist-info")) / "METADATA"
        kept = [
            line
            for line in metadata.read_text().splitlines(keepends=True)
            if not re.match(r"Requires-Dist: (nvidia|cuda|triton)", line)
        ]
        metadata.write_text("".join(kept))
    constraints = Path(__file__).resolve().parent.parent / "constraints.txt"
    subprocess.run([*pip, "-c", str(constraints), *PURE_DEPENDENCIES], check=True)
    check = "import torch; print('torch', torch.__version__, 'imports;', torch.backends.cpu.get_cpu_capability())"
    subprocess.run([sys.executable, "-c", check], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
