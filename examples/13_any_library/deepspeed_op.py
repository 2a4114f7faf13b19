"""Build a DeepSpeed op with opjit's cache, without an edit, because its OpBuilder calls torch's load, which `opjit run` replaces.

    opjit run examples/13_any_library/deepspeed_op.py
"""

from __future__ import annotations


def main() -> None:
    try:
        from deepspeed.ops.op_builder import FusedAdamBuilder
    except ImportError as error:
        print(f"skipped, because DeepSpeed is not installed: {error}; pip install deepspeed")
        return
    op = FusedAdamBuilder().load(verbose=False)
    print(f"{op.__name__}:", *(name for name in dir(op) if not name.startswith("_")))


if __name__ == "__main__":
    main()
