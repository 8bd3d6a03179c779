#!/usr/bin/env bash
# What ten minutes on a machine with a GPU can tell, stage by stage: bash bench/gpu/run.sh [--dry] [STAGE ...]
#
# The stages run in place, by PYTHON's torch, Triton and pytest: nothing is fetched or installed. A stage that has not
# ended after its share of the time is killed with all that it has started, and the next one runs. The report's folder is
# complete at any moment:
#   STAGE.txt    what a stage says: a line a result, as it comes
#   stages.txt   how each stage has ended
#   passed.txt   the tests that have passed
#   report.md    all of it, made when a stage has ended ("run.sh report" makes it anew)
# Called again, it goes on: stages and tests that have passed, of the same sources and card, do not run again. A stage
# runs if it is named.
#
# Variables: PYTHON; OUT: the report's folder; GPU_MINUTES: for all stages; LEAVE_OUT: names of tests, as in an earlier
# passed.txt; VARIANTS: see below; DRY=1, or --dry: tiny, and without a GPU.
#
# To add a stage: a function stage_NAME, which prints its results and returns 0 if all is well, and NAME with its seconds
# in STAGES, where it is to run. What it measures is one Python file, run by "$PYTHON" -m bench.gpu.NAME.
set -u

STAGES="build:60 smoke:70 loops:60 offload:45 test:170 versus:70 probe:40 sanitize:100 finetune:75 lease:180"  # share of the time, in seconds
# What `lease` compares with the tree as it is: NAME=FLAG,FLAG... for nvcc. Empty where nothing is open.
export VARIANTS=${VARIANTS-ahead=-DACCUMFUSED_PREFETCH_AHEAD}

