# Every target works in a fresh checkout with nothing but python3: it creates .venv, installs the
# versions pinned in requirements.txt once, and then runs.

PYTHON ?= python3
PRESET ?= cpu
RUN    ?= demo
# Tests that run side by side, each on a thread of its own.
JOBS   ?= 2
ARGS   ?=
# pypi: torch as PyPI has it (with CUDA on Linux). cpu: from PyTorch's CPU index, which must be
# reachable. Its stamp remembers it, so `make test` after `make demo TORCH=cpu` keeps it.
TORCH  ?= $(if $(wildcard .venv/.installed-cpu),cpu,pypi)

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(TORCH)
DEMO   := 00_setup 01_data_prep 02_train 03_evaluate_ema 04_inference
CPU_INDEX := https://download.pytorch.org/whl/cpu
CPU_TAG   := $(if $(filter Linux,$(shell uname -s)),+cpu)
PIP       := $(BIN)/python -m pip --disable-pip-version-check

# Waiting threads do not spin on cores others need, but wait a moment (10 000 turns) before they
# sleep: falling asleep at once made small operations twice as slow.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 10000
export PYTHONPATH := $(CURDIR)
export JUPYTER_PREFER_ENV_PATH := 1

.PHONY: help demo voice corpus-ru real hear lab address test test-oldest test-plain-cpu test-browser \
  test-colab test-indextts2 bench-indextts2 test-serve test-xtts judges test-judges test-matrix bench-data bench-train bench-infer \
  check-gpu gpu-page gpu-wheels gpu-run test-gpu-session lint clean
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  PYTHON=python3.12  which Python makes .venv (3.11, 3.12 or 3.13)"
	@echo "  TORCH=cpu          torch without CUDA: 1 GB instead of 5, from download.pytorch.org"
	@echo "  PRESET=tiny        size of the demo: a file in configs/ (now $(PRESET))"
	@echo "  RUN=try            name of the run: its folder is runs/try (now $(RUN))"
	@echo "  ARGS='-k codec'    passed to pytest, jupyter lab or the setup of a voice (--use, --set)"

# --- set-up ---------------------------------------------------------------------------------

CHECK_PYTHON = import sys; v = sys.version_info[:2]; \
  sys.exit(0 if (3, 11) <= v <= (3, 13) else "$(PYTHON) is Python %d.%d, but the pinned packages \
  need 3.11, 3.12 or 3.13. Name another one, for instance: make PYTHON=python3.12 ..." % v)
CHECK_VENV = import venv, ensurepip
# What a fresh install takes at its peak, downloads included (measured: 7.1 GB, then 5.3).
ROOM_GB   ?= $(if $(filter cpu,$(TORCH)),2,7)
FREE_GB    = df -Pk . | awk 'NR == 2 { print int($$4 / 1048576) }'
NO_VENV = $(PYTHON) has no venv module. On Debian or Ubuntu: sudo apt install python3-venv

# The stamp is touched last, so an interrupted install is taken up again; one per kind of torch.
$(STAMP): requirements.txt
	@case "$(TORCH)" in pypi|cpu) ;; *) echo "TORCH is pypi or cpu, not '$(TORCH)'" >&2; exit 1;; esac
	@command -v "$(PYTHON)" >/dev/null || { echo "There is no $(PYTHON) here; install Python 3.12." >&2; exit 1; }
	@"$(PYTHON)" -c '$(CHECK_PYTHON)'
	@"$(PYTHON)" -c '$(CHECK_VENV)' 2>/dev/null || { echo "$(NO_VENV)" >&2; exit 1; }
	@echo "Setting up $(VENV), torch flavour: $(TORCH). This happens once and takes a minute or more."
	@$(PIP) --version >/dev/null 2>&1 || { free=$$($(FREE_GB)); [ "$$free" -ge $(ROOM_GB) ] || { \
	  echo "Setting up needs $(ROOM_GB) GB on this disk, $$free are free. Make room, or where" \
	  "download.pytorch.org can be reached take the smaller torch: make TORCH=cpu ..." >&2; exit 1; }; \
	  "$(PYTHON)" -m venv --clear $(VENV); }
	@rm -f $(filter-out $@,$(wildcard $(VENV)/.installed-*))
	@[ "$(TORCH)" = cpu ] || ! $(PIP) freeze | grep -q '^torch.*+cpu$$' \
	  || $(PIP) uninstall --yes torch torchaudio
	@[ "$(TORCH)" = pypi ] || $(PIP) install --index-url $(CPU_INDEX) \
	  $$(sed -n 's/^\(torch[a-z]*==.*\)$$/\1$(CPU_TAG)/p' requirements.txt) \
	  || { echo "TORCH=cpu needs $(CPU_INDEX) to be reachable; plain 'make' uses PyPI alone." >&2; exit 1; }
	@$(PIP) install -r requirements.txt
	@touch $@

