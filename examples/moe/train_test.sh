#!/bin/bash
# A mixture of experts on two ranks, whose tokens take different experts: all
# stages have the same losses, to the bit, and experts are left out on one rank
# that the other uses.
set -euo pipefail

readonly train="$1"
folder="$(mktemp -d)"
readonly folder
trap 'rm -rf "${folder}"' EXIT

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

for i in $(seq 200); do
  echo "${i} And the evening and the morning were day ${i}."
done > "${folder}/text"

for stage in 0 1 2 3; do
  "${train}" --world=2 --prefix_output=off --data="${folder}/text" --seq=8 \
    --experts=12 --steps=25 --stage="${stage}" | sort > "${folder}/${stage}"
done
cat "${folder}/3"
[[ "$(wc -l < "${folder}/3")" == 50 ]] || fail "expected 25 steps of two ranks"
for stage in 0 1 2; do
  cmp "${folder}/${stage}" "${folder}/3" || fail "stage ${stage} has other bits"
done
awk '{ loss[$2] += $6 / 2; left[$2 " " $4] = $8; out += $8 }
     $8 != seen[$2] && seen[$2] != "" { differ++ }
     { seen[$2] = $8 }
     END {
       first = (loss[1] + loss[2] + loss[3]) / 3
       last = (loss[23] + loss[24] + loss[25]) / 3
       exit !(last < first - 1 && out > 100 && differ > 5)
     }' "${folder}/3" ||
  fail "the loss did not fall by 1, or the ranks' experts were the same"
echo "PASSED"
