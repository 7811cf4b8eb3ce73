"""A bound function: its signature, how its calls are batched, and how a batch is run."""

import dataclasses
import keyword
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from seed_rl.grpc_service import codec, errors
from seed_rl.grpc_service import service_pb2 as pb
from seed_rl.grpc_service.batching import Batch
from seed_rl.grpc_service.signature import Signature, fits, to_array
from seed_rl.grpc_service.specs import describe

DEFAULT_MAX_BATCH_SIZE = 64

# Bound functions appear as methods of a client, beside these.
RESERVED_NAMES = frozenset(
    {"address", "check", "close", "functions", "metadata", "num_environments"}
)


@dataclasses.dataclass(frozen=True)
class BoundFunction:
    """A function, or one for each device, that clients can call.

    Attributes:
      name: as clients call it.
      callables: interchangeable; each is entered by one thread at a time.
      inputs: signature of the positional arguments, a tuple.
      outputs: signature of the result.
      max_rows: rows of a full batch; 0: unbatched.
      batch_sizes: ascending; a batch is padded to the next of them. Empty: never padded.
      environments_leaf: which leaf of the inputs holds the numbers of the caller's environments.
    """

    name: str
    callables: tuple[Callable[..., Any], ...]
    inputs: Signature
    outputs: Signature
    max_rows: int
    batch_sizes: tuple[int, ...]
    environments_leaf: int | None = None

    @property
    def batched(self) -> bool:
        return self.max_rows > 0

    def to_proto(self) -> pb.Function:
        """For the handshake."""
        return pb.Function(
            name=self.name,
            inputs=codec.encode_structure(self.inputs.structure),
            outputs=codec.encode_structure(self.outputs.structure),
            batched=self.batched,
            max_rows=self.max_rows,
        )

    def check_inputs(self, layout: codec.Layout) -> int:
        """Whether what a client sends fits; returns the number of rows, 1 if unbatched.

        Raises:
          SignatureError: it does not fit; the message names the argument.
        """
        specs = self.inputs.specs
        if len(layout.shapes) != len(specs):
            raise errors.SignatureError(
                f"{self.name}: expected {len(specs)} tensors, got {len(layout.shapes)}"
            )
        num_rows = 1
        if self.batched:
            num_rows = layout.shapes[0][0] if layout.shapes[0] else 0
            if not 1 <= num_rows <= self.max_rows:
                raise errors.SignatureError(
                    f"{self.name}: a call brings 1 to {self.max_rows} rows, got {num_rows}"
                )
        for index, spec in enumerate(specs):
            expected = (num_rows, *spec.shape[1:]) if self.batched else spec.shape
            dtype, shape = layout.dtypes[index], layout.shapes[index]
            if dtype != spec.dtype or not fits(shape, expected):
                raise errors.SignatureError(
                    f"{self.name}: argument {self.inputs.paths[index]}: expected "
                    f"{describe(expected, spec.dtype)}, got {describe(shape, dtype)}"
                )
        return num_rows

    def run(self, fn: Callable[..., Any], batch: Batch) -> list[np.ndarray]:
        """Calls one of `callables` with a batch; returns the leaves of its result, as arrays.

        Raises:
          SignatureError: the result does not fit the signature.
          Exception: whatever the function raises.
        """
        arrays = self._pad(batch) if self.batched else list(batch.arrays)
        result = fn(*self.inputs.unflatten(arrays))
        outputs = self.outputs.flatten(result, f"{self.name}: result")
        for index, (leaf, spec) in enumerate(zip(outputs, self.outputs.specs, strict=True)):
            if type(leaf) is not np.ndarray or leaf.dtype != spec.dtype:
                outputs[index] = leaf = to_array(leaf, spec.dtype, self._result(index))
            expected = (len(arrays[0]), *spec.shape[1:]) if self.batched else spec.shape
            if not fits(leaf.shape, expected):
                raise errors.SignatureError(
                    f"{self._result(index)}: expected {describe(expected, spec.dtype)}, got "
                    f"{describe(leaf.shape, leaf.dtype)}"
                )
        return outputs

    def _result(self, index: int) -> str:
        return f"{self.name}: result{self.outputs.paths[index]}"

    def _pad(self, batch: Batch) -> list[np.ndarray]:
        num_rows = batch.num_rows
        size = next((size for size in self.batch_sizes if size >= num_rows), num_rows)
        if size > num_rows:
            for array in batch.arrays:
                # A real row: whatever the function does with it, it has done before.
                array[num_rows:size] = array[num_rows - 1]
        return [array[:size] for array in batch.arrays]