# Extra packages of one folder of tests: tests/<name>/requirements.txt.
$(VENV)/.extra-%: tests/%/requirements.txt $(STAMP)
	@$(PIP) install -r $<
	@touch $@

# --- the demo -------------------------------------------------------------------------------

# What cells print appears as they print it. papermill's own words go to a log beside the executed
# notebook; of those, only the error of a failed cell is worth a student's eye. Cells tagged
# `exercise` wait for a reader: papermill gets them with the tag of cells that it skips.
demo: KIT_RUNS ?= $(CURDIR)/runs
demo: $(STAMP)  ## train a voice with notebooks 00 to 04 on the CPU; writes runs/demo/report.html
	@! KIT_RUN="$(RUN)" $(BIN)/python -c 'import os; from kit.base.files import require_folder_name; \
	  require_folder_name(os.environ["KIT_RUN"], "RUN")' 2>&1 | tail -n 1 | grep . >&2
	@mkdir -p "$(KIT_RUNS)/$(RUN)/notebooks"; runs=$$(cd "$(KIT_RUNS)" && pwd); \
	home="$$runs/$(RUN)"; out="$$home/notebooks"; started=$$(date +%s); number=0; \
	export KIT_DEMO_STARTED=$$started KIT_PRESET="$(PRESET)" KIT_RUN="$(RUN)" KIT_RUNS="$$runs"; \
	for name in $(DEMO); do \
	  number=$$((number + 1)); begun=$$(date +%s); \
	  printf '\n===== %s of $(words $(DEMO)): %s =====\n' $$number $$name; \
	  sed -E 's/^( *)"exercise"(,?)$$/\1"skip-execution"\2/' notebooks/$$name.ipynb | \
	  $(BIN)/papermill --kernel python3 --cwd notebooks --no-progress-bar --log-level WARNING \
	    --stdout-file - --stderr-file - - "$$out/$$name.ipynb" 2> "$$out/$$name.log" || { \
	      printf '\n'; grep -q '^Exception encountered' "$$out/$$name.log" \
	        && sed -n '/^Exception encountered/,$$p' "$$out/$$name.log" || tail -n 15 "$$out/$$name.log"; \
	      printf '\n%s stopped after %s s. Its cells, with all they showed: %s\n' \
	        $$name $$(($$(date +%s) - begun)) "$$out/$$name.ipynb"; \
	      printf 'Fix it and run make demo again; finished work is kept.\n'; exit 1; } >&2; \
	  printf '%s s for this notebook, %s s in all\n' \
	    "----- $$name: $$(($$(date +%s) - begun))" $$(($$(date +%s) - started)); \
	done; \
	touch "$$home/demo-finished"; \
	printf '\nDone in %s s. Listen and look:\n' $$(($$(date +%s) - started)); \
	printf '  report     %s\n' "$$home/report.html"; \
	find "$$home/samples" -name '*-best.wav' | sort | sed 's/^/  sample     /'; \
	printf '  notebooks  %s\n' "$$out"

# The demo's steps for your own recordings, one command each. The first that stops ends it, and the
# same `make voice` resumes there. A voice that does not pass ends it with "Error 3" (make itself
# exits with 2, as after any error), after the checklist. Without PRESET on the command line, the
# machine decides.
voice: KIT_PRESET := $(if $(filter command line,$(origin PRESET)),$(PRESET))
voice: export KIT_RUNS ?= $(CURDIR)/runs
voice: $(STAMP)  ## train a voice on your recordings: DATA=folder RUN=name [LANGUAGE=am BASE_MODEL=]
	@[ -n "$(DATA)" ] && [ "$(origin RUN)" != file ] || { \
	  echo "Name your recordings and your run: make voice DATA=folder RUN=name" >&2; exit 2; }
	@export KIT_PRESET="$(KIT_PRESET)"; kit="$(BIN)/python -m kit"; \
	$$kit setup --run "$(RUN)" --own yes $(ARGS) && \
	$$kit prepare --run "$(RUN)" --data "$(DATA)" $(if $(LANGUAGE),--language "$(LANGUAGE)") \
	  $(if $(BASE_MODEL),--base-model "$(BASE_MODEL)") && \
	{ $$kit train --run "$(RUN)" && $$kit evaluate --run "$(RUN)"; code=$$?; \
	  [ $$code = 0 ] || [ $$code = 3 ] || exit $$code; } && \
	$$kit checklist --run "$(RUN)" --tables && \
	printf '\nTo hear any sentence: %s speak --run "%s" --text "..."\n' "$$kit" "$(RUN)" && \
	exit $$code

