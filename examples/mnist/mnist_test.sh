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
accuracy() { sed -n 's/^test set: \([0-9]*\)\..*/\1/p' <<< "$1"; }

untrained="$(run --steps 0)"
(($(accuracy "${untrained}") < 40)) || fail "untrained: ${untrained}"
whole="$(run --steps 100)"
echo "${whole}"
[[ "${whole}" == *"% of 200 images"* ]] || fail "not each image once"
(($(accuracy "${whole}") >= 97)) || fail "too few"

run --steps 37 --save "${work}/saved" > /dev/null
resumed="$(run --steps 100 --resume "${work}/saved")"
[[ "${resumed}" == "${whole}" ]] || fail "resumed: ${resumed}"
# A loss of 16 bits would have 8 significant bits.
sed 's/"stage": 3}/&,\n  "bf16": {"enabled": true}/' examples/mnist/adamw.json \
  > "${work}/bf16.json"
halves="$(run --steps 50 --config "${work}/bf16.json")"
awk '$1 == "step" {
       for (unit = 1; unit * 256 > $4; unit /= 2) {}
       n = int($4 / unit + 0.5) * unit
       far = (n > $4 ? n - $4 : $4 - n) > 0.000002
     }
     END { exit !far }' <<< "${halves}" || fail "a loss of 16 bits: ${halves}"
echo "PASSED"
