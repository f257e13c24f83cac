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
  "${train}" --world="${world}" --data "${folder}/text" --stage "${stage}" \
    --json --config examples/gpt/zero3.json --dim 32 --layers 2 --heads 2 \
    --seq 16 --dropout 0.1 --held_out 3 "$@" | tail -n 1
}

for i in $(seq 400); do
  echo "${i} And the evening and the morning were day ${i}."
done > "${folder}/text"

# What each of four ranks would hold, by one; nothing is trained.
planned="$("${train}" --data "${folder}/text" --plan_world=4 --stage 3 \
  --config examples/gpt/zero3.json --dim 32 --layers 2 --heads 2 --seq 16)"
[[ "${planned}" == *" on 4 ranks with "*$'\n> 3 '*"samples/s"* ]] ||
  fail "no plan: ${planned}"
[[ "${planned}" != *"loss"* ]] || fail "planned, and trained: ${planned}"
chunked="$("${train}" --data "${folder}/text" --plan_world=4 --stage 3 \
  --config examples/gpt/zero3.json --dim 32 --layers 2 --heads 2 --seq 16 \
  --chunked_loss)"
[[ "${chunked}" == *" on 4 ranks with "*$'\n> 3 '*"samples/s"* ]] ||
  fail "no plan of a loss in chunks: ${chunked}"

world=2
for stage in 0 3; do
  first="$(run --steps 7 --save "${folder}/state${stage}" --after 3)"
  echo "${first}"
  second="$(run --steps 0 --resume "${folder}/state${stage}" --after 3 \
    --sample 12 --prompt=)"
  echo "${second}"

  for key in first_loss last_loss uninterrupted_losses resumed_losses tok_s \
    held_out_loss world stage bytes_per_rank parameters gradients optimizer sample; do
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
  [[ "$(field "${first}" held_out_loss)" == '"0x1.'* ]] ||
    fail "no loss of the text held out"
  # Another number of ranks (3, then 1), at another stage, has the same model.
  others="$((stage == 0 ? 3 : 1))"
  other="$(world="${others}" stage="$((3 - stage))" run --steps 0 \
    --resume "${folder}/state${stage}")"
  [[ "$(field "${other}" held_out_loss)" == \
    "$(field "${first}" held_out_loss)" ]] ||
    fail "stage ${stage}: another loss of the text held out on ${others} ranks"
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

# It closes its engine: the run is told as one that was finished.
run --steps 2 --set jsonl_monitor.enabled=true \
  --set "jsonl_monitor.output_path=${folder}" --set jsonl_monitor.job_name=run \
  2> "${folder}/said" > /dev/null
grep -q '"end": "closed"' "${folder}/run/run.json" ||
  fail "$(cat "${folder}/run/run.json")"
if grep -q 'without Engine::Close' "${folder}/said"; then
  fail "$(cat "${folder}/said")"
fi
grep -q '2/2  .*  loss .*  lr .* tok/s  .*counted peak' "${folder}/said" ||
  fail "no line of the last step: $(cat "${folder}/said")"

# What a DeepSpeed user begins with: offload to the CPU is free there, and has
# the same losses as none.
seed='{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8,
"zero_optimization": {"stage": 2OFFLOAD}, "fp16": {"enabled": true},
"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}'
echo "${seed/OFFLOAD/}" > "${folder}/none.json"
echo "${seed/OFFLOAD/, \"offload_optimizer\": {\"device\": \"cpu\"\}}" \
  > "${folder}/cpu.json"
for world in 1 2; do
  cpu="$(stage=2 run --config "${folder}/cpu.json" --steps 2 \
    2> "${folder}/said")" || fail "$(cat "${folder}/said")"
  grep -q "offload_optimizer: the module is on the CPU" "${folder}/said" ||
    fail "nothing said: $(cat "${folder}/said")"
  none="$(stage=2 run --config "${folder}/none.json" --steps 2)"
  [[ "$(field "${cpu}" held_out_loss)" == '"0x1.'* ]] || fail "no loss: ${cpu}"
  [[ "$(field "${cpu}" last_loss)" != "$(field "${cpu}" first_loss)" ]] ||
    fail "nothing was trained on ${world} ranks: ${cpu}"
  for key in last_loss held_out_loss; do
    [[ "$(field "${cpu}" "${key}")" == "$(field "${none}" "${key}")" ]] ||
      fail "offloaded on ${world} ranks: ${cpu} instead of ${none}"
  done
done
world=2

# The loss in chunks is the same number, in other bits: it falls as far.
plain="$(field "$(run --steps 7)" last_loss)"
chunked="$(field "$(run --steps 7 --chunked_loss)" last_loss)"
python3 -c 'import sys
a, b = (float(x) for x in sys.argv[1:])
sys.exit(not abs(a - b) < 1e-3)' "${plain}" "${chunked}" ||
  fail "a loss of ${chunked} in chunks, ${plain} at once"

# The parameters of a model with other heads are the same.
run --heads 4 --steps 0 --resume "${folder}/state3" 2> "${folder}/said" &&
  fail "resumed with other heads"
grep -q "saved with --heads 2, but --heads is 4" "${folder}/said" ||
  fail "$(cat "${folder}/said")"

# Ranks with different flags say so.
head -c 5000 "${folder}/text" > "${folder}/half"
differ() {  # of rank 1, and what must be said
  local flags=() pids=() rank
  rm -f "${folder}/meet"
  for rank in 0 1; do
    "${train}" --rank="${rank}" --world_size=2 \
      --rendezvous="file://${folder}/meet" --config examples/gpt/zero3.json \
      --data "${folder}/text" --dim 32 --layers 2 --heads 2 --seq 16 \
      --steps 1 "${flags[@]}" > "${folder}/said${rank}" 2>&1 &
    pids+=($!)
    flags=("${@:2}")
  done
  for rank in 0 1; do
    if wait "${pids[rank]}"; then fail "rank ${rank} took $*"; fi
  done
  for rank in 0 1; do
    grep -q "differs between rank 0 (.*) and rank 1 (.*$1" \
      "${folder}/said${rank}" || fail "$(cat "${folder}/said${rank}")"
  done
}
differ "--heads 4" --heads 4
differ "--dropout 0.2" --dropout 0.2
differ "data of 5000 bytes" --data "${folder}/half"

echo "PASSED"
