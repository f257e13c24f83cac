#!/bin/bash
# Two ranks learn the test set: 97 % and more, where ten classes by chance are
# 10 %. Stopped within an epoch and resumed in new processes: the same, to the
# digit.
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
echo "PASSED"
