"""An op's C glue, generated from its schema and the templates glue.c.in and kernel.in.

This module fills in what depends on the schema: the kernel's prototype, how each boxed argument is read, passed and freed, and how each
result is boxed. It does not run on a cache hit. Increase recipe.GLUE_GENERATOR when its output changes."""

import re
from pathlib import Path

from opjit import resources
from opjit.backends import Backend, Stream
from opjit.recipe.schema import TYPES, Argument, Result, Schema, c_names


def function_name(schema: Schema, backend: str) -> str:
    """Return the name of the author's C function: ``allreduce_cpu``."""
    return f"{schema.name}_{backend}"


def parameters(schema: Schema) -> list[str]:
    """Return the kernel's parameters as C declarations, without a backend's stream."""
    return [f"{c_type}{name}" for c_type, name in zip(_types(schema), c_names(schema), strict=True)]


def numbered_parameters(schema: Schema) -> list[str]:
    """Return the kernel's parameters with the names opjit_0, opjit_1 and so on, because the author may use the schema's names for more."""
    return [f"{of}opjit_{index}" for index, of in enumerate(_types(schema))]


def _types(schema: Schema) -> list[str]:
    """Return the C types of the kernel's parameters, in the form before a name."""
    return [
        *map(_c_type, schema.arguments),
        *(f"{_result_type(result)} *" for result in schema.results),
    ]


def prototype(schema: Schema, backend: Backend) -> str:
    """Return the author's prototype: ``opjit_status scale_cpu(const opjit_tensor *x, double a, opjit_tensor *out)``."""
    declared = [*parameters(schema), *([f"{backend.stream.type} stream"] if backend.stream else [])]
    return f"opjit_status {function_name(schema, backend.name)}({', '.join(declared)})"


def write(schema: Schema, backend: Backend, source: str, folder: Path) -> list[Path]:
    """Write the glue of an op into a folder; see `render`. Returns its files."""
    texts = render(schema, backend, source)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in texts]


def render(schema: Schema, backend: Backend, source: str) -> dict[str, str]:
    """Return the glue files of an op for a backend, by file name: the C glue, which includes the author's source, a kernel in C; for a
    device with a compiler of its own, beside it the file that this compiler takes."""
    function = function_name(schema, backend.name)
    stream = backend.stream
    text = {
        "op": schema.qualified,
        "schema": schema.text.replace("*/", "* /"),
        "backend": backend.name,
        "namespace": schema.namespace,
        "name": schema.name,
        "schema_literal": schema_literal(schema),
        "tags": ", ".join(tags(schema)),
        "tensors": tensor_bits(schema),
        "dispatch_key": backend.dispatch_key,
        "function": function,
        "source": source,
    }
    device = _device(stream, backend.name) if stream else ""
    if not (backend.compiler or backend.uses_nvcc):
        device = f'#include "{stream.header}"\n\n{device}' if stream else ""
        declared = prototype(schema, backend)
        kernel = f'#include "{source}"'
        return {
            "opjit_glue.c": _c_glue(
                schema,
                text,
                device,
                declared,
                kernel,
                function,
                f"({stream.type})stream" if stream else None,
            )
        }
    beside = f"opjit_kernel{backend.suffix}"
    declared = f"opjit_status opjit_{function}({', '.join([*parameters(schema), *(['void *stream'] if stream else [])])})"
    kernel = f"/* compiled beside this file, from {beside} */"
    c_glue = _c_glue(
        schema, text, device, declared, kernel, f"opjit_{function}", "stream" if stream else None
    )
    return {"opjit_glue.c": c_glue, beside: _wrapper(schema, text, stream)}


def schema_literal(schema: Schema) -> str:
    """Return the schema without its namespace as a string literal of C."""
    literal = re.sub(
        r'[\\"?\n]',
        lambda found: "\\n" if found[0] == "\n" else f"\\{found[0]}",
        schema.text.partition("::")[2],
    )
    return f'"{literal}"'


def tags(schema: Schema) -> list[str]:
    """Return the functions of torch's C interface that give the op's tags; it lacks some of torch's tags."""
    shim = (resources.folder("kernels_c") / "opjit_shim.h").read_text("utf-8")
    return [f"torch_tag_{name}" for name in schema.all_tags if f" torch_tag_{name}(" in shim]


