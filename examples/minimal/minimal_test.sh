#!/bin/bash
# Runs the smallest program on two ranks: twenty losses, the last the smaller.
# Its command line is tessera::Start's: a fault is one line, however many ranks
# there are.
set -euo pipefail

readonly minimal="$1"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# said CODE LINE ARGUMENTS...: it ends with CODE, after that line on stderr.
said() {
  local code=0 text
  text="$("${minimal}" "${@:3}" 2>&1 > /dev/null)" || code=$?
  [[ "${code}" == "$1" && "${text}" == "$2" ]] ||
    fail "${*:3}: exit code ${code}: ${text}"
}

losses="$("${minimal}" --world=2)"
echo "${losses}"
awk 'NR == 1 { first = $2 } { last = $2 }
     END { exit !(NR == 20 && last < first) }' <<< "${losses}" ||
  fail "the loss did not fall"
[[ "$("${minimal}" --world=2 --set zero_optimization.stage=0)" == \
  "${losses}" ]] || fail "stage 0 has other losses"

said 2 "minimal: unknown flag --wrld (did you mean --world?); --help lists the flags" \
  --world=2 --wrld=2
said 2 "minimal: unexpected argument 'x'; --help lists the flags" --world=2 x
said 1 "minimal: INVALID_ARGUMENT: --set zero_optimization.stage: expected 0, 1, 2 or 3, got 4" \
  --world=2 --set zero_optimization.stage=4
# What only ranks can see, they say together, and the launcher says who failed.
text="$("${minimal}" --world=2 --set optimizer.type=LBFGS 2>&1)" &&
  fail "trained with an optimizer that is not there"
[[ "$(grep -c 'minimal: UNIMPLEMENTED: ' <<< "${text}")" == 1 &&
  "${text}" == *"[0-1] minimal: UNIMPLEMENTED: "* ]] || fail "${text}"

help="$("${minimal}" --world=2 --help 2> /dev/null)"
[[ "$(grep -c -- '--world=N  ' <<< "${help}")" == 1 ]] || fail "${help}"
echo "PASSED"
