# make demo   the main job on the shipped pair: convert, then generate with and without drafting
# make test   linters, types and tests: what CI runs
# make docs   write docs/reference.md again, from the commands
# make train  train the demo pair again (up to two hours on two cores)
# make sanitize  the C++ parts under gcc's address, undefined-behaviour and thread sanitizers (Linux)

PYTHON ?= python3
BIN := .venv/bin
CACHE := $(or $(DFLASH2_CACHE),$(HOME)/.cache/llama-dflash2)
LLAMA_CPP_PYTHON := 0.3.36

# gcc drops the tile configuration of ggml's AMX kernels, which then crash on CPUs that have AMX (llama.cpp PR 26954).
NO_AMX := $(shell $(CC) -march=native -dM -E - </dev/null 2>/dev/null | grep -q __AMX_INT8__ \
	&& echo -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
# A wheel of llama-cpp-python holds code for one CPU, compiler and set of flags: its cache folder is named after them.
KEY := $(shell { $(PYTHON) -VV; uname -sm; echo $(LLAMA_CPP_PYTHON) $(CMAKE_ARGS) $(NO_AMX); \
	$(CC) -march=native -dM -E - </dev/null; } 2>&1 | cksum | cut -d' ' -f1)
WHEELS := $(CACHE)/wheels/$(KEY)
SOURCES := $(shell find src converter runtime patches modelfiles evidence -type f -not -name '*.pyc')

# A library that needs a sanitizer's runtime must not be found by anyone else: it gets a cache of its own.
SANITIZED := DFLASH2_CACHE=$(CACHE)/sanitized CMAKE_ARGS="$(CMAKE_ARGS) \
	-DCMAKE_C_COMPILER_LAUNCHER=$(CURDIR)/tests/sanitizing_launcher.sh \
	-DCMAKE_CXX_COMPILER_LAUNCHER=$(CURDIR)/tests/sanitizing_launcher.sh \
	-DCMAKE_SHARED_LINKER_FLAGS=-fsanitize=address,undefined \
	-DCMAKE_EXE_LINKER_FLAGS=-fsanitize=address,undefined"
# Python itself never frees all it has; containers cross from checked code to unchecked and back.
ASAN = ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0 LD_PRELOAD="$$(gcc -print-file-name=libasan.so)"
TSAN = TSAN_OPTIONS=halt_on_error=1:suppressions=tests/kernels/tsan.supp LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)"

.PHONY: demo test lint docs train sanitize clean

demo: .venv/.installed
	$(BIN)/dflash2 demo

test: .venv/.tested lint
	$(BIN)/python -m pytest

lint: .venv/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.installed
	$(BIN)/python docs/reference.py

train: .venv/.tested
	OMP_WAIT_POLICY=passive $(BIN)/python examples/demo_pair/train.py --work $(CACHE)/train --output src/dflash2/demo_pair

# The kernels' bodies by themselves, then the library that drafts; -s lets a sanitizer speak before it ends the process.
# The test against PyTorch is left out: PyTorch takes minutes under a sanitizer.
sanitize: .venv/.tested
	DFLASH2_TEST_SANITIZE=address,undefined $(ASAN) $(BIN)/python -m pytest -q -s tests/test_kernels_cpu.py tests/test_kernels_gpu.py
	DFLASH2_TEST_SANITIZE=thread $(TSAN) $(BIN)/python -m pytest -q -s tests/test_kernels_cpu.py
	$(SANITIZED) $(BIN)/dflash2 build --targets libs,server
	$(SANITIZED) $(ASAN) $(BIN)/python -m pytest -q -k "not causal_where" tests/test_patched_graph.py

clean:
	rm -rf .venv build

.venv/.created:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(WHEELS)/.built: | .venv/.created
	@echo "building llama-cpp-python $(LLAMA_CPP_PYTHON) (once, about 5 minutes on 2 cores)"
	mkdir -p $(WHEELS)
	CFLAGS="$(CFLAGS) $(NO_AMX)" CXXFLAGS="$(CXXFLAGS) $(NO_AMX)" $(BIN)/python -m pip wheel --quiet --no-deps \
		--no-cache-dir --wheel-dir $(WHEELS) llama-cpp-python==$(LLAMA_CPP_PYTHON)
	touch $@

# build/ is setuptools' scratch folder; what it still holds of deleted modules would be installed again.
.venv/.installed: pyproject.toml $(SOURCES) $(WHEELS)/.built
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-index --find-links $(WHEELS) --no-deps llama-cpp-python==$(LLAMA_CPP_PYTHON)
	$(BIN)/python -m pip install --quiet .
	rm -rf build
	touch $@

# dflash pins exact versions of packages that the tests do not use: installed without its requirements.
.venv/.tested: .venv/.installed
	$(BIN)/python -m pip install --quiet ".[test,reference,build,report,server]"
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	rm -rf build
	touch $@
