#!/usr/bin/env bash
# What somebody with a GPU runs from a checkout, installed or not: the GPU tests, the memory checker over a short
# selection of them, the benchmark. Logs and seed.json go to a folder.
#
#   benchmarks/gpu.sh FOLDER [tests] [sanitizer] [bench]      # default: all three
#
# PYTHON names the interpreter (default: python3); SANITIZE the pytest arguments of the memory checker's selection;
# BENCH further options of `kvstore bench seed`. The exit code is 0 when all steps ended well.
set -uo pipefail
logs=${1:?usage: benchmarks/gpu.sh FOLDER [tests] [sanitizer] [bench]}
shift
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
export PYTHONPATH="$root:$root/client:$root/kernels:$root/proto/gen${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
failed=0

step() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 began=$SECONDS code=0
  shift 2
  timeout --kill-after=15 "$limit" "$@" >"$logs/$name.log" 2>&1 || code=$?
  echo "$name: exit code $code after $((SECONDS - began)) s, $logs/$name.log"
  if [ "$code" -ne 0 ]; then
    failed=1
    tail -n 25 "$logs/$name.log"
  fi
}

for what in "${@:-tests sanitizer bench}"; do
  for name in $what; do
    case $name in
      tests)
        step tests 900 "$python" -m pytest -m gpu -p no:cacheprovider --timeout 120 tests
        ;;
      sanitizer)
        # Kernels run some fifty times slower under it: a short selection, without child processes. Launches look for the
        # number of a kernel's arguments by asking until the driver says there are no more: that is no error of memory.
        # shellcheck disable=SC2086  # a list of arguments
        step sanitizer 400 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$python" -m pytest -m gpu \
          -p no:cacheprovider --timeout 300 ${SANITIZE:-tests/kernels -k "not 25k and not long"}
        ;;
      bench)
        # shellcheck disable=SC2086  # a list of arguments
        step bench 1800 "$python" -m kvstore bench seed --json "$logs/seed.json" ${BENCH:-}
        ;;
      *)
        echo "unknown step $name: expected tests, sanitizer or bench" >&2
        exit 2
        ;;
    esac
  done
done
exit $failed
