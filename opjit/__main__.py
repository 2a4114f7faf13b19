"""``python -m opjit``: the command ``opjit``."""

from opjit.cli import main

main(prog_name="opjit")
