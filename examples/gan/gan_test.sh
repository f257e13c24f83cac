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

# The lines about the end.
results() { tail -n 2 <<< "$1"; }

for name in generator critic; do
  sed 's/"stage": 3/"stage": 0/' "examples/gan/${name}.json" \
    > "${work}/${name}.json"
done

untrained="$(run --steps 0)"
[[ "$(clusters "${untrained}")" == 0 ]] || fail "untrained: ${untrained}"
whole="$(run --steps 300)"
echo "${whole}"
(($(clusters "${whole}") >= 6)) || fail "few clusters"
[[ "${whole}" =~ last\ losses\ here\ [0-9.]{8,}\ [0-9.]{8,}$ ]] ||
  fail "no losses"
replicated="$(run --steps 300 --generator "${work}/generator.json" \
  --critic "${work}/critic.json")"
[[ "$(results "${replicated}")" == "$(results "${whole}")" ]] ||
  fail "at stage 0: ${replicated}"

run --steps 120 --save "${work}/saved" > /dev/null
resumed="$(run --steps 300 --resume "${work}/saved")"
[[ "$(results "${resumed}")" == "$(results "${whole}")" ]] ||
  fail "resumed: ${resumed}"
# An engine warns of a loss of 16 bits.
for name in generator critic; do
  sed 's/"stage": 3}/&,\n  "bf16": {"enabled": true}/' \
    "examples/gan/${name}.json" > "${work}/${name}.json"
done
run --steps 20 --generator "${work}/generator.json" \
  --critic "${work}/critic.json" > "${work}/halves" 2> "${work}/log"
grep -q '^last losses' "${work}/halves" || fail "$(< "${work}/halves")"
if grep -q 'the loss is bfloat16' "${work}/log"; then
  fail "losses of 16 bits"
fi

"${gan}" --steps 1000000000 > "${work}/said" &
readonly running=$!
trap 'kill -KILL "${running}" 2> /dev/null || true' EXIT
for _ in $(seq 600); do
  if grep -q '^ *1/1000000000  ' "${work}/said"; then break; fi
  sleep 0.1
done
kill -TERM "${running}"
wait "${running}" || true
grep -q '^ *1/1000000000  ' "${work}/said" || fail "nothing was said before the end"
echo "PASSED"
