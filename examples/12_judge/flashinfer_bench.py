"""Turn a definition of flashinfer-bench into a task for `opjit judge`, or a solution in Python or Triton into a candidate.

    python flashinfer_bench.py DATASET/definitions/TYPE/NAME.json > task.py
    python flashinfer_bench.py DATASET/definitions/TYPE/NAME.json solution.json > candidate.py
    opjit judge task.py candidate.py

The task draws its calls from the workloads in DATASET/workloads/TYPE/NAME.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TASK = '''
import torch

_DEFINITION = {definition!r}
_WORKLOADS = {workloads!r}


class Model(torch.nn.Module):
    def forward(self, *inputs):
        results = run(*inputs)
        return [*results.values()] if isinstance(results, dict) else results


def get_init_inputs():
    return []


def get_inputs():
    workload = _WORKLOADS[int(torch.randint(len(_WORKLOADS), ()))]
    sizes = workload["axes"] | {{name: axis["value"] for name, axis in _DEFINITION["axes"].items() if "value" in axis}}
    return [_input(spec, workload["inputs"].get(name, {{}}), sizes) for name, spec in _DEFINITION["inputs"].items()]


def _input(spec, given, sizes):
    if "value" in given:
        return given["value"]
    if "path" in given:
        from safetensors.torch import load_file

        return load_file({root!r} + "/" + given["path"])[given["tensor_key"]]
    dtype = getattr(torch, spec["dtype"])
    shape = [sizes[name] for name in spec["shape"] or ()]
    if dtype.is_floating_point:
        values = torch.randn(shape)
        values = values.clamp(-2, 2).to(dtype) if dtype.itemsize == 1 else values.to(dtype)
    else:
        values = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    return values if spec["shape"] is not None else values.item()
'''
CANDIDATE = '''
import torch as _torch

_INPUTS = {inputs!r}
_OUTPUTS = {outputs!r}
_SIZES = {sizes!r}


class ModelNew(_torch.nn.Module):
    def forward(self, *inputs):
        if not {writes!r}:
            return {entry}(*inputs)
        sizes = dict(_SIZES)
        for shape, value in zip(_INPUTS, inputs):
            sizes.update(zip(shape or (), getattr(value, "shape", ())))
        device = next(value.device for value in inputs if isinstance(value, _torch.Tensor))
        outputs = [_torch.empty([sizes[name] for name in shape], dtype=getattr(_torch, dtype), device=device) for shape, dtype in _OUTPUTS]
        {entry}(*inputs, *outputs)
        return outputs
'''


def task(path: Path, definition: dict[str, Any]) -> str:
    """Return a file in KernelBench's format."""
    root = path.absolute().parents[2]
    listed = root / "workloads" / path.parent.name / f"{path.stem}.jsonl"
    workloads = [json.loads(line)["workload"] for line in listed.read_text("utf-8").splitlines() if line.strip()]
    shown = {name: definition[name] for name in ("axes", "inputs")}
    return f"{definition['reference']}\n{TASK.format(definition=shown, workloads=workloads, root=str(root))}"


def candidate(definition: dict[str, Any], solution: dict[str, Any]) -> str:
    """Return a file with ModelNew. The solution must be one file of Python."""
    spec = solution["spec"]
    file, _, entry = spec["entry_point"].partition("::")
    texts = {each["path"]: each["content"] for each in solution["sources"]}
    if [*texts] != [file] or not file.endswith(".py"):
        raise SystemExit(f"expected one file of Python in {solution['name']}, got {', '.join(texts)}; write CUDA as an op")
    wrapper = CANDIDATE.format(
        inputs=[each["shape"] for each in definition["inputs"].values()],
        outputs=[(each["shape"], each["dtype"]) for each in definition["outputs"].values()],
        sizes={name: axis["value"] for name, axis in definition["axes"].items() if "value" in axis},
        writes=spec.get("destination_passing_style", True), entry=entry)
    return f"{texts[file]}\n{wrapper}"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    given = json.loads(place.read_text("utf-8"))
    print(candidate(given, json.loads(Path(sys.argv[2]).read_text("utf-8"))) if sys.argv[2:] else task(place, given))
