# The commands of README.md. Everything they need is installed into a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := models/pycode-moe-20m-Q4_K_M.gguf
PROFILE := $(VENV)/demo-profile.yaml

.PHONY: demo test test-together test-clusters test-alone test-builds test-gpu cuda-check lint format generate fuzz sanitize clean

# From a fresh clone: build, install, tune the shipped model on this machine, generate text under the profile.
demo: $(VENV)/.installed
	$(BIN)/python -m dyno_tuner.cli --model $(MODEL) --device cpu --budget 2m --force --out $(PROFILE)  # Ray may own bin/tune
	printf 'class Shape:\n    def __init__(self, name):\n' | \
	  $(BIN)/dyno run --model $(MODEL) --profile $(PROFILE) --prompt - --max-tokens 44
	@echo "Next: . $(BIN)/activate && pip install 'gguf-dyno[chat,serve]', then dyno chat MODEL.gguf or tune MODEL.gguf."
	@echo "docs/user/getting-started.md goes on."

# Most tests run beside each other. The second command starts clusters of Ray one after the other, and waits for them most of
# the time. The third one runs the other tests that measure this machine or load it. Both name their files, since to collect
# all tests takes half a minute of one core. Each worker computes the references in one thread: threads of several workers
# that share the cores spin while they wait for each other.
WORKERS ?= auto
marked = grep -rlE --include='test_*.py' 'pytest\.mark\.$(1)\>' tests | sort
together = OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not alone" -n $(WORKERS) tests
clusters = $(BIN)/python -m pytest -m "not gpu and cluster" $$($(call marked,cluster))
alone = $(BIN)/python -m pytest -m "not gpu and alone and not cluster and not builds" $$($(call marked,alone))
test: $(VENV)/.installed-test
	$(together)
	$(clusters)
	$(alone)

test-together: $(VENV)/.installed-test
	$(together)

test-clusters: $(VENV)/.installed-test
	$(clusters)

test-alone: $(VENV)/.installed-test
	$(alone)

# `tune build` for real: five builds of the CPU engine, measured against each other.
test-builds: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m builds $$($(call marked,builds))

test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m gpu tests

# The CUDA engine compiled and linked for the oldest and a Hopper chip, with the kernel instances that defaults take. Its CPU
# half is compiled for this machine alone, with few optimisations and its kernels with none: `make test` runs the whole of it.
# Device code has few as well, but for instructions of one chip (DYNO_CUDA_QUICK). Then a small module with GGML_CUDA_LTO=ON,
# for which pip installs the libnvvm of the toolkit's release. Needs a toolkit, which is an error to lack, and no GPU.
LTO_BUILD := build/cuda-lto-check
CUDA_RELEASE = $$(sed -n 's/.*{"CUDA", "\([0-9.]*\)".*/\1/p' build/cuda-check/csrc/bindings/build_info.h)
cuda-check: $(VENV)/.installed-test
	$(BIN)/cmake --preset cuda-check -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build --preset cuda-check
	$(BIN)/cmake --build --preset cuda-check --target check_errors
	$(BIN)/pip install --quiet "$$($(BIN)/python csrc/cmake/find_nvvm.py --requirement $(CUDA_RELEASE))"
	$(BIN)/cmake --preset cuda-lto-check -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build --preset cuda-lto-check --target check_lto
	DYNO_CUDA_BUILD=build/cuda-check DYNO_CUDA_CHECKS=build/cuda-check/tests/cuda DYNO_CUDA_LTO_BUILD=$(LTO_BUILD) \
	  $(BIN)/python -m pytest tests/build/test_cuda_build.py tests/build/test_cuda_lto.py tests/cuda/test_errors.py \
	  tests/python/test_token_stages.py

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -n 60 -P 4 $(BIN)/clang-format --dry-run --Werror
	$(BIN)/python -m dyno.profiles.generate --check --root .
	$(BIN)/python csrc/bindings/stubs.py --check

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

# The pages, schemas and type stubs that are made from code.
generate: $(VENV)/.installed-lint
	$(BIN)/python -m dyno.profiles.generate --root .
	$(BIN)/python csrc/bindings/stubs.py
	$(BIN)/python benchmarks/report.py

# Both fuzz targets, each for SECONDS. FUZZ_JSON=benchmarks/results/fuzz.json adds the number of executions to that file.
SECONDS ?= 60
fuzz: $(VENV)/.installed-test
	PYTHON=$(BIN)/python FUZZ_JSON=$(FUZZ_JSON) tests/fuzz/run.sh $(SECONDS) gguf session

# Tests on a module under AddressSanitizer and UndefinedBehaviorSanitizer, of the same build.
sanitize: $(VENV)/.installed-test
	PYTHON=$(BIN)/python tests/fuzz/run.sh suite

SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc python tuner profiles -type f -not -name '*.so' -not -path '*/__pycache__/*' 2>/dev/null)

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	touch $@

$(VENV)/.installed: $(VENV)/.created $(SOURCES)
	@echo "building the engine: about 7 minutes on one core; pip prints nothing until it has ended"
	$(BIN)/pip install --quiet .
	touch $@

# The extras of the package that is installed: naming the source tree would build it again.
$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet "gguf-dyno[test]"
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/pip install --quiet "gguf-dyno[lint]"
	touch $@

clean:
	rm -rf $(VENV) build build-fuzz