def make_bound_function(
    fn: Callable[..., Any] | Sequence[Callable[..., Any]],
    name: str | None = None,
    input_signature: Any = None,
    output_signature: Any = None,
    max_batch_size: int | None = None,
    batch_sizes: Sequence[int] | None = None,
    batched: bool | None = None,
    environments_argument: int | None = None,
) -> BoundFunction:
    """See `Server.bind`."""
    callables = tuple(fn) if isinstance(fn, list | tuple) else (fn,)
    if not callables or not all(callable(item) for item in callables):
        raise TypeError(f"expected a function or a non-empty list of functions, got {fn!r}")
    name = _check_name(name if name is not None else _name_of(callables[0]))
    if all(_is_tf_function(item) for item in callables):
        if input_signature is not None or output_signature is not None:
            raise errors.SignatureError(
                f"{name}: the signature of a tf.function is its own; give none to bind"
            )
        inputs, outputs = _read_tf_signatures(name, callables)
        pads = True
    else:
        if input_signature is None:
            raise errors.SignatureError(
                f"{name}: binding a Python function takes input_signature (a tuple, one nest of "
                "specs an argument) and output_signature (None: it returns nothing)"
            )
        inputs, outputs = _python_signatures(name, input_signature, output_signature)
        pads = False
    leaf = _environments_leaf(name, inputs, environments_argument)
    dimension = _batch_dimension(name, inputs, outputs, batched)
    if dimension is _UNBATCHED:
        if max_batch_size is not None or batch_sizes is not None:
            raise errors.SignatureError(
                f"{name}: max_batch_size and batch_sizes are for batched functions, and the inputs "
                f"{inputs} and outputs {outputs} do not all lead with the same dimension"
            )
        return BoundFunction(name, callables, inputs, outputs, 0, (), leaf)
    max_rows, sizes = _batch_sizes(name, dimension, pads, max_batch_size, batch_sizes)
    return BoundFunction(name, callables, inputs, outputs, max_rows, sizes, leaf)


def _environments_leaf(name: str, inputs: Signature, argument: int | None) -> int | None:
    if argument is None:
        return None
    arguments = inputs.structure
    if 0 <= argument < len(arguments):
        leaf = len(Signature(arguments[:argument]).specs)
        specs = Signature((arguments[argument],)).specs
        if len(specs) == 1 and specs[0].dtype.kind in "iu":
            return leaf
    raise errors.SignatureError(
        f"{name}: environments_argument={argument}: expected the index of an argument that is one "
        f"tensor of integers, of {inputs}"
    )


_UNBATCHED = -1


def _batch_dimension(
    name: str, inputs: Signature, outputs: Signature, batched: bool | None
) -> int | None:
    """The dimension that all tensors lead with (None: any size), or `_UNBATCHED`."""
    if batched is False:
        return _UNBATCHED
    specs = inputs.specs + outputs.specs
    leading = {spec.shape[0] if spec.shape else _UNBATCHED for spec in specs}
    same = bool(inputs.specs) and bool(outputs.specs) and len(leading) == 1
    dimension = leading.pop() if same else _UNBATCHED
    if dimension == 0:
        dimension = _UNBATCHED
    if dimension is _UNBATCHED:
        if batched:
            raise errors.SignatureError(
                f"{name}: cannot be batched: the inputs {inputs} and outputs {outputs} do not all "
                "lead with the same dimension"
            )
        return _UNBATCHED
    for spec, path in zip(inputs.specs, inputs.paths, strict=True):
        if None in spec.shape[1:]:
            raise errors.SignatureError(
                f"{name}: argument {path}: {spec}: only the first dimension of an input can be "
                "open in a batched function; fix the others, or bind with batched=False"
            )
    return dimension