# 620 sentences of a man's Russian, to try the kit with real speech: 179 MB from deb.debian.org.
CORPUS_RU ?= $(or $(KIT_RUNS),$(CURDIR)/runs)/corpus-ru
corpus-ru: $(STAMP)  ## Russian recordings to try the kit with: [PACKAGE=festvox-ru_....deb]
	@$(BIN)/python tests/tools/russian_corpus.py --into "$(CORPUS_RU)" \
	  $(if $(PACKAGE),--package "$(PACKAGE)")

real: corpus-ru  ## train a voice on them, in runs/real: [BASE_MODEL= PRESET= PACKAGE=]
	@$(MAKE) --no-print-directory voice DATA="$(CORPUS_RU)" LANGUAGE=ru \
	  RUN="$(if $(filter file,$(origin RUN)),real,$(RUN))"

hear: $(STAMP)  ## hear the voice that comes with the kit, in Amharic: [TEXT=]
	@$(BIN)/python -m kit speak --voice sample --text "$(or $(TEXT),ትናንት እናቴ ከገበያ ትኩስ ዳቦ ገዛች)"

lab: $(STAMP)  ## open JupyterLab with the notebook your_voice
	@$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/your_voice.ipynb $(ARGS)

address:  ## write the repository's address into badges and first cells: URL=https://github.com/OWNER/NAME
	@$(PYTHON) tests/tools/address.py "$(URL)"

# --- checks ---------------------------------------------------------------------------------

test: $(STAMP)  ## run the tests, and notebooks 00 to 04 with the preset tiny
	@$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder $(ARGS)

test-long: $(STAMP)  ## run the tests that take long, and notebooks 05 to 07
	@$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder -m "long or basis" $(ARGS)

# An environment of its own, 5 GB; NumPy's oldest has wheels for Python 3.11 and 3.12.
.venv-oldest/.installed: pyproject.toml tests/tools/oldest.py
	@"$(PYTHON)" -m venv --clear .venv-oldest
	@.venv-oldest/bin/python tests/tools/oldest.py > .venv-oldest/oldest.txt
	@.venv-oldest/bin/python -m pip --disable-pip-version-check install -r .venv-oldest/oldest.txt
	@touch $@

test-oldest: .venv-oldest/.installed  ## run the tests with the oldest supported versions of all packages
	@.venv-oldest/bin/python -m pytest -n $(JOBS) --no-loadscope-reorder -m "" $(ARGS)

test-plain-cpu: $(STAMP)  ## test as on a CPU without AVX-512; with qemu-user installed, notebooks too
	@$(BIN)/python -m pytest tests/plain_cpu $(ARGS)

test-browser: $(VENV)/.extra-browser  ## test the panel in JupyterLab with Chromium
	@$(BIN)/python -m pytest tests/browser $(ARGS)

test-serve: $(VENV)/.extra-serve  ## test the speech server with OpenAI's client and Chromium, and onnxruntime
	@$(BIN)/python -m pytest tests/serve $(ARGS)

test-colab: $(STAMP)  ## test as on Colab: its versions, a simulated Drive, a new machine for each notebook
	@$(BIN)/python -m pytest tests/colab $(ARGS)

# Its dependencies may be any version, as long as no pinned version changes.
$(VENV)/.extra-serve: tests/serve/requirements.txt $(STAMP)
	@$(PIP) install -r $< -c requirements.txt
	@touch $@

$(VENV)/.extra-xtts: tests/xtts/requirements.txt $(STAMP)
	@$(PIP) install -r $< -c requirements.txt
	@touch $@

test-xtts: $(VENV)/.extra-xtts  ## compare XTTS-v2 with coqui-tts's own classes: [ARGS='-m "not full_size"']
	@$(BIN)/python -m pytest tests/xtts $(ARGS)

.venv-indextts2/.installed: tests/indextts2/requirements.txt $(STAMP)
	@"$(PYTHON)" -m venv --clear .venv-indextts2
	@for site in .venv-indextts2/lib/python*/site-packages; do \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$site/kit.pth; done
	@.venv-indextts2/bin/python -m pip --disable-pip-version-check install --no-deps -r $<
	@touch $@

test-indextts2: .venv-indextts2/.installed  ## compare IndexTTS2 with its package's classes, in .venv-indextts2
	@.venv-indextts2/bin/python -m pytest tests/indextts2 $(ARGS)

bench-indextts2: .venv-indextts2/.installed  ## compare a step of IndexTTS2 with a plain loop: [ARGS=--full]
	@.venv-indextts2/bin/python tests/indextts2/bench_step.py $(ARGS)

# The judges' packages may be any version, as long as no pinned version changes.
$(VENV)/.extra-judges: tests/judges/requirements.txt tests/judges/alone.txt $(STAMP)
	@$(PIP) install -r $< -c requirements.txt
	@$(PIP) install --no-deps -r tests/judges/alone.txt
	@touch $@

