#!/bin/bash
# Both engines train: from no cluster to several. Stage 0, stage 3, and a run
# that is saved in the middle and resumed in new processes have the same bits.
# In bfloat16 losses are float32. What has been said is in a file when a run is
# ended.
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
# A bfloat16 number has two hexadecimal digits behind its point at most.
for name in generator critic; do
  sed 's/"stage": 3}/&,\n  "bf16": {"enabled": true}/' \
    "examples/gan/${name}.json" > "${work}/${name}.json"
done
halves="$(run --steps 20 --generator "${work}/generator.json" \
  --critic "${work}/critic.json" | tail -n 1)"
[[ "${halves}" =~ ^last\ losses\ 0x1\.[0-9a-f]{3,}p.*\ 0x1\.[0-9a-f]{3,}p ]] ||
  fail "losses of 16 bits: ${halves}"

"${gan}" --steps 1000000000 > "${work}/said" &
readonly running=$!
trap 'kill -KILL "${running}" 2> /dev/null || true' EXIT
for _ in $(seq 600); do
  if grep -q '^step 200:' "${work}/said"; then break; fi
  sleep 0.1
done
kill -TERM "${running}"
wait "${running}" || true
grep -q '^step 200:' "${work}/said" || fail "nothing was said before the end"
echo "PASSED"