def tensor_bits(schema: Schema) -> str:
    """Return an integer of C with bit i set if argument i is a Tensor, neither optional nor in a list."""
    bits = sum(1 << i for i, each in enumerate(schema.arguments[:64]) if each.plain)
    return f"UINT64_C({bits:#x})"


def _wrapper(schema: Schema, text: dict[str, str], stream: Stream | None) -> str:
    """Return the file for the device's compiler: the kernel, and a function around it that C can call."""
    types = _types(schema)
    numbered = [f"opjit_{i}" for i in range(len(types))]
    parameters = numbered_parameters(schema)
    headers = ["opjit.h"]
    if stream:
        types = [*types, stream.type]
        headers = [stream.header, *headers]
        numbered = [*numbered, f"({stream.type})opjit_stream"]
        parameters = [*parameters, "void *opjit_stream"]
    return resources.filled(
        "kernel.in",
        **text,
        include="\n".join(f'#include "{header}"' for header in headers),
        types=", ".join(types),
        parameters=", ".join(parameters),
        arguments=", ".join(numbered),
    )


def _device(stream: Stream, name: str) -> str:
    """Return the declarations of the device's functions that the glue calls."""
    signatures = {
        "current": "int32_t device_index, void **stream",
        "exchange": "int32_t device_index, int32_t *before",
        "allocate": "uint64_t bytes, void **memory",
        "free": "void *memory",
    }
    functions = {field: getattr(stream, field) for field in signatures if getattr(stream, field)}
    torchs = all(function.startswith("aoti_torch_") for function in functions.values())
    members = [
        f'.name = "{name}"',
        *(f".{field} = {function}" for field, function in functions.items()),
        f".torchs = {'true' if torchs else 'false'}",
    ]
    return (
        "".join(
            f"int32_t {function}({signatures[field]});\n" for field, function in functions.items()
        )
        + f"static const opjit_device opjit_this_device = {{\n{_lines([f'{member},' for member in members])}\n}};\n\n"
    )


def _c_glue(
    schema: Schema,
    text: dict[str, str],
    device: str,
    declared: str,
    kernel: str,
    function: str,
    stream: str | None,
) -> str:
    """Return the C glue, which calls the kernel `function`, with the prototype `declared`.

    `device` has declarations for `opjit_enter_device`, and `stream` is the expression that passes
    the stream, if there is one.
    """
    boxed = [f"boxed{i}" for i in range(len(schema.arguments))]
    results = [(f"out{i}", result) for i, result in enumerate(schema.results)]
    run_parameters = ["opjit_call *call", *(f"torch_ivalue {name}" for name in boxed)]
    run_parameters += [f"{_result_type(result)} *{out}" for out, result in results]
    run_arguments = ["&call", *boxed, *(f"&{out}" for out, _ in results)]
    values = {
        "device": device,
        "prototype": f"{declared};",
        "kernel": kernel,
        "run_parameters": ", ".join(run_parameters),
        "body": _lines(_body(schema, function, stream)),
        "locals": _lines(_locals(schema)),
        "run_arguments": ", ".join(run_arguments),
        "fresh_checks": _lines(_fresh_checks(schema)),
        "free_arguments": _lines(_free_arguments(schema)),
        "box_results": _lines(_box_results(schema)),
        "free_results": _lines(_free_results(schema), 2),
        "results": _lines(_results(schema)),
    }
    return resources.filled("glue.c.in", **text, **values)


def _locals(schema: Schema) -> list[str]:
    arguments = range(len(schema.arguments))
    lines = [f"torch_ivalue boxed{i} = stack[{i}];" for i in arguments]
    return lines + [_declare(result, i) for i, result in enumerate(schema.results)]


def _free_arguments(schema: Schema) -> list[str]:
    lines = []
    for i, argument in enumerate(schema.arguments):
        if i not in schema.returned:
            lines += _free(argument, f"boxed{i}")
    return lines


def _box_results(schema: Schema) -> list[str]:
    """Return statements that box the results that are lists or optional."""
    lines = []
    for i, result in enumerate(schema.results):
        if result.list or result.optional:
            kind = "list" if result.list else "optional"
            lines.append(f"status = opjit_box_{kind}(status, &out{i}, &box{i});")
    return lines


