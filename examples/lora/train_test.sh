#!/bin/bash
# Adapters of a tiny Llama on two ranks at stage 3: its loss falls, the base
# keeps its bits, through a save and a resume too; adapters and the merged
# model are written.
set -euo pipefail

readonly pretrain="$1" train="$2"
folder="$(mktemp -d)"
readonly folder
trap 'rm -rf "${folder}"' EXIT

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

for i in $(seq 300); do
  echo "${i} And the evening and the morning were day ${i}."
done > "${folder}/text"
sed 's/And the/Or a/; s/were day/is hour/' "${folder}/text" > "${folder}/other"

"${pretrain}" --world=2 --data="${folder}/text" --seq=32 --steps=40 \
  --out="${folder}/base" > "${folder}/said"

run() {  # the name of its metrics, flags
  "${train}" --world=2 --prefix_output=off --data="${folder}/other" --seq=32 \
    --set jsonl_monitor.enabled=true \
    --set "jsonl_monitor.output_path=${folder}/metrics" \
    --set "jsonl_monitor.job_name=$1" \
    --model="${folder}/base" --targets=q_proj,v_proj,down_proj "${@:2}"
}

# Each step's loss over ranks, with all of its digits.
losses() {
  sed -n 's/^{"step": \([0-9]*\), .*"loss": \([^,]*\),.*/\1 \2/p' \
    "${folder}/metrics/$1/metrics.jsonl"
}

whole="$(run whole --steps=10 --adapters="${folder}/adapters" \
  --merged="${folder}/merged")"
echo "${whole}"
losses whole
awk '{ if (!n++) first = $2; last = $2 }
     END { exit !(n == 10 && last < first - 0.3) }' <<< "$(losses whole)" ||
  fail "expected 10 losses, the last lower by 0.3"

run first --steps=6 --save="${folder}/state" > "${folder}/first"
run second --steps=10 --resume="${folder}/state" > "${folder}/second"
[[ "$(losses first; losses second)" == "$(losses whole)" ]] ||
  fail "the resumed run's losses are others: $(losses second)"

# One base, before and after, of all runs.
bases="$(grep -ho 'frozen base [0-9a-f]*' <<< "${whole}" "${folder}/first" \
  "${folder}/second" - | sort | uniq -c)"
[[ "${bases}" =~ ^\ *6\ frozen\ base\ [0-9a-f]{16}$ ]] ||
  fail "expected one base, 6 times: ${bases}"

# Two layers of width 64, with k and v of 32 and a hidden size of 176, each of
# A and B of rank 8 over two ranks, two states of four bytes each.
states=$(((64 + 64 + 64 + 32 + 176 + 64) * 8 * 2 / 2 * 8))
grep -q "^after: .*, ${states} of optimizer states" <<< "${whole}" ||
  fail "expected ${states} bytes of optimizer states"

# The merged model goes on where the adapters ended; the base does not.
loss_of() {
  "${pretrain}" --world=2 --prefix_output=off --data="${folder}/other" \
    --seq=32 --steps=1 --model="$1" --load | awk '{ print $4 }'
}
awk -v base="$(loss_of "${folder}/base")" \
  -v merged="$(loss_of "${folder}/merged")" \
  -v last="$(losses whole | awk 'END { print $2 }')" \
  'BEGIN { exit !(merged < last + 0.3 && base > merged + 0.3) }' ||
  fail "the merged model's loss is not what it was trained to"

/usr/bin/python3 - "${folder}/adapters" << 'END'
import json, struct, sys
folder = sys.argv[1]
config = json.load(open(folder + "/adapter_config.json"))
assert config["r"] == 8 and config["lora_alpha"] == 16, config
assert len(config["target_modules"]) == 6, config
raw = open(folder + "/adapter_model.safetensors", "rb")
header = json.loads(raw.read(struct.unpack("<Q", raw.read(8))[0]))
header.pop("__metadata__", None)
names = {"base_model.model." + path + ".lora_%s.weight" % side
         for path in config["target_modules"] for side in "AB"}
assert set(header) == names, header
END

# What peft makes of base and adapters is the merged model, where a Python that
# has it is at hand.
if [[ -n "${TESSERA_PYTHON:-}" ]] && "${TESSERA_PYTHON}" -c \
  'import peft, torch, transformers' 2> /dev/null; then
  HF_HUB_OFFLINE=1 HF_HOME="${folder}" "${TESSERA_PYTHON}" \
    examples/lora/peft_check.py "${folder}/base" "${folder}/adapters" \
    "${folder}/merged"
fi
echo "PASSED"
