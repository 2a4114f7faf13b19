#!/bin/sh
# A node on which an op would be compiled gets no task. It names each entry that is missing, ends with 1 then, and builds nothing:
#
#     opjit precompile --from ops.json --store "$HOME/opjit-layer"             # on the login node, once
#     srun --ntasks-per-node 1 prolog.sh ops.json "$HOME/opjit-layer" && srun python train.py
#
# As Slurm's own Prolog, whose environment is empty, it takes absolute paths; Slurm drains a node whose Prolog fails.
set -eu
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
export PATH
exec opjit precompile --check "$1" --store "$2"