def _free_results(schema: Schema) -> list[str]:
    """Return the release of the results of a call that failed."""
    lines = []
    for i in _tensor_results(schema):
        result = schema.results[i]
        if result.list:
            lines.append(f"if (box{i}) opjit_free_tensors(box{i});")
            continue
        lines.append(f"opjit_free_tensor(opjit_handle_value(out{i}.handle));")
        if result.optional:
            free = f"opjit_free_tensor(opjit_cell(box{i})); opjit_free_cell(box{i});"
            lines.append(f"if (box{i}) {{ {free} }}")
    return lines + [f"opjit_free_tensor(boxed{i});" for i in schema.returned]


def _results(schema: Schema) -> list[str]:
    """Return statements that put the results on torch's stack."""
    lines = []
    for i, result in enumerate(schema.results):
        is_boxed = result.list or result.optional
        value = f"box{i}" if is_boxed else TYPES[result.kind].box.format(f"out{i}")
        lines.append(f"stack[{i}] = {value};")
    return lines + [f"stack[{i}] = boxed{place};" for i, place in enumerate(schema.returned)]


def _lines(lines: list[str], depth: int = 1) -> str:
    return "\n".join("    " * depth + line for line in lines)


def _c_type(argument: Argument) -> str:
    if argument.list:
        return f"const opjit_{argument.kind.lower()}s *"
    if argument.kind == "Tensor":
        return "opjit_tensor *" if argument.writes else "const opjit_tensor *"
    c_type = TYPES[argument.kind].c_type
    if c_type.endswith("*"):
        return c_type
    return f"const {c_type} *" if argument.optional else f"{c_type} "


def _result_type(result: Result) -> str:
    return "opjit_outputs" if result.list else TYPES[result.kind].c_type


def _tensor_results(schema: Schema) -> list[int]:
    return [i for i, result in enumerate(schema.results) if result.kind == "Tensor"]


def _declare(result: Result, index: int) -> str:
    if result.kind == "Tensor":
        boxed = f" torch_ivalue box{index} = 0;" if result.list or result.optional else ""
        return f"{_result_type(result)} out{index} = {{.call = &call}};{boxed}"
    return f"{TYPES[result.kind].c_type} out{index} = 0;"


def _body(schema: Schema, function: str, stream: str | None) -> list[str]:
    """Return the body of opjit_run(): read each argument, call the kernel, check its outputs."""
    lines = list[str]()
    drawn = list[str]()
    passed = []
    for index, argument in enumerate(schema.arguments):
        declared, expression = _unboxed(argument, f"boxed{index}", f"arg{index}")
        (drawn if argument.kind == "Generator" else lines).extend(declared)
        passed.append(expression)
    passed += [f"out{i}" for i in range(len(schema.results))]
    if stream:
        lines += [
            "void *stream;",
            "OPJIT_TRY(opjit_enter_device(call, &opjit_this_device, &stream));",
        ]
        passed.append(stream)
    else:
        lines.append("(void)call;")
    lines += drawn
    for index, argument in enumerate(schema.arguments):
        if argument.writes and not argument.list:
            lines += _keep_view(argument, index)
    lines.append(f"OPJIT_TRY({function}({', '.join(passed)}));")
    for index, argument in enumerate(schema.arguments):
        if argument.writes:
            lines += _wrote(argument, index)
    names = c_names(schema)[len(schema.arguments) :]
    lines += [
        f'OPJIT_TRY(opjit_check_output{"s" * schema.results[i].list}(out{i}, "{names[i]}"));'
        for i in _tensor_results(schema)
        if not schema.results[i].optional
    ]
    return lines