def _batch_sizes(
    name: str,
    dimension: int | None,
    pads: bool,
    max_batch_size: int | None,
    batch_sizes: Sequence[int] | None,
) -> tuple[int, tuple[int, ...]]:
    """(rows of a full batch, sizes to pad to)."""
    sizes = tuple(sorted(set(batch_sizes or ())))
    if any(size < 1 for size in sizes) or (max_batch_size is not None and max_batch_size < 1):
        raise ValueError(f"{name}: batch sizes are at least 1")
    if dimension is not None:
        if sizes or max_batch_size not in (None, dimension):
            raise errors.SignatureError(
                f"{name}: its signature fixes the batch size at {dimension}; give no other"
            )
        return dimension, (dimension,)
    if sizes:
        if max_batch_size not in (None, sizes[-1]):
            raise ValueError(
                f"{name}: max_batch_size {max_batch_size} is not the largest of batch_sizes "
                f"{list(sizes)}"
            )
        return sizes[-1], sizes
    max_rows = max_batch_size or DEFAULT_MAX_BATCH_SIZE
    if not pads:
        return max_rows, ()
    powers = [2**i for i in range(max_rows.bit_length()) if 2**i < max_rows]
    return max_rows, (*powers, max_rows)


def _check_name(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(
            f"{name!r} cannot be a method of a client; bind with name= and a public identifier"
        )
    if name in RESERVED_NAMES:
        raise ValueError(f"{name!r} is taken by the client itself; bind under another name")
    return name


def _name_of(fn: Any) -> str:
    name = getattr(fn, "__name__", None) or getattr(
        getattr(fn, "python_function", None), "__name__", None
    )
    if name is None:
        raise ValueError(f"{fn!r} has no name of its own; bind it with name=")
    return name


def _is_tf_function(fn: Any) -> bool:
    return hasattr(fn, "get_concrete_function") and hasattr(fn, "input_signature")


def _read_tf_signatures(name: str, functions: Sequence[Any]) -> tuple[Signature, Signature]:
    signatures = []
    for fn in functions:
        if fn.input_signature is None:
            raise errors.SignatureError(
                f"{name}: the tf.function has no input_signature; give it one where it is defined"
            )
        inputs = _signature(f"{name}: input", tuple(fn.input_signature))
        outputs = fn.get_concrete_function().structured_outputs
        signatures.append((inputs, _signature(f"{name}: output", outputs)))
    first = signatures[0]
    for other in signatures[1:]:
        if [str(item) for item in other] != [str(item) for item in first]:
            raise errors.SignatureError(
                f"{name}: the functions of a list need the same signature, these have "
                f"{first[0]} -> {first[1]} and {other[0]} -> {other[1]}"
            )
    return first


def _python_signatures(name: str, inputs: Any, outputs: Any) -> tuple[Signature, Signature]:
    if not isinstance(inputs, tuple | list) or codec.is_named_tuple(inputs):
        raise errors.SignatureError(
            f"{name}: input_signature is a tuple with one entry a positional argument, got "
            f"{inputs!r}"
        )
    return _signature(f"{name}: input", tuple(inputs)), _signature(f"{name}: output", outputs)


def _signature(what: str, nest: Any) -> Signature:
    try:
        return Signature(nest)
    except errors.SignatureError as error:
        raise errors.SignatureError(f"{what} {error}") from None
