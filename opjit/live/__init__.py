"""New code for ops in use: reload, watch, inline sources and the notebook magic."""
