# Each target does all its own set-up: a venv in .venv, the native module, the runtimes that judge.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
NATIVE := CMakeLists.txt $(wildcard src/fewbits/kernels/native/*)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 2

.PHONY: bench-gpu-compile demo test test-all test-neon test-sanitized lint format wheel wheel-check train clean readme-results

demo: .venv/ready
	$(BIN)/fewbits demo -o demo-out

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" --ignore tests/gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/gpu

test-all: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --ignore tests/gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/gpu

# Every kernel for GPUs, compiled for every architecture, and the tables of docs/kernels.md made anew: some twenty minutes.
bench-gpu-compile: .venv/ready
	$(BIN)/python -m fewbits.kernels.triton.listing docs/kernels.md

# Kernels of AArch64 in an emulator; needs a cross compiler and qemu, says so, and is no part of `make test`.
test-neon:
	$(MAKE) -C tests/native neon

# The kernels of this processor under the compiler's sanitizers: addresses and undefined behaviour, then threads.
test-sanitized:
	$(MAKE) -C tests/native sanitized

lint: .venv/ready
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(wildcard src/fewbits/kernels/native/*.cc src/fewbits/kernels/native/*.h src/fewbits/kernels/native/*.inc tests/native/*.cc tests/native/*.h)

format: .venv/ready
	$(BIN)/ruff check --fix src tests tools
	$(BIN)/ruff format src tests tools
	$(BIN)/clang-format -i $(wildcard src/fewbits/kernels/native/*.cc src/fewbits/kernels/native/*.h src/fewbits/kernels/native/*.inc tests/native/*.cc tests/native/*.h)

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

train: .venv/ready
	$(BIN)/python tools/train_embedded.py

# The build tools first and no build isolation: a rebuild then needs no network, and torch is never fetched twice.
.venv/ready: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) cmake ninja nanobind scikit-build-core
	$(PIP) --no-build-isolation -e '.[ct,genai,lint,llamacpp,onnx,test,triton]'
	touch $@

clean:
	rm -rf .venv build dist demo-out
