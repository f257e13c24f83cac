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

run() {  # the name of its metrics, flags
  "${train}" --world=2 --prefix_output=off --data="${folder}/text" --seq=32 \
    --set jsonl_monitor.enabled=true \
    --set "jsonl_monitor.output_path=${folder}/metrics" \
    --set "jsonl_monitor.job_name=$1" "${@:2}"
}

# Each step's loss over ranks, with all of its digits.
losses() {
  sed -n 's/^{"step": \([0-9]*\), .*"loss": \([^,]*\),.*/\1 \2/p' \
    "${folder}/metrics/$1/metrics.jsonl"
}

for i in $(seq 400); do
  echo "${i} And the evening and the morning were day ${i}."
done > "${folder}/text"

whole="$(run whole --steps=12 --set zero_optimization.stage=3)"
echo "${whole}"
[[ "${whole}" == *$'\n12/12  '*'  loss '*'  lr '*' tok/s'* ]] ||
  fail "no line of the last step"
losses whole
awk '{ if (!n++) first = $2; last = $2 }
     END { exit !(n == 12 && last < first - 1) }' <<< "$(losses whole)" ||
  fail "expected 12 losses, the last lower by 1"

run first --steps=7 --set zero_optimization.stage=3 \
  --checkpoints="${folder}/run" > /dev/null
resumed="$(run second --steps=12 --set zero_optimization.stage=1 \
  --checkpoints="${folder}/run" --out="${folder}/out" --sample=20)"
[[ "$(losses whole)" == "$(losses first; losses second)" ]] ||
  fail "the resumed run's losses are others: $(losses second)"
[[ "$(grep -vE '^ *[0-9]+/12  ' <<< "${resumed}")" != '' ]] || fail "no sample"

# The folder is a model: its loss goes on where the training ended, on another
# number of ranks; that of drawn values does not.
loaded="$("${train}" --world=1 --data="${folder}/text" --seq=32 --steps=1 \
  --model="${folder}/out" --load)"
awk -v last="$(losses whole | awk 'END { print $2 }')" \
  '{ exit !($4 < last + 0.5) }' <<< "${loaded}" ||
  fail "loaded: ${loaded}"

# The model is looked for beside the program, too.
"${train}" --world=2 --model=sub/none.json 2> "${folder}/said" &&
  fail "a model that is not there was taken"
grep -q "no file or folder 'sub/none.json'; looked for .*/sub/none.json, .*; give its path with --model" \
  "${folder}/said" || fail "$(cat "${folder}/said")"
mkdir "${folder}/bin"
cp -L "${train}" examples/llama/tiny.json examples/llama/zero3.json \
  "${folder}/bin"
(cd "${folder}" && bin/train --steps=1 --seq=8 --data=text > /dev/null) ||
  fail "the model's default is not found from elsewhere"

# What is not supported is refused by name, on all ranks, before anything runs.
sed 's/"model_type"/"rope_scaling": {"rope_type": "yarn", "factor": 4}, &/' \
  examples/llama/tiny.json > "${folder}/yarn.json"
if run yarn --steps=1 --model="${folder}/yarn.json" 2> "${folder}/said"; then
  fail "yarn was taken"
fi
grep -q 'yarn.json:2:33: rope_type: "yarn" is not supported here; expected default or linear or llama3' \
  "${folder}/said" || fail "$(cat "${folder}/said")"
echo "PASSED"
