#!/bin/bash
# Runs the smallest program on two ranks: twenty losses, the last the smaller.
set -euo pipefail

losses="$("$1" --world=2)"
echo "${losses}"
awk 'NR == 1 { first = $2 } { last = $2 }
     END { exit !(NR == 20 && last < first) }' <<< "${losses}"
