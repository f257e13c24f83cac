#!/bin/bash
# The short run of curves.py: its stated loss, and the same bits at all stages.
set -euo pipefail
exec examples/gpt/curves.py "$1" --run short
