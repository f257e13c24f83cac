#!/bin/bash
# A mixture of experts on two ranks, whose tokens take different experts:
# stages have the same losses, to the bit, and experts are left out on one rank
# that the other uses. In bfloat16, too, with losses in float32.
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

run() {  # stage, configuration
  "${train}" --world=2 --prefix_output=off --data="${folder}/text" --seq=8 \
    --experts=12 --steps=25 --set "zero_optimization.stage=$1" \
    --config="$2" | sort
}

for stage in 0 3; do
  run "${stage}" examples/moe/zero3.json > "${folder}/${stage}"
done
cat "${folder}/3"
[[ "$(wc -l < "${folder}/3")" == 50 ]] || fail "expected 25 steps of two ranks"
cmp "${folder}/0" "${folder}/3" || fail "stages differ"
awk '{ loss[$2] += $6 / 2; left[$2 " " $4] = $8; out += $8 }
     $8 != seen[$2] && seen[$2] != "" { differ++ }
     { seen[$2] = $8 }
     END {
       first = (loss[1] + loss[2] + loss[3]) / 3
       last = (loss[23] + loss[24] + loss[25]) / 3
       exit !(last < first - 1 && out > 100 && differ > 5)
     }' "${folder}/3" ||
  fail "the loss did not fall by 1, or the ranks' experts were the same"

sed 's/"train_micro/"bf16": {"enabled": true},\n  &/' examples/moe/zero3.json \
  > "${folder}/bf16.json"
for stage in 1 2; do
  run "${stage}" "${folder}/bf16.json" > "${folder}/bf16-${stage}"
done
cat "${folder}/bf16-2"
cmp "${folder}/bf16-1" "${folder}/bf16-2" || fail "in bf16 stages differ"
# A bfloat16 number has two hexadecimal digits behind its point at most.
awk '{ loss[$2] += $6 / 2; if (length($7) > length("0x1.00p+2,")) fine++ }
     END { exit !(NR == 50 && fine > 40 && loss[25] < loss[1] - 0.7) }' \
  "${folder}/bf16-2" || fail "in bf16 the loss did not fall, or has 16 bits"
echo "PASSED"
