#!/bin/bash
# A list of targets that has to be empty.
set -euo pipefail

cat "$1"
[[ -f "$1" && ! -s "$1" ]]
