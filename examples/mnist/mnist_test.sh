#!/bin/bash
# Two ranks learn the test set: 97 % and more, where ten classes by chance are
# 10 %. Stopped within an epoch and resumed in new processes: the same, to the
# digit. In bfloat16 the loss is float32.
set -euo pipefail

work="${TEST_TMPDIR}"
readonly mnist="$1" work

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

run() { "${mnist}" --world=2 --images 1000 "$@"; }
score() { grep '^test set: ' <<< "$1"; }
accuracy() { sed -n 's/^test set: \([0-9]*\)\..*/\1/p' <<< "$1"; }

untrained="$(run --steps 0)"
(($(accuracy "${untrained}") < 40)) || fail "untrained: ${untrained}"
whole="$(run --steps 100)"
echo "${whole}"
[[ "${whole}" == *"% of 200 images"* ]] || fail "not each image once"
(($(accuracy "${whole}") >= 97)) || fail "too few"

run --steps 37 --save "${work}/saved" > /dev/null
resumed="$(run --steps 100 --resume "${work}/saved")"
[[ "$(score "${resumed}")" == "$(score "${whole}")" ]] ||
  fail "resumed: ${resumed}"
# An engine warns of a loss of 16 bits.
sed 's/"stage": 3}/&,\n  "bf16": {"enabled": true}/' examples/mnist/adamw.json \
  > "${work}/bf16.json"
halves="$(run --steps 10 --config "${work}/bf16.json" 2> "${work}/log")"
[[ "$(score "${halves}")" != "$(score "$(run --steps 10)")" ]] ||
  fail "bf16 has the bits of float32"
if grep -q 'the loss is bfloat16' "${work}/log"; then
  fail "a loss of 16 bits"
fi
echo "PASSED"
