# Everything runs in a virtual environment of its own; the first call of any target makes it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

# A framework's tests in an environment of its own, which is made once; this checkout is put on its path with its entry points.
FRAMEWORK = python=$$(PYTHON=$(PYTHON) scripts/framework_env.sh $(1)) && $(PYTHON) scripts/checkout_metadata.py .frameworks && \
	PYTHONPATH="$(CURDIR)/.frameworks:$(CURDIR)/src" $$python -m pytest $(2)

.PHONY: demo test test-vllm test-verl test-frameworks compatibility check bench bench-locate bench-locate-sample bench-train bench-gpu bench-train-gpu bench-scale bench-store validate validate-sample mutants nano example-ledger example-harden format clean

# The whole guided-AQN study on nano: plant a dead zone, locate it, guide, train the arms over seeds, compare, report.
demo: $(STAMP)
	@$(BIN)/shaketable study run studies/guided-aqn.yaml --store demo-runs --report demo.html --force

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-vllm:
	@$(call FRAMEWORK,vllm,tests/frameworks/vllm)

test-verl:
	@$(call FRAMEWORK,verl,tests/frameworks/verl)

# What CI has time for: the fastest tests of each that really run it.
test-frameworks:
	@$(call FRAMEWORK,vllm,$(addprefix tests/frameworks/vllm/,test_vllm_eager.py test_vllm_aqn.py test_vllm_run.py))
	@$(call FRAMEWORK,verl,tests/frameworks/verl/test_verl_noise.py)

# Runs the tests of all frameworks, and writes the table of docs/frameworks.md from what they say.
compatibility: $(STAMP)
	$(BIN)/python -m pytest tests/integrations tests/launch tests/sites --covers tests/frameworks/results/core.json
	@$(call FRAMEWORK,vllm,tests/frameworks/vllm --covers tests/frameworks/results/vllm.json)
	@$(call FRAMEWORK,verl,tests/frameworks/verl --covers tests/frameworks/results/verl.json)
	$(BIN)/python scripts/compatibility.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The other tools are installed without what they would drag in.
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/rivals-requirements.txt
	$(BIN)/python benchmarks/speed.py

# All faults take about an hour on one core; CI runs a sample, and fails on a false alarm or a miss.
bench-locate: $(STAMP)
	$(BIN)/python benchmarks/locate.py --out benchmarks/locate.json

bench-locate-sample: $(STAMP)
	$(BIN)/python benchmarks/locate.py --sample 200 --prompts 2 --whole 4

# Every architecture, the attacks and simulated studies: half an hour on one core; a run that was stopped goes on. CI runs a sample.
validate: $(STAMP)
	$(BIN)/python validation/validate.py

validate-sample: $(STAMP)
	$(BIN)/python validation/validate.py --sample 24

# Bugs planted one at a time: which of them no test catches.
mutants: $(STAMP)
	$(BIN)/python scripts/mutants.py

# The model that ships with the package; half an hour on two cores, two minutes with DEVICE=cuda.
nano: $(STAMP)
	$(BIN)/python scripts/make_nano.py --device $(or $(DEVICE),cpu)

example-ledger: $(STAMP)
	@$(BIN)/python examples/ledger.py

example-harden: $(STAMP)
	$(BIN)/python examples/harden.py

bench-train: $(STAMP)
	$(BIN)/python benchmarks/train.py

# On a machine with a CUDA device and a torch that knows it; not through the environment of this file.
bench-gpu:
	python3 benchmarks/gpu.py

bench-train-gpu:
	python3 benchmarks/train_gpu.py

bench-scale: $(STAMP)
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python scripts/roofline.py

bench-store: $(STAMP)
	$(BIN)/python benchmarks/store.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
