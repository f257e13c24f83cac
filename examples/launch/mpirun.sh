#!/bin/bash
# Starts a program's ranks by Open MPI's mpirun; MPI itself is not used.
#
#   RANKS=4 examples/launch/mpirun.sh PROGRAM ARGUMENTS...
#   RANKS=16 HOSTFILE=hosts HEAD=node1 examples/launch/mpirun.sh PROGRAM ...
#
# HOSTFILE has a line "node1 slots=8" for each host; HEAD is the first of them,
# since mpirun does not tell the ranks where rank 0 is.
set -euo pipefail

options=(-np "${RANKS:-1}")
if [[ -n "${HOSTFILE:-}" ]]; then
  export MASTER_ADDR="${HEAD:?the first host of ${HOSTFILE}}"
  options+=(--hostfile "${HOSTFILE}" -x MASTER_ADDR)
fi
# Every rank proves that it is of this job (docs/security.md).
TESSERA_JOB_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export TESSERA_JOB_SECRET
# By default mpirun binds each rank to one processor, and a rank takes as many
# threads as it may use processors.
exec mpirun "${options[@]}" -x TESSERA_JOB_SECRET --bind-to none "$@"
