#!/bin/bash
# Both engines train: from no cluster to several. Stage 0, stage 3, and a run
# that is saved in the middle and resumed in new processes have the same bits.
set -euo pipefail

work="${TEST_TMPDIR}"
readonly gan="$1" work

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

run() { "${gan}" --world=2 "$@"; }
clusters() { sed -n 's/^\([0-9]\) of 8 clusters.*/\1/p' <<< "$1"; }

for name in generator critic; do
  sed 's/"stage": 3/"stage": 0/' "examples/gan/${name}.json" \
    > "${work}/${name}.json"
done

untrained="$(run --steps 0)"
[[ "$(clusters "${untrained}")" == 0 ]] || fail "untrained: ${untrained}"
whole="$(run --steps 300)"
echo "${whole}"
(($(clusters "${whole}") >= 6)) || fail "few clusters"
replicated="$(run --steps 300 --generator "${work}/generator.json" \
  --critic "${work}/critic.json")"
[[ "${replicated}" == "${whole}" ]] || fail "at stage 0: ${replicated}"

run --steps 120 --save "${work}/saved" > /dev/null
resumed="$(run --steps 180 --resume "${work}/saved" | tail -n 2)"
[[ "${resumed}" == "$(tail -n 2 <<< "${whole}")" ]] || fail "resumed: ${resumed}"
echo "PASSED"