ROOT=$(realpath "$(dirname "$0")/../..")
PYTHON=${PYTHON:-python3} LEAVE_OUT=${LEAVE_OUT:+$(realpath "$LEAVE_OUT")} OUT=$(realpath -m "${OUT:-$ROOT/build/gpu}")
if [[ $PYTHON == */* ]]; then PYTHON=$(realpath -s "$PYTHON"); fi  # links stay: a virtual environment's python is one
export PYTHON OUT LEAVE_OUT DRY=${DRY-} PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export PATH=$PATH:/usr/local/cuda/bin  # nvcc and compute-sanitizer are often not on it
PYTEST=("$PYTHON" -m pytest -p bench.gpu.plugin -p no:cacheprovider -q --no-header --no-summary --tb=short)
BITS=tests/conformance/test_bits.py

stage_build() {  # -lineinfo: compute-sanitizer names lines; the machine code is the same
  NVCC_APPEND_FLAGS="-lineinfo ${NVCC_APPEND_FLAGS-}" "$PYTHON" -m bench.gpu.build "$OUT"
}

stage_smoke() {  # do the kernels give the reference's bits, and does any launch hang?
  if [[ $DRY ]]; then tests emulated 600 $BITS -k edges; return; fi  # which compiles
  local files="tests/conformance/test_gpu_graphs.py tests/conformance/test_gpu.py $BITS" status=0
  tests cuda 30 $files -k "more_chunks or captured_window or fused_linears or test_bits" || status=1
  tests triton 60 $files -k "edges or captured_window" || status=1  # Triton compiles for seconds: a few
  return $status
}

stage_loops() {  # on one card; compiling starts no processes that would outlive the stage
  CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} TORCHINDUCTOR_COMPILE_THREADS=1 "$PYTHON" -m bench.gpu.loops
}

stage_offload() {  # bits, streams, bytes and times of offload=True
  "$PYTHON" -m bench.gpu.offload
}

stage_test() {
  if [[ $DRY ]]; then tests torch,cpu 60 tests/numbers/test_rules.py -k no_decay; return; fi
  # Those about GPUs, and those with a test for every backend: to collect the others takes time.
  local files workers=()
  files=$(find tests -name 'test_gpu*.py'; grep -rlE '\b(backend: str|place: Place)\b' tests --include='test_*.py')
  if "$PYTHON" -c "import xdist" 2>/dev/null; then
    # At most 12: each has its context on the GPU, of half a gigabyte. The last option is how many tests a worker is
    # given at once, so that the order holds across workers.
    workers=(-p xdist -n $(($(nproc) < 12 ? $(nproc) : 12)) --dist load --maxschedchunk 8)
  fi
  tests cuda,triton 60 $(sort -u <<<"$files") "${workers[@]}"
}

stage_versus() {
  "$PYTHON" -m bench.gpu.versus
}

stage_finetune() {  # loss, bytes and seconds of every recipe: 0.5B parameters
  local size="--device cuda --size 500M --pretraining 10 --updates 20"
  if [[ $DRY ]]; then size="--size tiny --pretraining 2 --updates 2"; fi
  "$PYTHON" examples/finetune.py $size --json "$OUT/finetune.json" --picture "$OUT/finetune.png"
}

stage_probe() {
  "$PYTHON" -m bench.gpu.probe
}

stage_sanitize() {
  if ! command -v compute-sanitizer >/dev/null; then
    echo "left out: compute-sanitizer is not on the PATH"
    [[ $DRY ]]; return
  fi
  local tool log code status=0
  for tool in memcheck racecheck synccheck; do
    log=$OUT/$tool.log
    # Without torch's own cache an overrun does not stay inside its large blocks.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --kernel-name kns=accumfused --error-exitcode 7 \
      --print-limit 2000 --log-file "$log" "${PYTEST[@]}" --gpu-backends cuda --gpu-seconds 80 $BITS -k "edges or corner"
    code=$?
    echo "$tool: exit code $code; its distinct lines, and how often each:"
    # Without threads and the host's stack, which make each line another one.
    sed -nE 's/^=+ +//p' "$log" | grep -vE '^(by thread|Host Frame|Saved host|COMPUTE-SANITIZER)|^$' |
      sed -E 's/0x[0-9a-f]{9,}/0x.../g; s/ \[[0-9]+ hazards?\]//' | sort | uniq -c | sort -rn
    if [[ $code != 0 ]] || ! grep -q ' SUMMARY: 0 ' "$log"; then status=1; fi
  done
  return $status
}

stage_lease() {  # the variants beside the tree as it is: their bits, 8-bit steps, small models
  if [[ ! $VARIANTS ]]; then echo "there are no variants to compare"; return; fi
  local work each name flags status=0 code seen="" names=()
  local -A processes
  work=$(mktemp -d)
  trap "rm -rf '$work'" EXIT
  within() { (cd "$work/$1" && PYTHONPATH=$work/$1:$PYTHONPATH "${@:2}"); }
  for each in base= $VARIANTS; do
    name=${each%%=*} flags=${each#*=}
    names+=("$name")
    mkdir "$work/$name"
    cp -rp accumfused bench csrc tests tools setup.py pyproject.toml conftest.py LICENSE README.md "$work/$name"
    if [[ $DRY ]]; then ln -s "$ROOT/build" "$work/$name"; fi  # with the emulation that is compiled
    NVCC_APPEND_FLAGS="${flags//,/ }" within "$name" stage_build >"$work/$name.txt" 2>&1 &
    processes[$name]=$!
  done
  for name in "${names[@]}"; do
    if ! wait "${processes[$name]}"; then
      tail -n 30 "$work/$name.txt"
      echo "$name: does not build, so nothing is compared"
      status=1
    fi
  done
  if [[ $status != 0 ]]; then return 1; fi
  for name in "${names[@]}"; do
    code=$(sed -n 's/^machine code: //p' "$work/$name.txt")
    echo "$name: machine code $code"
    if [[ " $seen " == *" $code "* && ! $DRY ]]; then
      echo "$name: has the machine code of another variant, so nothing is compared"
      return 1
    fi
    seen+=" $code"
  done

  local bits=(--gpu-backends cuda --gpu-seconds 60 $BITS -k "packed or corner or edges") round
  if [[ $DRY ]]; then bits=(--gpu-backends emulated --gpu-seconds 600 $BITS -k edges); fi
  for name in "${names[@]:1}"; do
    echo "== $name: the tests of its bits"
    within "$name" "${PYTEST[@]}" "${bits[@]}" || status=1
  done
  for round in 1 2; do
    for name in "${names[@]}"; do
      echo "== $name: 8-bit steps, round $round"
      within "$name" "$PYTHON" -m bench.gpu.probe "8-bit states" || status=1
    done
  done
  for name in "${names[@]}"; do
    echo "== $name: small models"
    within "$name" "$PYTHON" -m bench.gpu.versus small || status=1
  done
  return $status
}

tests() {  # tests BACKENDS SECONDS_OF_A_TEST ARGUMENT...: those that have not passed; names one that ends its process
  local before status
  rm -f "$OUT/running.txt"
  before=$(mktemp)  # passed.txt grows; all processes leave out the same
  cat "$OUT/passed.txt" ${LEAVE_OUT:+"$LEAVE_OUT"} >"$before" 2>/dev/null
  "${PYTEST[@]}" --gpu-backends "$1" --gpu-seconds "$2" --gpu-leave-out "$before" --gpu-folder "$OUT" "${@:3}"
  status=$?
  rm "$before"
  if [[ -s $OUT/running.txt ]]; then echo "HANGS OR DIES: $(cat "$OUT/running.txt")"; fi
  if [[ $status == 5 ]]; then status=0; fi  # no test is left
  return $status
}

note() {  # note STAGE OUTCOME
  { grep -v "^$1: " "$OUT/stages.txt" 2>/dev/null; echo "$1: $2"; } >"$OUT/stages.new"
  mv "$OUT/stages.new" "$OUT/stages.txt"
}

report() {
  local each text
  {
    printf '# GPU report\n\n'
    sed 's/^/- /' "$OUT/stages.txt"
    for each in $STAGES; do
      text=$OUT/${each%:*}.txt
      if [[ -s $text ]]; then printf '\n## %s\n\n````\n%s\n````\n' "${each%:*}" "$(cat "$text")"; fi
    done
  } >"$OUT/report.new"
  mv "$OUT/report.new" "$OUT/report.md"
}

stop() {  # the stage that runs
  kill -KILL -- "-$group"
  note "$stage" interrupted
  report
  exit 130
}

main() {
  cd "$ROOT" || exit
  if [[ ${1-} == report ]]; then report; exit; fi
  if [[ ${1-} == --inside ]]; then "stage_$2"; exit; fi  # the process of one stage

  local asked=" build " chosen="" whole=0 bad="" each where sources total deadline limit begin shown status outcome
  for each; do
    if [[ $each == --dry ]]; then DRY=1; continue; fi
    if [[ " $STAGES" != *" $each:"* ]]; then echo "unknown stage $each; choose from $STAGES" >&2; exit 2; fi
    asked+="$each "
  done
  where=$("$PYTHON" - <<'PY'
import os, sys
try:
    import torch
except ImportError:
    sys.exit(f"{sys.executable} has no torch; name an interpreter that has: PYTHON=...")
dry = os.environ["DRY"]
if not dry and not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no GPU that it can use; --dry runs the stages without one")
print(sys.version, torch.__version__, "dry" if dry else torch.cuda.get_device_name())
PY
  ) || exit

  mkdir -p "$OUT"
  sources=$({ echo "$where"; find accumfused csrc tests -name '*.py' -o -path 'csrc/*' -type f | sort | xargs sha256sum; } | sha256sum)
  if [[ $(cat "$OUT/sources.txt" 2>/dev/null) != "$sources" ]]; then  # begin anew
    for each in $STAGES; do rm -f "$OUT/${each%:*}.txt"; done
    rm -f "$OUT"/{passed,running,stages}.txt
    echo "$sources" >"$OUT/sources.txt"
  fi

  for each in $STAGES; do
    stage=${each%:*}
    if [[ $asked == " build " && $stage != build ]]; then  # a whole run
      if [[ $stage == lease && ! $VARIANTS ]]; then continue; fi
      if grep -q "^$stage: passed" "$OUT/stages.txt" 2>/dev/null; then echo "$stage has passed before"; continue; fi
    elif [[ $asked != *" $stage "* ]]; then continue; fi
    chosen+=" $each" whole=$((whole + ${each#*:}))
  done

  total=$(awk "BEGIN { print int(60 * ${GPU_MINUTES:-9.5}) }") deadline=$SECONDS
  trap stop INT TERM HUP
  for each in $chosen; do
    stage=${each%:*} begin=$SECONDS
    deadline=$((deadline + total * ${each#*:} / whole))  # so the next one also has what this one leaves
    limit=$((deadline > SECONDS ? deadline - SECONDS : 1))
    echo "=== $stage: at most $limit s"
    note "$stage" "did not end"
    : >"$OUT/$stage.txt"
    timeout --kill-after=5 $limit bash bench/gpu/run.sh --inside "$stage" >>"$OUT/$stage.txt" 2>&1 </dev/null &
    group=$!  # timeout makes a process group
    tail -n +1 -f -s 0.2 --pid=$group "$OUT/$stage.txt" &
    shown=$!
    wait $group
    status=$?
    kill -KILL -- "-$group" 2>/dev/null  # what the stage has left
    wait $shown
    case $status in
      0) outcome=passed ;;
      124 | 137) outcome="cut off" ;;
      *) outcome="failed ($status)" ;;
    esac
    if [[ $outcome != passed ]]; then bad+=" $stage"; fi
    note "$stage" "$outcome, $((SECONDS - begin)) s"
    report
  done
  printf '\n%s\n' "$(cat "$OUT/stages.txt")"
  echo "report: $OUT/report.md"
  if [[ $bad ]]; then echo "not passed:$bad"; exit 1; fi
  exit
}

main "$@"
