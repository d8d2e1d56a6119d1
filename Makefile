# Everything runs in a virtual environment of its own; the first call of any target makes it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

# Where Python is told to keep no bytecode, pytest would rewrite every assertion again in each run.
unexport PYTHONDONTWRITEBYTECODE

# A framework's tests in an environment of its own, which is made once; this checkout is put on its path with its entry points.
FRAMEWORK = python=$$(PYTHON=$(PYTHON) scripts/framework_env.sh $(1)) && $(PYTHON) scripts/checkout_metadata.py .frameworks && \
	PYTHONPATH="$(CURDIR)/.frameworks:$(CURDIR)/src" $$python -m pytest $(2)

.DEFAULT_GOAL := help
PYTEST = $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder  # four on two cores: many tests wait for programs that they started
.PHONY: help help-all demo test test-all test-repeat test-vllm test-verl test-frameworks compatibility check coverage docs dist bench bench-locate bench-locate-sample bench-train bench-gpu bench-train-gpu bench-scale bench-mismatch validate validate-sample numbers nano example-ledger format clean

# `##` is listed by `make`, `#-` only by `make help-all`.
help:
	@$(call LIST,##)
	@echo "  make help-all             Everything else: frameworks, benchmarks, releases"

help-all: #- Print all targets
	@$(call LIST,#[-\#])

LIST = sed -n 's/^\([a-z-]*\):.*$(1) \(.*\)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name what; do \
	printf '  make %-20s %s\n' "$$name" "$$what"; done

demo: $(STAMP) ## A fault is planted in nano, located, repaired over four seeds; writes the report demo.html
	@$(BIN)/shaketable study run studies/hardening.yaml --store demo-runs --report demo.html --force

test: $(STAMP) ## The tests, without the long ones
	$(PYTEST) -m "not slow"

test-all: $(STAMP) ## All tests that need one machine; what CI runs
	$(PYTEST)

test-repeat: $(STAMP) #- `make test` N times beside two busy processes, every second time in another order
	PYTEST="$(PYTEST) -m 'not slow'" scripts/test_repeat.sh $(or $(N),10)

check: $(STAMP) ## Lint, formatting, types, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code, and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## The documentation site, in build/site; a warning is an error
	$(BIN)/python scripts/site.py

coverage: $(STAMP) #- Print the coverage of the tests, folder by folder
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term

dist: $(STAMP) #- Wheel and sdist in dist/; the wheel is tried in a clean environment
	rm -rf dist
	$(BIN)/python -m build
	PYTHON=$(PYTHON) scripts/try_wheel.sh

test-vllm: #- The tests in vLLM, in an environment of their own
	@$(call FRAMEWORK,vllm,tests/frameworks/vllm)

test-verl: #- The tests in verl, in an environment of their own
	@$(call FRAMEWORK,verl,tests/frameworks/verl)

# What CI has time for: the fastest tests of each that really run it.
test-frameworks: #- The fastest tests in vLLM and verl
	@$(call FRAMEWORK,vllm,$(addprefix tests/frameworks/vllm/,test_eager.py test_aqn.py test_run.py))
	@$(call FRAMEWORK,verl,tests/frameworks/verl/test_noise.py)

compatibility: $(STAMP) #- All tests of frameworks; writes the table of docs/frameworks.md
	$(BIN)/python -m pytest tests/integrations tests/launch tests/sites --covers tests/frameworks/results/core.json
	@$(call FRAMEWORK,vllm,tests/frameworks/vllm --covers tests/frameworks/results/vllm.json)
	@$(call FRAMEWORK,verl,tests/frameworks/verl --covers tests/frameworks/results/verl.json)
	$(BIN)/python scripts/compatibility.py

# The other tools are installed without what they would drag in.
bench: $(STAMP) ## Speed on a CPU, beside other tools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/rivals-requirements.txt
	$(BIN)/python benchmarks/speed.py

bench-locate: $(STAMP) #- Thousands of planted faults; about an hour on one core
	$(BIN)/python benchmarks/locate.py --out benchmarks/locate.json

bench-locate-sample: $(STAMP) #- A sample of them; fails on a false alarm or a miss
	$(BIN)/python benchmarks/locate.py --sample 120 --prompts 2 --whole 4

# A run that was stopped goes on. CI runs a sample.
validate: $(STAMP) ## Every architecture, the attacks and simulated studies; half an hour on one core
	$(BIN)/python validation/validate.py

validate-sample: $(STAMP) #- A sample of the architectures; may fail only where docs/validation.md says so
	$(BIN)/python validation/validate.py --sample 12

bench-train: $(STAMP) #- Training and sweeping on a CPU, beside plain TRL
	$(BIN)/python benchmarks/train.py

# On a machine with a CUDA device and a torch that knows it; not through the environment of this file.
bench-gpu: #- Speed on a GPU, with the python3 of the path
	python3 benchmarks/gpu.py

bench-train-gpu: #- Training on a GPU, with the python3 of the path
	python3 benchmarks/train_gpu.py

bench-scale: $(STAMP) #- Ledgers of up to a thousand processes
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python scripts/roofline.py

bench-mismatch: #- shaketable mismatch with vLLM: healthy pairs and planted defects; an hour
	@python=$$(scripts/framework_env.sh vllm) && $(PYTHON) scripts/checkout_metadata.py .frameworks \
		&& PYTHONPATH="$(CURDIR)/.frameworks:$(CURDIR)/src" $$python benchmarks/mismatch.py

numbers: #- Write the numbers of docs/tour.md from benchmarks/
	$(PYTHON) scripts/readme_numbers.py

nano: $(STAMP) #- Train the model that ships; half an hour on two cores, two minutes with DEVICE=cuda
	$(BIN)/python scripts/make_nano.py --device $(or $(DEVICE),cpu)

example-ledger: $(STAMP) #- Four faults at once, and their ledger
	@$(BIN)/python examples/ledger.py

$(STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean: ## Remove the environment, and what was built
	rm -rf $(VENV) build dist
