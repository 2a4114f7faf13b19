"""`opjit.aoti_compile_and_package`.

The package is a zip file. torch's loader unpacks the model's folder and opens the model's library
there. The libraries of the ops are next to it, under names that do not end in ``.so``. torch copies
texts into the model's C++ source, which usually declare functions that a model calls without the
dispatcher (C shims). Here, these texts are complete functions that open the libraries of the ops.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from opjit import request, resources
from opjit.catalog import registry
from opjit.files import StrPath
from opjit.operators.op import Op
from opjit.recipe.schema import TYPES, Schema
from opjit.tensors import tensors_of
from opjit.wanted import target_of

_SHIMS = "aot_inductor.custom_ops_to_c_shims"


def aoti_compile_and_package(
    exported_program: torch.export.ExportedProgram,
    *,
    package_path: StrPath,
    inductor_configs: dict[str, Any] | None = None,
) -> str:
    """Compile an exported program with AOTInductor into a package that contains its ops.

    It works like ``torch._inductor.aoti_compile_and_package``, and adds the libraries of the program's ops to the package.

    A C++ program needs only torch's ``AOTIModelPackageLoader`` to run it, without Python. The model
    calls an op directly, like an op of torch, if the op does not write an argument, its arguments
    are Tensors, numbers, bools and dtypes, and its results are Tensors. Otherwise, it calls the op
    through the dispatcher.

    Args:
        exported_program: from ``torch.export.export``. Its ops are built for this machine's devices of the kinds of their tensors.
        package_path: ends in ``.pt2``. The function returns it.
        inductor_configs: the same as for torch.

    Raises:
        DeviceUnavailable, NoKernel, ToolMissing, CompileError: see `opjit.errors`.

    Example:
        >>> opjit.aoti_compile_and_package(torch.export.export(model, (torch.ones(3),)), package_path="model.pt2")
        'model.pt2'
    """
    configs = dict(inductor_configs or {})
    libraries = dict[str, Path]()
    shims = dict[Op, list[str]]()
    defined = ""
    for op, devices in _used(exported_program).items():
        names = {device: f"{op.qualified.replace('::', '.')}.so.{device}" for device in devices}
        libraries |= {
            name: request.entry(op, target_of(device, None)).library
            for device, name in names.items()
        }
        if all(_takes_shim(op.schema, device) for device in devices) and op.schema.name not in (
            other.schema.name for other in shims
        ):
            shims[op] = [_shim(op.schema, device, name) for device, name in names.items()]
        else:
            defined += "".join(
                f'{{"{name}", "opjit_{"register" if index else "define"}"}}, '
                for index, name in enumerate(names.values())
            )
    if libraries:  # torch copies the texts in this order. It does not search for an op without a name, so the first key only carries a text
        text = resources.filled("package/library.cpp.in", ops=defined)
        texts = {
            torch.ops.aten.detach.default: [text],
            **{op.overload: shim for op, shim in shims.items()},
        }
        configs[_SHIMS] = {**texts, **configs.get(_SHIMS, {})}
    path = torch._inductor.aoti_compile_and_package(
        exported_program, package_path=os.fspath(package_path), inductor_configs=configs
    )
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        for name, library in libraries.items():
            archive.write(library, f"{root}/data/aotinductor/model/{name}")
    return path


def _used(program: torch.export.ExportedProgram) -> dict[Op, list[str]]:
    """Return the ops that a program calls, each with the devices of its tensors; a functionalized call has its op as an argument."""
    found = dict[Op, set[str]]()
    modules = program.graph_module.modules()
    graphs = [module.graph for module in modules if isinstance(module, torch.fx.GraphModule)]
    for node in [node for graph in graphs for node in graph.nodes]:
        for target in (node.target, *node.args[:1]):
            op = (
                registry.declared(target._schema.name)
                if isinstance(target, torch._ops.OpOverload)
                else None
            )
            if op is not None:
                tensors = tensors_of([each.meta.get("val") for each in node.all_input_nodes])
                found.setdefault(op, set()).update(each.device.type for each in tensors)
    return {op: sorted(devices) for op, devices in found.items()}


def _takes_shim(schema: Schema, device: str) -> bool:
    """Return whether a model can call an op directly.

    The names of shims do not include a namespace, and torch's headers declare some of them.
    """
    plain = not schema.mutates and not any(
        each.list or not TYPES[each.kind].shim for each in schema.arguments
    )
    tensors = bool(schema.results) and not any(
        each.list or each.optional or each.kind != "Tensor" for each in schema.results
    )
    headers = Path(torch.__file__).parent.glob("include/torch/csrc/inductor/aoti_torch/**/*.h")
    name = f"aoti_torch_{device}_{schema.name}("
    return plain and tensors and not any(name in header.read_text("utf-8") for header in headers)


def _shim(schema: Schema, device: str, library: str) -> str:
    """Return a C shim for an op, which calls the kernel in its library."""
    arguments = [f"arg{i}" for i in range(len(schema.arguments))]
    results = [f"ret{i}" for i in range(len(schema.results))]
    parameters = [
        f"{TYPES[each.kind].shim} {'*' * each.optional}{name}"
        for each, name in zip(schema.arguments, arguments, strict=True)
    ]
    function = f"aoti_torch_{device}_{schema.name}({', '.join([*parameters, *(f'AtenTensorHandle *{name}' for name in results)])})"
    size = max(len(arguments), len(results))
    return resources.filled(
        "package/shim.cpp.in",
        function=function,
        library=library,
        size=size,
        num_arguments=len(arguments),
        num_results=len(results),
        arguments=", ".join(arguments),
        results=", ".join(results),
    )
