#!/bin/sh
# Check a node before it gets a task. If an op would be compiled, this lists the missing entries and exits with 1:
#
#     opjit precompile --from ops.json --store "$HOME/opjit-layer"             # on the login node, once
#     srun --ntasks-per-node 1 prolog.sh ops.json "$HOME/opjit-layer" && srun python train.py
#
# If you use it as Slurm's Prolog, pass absolute paths, because its environment is empty. Slurm drains a node if its Prolog fails.
set -eu
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
export PATH
exec opjit precompile --check "$1" --store "$2"
