#!/bin/bash
# The program of docs/quickstart.md on two ranks: a line at each tenth of its
# steps, whose losses fall, and a checkpoint. Its configuration is found beside the program.
set -euo pipefail

train="$(realpath "$1")" config="$(realpath "$2")"
mkdir -p "${TEST_TMPDIR}/bin" "${TEST_TMPDIR}/here"
cp "${train}" "${config}" "${TEST_TMPDIR}/bin"
cd "${TEST_TMPDIR}/here"
losses="$(../bin/train --world=2)"
echo "${losses}"
awk 'NR == 1 { first = $4 } { last = $4 }
     END { exit !(NR == 11 && last < first) }' <<< "${losses}"
[[ -s run/ckpt/manifest ]]
[[ "$(../bin/train --help)" == *'--dir  '*'Default: run/ckpt.'* ]]
