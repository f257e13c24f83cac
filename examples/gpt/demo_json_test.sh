#!/bin/bash
# Trains a tiny GPT on two ranks, saves its state, trains on; then new processes
# resume from the state and must meet the same losses, to the bit.
set -euo pipefail

readonly train="$1"
folder="$(mktemp -d)"
readonly folder
trap 'rm -rf "${folder}"' EXIT

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# The value of a key of one of train's JSON lines: a number, or a list's inside.
field() {
  sed -n "s/.*\"$2\": \(\[\([^]]*\)\]\|\([^,}]*\)\).*/\2\3/p" <<< "$1"
}

run() {
  "${train}" --world=2 --data "${folder}/text" --stage "${stage}" --json \
    --config examples/gpt/zero3.json --dim 32 --layers 2 --heads 2 --seq 16 \
    --dropout 0.1 "$@" | tail -n 1
}

for i in $(seq 400); do
  echo "${i} And the evening and the morning were day ${i}."
done > "${folder}/text"

for stage in 0 3; do
  first="$(run --steps 6 --save "${folder}/state${stage}" --after 3)"
  echo "${first}"
  second="$(run --steps 0 --resume "${folder}/state${stage}" --after 3 \
    --sample 12)"
  echo "${second}"

  for key in first_loss last_loss uninterrupted_losses resumed_losses tok_s \
    world stage bytes_per_rank parameters gradients optimizer sample; do
    [[ "${first}" == *"\"${key}\": "* ]] || fail "no ${key} at stage ${stage}"
  done
  [[ "$(field "${first}" world)" == 2 ]] || fail "world is not 2"
  [[ "$(field "${first}" stage)" == "${stage}" ]] || fail "not stage ${stage}"
  [[ "${second}" != *'"sample": ""'* ]] || fail "no sample"

  expected="$(field "${first}" uninterrupted_losses)"
  [[ "${expected}" == '"0x1.'*', "0x1.'*', "0x1.'* ]] ||
    fail "not three losses: ${expected}"
  [[ "$(field "${second}" resumed_losses)" == "${expected}" ]] ||
    fail "stage ${stage}: the resumed losses are others"
  losses[stage]="${expected} $(field "${first}" last_loss)"
done
[[ "${losses[0]}" == "${losses[3]}" ]] || fail "stages 0 and 3 differ"

# What a configuration says of ranks holds, too; and what it says beside.
sed '1a "my_key": 1, "communication": {"backend": "gloo"},\
"bf16": {"enabled": true}, "torch_autocast": {"enabled": true},' \
  examples/gpt/zero3.json > "${folder}/gloo.json"
stage=3
run --config "${folder}/gloo.json" --ignore_unknown --steps 1 \
  2> "${folder}/said" > /dev/null
grep -q "2 ranks over gloo" "${folder}/said" || fail "$(cat "${folder}/said")"
grep -q 'gloo.json:2:1: my_key: ignored: unknown key' "${folder}/said" ||
  fail "$(cat "${folder}/said")"

echo "PASSED"
