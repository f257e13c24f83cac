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

run() {  # stage, configuration; its metrics have its name
  "${train}" --world=2 --prefix_output=off --data="${folder}/text" --seq=8 \
    --experts=12 --steps=25 --set steps_per_print=1 \
    --set "zero_optimization.stage=$1" --config="$2" \
    --set jsonl_monitor.enabled=true \
    --set "jsonl_monitor.output_path=${folder}/metrics" \
    --set "jsonl_monitor.job_name=$(basename "$2" .json)$1"
}

# Each step's loss over ranks, the balance included, with all of its digits.
losses() {
  sed -n 's/^{"step": \([0-9]*\), .*"loss": \([^,]*\),.*/\1 \2/p' \
    "${folder}/metrics/$1/metrics.jsonl"
}

for stage in 0 3; do
  run "${stage}" examples/moe/zero3.json > "${folder}/${stage}"
done
cat "${folder}/3"
losses zero33
[[ "$(losses zero33 | wc -l)" == 25 ]] || fail "expected 25 steps"
[[ "$(losses zero30)" == "$(losses zero33)" ]] || fail "stages differ"
awk '{ loss[$1] = $2 }
     END {
       first = (loss[1] + loss[2] + loss[3]) / 3
       last = (loss[23] + loss[24] + loss[25]) / 3
       exit !(last < first - 1)
     }' <<< "$(losses zero33)" || fail "the loss did not fall by 1"
# A mean of two ranks that ends in .5 is of two numbers.
sed -n 's/.*  balance [0-9.]*, \([0-9.]*\) experts without a token$/\1/p' \
  "${folder}/3" |
  awk '{ idle += $1; if ($1 ~ /\.5$/) differ++ }
       END { exit !(NR == 25 && idle > 50 && differ > 2) }' ||
  fail "the ranks' experts were the same"

sed 's/"train_micro/"bf16": {"enabled": true},\n  &/' examples/moe/zero3.json \
  > "${folder}/bf16.json"
for stage in 1 2; do
  run "${stage}" "${folder}/bf16.json" > /dev/null 2> "${folder}/log${stage}"
done
losses bf162
[[ "$(losses bf161)" == "$(losses bf162)" ]] || fail "in bf16 stages differ"
awk '{ loss[$1] = $2 }
     END { exit !(NR == 25 && loss[25] < loss[1] - 0.7) }' \
  <<< "$(losses bf162)" || fail "in bf16 the loss did not fall"
# An engine warns of a loss of 16 bits.
if grep -q 'the loss is bfloat16' "${folder}/log1"; then
  fail "a loss of 16 bits"
fi
echo "PASSED"
