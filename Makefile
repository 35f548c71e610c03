# Each target creates what it needs: a virtual environment in .venv with the pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.installed-tests
# AIPerf wants other versions than constraints.txt.
AIPERF := $(VENV)/agentx/bin/aiperf
PEER_PYTHON ?=
TRACES ?=
MODEL ?=
# Three files at a time: a test uses one processor and waits often.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
# The registry's torch asks for CUDA packages on Linux; PyTorch's own index has builds for the CPU that do without.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ANSWERS := timeout 5 $(BIN)/python -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1])' $(CPU_INDEX)/torch/

.DEFAULT_GOAL := help
.PHONY: help demo chat serve test check bench agentx gpu clean

help:
	@echo "make demo   a conversation over kill -9 and a truncation; what each turn costs, in a table"
	@echo "make chat   talk to the built-in model (MODEL=... for another one)"
	@echo "make serve  answer over HTTP on port 8000, with a web page (MODEL=... for another model)"
	@echo "make test   the tests"
	@echo "make check  ruff, mypy and the tests"
	@echo "make bench  the benchmarks (minutes; results go to the terminal)"
	@echo "make agentx agents' sessions, replayed by AIPerf (PEER_PYTHON=... of vLLM's environment, TRACES=... recorded ones)"
	@echo "make gpu    on a CUDA device: checks from the kernels upwards, then figures (half an hour; PYTHON=... has torch)"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies into $(VENV) (once)"
	@if [ "$$(uname)" != Linux ]; then $(PIP) -e .; \
	elif ! nvidia-smi >/dev/null 2>&1 && $(ANSWERS) 2>/dev/null; then $(PIP) --extra-index-url $(CPU_INDEX) -e .; \
	else echo "fetching torch with its CUDA packages, some 3 GB, unless pip knows of a build for the CPU"; $(PIP) -e .; fi
	@touch $@

$(TESTS): $(STAMP)
	@echo "installing what the tests need (once)"
	@$(PIP) -e '.[test]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m bench.demo

chat: $(STAMP)
	@$(BIN)/kvstore chat $(MODEL)

serve: $(STAMP)
	@$(BIN)/kvstore serve $(MODEL)

test: $(TESTS)
	@$(PYTEST)

check: $(TESTS)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(PYTEST)

bench: $(STAMP)
	@$(BIN)/python -m bench.throughput

$(AIPERF):
	@echo "installing AIPerf into $(VENV)/agentx (once)"
	@$(PYTHON) -m venv $(VENV)/agentx
	@$(VENV)/agentx/bin/python -m pip install -q --disable-pip-version-check aiperf==0.13.0

agentx: $(STAMP) $(AIPERF)
	@$(BIN)/python -m bench.agentx --aiperf $(AIPERF) $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) $(if $(TRACES),--traces $(TRACES))

# A fault in what moves KV ends it: nothing after that would mean anything. A capture that is refused does not.
GPU_CHECK := $(PYTHON) -m pytest -m gpu -W default
gpu:
	nvidia-smi
	$(PYTHON) -c "import torch, triton, lmdb, msgspec, xxhash, zstandard, psutil; print(torch.__version__, triton.__version__)"
	$(GPU_CHECK) -x tests/kvstore/memory/test_arena.py tests/kernels/test_write_kv.py tests/kvstore/memory/test_device_transfer.py tests/engine/model/step/test_step.py::test_tensors_of_a_step_on_cuda
	$(GPU_CHECK) -x tests/kernels/cuda/test_block_copy.py tests/kernels/cuda/test_attention.py
	$(PYTHON) -m bench.gpu --part check --part copy --json gpu-kernels.json
	-$(GPU_CHECK) tests/engine/model/step/test_graphs.py tests/engine/model/test_packing.py tests/engine/model/step/test_step.py tests/engine/faults/test_torn_blocks.py tests/engine/model/parallel/test_group.py tests/engine/ranks/test_on_devices.py
	$(PYTHON) -m bench.gpu --quick --model-shape qwen-2.5-0.5b --json gpu-quick.json
	$(PYTHON) -m bench.gpu --model-shape llama-3.1-8b --part ttft --part overlap --budget-s 300 --json gpu-turns.json
	$(PYTHON) -m bench.gpu --model-shape llama-3.1-8b --part decode --part graphs --part saving --part prefill \
		--budget-s 300 --json gpu-steps.json

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
