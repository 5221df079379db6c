# make demo    the main job on this machine
# make demo-megatron   the same with a Megatron-Core trainer
# make test    all tests (PYTEST_ARGS="-m 'not slow'" for the quick ones)
# make cluster tests of several hosts (network namespaces, as root), of Ray nodes that come and go, and of SGLang on Ray
# make check   ruff, mypy, import-linter
# make bench   planning at the size of published models, beside Awex's planner (BENCH_ARGS="--case k2-equal")
# make bench-transfer   the executor beside one large tensor, Awex and gather-broadcast-load (TRANSFER_ARGS="--mib 64")
# make bench-verify   what verification adds to a whole update (VERIFY_ARGS="--mib 1024")
# make bench-colocated   reading in place beside plain copy, Gloo and handing over full tensors (COLOCATED_ARGS="--mib 64")
# make bench-ray   an update through Ray beside the same over plain processes and HTTP (RAY_ARGS="--mib 64")
# make faults  200 updates of real processes with a fault each (about a quarter of an hour; FAULTS_ARGS="--runs 34")
# make openapi   the document of the gateway's routes, docs/generated/openapi.json
# make fuzz    a million mutated messages and requests to the gateway (FUZZ_ARGS="--count 10000")
# make clean   remove the virtual environment and what the other targets left
#
# Each target sets up what it needs in a virtual environment of its own: nothing else on the machine is touched.
#   VENV=DIR       where it lies (.venv)
#   PYTHON=FILE    the interpreter it is made from (Python 3.11 or later)
# requirements/ says what goes into it and why; a change there, or of pyproject.toml, sets up again what depends on it.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)

STAMPS := $(VENV)/.stamps
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts
SHIMS := tests/sglang_cpu
SHIM_FILES := $(wildcard $(SHIMS)/*.toml $(SHIMS)/*.py $(SHIMS)/*.pth $(SHIMS)/*/*.py)

# The environment is the one made here, whatever the caller's shell adds to it.
unexport PYTHONPATH PYTHONHOME

.PHONY: demo demo-megatron test cluster check bench bench-transfer bench-verify bench-colocated bench-ray faults fuzz openapi setup clean
.DELETE_ON_ERROR:

demo: setup
	$(BIN)/weightcast demo $(DEMO_ARGS)

demo-megatron: setup
	$(BIN)/weightcast demo --trainer megatron --trainer-prelude tests/support/megatron_cpu.py $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

cluster: setup
	$(BIN)/python -m pytest -m cluster $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(VENV)/src && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache
	$(BIN)/lint-imports

bench-ray: setup
	$(BIN)/python benchmarks/bench_ray.py $(RAY_ARGS)

faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults.py $(FAULTS_ARGS)

openapi: setup
	cd docs/generated && $(abspath $(BIN))/python -m weightcast.gateway.server.app > openapi.json

fuzz: setup
	$(BIN)/python benchmarks/fuzz.py $(FUZZ_ARGS)

bench: setup $(STAMPS)/bench
	$(BIN)/python benchmarks/bench_plan.py --awex $(VENV)/awex $(BENCH_ARGS)

bench-transfer: setup $(STAMPS)/bench
	$(BIN)/python benchmarks/bench_transfer.py --awex $(VENV)/awex $(TRANSFER_ARGS)

bench-verify: setup
	$(BIN)/python benchmarks/bench_verify.py $(VERIFY_ARGS)

bench-colocated: setup
	$(BIN)/python benchmarks/bench_colocated.py $(COLOCATED_ARGS)

setup: $(STAMPS)/shims $(STAMPS)/megatron $(VENV)/src/weightcast

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "error: $(PYTHON) is older than Python 3.11; set PYTHON to a newer one" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: requirements/torch.txt requirements/install_torch.sh | $(STAMPS)/venv
	@echo "Setting up $(VENV): torch"
	@bash requirements/install_torch.sh $(BIN)/python
	@touch $@

$(STAMPS)/sglang: requirements/sglang-cpu.txt requirements/sglang-cpu-no-deps.txt $(STAMPS)/torch
	@echo "Setting up $(VENV): SGLang and what it needs (about a minute)"
	@$(PIP) --constraint requirements/torch.txt --requirement requirements/sglang-cpu.txt
	@$(PIP) --no-deps --requirement requirements/sglang-cpu-no-deps.txt
	@touch $@

$(STAMPS)/megatron: requirements/megatron-cpu-no-deps.txt $(STAMPS)/sglang
	@echo "Setting up $(VENV): Megatron-Core and Megatron-Bridge"
	@$(PIP) --no-deps --ignore-requires-python --requirement requirements/megatron-cpu-no-deps.txt
	@touch $@

# torch is installed and constrained, so that no dependency of ours can bring another one.
$(STAMPS)/project: pyproject.toml requirements/dev.txt $(STAMPS)/torch $(STAMPS)/sglang
	@echo "Setting up $(VENV): weightcast and its checkers"
	@$(PIP) --constraint requirements/torch.txt --constraint requirements/dev.txt --editable '.[dev,ray,cpu]'
	@touch $@

$(STAMPS)/shims: $(SHIM_FILES) $(STAMPS)/sglang $(STAMPS)/project
	@echo "Setting up $(VENV): what SGLang lacks without a GPU"
	@$(PIP) --no-deps --no-build-isolation --force-reinstall ./$(SHIMS)
	@SGLANG_USE_CPU_ENGINE=1 $(BIN)/python -c 'import torchvision, sgl_kernel, sglang.srt.server_args' \
	    || { echo "error: SGLang cannot be imported in $(VENV); see requirements/sglang-cpu.txt" >&2; exit 1; }
	@touch $@

# What is measured beside ours lies in a folder of its own and is no part of the environment.
$(STAMPS)/bench: requirements/bench.txt | $(STAMPS)/venv
	@echo "Setting up $(VENV)/awex: what the benchmark compares with"
	@if $(PIP) --no-deps --upgrade --target $(VENV)/awex --requirement requirements/bench.txt; then touch $@; \
	else echo "Awex could not be installed; the benchmark runs without it" >&2; fi

# mypy takes a package from a folder of its name, and the root of a clone may be called anything: it runs beside this link.
$(VENV)/src/weightcast: | $(STAMPS)/venv
	@mkdir -p $(@D) && ln -sfn $(CURDIR) $@

clean:
	@if [ -f $(VENV)/pyvenv.cfg ]; then rm -rf $(VENV); fi
	rm -rf build dist *.egg-info $(SHIMS)/build $(SHIMS)/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
