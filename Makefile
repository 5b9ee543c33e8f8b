# make demo: everything from nothing to streamed tokens.  make test: everything that proves it.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

# A CUDA machine has its own torch; the virtual environment made here has one for CPUs.
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),$(PYTHON))
GPU_WHEELS := build/gpu-wheels
GPU_WHEELS_PYTHON ?= 3.12
GPU_WHEELS_MAX_MB := 60
# What the engine and its tests import beside torch, numpy and transformers, with all that these need in turn.
GPU_PACKAGES := msgspec PyYAML pyzmq uvloop prometheus_client tokenizers safetensors gguf tqdm \
	aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl idna typing_extensions \
	Jinja2 MarkupSafe rich markdown-it-py mdurl Pygments psutil \
	pytest iniconfig packaging pluggy pytest-timeout hypothesis sortedcontainers

# How many processes the tests are dealt out to: they wait about as long as they compute.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 3 ? 4 : cores < 7 ? cores + 2 : 8)))
# Tests of many processes meet deadlines of seconds (a lease is one of 3 s) and share the cores with all others: what
# fails is run once more with nothing beside it, and fails for good then. Both runs show what failed.
define TESTS
code=0
$(PY) -m pytest -rs $(1) $(2) || code=$$?
if [ $$code -eq 1 ]; then
  echo "once more, one after the other with nothing beside them: the tests that failed (4 failures end it)"
  $(PY) -m pytest -v --last-failed --last-failed-no-failures none --maxfail 4 $(2)
elif [ $$code -ne 0 ]; then
  exit $$code
fi
endef
# Each of the many processes that tests start is there half a second sooner.
unexport PYTHONDONTWRITEBYTECODE

# Whose cluster the end-to-end tests use: one made on this machine, or that of KUBECONFIG.
CLUSTER_OF := $(if $(filter-out /var/lib/dpi-cluster/%,$(KUBECONFIG)),given,local)

.PHONY: help setup demo test lint typecheck interop manifests gpu-check gpu-wheels images cluster cluster-down cluster-status e2e bench bench-peer bench-docs bench-routing clean

help: ## What can be made
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## Virtual environment with all that demo and test need

$(VENV)/.torch: constraints.txt tools/cpu_torch.py
	@echo "[1/2] virtual environment in $(VENV), torch $(TORCH) for CPUs (0.5 GB, 1 to 2 minutes)"
	[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(PY) tools/cpu_torch.py $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "[2/2] dpinference and what it needs (half a minute)"
	$(PIP) -e '.[engine,operator,test]'
	touch $@

demo: setup ## Two ranks of a small model on this machine answer a question
	@echo "dpi up: model, two ranks, one question"
	$(VENV)/bin/dpi up -f manifests/samples/smollm2.yaml --ask "What is the capital of France, and what is it known for?"

lint: setup ## ruff, format check
	$(VENV)/bin/ruff check engine operator tests tools benchmarks
	$(VENV)/bin/ruff format --check engine operator tests tools benchmarks

typecheck: setup ## mypy, strict where it matters
	$(VENV)/bin/mypy engine/dpi_engine operator/dpi_operator

test: lint typecheck ## lint, types, all tests (no root, no cluster); E2E=1: a real cluster too; ARGS="tests/wire -k lease": some
	@echo "tests in $(WORKERS) processes (WORKERS), $(or $(ARGS),all of them: 12 to 19 minutes on two cores)"
	case "$(E2E)" in
	"" | 0) $(call TESTS,-n $(WORKERS) --durations=10,$(ARGS)) ;;
	*)
	  case "$(CLUSTER_OF)" in local) tests/cluster/build ;; esac
	  unset E2E
	  $(call TESTS,-n $(WORKERS) --durations=10,--ignore tests/e2e --ignore tests/images $(ARGS))
	  $(MAKE) e2e ;;
	esac

interop: setup ## Our engine and a real vLLM 0.32 in one group, both ways (builds vLLM the first time: 7 minutes, 3.4 GB)
	benchmarks/peer/setup.sh
	INTEROP=1 $(PY) -m pytest tests/interop

manifests: setup ## CRD, chart schemas and READMEs, install.yaml (with helm) from the types and charts
	$(PY) tools/manifests.py

gpu-check: ## Check the engine on a CUDA machine, under six minutes, no network (GPU_PYTHON, ARGS)
	$(GPU_PYTHON) tools/gpu_check.py $(ARGS)

gpu-wheels: ## Packages for a CUDA machine without network, into build/gpu-wheels (GPU_WHEELS_PYTHON)
	rm -rf $(GPU_WHEELS)
	platforms=(); for n in 17 24 27 28 31 34 35; do platforms+=(--platform manylinux_2_$${n}_x86_64); done
	$(GPU_PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --python-version $(GPU_WHEELS_PYTHON) --implementation cp "$${platforms[@]}" \
	  --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
	  -c constraints.txt -d $(GPU_WHEELS) $(GPU_PACKAGES)
	size=$$(du -sm $(GPU_WHEELS) | cut -f1)
	echo "$(GPU_WHEELS): $$(ls $(GPU_WHEELS) | wc -l) wheels for Python $(GPU_WHEELS_PYTHON), $$size MB"
	if [ $$size -ge $(GPU_WHEELS_MAX_MB) ]; then echo "that is more than $(GPU_WHEELS_MAX_MB) MB" >&2; exit 1; fi

images: ## Container images with buildah: engine, operator, engine with a small model (root)
	tools/images

cluster: ## Kubernetes on this machine, NODES=2; builds what is not cached (root; half an hour the first time)
	tests/cluster/build
	NODES=$(or $(NODES),2) tests/cluster/up

cluster-down: ## End the cluster and leave nothing of it
	tests/cluster/down

cluster-status: ## What runs of the cluster
	tests/cluster/status

e2e: setup ## End-to-end tests on a real cluster: KUBECONFIG, or one made here with images built here
	@case "$(CLUSTER_OF)" in local) $(MAKE) images cluster ;; esac
	export E2E=1
	$(call TESTS,-v --durations=15,tests/images tests/e2e)

BENCH = $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ONLY),--only $(ONLY)) $(if $(RESUME),--resume) $(if $(LIST),--list)

bench: setup ## Table of our own speed, 20 minutes (ROUNDS=5, ONLY="row ...", LIST=1 says which)
	$(PY) benchmarks/run.py $(BENCH)

bench-peer: setup ## Table beside a real vLLM 0.32 tuned to this machine, 50 minutes and its build (ROUNDS, ONLY, LIST, RESUME=1)
	benchmarks/peer/setup.sh
	benchmarks/peer/llama.sh || echo "no llama.cpp: the row beside it will say so"
	$(PY) benchmarks/run.py --peer $(BENCH)

bench-docs: setup ## Table and plots of docs/performance.md out of the last bench-peer
	$(PIP) -e '.[bench]'
	$(PY) benchmarks/docs.py

bench-routing: setup ## Tables: cost of a route and spread beside vLLM's, 1,024 ranks on real sockets (ARGS: for the last)
	$(PY) benchmarks/router_pick.py
	$(PY) benchmarks/router_spread.py
	$(PY) benchmarks/routing_scale.py $(ARGS)

clean: ## Remove what make made in this folder
	rm -rf $(VENV) build dist *.egg-info
