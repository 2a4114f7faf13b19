"""An op as its author and its users see it: decorators that declare its functions, and the call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from opjit import backends
from opjit.declare.declaration import Declaration, Function
from opjit.declare.gradient_op import match
from opjit.declare.op_state import OpState
from opjit.declare.sample import Sample, Workload
from opjit.errors import DeclarationError, OpjitError
from opjit.operators import graph_cache, rules, transforms, variants

F = TypeVar("F", bound=Function)


class Op(OpState):
    """A declared op, from `opjit.op` or `opjit.inline`. Call it like a function.

    Its decorators declare the parts that torch, tests and benchmarks need, for example `backward` and `samples`.

    Attributes:
        schema: the schema as torch parsed it.
        folder: the directory of its C and CUDA sources.
        fake: the fake kernel, which computes the shape, dtype and device of the results without data.
        overload: the torch operator, ``torch.ops.<namespace>.<name>.default``.
        constant: True if autograd treats its results as constants.
        elementwise: the argument of `opjit.op`.
        loaded: the kernels in this process, by the name of the backend.

    Example:
        >>> [scale] = opjit.add_path("my_ops")
        >>> scale.qualified, scale.backends()
        ('mylib::scale', ['cpu'])
        >>> scale.overload(torch.ones(2), 2.5)
        tensor([2.5000, 2.5000])
    """

    def __repr__(self) -> str:
        return f"<opjit op {self.schema.text}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.overload(*args, **kwargs)
        except OpjitError as error:
            # A user learns nothing from torch's and opjit's frames.
            raise error.with_traceback(None) from error.__cause__
        except RuntimeError as error:
            code = self.declaration.code
            name = self.schema.name
            if code is not None and f"[{name}." in str(error):
                error.args = (code.in_program(str(error), name),)
            raise

    @property
    def folder(self) -> Path:
        return self.declaration.folder

    @property
    def fake(self) -> Function:
        return self.declaration.fake

    @property
    def constant(self) -> bool:
        return self.declaration.constant

    @property
    def elementwise(self) -> bool:
        return self.declaration.elementwise

    @property
    def reference_function(self) -> Function:
        """Return the declared reference, which is the op in plain torch.

        Raises DeclarationError if the op does not declare one.
        """
        return self._required("reference")

    def samples_on(self, device: str) -> Iterator[Sample]:
        """Yield the declared samples on a device.

        Raises DeclarationError if the op does not declare any.
        """
        yield from map(Sample.of, self._required("samples")(device))

    def workloads_on(self, device: str) -> Iterator[Workload]:
        """Yield the declared workloads on a device.

        Raises DeclarationError if the op does not declare any.
        """
        yield from self._required("workloads")(device)

    def _required(self, what: str) -> Function:
        function: Function | None = getattr(self.declaration, what)
        if function is None:
            raise DeclarationError(
                f"{self.qualified} declares no {what}; add @{self.schema.name}.{what} to its op.py"
            )
        return function

    def declare(self, **changes: Any) -> None:
        """Change fields of the declaration."""
        self.update(replace(self.declaration, **changes))

    def update(self, declaration: Declaration) -> None:
        """Replace the declaration, and update its registration with torch.

        If the schema or `constant` changes, call `registration.redeclare` instead.
        """
        before = self.declaration
        self.declaration = declaration
        if self.library is None:
            return
        rules.bind_rules(self)
        for name, loaded in self.loaded.items():
            backend = backends.for_device(name)
            self.enable_variants(backend)
            if declaration.backward != before.backward:
                self.bind_autograd(backend, loaded)
        graph_cache.note_change(declaration)

    def reference(self, function: Function) -> Function:
        """Declare the same operation in plain torch. Tests and benchmarks compare the op with it."""
        self.declare(reference=function)
        return function

    def samples(self, function: Function) -> Function:
        """Declare the sample inputs of tests, with a generator ``samples(device)``.

        Each sample is a tuple of arguments, a pair ``(args, kwargs)``, or an `opjit.Sample`. Choose samples that reach every branch of
        the kernel, for example each dtype, odd and empty sizes, and tensors that are not contiguous.
        """
        self.declare(samples=function)
        return function

    def waive(self, check: str, why: str) -> None:
        """Let ``opjit test`` skip a check.

        Args:
            check: the name of the check, for example ``"nan and inf"``. An unknown name is an error of ``opjit test``.
            why: the reason, which ``opjit test`` shows.
        """
        self.declare(waived={**self.declaration.waived, check: why})

    def workloads(self, function: Function) -> Function:
        """Declare the benchmark cases of ``opjit bench``, with a generator ``workloads(device)`` of `Workload`."""
        self.declare(workloads=function)
        return function

    def backward(self, function: F) -> F:
        """Declare the backward, ``backward(ctx, *grads)``, like torch.library.register_autograd. It can be another op.

        opjit saves the arguments of a backward that is an op, and finds them by name among the arguments of this op, its results (``out``
        without a name), their gradients (``grad`` of a single result, ``grad_<result>`` of several), and ``bool[] output_mask``, which
        tells for each gradient whether it is needed. Its results are the gradients of all Tensor arguments in order, or of the arguments
        in their names: ``grad_<argument>``. A ``Tensor?`` can be missing if it is not needed. A result of this op is a constant if the
        backward has no argument for its gradient.
        torch calls such a backward without Python, if `opjit precompile` has compiled the C++ autograd kernel.

        Args:
            function: a function, or another op.

        Raises:
            DeclarationError: torch cannot differentiate the op, because it writes an argument or has keyword-only Tensors, the op is
                declared with differentiable=False, or an argument or result of the other op has no match in this op.

        Example:
            >>> @scale.backward
            ... @opjit.op("mylib::scale_backward(Tensor grad, float a) -> Tensor")
            ... def scale_backward(grad, a):
            ...     return torch.empty_like(grad)
        """
        if self.constant:
            raise DeclarationError(
                f"{self.qualified} is declared with differentiable=False; remove "
                "differentiable=False or the backward"
            )
        if self.schema.mutates:
            raise DeclarationError(
                f"{self.qualified} writes an argument, so torch does not support a backward for "
                "it; return a new tensor instead"
            )
        self._refuse_keyword_only("backward")
        gradient = match(self.schema, function.schema) if isinstance(function, Op) else function
        self.declare(backward=gradient)
        return function

    def setup_context(self, function: Function) -> Function:
        """Declare how a call saves values for the backward, like torch.library.register_autograd.

        The function is ``setup_context(ctx, inputs, output)``. If the op has keyword-only arguments, it is
        ``setup_context(ctx, inputs, keyword_only_inputs, output)``.
        """
        self.declare(setup_context=function)
        return function

    def variants(
        self, device: str | None = None, /, **values: Sequence[object]
    ) -> Callable[[Function], Function]:
        """Declare variants, from which opjit chooses the fastest by measurement.

        Each combination of values is compiled into a separate binary, with the values as -D definitions. opjit measures the variants at
        the first call on a device with tensors of about the same size, and keeps the choice in the cache. ``opjit tune`` does this in
        advance.

        Args:
            device: ``"cpu"`` or ``"cuda"``. None means both.
            values: the values of each definition. If nothing can be measured, the first combination runs.

        Returns:
            A decorator for a function that returns whether a combination is valid.

        Raises:
            DeclarationError: every combination was rejected, or a flag cannot hold a value.

        Example:
            >>> @scale.variants("cpu", TILE=(64, 256), UNROLL=(1, 4))
            ... def fits(TILE, UNROLL):
            ...     return TILE % UNROLL == 0
        """
        combinations = variants.combinations(self, device, values)

        def among(fits: Function) -> Function:
            self._vary(device, [each for each in combinations if fits(**each)])
            return fits

        self._vary(device, combinations)
        return among

    def _vary(self, device: str | None, combinations: Sequence[Mapping[str, object]]) -> None:
        if not combinations:
            raise DeclarationError(
                f"{self.qualified} expected at least one variant, but the function under "
                "@variants rejected every combination of values; let it return True for one"
            )
        labeled = {variants.label(each): each for each in combinations}
        for_nvcc = (False, True) if device is None else (backends.for_device(device).uses_nvcc,)
        changed = {**self.declaration.variants, **dict.fromkeys(for_nvcc, labeled)}
        replace(self.declaration, variants=changed).flags_of_author  # noqa: B018 - raises for a value that no flag can hold
        self.declare(variants=changed)

    def vmap(self, function: Function) -> Function:
        """Declare the batching rule, ``vmap(info, in_dims, *args)``, like torch.library.register_vmap.

        Without a rule, torch.vmap calls the op once for each element of the batch, or once for the whole batch if the op is declared with
        elementwise=True.

        Example:
            >>> @scale.vmap
            ... def vmap(info, in_dims, x, a):
            ...     return torch.ops.mylib.scale(x.movedim(in_dims[0], 0), a), 0
        """
        self._refuse_keyword_only("vmap rule")
        self.declare(vmap=function)
        return function

    def _refuse_keyword_only(self, what: str) -> None:
        for argument in self.schema.arguments:
            if argument.keyword_only and argument.kind == "Tensor":
                raise DeclarationError(
                    f"{self.qualified} has a keyword-only Tensor, for which torch supports no {what}; make it positional"
                )

    def autocast(self, dtype: torch.dtype | None = None, only: Sequence[str] | None = None) -> None:
        """Convert floating-point arguments in regions of torch.autocast.

        Without this rule, the op gets the arguments unchanged. As in torch's rules, float64 arguments are not converted.

        Args:
            dtype: the dtype to convert to, for example torch.float32. None means the dtype of the region.
            only: the names of the arguments to convert. None means all.

        Example:
            >>> scale.autocast(torch.float32)
            >>> with torch.autocast("cpu", dtype=torch.bfloat16):
            ...     torch.ops.mylib.scale(torch.ones(2, dtype=torch.bfloat16), 2.5)
            tensor([2.5000, 2.5000])

        Raises:
            DeclarationError: the op writes an argument, so it would write a converted copy, or it lacks a Tensor with a name in `only`.
        """
        if self.schema.mutates:
            raise DeclarationError(
                f"{self.qualified} writes an argument, so autocast() is not supported, because "
                "the op would write a converted copy; convert the argument before the call"
            )
        names = None if only is None else transforms.tensor_names(self.schema, only)
        self.declare(autocast=(dtype, names))

    def sharding(self, function: Function) -> Function:
        """Declare the sharding rule for DTensor, ``sharding(*args, **kwargs)``.

        Like with torch.distributed.tensor.experimental.register_sharding, it returns pairs: the placements of the results, and the
        placements of the arguments that they need. An op that is declared with elementwise=True has a rule.

        Example:
            >>> @scale.sharding
            ... def sharding(x, a):
            ...     replicate = torch.distributed.tensor.Replicate()
            ...     shards = [torch.distributed.tensor.Shard(dim) for dim in range(x.ndim)]
            ...     return [([place], [place, None]) for place in (replicate, *shards)]
        """
        self.declare(sharding=function)
        return function