judges: $(VENV)/.extra-judges  ## measure a run with Whisper, DNSMOS and speaker similarity: RUN=name
	@$(BIN)/python tests/judges/judge_run.py --run "$(RUN)" $(ARGS)

test-judges: $(VENV)/.extra-judges  ## test these measuring networks themselves
	@$(BIN)/python -m pytest tests/judges $(ARGS)

test-matrix: $(STAMP)  ## run notebooks with every preset, use and switch, tiny: runs/bench/matrix.json
	@$(BIN)/python tests/matrix.py $(ARGS)

bench-data: $(VENV)/.extra-bench  ## compare streaming with other libraries: runs/bench/data.json
	@$(BIN)/python tests/bench/bench_data.py $(ARGS)

# Their packages may be any version, as long as no pinned version changes.
$(VENV)/.extra-bench-train: tests/bench/train-requirements.txt $(STAMP)
	@$(PIP) install -r $< -c requirements.txt
	@touch $@

bench-train: $(VENV)/.extra-bench-train  ## compare a training step with other libraries: runs/bench/train.json
	@$(BIN)/python tests/bench/bench_train.py $(ARGS)

$(VENV)/.extra-bench-infer: tests/bench/infer-requirements.txt $(STAMP)
	@$(PIP) install -r $< -c requirements.txt
	@touch $@

bench-infer: $(VENV)/.extra-bench-infer  ## compare speaking with other libraries: runs/bench/infer.json
	@$(BIN)/python tests/bench/bench_infer.py $(ARGS)

check-gpu: $(STAMP)  ## measure on a GPU, in a quarter of an hour: runs/bench/gpu.json
	@$(BIN)/python tests/bench/check_gpu.py $(ARGS)

TABLES ?= runs/bench/gpu.json
gpu-page: $(STAMP)  ## write GPU measurements into docs/measurements-archive.md: [TABLES="a.json b.json"]
	@$(BIN)/python tests/bench/gpu_page.py $(TABLES) $(ARGS)

# For a machine with a GPU and no network: tests/bench/gpu_session.sh installs them there.
WHEELS ?= .whl
gpu-wheels: $(STAMP)  ## download wheels for tests/bench/gpu_session.sh: WHEELS=folder (default .whl)
	@$(BIN)/python tests/bench/gpu_wheels.py "$(WHEELS)" $(ARGS)

# Codes of 3,000 sentences for the part "a real run", 60 MB, to be copied to that machine, too.
GPU_RUN := data.reference_frames=86 corpus.utterances=3000 corpus.held_out=64 corpus.unseen=8 corpus.long=4 \
  corpus.free_order=8 codec.steps=500 codec.width=192 codec.batch=8 codec.minutes=0 \
  codec.sharpen_steps=0 codec.vocoder_steps=0 recognizer.steps=200 recognizer.utterances=1500 \
  recognizer.minutes=0 align.clips=200
gpu-run: $(STAMP)  ## prepare a run for the GPU session on a CPU, in ten minutes: runs/gpu-session
	@KIT_RUNS=runs/gpu-session $(BIN)/python -m kit prepare --run gpu --preset 12gb --set $(GPU_RUN)
	@rm -rf runs/gpu-session/gpu/corpus/wavs

PYTHON_VERSION = $(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
.venv-gpu/.installed: tests/gpu_session/requirements.txt tests/bench/gpu_wheels.py
	@"$(PYTHON)" -m venv --clear .venv-gpu
	@.venv-gpu/bin/python -m pip --disable-pip-version-check install -r $<
	@.venv-gpu/bin/python tests/bench/gpu_wheels.py .venv-gpu/wheels --python $(PYTHON_VERSION)
	@touch $@

test-gpu-session: $(STAMP) .venv-gpu/.installed  ## rehearse the GPU session without a GPU
	@$(BIN)/python -m pytest tests/gpu_session $(ARGS)

tour: $(STAMP)  ## write docs/tour.md from the notebooks that `make demo` ran
	@$(BIN)/python tests/tools/make_tour.py "$(KIT_RUNS)/$(RUN)"

NOTEBOOKS := $(wildcard notebooks/*.ipynb)
lint: $(STAMP)  ## check code, wording and that notebooks have no outputs; changes nothing
	@$(BIN)/ruff check
	@$(BIN)/ruff check -q --preview --select PLW1514 kit notebooks  # text files name their encoding
	@$(BIN)/ruff format --check
	@$(BIN)/python tests/tools/dialect.py
	@$(BIN)/python tests/tools/size_of_kit.py
	@$(if $(NOTEBOOKS),$(BIN)/nbstripout --verify --keep-id $(NOTEBOOKS),echo "no notebooks yet")

clean:  ## remove .venv and caches; keeps runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
