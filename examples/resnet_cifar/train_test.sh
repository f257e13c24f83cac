#!/bin/bash
# A narrow ResNet-18 on two ranks: it learns a small set by heart. A run that is
# stopped within an epoch and resumed by other processes, at another stage and
# with other threads, has the lines of one that was not; so have ranks that are
# started by PyTorch's arguments.
set -euo pipefail

work="${TEST_TMPDIR}"
readonly train="$1" work

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# The lines of epochs, without those of progress.
epochs() { grep '^epoch ' <<< "$1"; }

# config NAME BATCH RATE STAGE
config() {
  sed "s/768,/$2,/; s/\"lr\": 0.1/\"lr\": $3/; s/\"stage\": 1/\"stage\": $4/" \
    examples/resnet_cifar/sgd.json > "${work}/$1.json"
}
config overfit 64 0.1 1
config short 32 0.05 1
config stage3 32 0.05 3

# By heart: 64 images, all of them in each step.
said="$("${train}" --world=2 --config "${work}/overfit.json" --width 8 \
  --images 64 --epochs 40 --noaugment)"
tail -n 3 <<< "${said}"
[[ "${said}" == *$'\n40/40  '*'  loss '*' samples/s'* ]] || fail "no progress"
[[ "$(epochs "${said}" | tail -n 1)" == \
  "epoch 40/40 step 40 rate 0.00"*" accuracy 100.00 %; test:"* ]] ||
  fail "not by heart: ${said}"

# 4 steps an epoch, the last of 4 images: 16 + 16 + 16 + 2 on each rank.
run() { "${train}" --width 4 --images 100 --epochs 3 "$@"; }
expected="$(epochs "$(run --world=2 --config "${work}/short.json")")"
echo "${expected}"
[[ "${expected}" == "epoch 1/3 step 4 "*$'\nepoch 3/3 step 12 '* ]] ||
  fail "not 4 steps an epoch: ${expected}"

run --world=2 --config "${work}/short.json" --max_steps 6 \
  --save "${work}/run" > "${work}/first"
[[ "$(epochs "$(< "${work}/first")")" == "$(head -n 1 <<< "${expected}")" ]] ||
  fail "the first part: $(< "${work}/first")"
resumed="$(run --world=2 --config "${work}/stage3.json" --workers 0 \
  --save "${work}/run" --resume 2> "${work}/log")"
[[ "$(grep -c "resumed at step 6 (192 samples) from ${work}/run/" \
  "${work}/log")" == 1 ]] || fail "$(< "${work}/log")"
[[ "$(epochs "${resumed}")" == "$(tail -n 2 <<< "${expected}")" ]] ||
  fail "resumed: ${resumed}"

# By PyTorch's arguments.
for rank in 1 0; do
  run --dist-url "file://${work}/meet" --world-size 2 --rank "${rank}" \
    --config "${work}/short.json" > "${work}/rank${rank}" &
done
wait -n && wait -n || fail "--dist-url: $(< "${work}/rank0")"
[[ "$(epochs "$(< "${work}/rank0")")" == "${expected}" ]] ||
  fail "--dist-url: $(< "${work}/rank0")"
[[ ! -s "${work}/rank1" ]] || fail "rank 1 said $(< "${work}/rank1")"

# What a user gets wrong is one line.
"${train}" --world=2 --data "${work}/nowhere" 2> "${work}/said" &&
  fail "trained without data"
grep -q "NOT_FOUND: .*${work}/nowhere/data_batch_1.bin" "${work}/said" ||
  fail "$(< "${work}/said")"
echo "PASSED"