def _unboxed(argument: Argument, boxed: str, name: str) -> tuple[list[str], str]:
    """Return statements that unbox a value into `name`, and the expression to pass to the kernel."""
    if argument.kind == "Generator":
        return [
            f"const uint64_t *{name};",
            f"OPJIT_TRY(opjit_draw_seed(call, {boxed}, &{name}));",
        ], name
    if argument.optional:
        inner, expression = _unboxed(argument._replace(optional=False), "cell", f"{name}_value")
        pointer = _c_type(argument)
        address = (
            expression
            if pointer == "const char *" or expression.startswith("&")
            else f"&{name}_value"
        )
        declared = [line for line in inner if not line.startswith("OPJIT_")]
        assigned = [line for line in inner if line.startswith("OPJIT_")]
        if not inner:  # a plain number, which needs a variable for the pointer
            declared = [f"{TYPES[argument.kind].c_type} {name}_value;"]
            assigned = [f"{name}_value = {expression};"]
        return (
            [
                *declared,
                f"{pointer}{name} = NULL;",
                f"if ({boxed}) {{",
                f"    torch_ivalue cell = opjit_cell({boxed});",
                *(f"    {line}" for line in assigned),
                f"    {name} = {address};",
                "}",
            ],
            name,
        )
    writes = "true" if argument.writes else "false"
    if argument.list:
        read = f"opjit_read_{argument.kind.lower()}s(call, {boxed}, "
        read += f'{writes}, "{argument.name}", ' if argument.kind == "Tensor" else ""
        return [
            f"opjit_{argument.kind.lower()}s {name};",
            f"OPJIT_TRY({read}&{name}));",
        ], f"&{name}"
    if argument.kind == "Tensor":
        return [
            f"opjit_tensor {name};",
            f'OPJIT_TRY(opjit_read_tensor(call, {boxed}, {writes}, "{argument.name}", &{name}));',
        ], f"&{name}"
    if argument.kind == "str":
        return [f"const char *{name};", f"OPJIT_TRY(opjit_read_string({boxed}, &{name}));"], name
    return [], TYPES[argument.kind].unbox.format(boxed)


def _keep_view(argument: Argument, index: int) -> list[str]:
    """Return statements that keep the view of an argument that the kernel writes."""
    view = f"arg{index}"
    if not argument.optional:
        return [f"const opjit_tensor before{index} = {view};"]
    return [
        f"opjit_tensor before{index} = {{0}};",
        f"if ({view})",
        f"    before{index} = *{view};",
    ]


def _wrote(argument: Argument, index: int) -> list[str]:
    name = f"arg{index}"
    if not argument.list:
        view = name if argument.optional else f"&{name}"
        check = f'OPJIT_TRY(opjit_check_written({view}, &before{index}, "{argument.name}"));'
        return [f"if ({name})", f"    {check}"] if argument.optional else [check]

    view = f"{name}{'->' if argument.optional else '.'}"
    lines = [
        f"for (int64_t i = 0; i < {view}len; i++)",
        f"    OPJIT_TRY(opjit_wrote({view}data + i));",
    ]
    if not argument.optional:
        return lines
    return [f"if ({name}) {{", *(f"    {line}" for line in lines), "}"]


def _fresh_checks(schema: Schema) -> list[str]:
    """Return checks that an output is not an input or an earlier output."""
    lines = []
    for out in _tensor_results(schema):
        name = c_names(schema)[len(schema.arguments) + out]
        listed = schema.results[out].list
        each = f"for (int64_t i = 0; i < out{out}.len; i++) " if listed else ""
        item = f"out{out}.data + i" if listed else f"&out{out}"
        for index, argument in enumerate(schema.arguments):
            if argument.kind != "Tensor":
                continue
            check = "opjit_check_fresh_list" if argument.list else "opjit_check_fresh"
            boxed = f"opjit_cell(boxed{index})" if argument.optional else f"boxed{index}"
            guard = f"if (boxed{index}) " if argument.optional else ""
            lines.append(f'{guard}{each}status = {check}(status, {boxed}, {item}, "{name}");')
        for earlier in (
            index for index in _tensor_results(schema) if index < out or (index == out and listed)
        ):
            end = "i" if earlier == out else f"out{earlier}.len"
            every = f"for (int64_t k = 0; k < {end}; k++) " if schema.results[earlier].list else ""
            handle = f"out{earlier}.data[k].handle" if every else f"out{earlier}.handle"
            lines.append(
                f'{each}{every}status = opjit_check_fresh(status, opjit_handle_value({handle}), {item}, "{name}");'
            )
    return lines


def _free(argument: Argument, boxed: str) -> list[str]:
    if argument.kind == "Generator":
        return [f"opjit_free_generator({boxed});"]
    if argument.optional:
        inner = _free(argument._replace(optional=False), f"opjit_cell({boxed})")
        return [
            f"if ({boxed}) {{",
            *(f"    {line}" for line in [*inner, f"opjit_free_cell({boxed});"]),
            "}",
        ]
    if argument.list:
        return [f"opjit_free_{'tensors' if argument.kind == 'Tensor' else 'list'}({boxed});"]
    if argument.kind in ("Tensor", "str"):
        return [f"opjit_free_{'tensor' if argument.kind == 'Tensor' else 'string'}({boxed});"]
    return []
