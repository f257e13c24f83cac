#!/bin/bash
# The program of docs/quickstart.md on two ranks: five losses, the last the
# smaller, and a checkpoint.
set -euo pipefail

train="$(realpath "$1")" config="$(realpath "$2")"
cd "${TEST_TMPDIR}"
losses="$("${train}" "${config}" --world=2)"
echo "${losses}"
awk 'NR == 1 { first = $4 } { last = $4 }
     END { exit !(NR == 5 && last < first) }' <<< "${losses}"
[[ -s checkpoint/manifest ]]
