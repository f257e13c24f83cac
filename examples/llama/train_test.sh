#!/bin/bash
# A tiny Llama on two ranks: loses loss, resumes at another stage with the bits
# of a run that did not stop, writes a folder as Hugging Face's and goes on from
# that.
set -euo pipefail

readonly train="$1"
folder="$(mktemp -d)"
readonly folder
trap 'rm -rf "${folder}"' EXIT

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

run() {
  "${train}" --world=2 --prefix_output=off --data="${folder}/text" --seq=32 "$@"
}

for i in $(seq 400); do
  echo "${i} And the evening and the morning were day ${i}."
done > "${folder}/text"

whole="$(run --steps=12 --set zero_optimization.stage=3)"
echo "${whole}"
awk '$1 == "step" { if (!n++) first = $4; last = $4 }
     END { exit !(n == 12 && last < first - 1) }' <<< "${whole}" ||
  fail "expected 12 losses, the last lower by 1"

run --steps=7 --set zero_optimization.stage=3 --checkpoints="${folder}/run" \
  > "${folder}/first"
resumed="$(run --steps=12 --set zero_optimization.stage=1 \
  --checkpoints="${folder}/run" --out="${folder}/out" --sample=20)"
[[ "$(grep '^step' <<< "${whole}")" == \
  "$(cat "${folder}/first"; grep '^step' <<< "${resumed}")" ]] ||
  fail "the resumed run's losses are others: ${resumed}"
[[ "$(grep -v '^step' <<< "${resumed}")" != '' ]] || fail "no sample"

# The folder is a model: its loss goes on where the training ended, on another
# number of ranks; that of drawn values does not.
loaded="$("${train}" --world=1 --data="${folder}/text" --seq=32 --steps=1 \
  --model="${folder}/out" --load)"
awk -v last="$(awk 'END { print $4 }' <<< "${whole}")" \
  '{ exit !($4 < last + 0.5) }' <<< "${loaded}" ||
  fail "loaded: ${loaded}"

# What is not supported is refused by name, on all ranks, before anything runs.
sed 's/"model_type"/"rope_scaling": {"rope_type": "yarn", "factor": 4}, &/' \
  examples/llama/tiny.json > "${folder}/yarn.json"
if run --steps=1 --model="${folder}/yarn.json" 2> "${folder}/said"; then
  fail "yarn was taken"
fi
grep -q 'yarn.json:2:33: rope_type: "yarn" is not supported here; expected default or linear or llama3' \
  "${folder}/said" || fail "$(cat "${folder}/said")"
echo "PASSED"
