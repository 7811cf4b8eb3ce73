"""Which devices train and which infer: the one place that knows devices.

`make_placement` looks what there is and decides; gin says otherwise where it should:

    make_placement.accelerator = 'gpu'
    make_placement.num_training_gpus = 3   # of four: the fourth infers

Devices that do not train infer. Where all of them train, they infer too.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gin
import numpy as np
import tensorflow as tf
from absl import logging

from seed_rl.hosts import ALONE, HostGroup
from seed_rl.nests import map_nest
from seed_rl.setting_checks import check_number
from seed_rl.user_error import UserError

_ACCELERATORS = ("auto", "cpu", "gpu", "tpu")
_TPU_TRAINING_SHARE = 0.75  # of a host's cores, where the user does not say


class Placement(NamedTuple):
    """Where a learner trains and infers."""

    training_devices: tuple[str, ...]  # one replica each, of this process
    inference_devices: tuple[str, ...]  # used in turn
    strategy: tf.distribute.Strategy | None = None  # None: one device trains, without any
    encodes: bool = False  # whether tensors travel to the devices as `tpu_encode` has them
    compiles: bool = False  # whether the strategy compiles with XLA whatever one says
    hosts: HostGroup = ALONE  # those that train together, each on devices of its own

    @property
    def num_replicas(self) -> int:
        """How many parts a training batch of this host is cut into."""
        return 1 if self.strategy is None else self.strategy.num_replicas_in_sync

    @property
    def copies(self) -> tuple[str, ...]:
        """The inference devices that need a copy of the variables.

        The first training device has the variables themselves.
        """
        return tuple(d for d in self.inference_devices if d != self.training_devices[0])

    @property
    def on_accelerator(self) -> bool:
        """Whether training leaves the host's CPU to the host."""
        return "CPU" not in self.training_devices[0]

    def scope(self) -> contextlib.AbstractContextManager:
        """Returns the context in which the variables that are trained must be created."""
        # One device that trains is the one that TensorFlow takes by itself.
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    def describe(self) -> str:
        """Says what trains where, for the log."""
        kind = type(self.strategy).__name__ if self.strategy is not None else "no strategy"
        host = f"host {self.hosts.index} of {self.hosts.size}: " if self.hosts.size > 1 else ""
        return (
            f"{host}training on {_listed(self.training_devices)} ({kind}, {self.num_replicas} "
            f"replicas); inference on {_listed(self.inference_devices)}"
        )


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(_short(d) for d in devices)


def _short(device: str) -> str:
    """'/job:localhost/replica:0/task:0/device:CPU:1' → 'CPU:1'; a pod's task's number is kept."""
    spec = tf.DeviceSpec.from_string(device)
    task = f"task {spec.task} " if spec.task and spec.device_type == "TPU" else ""
    return f"{task}{spec.device_type}:{spec.device_index}"


@gin.configurable(denylist=["connect"])
def make_placement(
    accelerator: str = "auto",
    num_training_gpus: int | None = None,
    num_training_tpus: int | None = None,
    num_training_cpus: int = 1,
    num_logical_cpus: int = 1,
    tpu: str = "local",
    connect: Callable[[], HostGroup] = lambda: ALONE,
) -> Placement:
    """Decides where to train and to infer, and logs it. To be called before TensorFlow is used.

    Args:
      accelerator: 'cpu', 'gpu', 'tpu', or 'auto': the best there is, in the order TPU, GPU, CPU.
      num_training_gpus: GPUs that train, by MirroredStrategy if more than one; the others infer.
        None: all of them, which infer too.
      num_training_tpus: cores of each TPU host that train, by TPUStrategy; the others infer. None:
        three quarters of them, 6 of 8.
      num_training_cpus: logical CPU devices that train; the others infer. More than one is for
        trying on a CPU what several accelerators would do; it is not faster.
      num_logical_cpus: how many logical devices the CPU is cut into, for the same.
      tpu: name or address of the TPU; 'local' is the one in this machine.
      connect: returns the hosts that train together; called when TensorFlow knows how it shall
        divide this one's devices, which it must before it talks to others.

    Raises:
      UserError: there is no such device, or not so many; or what `connect` raises.
    """
    if accelerator not in _ACCELERATORS:
        raise UserError(
            f"make_placement.accelerator must be one of {', '.join(_ACCELERATORS)}, got "
            f"{accelerator!r}"
        )
    check_number("make_placement.num_logical_cpus", num_logical_cpus, at_least=1)
    kind = _best() if accelerator == "auto" else accelerator
    if accelerator == "auto" and kind == "cpu":
        _check_nothing_else_is_wanted({"gpu": num_training_gpus, "tpu": num_training_tpus})
    if not tf.config.list_physical_devices(kind.upper()) and (kind != "tpu" or tpu == "local"):
        raise _absent(kind, f"accelerator={kind!r}", "accelerator='auto' takes the best there is")
    _configure(kind, num_logical_cpus)
    hosts = connect()
    if kind == "tpu":
        placement = _on_tpu(tpu, num_training_tpus, hosts)
    elif kind == "gpu":
        placement = _mirrored("gpu", num_training_gpus, hosts)
    else:
        placement = _mirrored("cpu", num_training_cpus, hosts)
    placement = placement._replace(hosts=hosts)
    logging.info("%s", placement.describe())
    return placement


def _check_nothing_else_is_wanted(numbers: dict[str, int | None]) -> None:
    """Raises UserError if so many accelerators shall train that there is none of."""
    for kind, number in numbers.items():
        if number is not None:
            raise _absent(kind, f"num_training_{kind}s={number}", "accelerator='cpu' does without")


def default_placement() -> Placement:
    """Returns the placement on whatever device TensorFlow takes by itself: one, for everything."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    device = tf.config.list_logical_devices(kind)[0].name
    return Placement((device,), (device,))


def _best() -> str:
    found = [k for k in ("tpu", "gpu") if tf.config.list_physical_devices(k.upper())]
    return found[0] if found else "cpu"


def _configure(kind: str, num_logical_cpus: int) -> None:
    """Settings that TensorFlow only takes before it has initialised its devices."""
    try:
        if kind == "cpu":
            tf.config.set_visible_devices([], "GPU")
        for gpu in tf.config.list_physical_devices("GPU"):
            # Without it the learner would take all of the memory, whatever it needs.
            tf.config.experimental.set_memory_growth(gpu, True)
        if num_logical_cpus > 1:
            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0],
                [tf.config.LogicalDeviceConfiguration()] * num_logical_cpus,
            )
    except RuntimeError as error:
        # They may be as they ought to be already: what follows will see.
        logging.warning("devices are in use already and stay as they are: %s", error)


_INSTALLED_BY = {
    "cpu": "TensorFlow",
    "gpu": "CUDA for TensorFlow (pip install 'seed-rl[gpu]')",
    "tpu": "the TensorFlow for TPUs (see docs/devices.md)",
}


def _absent(kind: str, asked_by: str, way_out: str) -> UserError:
    there = [d.name.removeprefix("/physical_device:") for d in tf.config.list_physical_devices()]
    return UserError(
        f"make_placement.{asked_by}, but TensorFlow sees no {kind.upper()} here; it sees "
        f"{', '.join(there)}. Is its driver installed, and {_INSTALLED_BY[kind]}? "
        f"make_placement.{way_out}"
    )


def _mirrored(kind: str, num_training: int | None, hosts: HostGroup) -> Placement:
    devices = [device.name for device in tf.config.list_logical_devices(kind.upper())]
    if hosts.size > 1:  # the others' are listed too
        devices = [d for d in devices if tf.DeviceSpec.from_string(d).task == hosts.index]
    training, others = _divided(devices, num_training, f"num_training_{kind}s")
    strategy = None
    if len(training) > 1:
        # NCCL is for GPUs; between logical devices of a CPU one device adds all up.
        operations = tf.distribute.ReductionToOneDevice() if kind == "cpu" else None
        strategy = tf.distribute.MirroredStrategy(training, cross_device_ops=operations)
    return Placement(tuple(training), tuple(others or training), strategy)


def _divided(
    devices: Sequence[str], num_training: int | None, name: str
) -> tuple[Sequence[str], Sequence[str]]:
    """Returns (those that train, the others)."""
    number = len(devices) if num_training is None else num_training
    if not 1 <= number <= len(devices):
        raise UserError(
            f"make_placement.{name}={num_training}, but there are {len(devices)} of them: "
            f"{_listed(devices)}"
        )
    return devices[:number], devices[number:]


def _on_tpu(tpu: str, num_training: int | None, hosts: HostGroup) -> Placement:
    """Some cores of every host train, the others infer. Not tried: there was no TPU to try it on.

    One process drives the hosts of a pod: it serves all actors, and its batches go to the cores of
    all hosts; unless each host has a process of its own, which sees the host's own cores alone.
    """
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
    if tpu != "local":
        tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    coordinates = np.asarray(topology.device_coordinates)  # [hosts, cores of a host, dimensions]
    num_hosts, num_cores = coordinates.shape[:2]
    if num_training is None:
        num_training = max(1, int(num_cores * _TPU_TRAINING_SHARE))
    names = [d.name for d in tf.config.list_logical_devices("TPU")]
    by_host = [
        _divided(
            [n for n in names if (tf.DeviceSpec.from_string(n).task or 0) == hosts.index + host],
            num_training,
            "num_training_tpus",
        )
        for host in range(num_hosts)
    ]
    training = [name for first, _ in by_host for name in first]
    assignment = tf.tpu.experimental.DeviceAssignment(
        topology, coordinates[:, :num_training].reshape(-1, 1, coordinates.shape[-1])
    )
    strategy = tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment)
    others = [name for _, rest in by_host for name in rest]
    return Placement(
        tuple(training), tuple(others or training), strategy, encodes=True, compiles=True
    )


# A TPU works on tiles whose last dimension is 128; four bytes are one uint32.
_TILE = 128
# What a TPU does not compute with, and the smallest type it does that holds all of its values.
_WIDER = {
    tf.uint8: tf.bfloat16,  # 8 significant bits: 0 to 255 are exact
    tf.int8: tf.bfloat16,
    tf.uint16: tf.int32,
    tf.int16: tf.int32,
}


class Encoded(tf.experimental.ExtensionType):
    """A tensor in the layout in which it travels to a TPU; see tpu_encode."""

    data: tf.Tensor
    original_shape: tf.TensorShape
    original_dtype: tf.DType


def tpu_encode(nest: Any) -> Any:
    """Brings tensors into layouts that a TPU takes well; done on the host.

    Small types, which a TPU cannot compute with, are packed where that needs no padding: four uint8
    in a uint32, if the number of elements divides by 128. Otherwise they are cast to a type that
    holds all of their values. Floats become flat where their last dimension would be padded to a
    tile. What a TPU takes as it is stays as it is.

    Args:
      nest: nest of tensors or arrays. Tensors of unknown shape are only cast.

    Returns:
      The nest with an `Encoded` in place of every tensor that was changed: for `tpu_decode`.
    """
    return map_nest(_encode, nest)


def tpu_decode(nest: Any, structure: Any = None) -> Any:
    """Undoes `tpu_encode`, without loss; done on the TPU, in a tf.function.

    Args:
      nest: what tpu_encode returned; or, with a structure, only the tensors in it (`Encoded.data`,
        or the tensor itself), in a nest or, flat, in a list.
      structure: says what was encoded: the nest that tpu_encode was given or has returned, or
        tf.TensorSpecs for it.

    Returns:
      The nest that was encoded, in the form of the structure if there is one.

    Raises:
      ValueError: the structure has another number of tensors.
    """
    if structure is None:
        return map_nest(lambda x: _decode(x) if isinstance(x, Encoded) else x, nest)
    tensors, originals = tf.nest.flatten(nest), tf.nest.flatten(structure)
    if len(tensors) != len(originals):
        raise ValueError(
            f"tpu_decode got {len(tensors)} tensors for a structure of {len(originals)}"
        )
    decoded = [_decode_as(x, s) for x, s in zip(tensors, originals, strict=True)]
    return tf.nest.pack_sequence_as(structure, decoded)


def _encode(x: Any) -> Any:
    x = tf.convert_to_tensor(x)
    data = _packed(x)
    return x if data is x else Encoded(data, x.shape, x.dtype)


def _packed(x: tf.Tensor) -> tf.Tensor:
    number: int = x.shape.num_elements() or 0 if x.shape.rank is not None else 0
    in_tiles = number > 0 and number % _TILE == 0
    if x.dtype == tf.uint8 and in_tiles:
        return tf.bitcast(tf.reshape(x, [number // 4, 4]), tf.uint32)
    if x.dtype in _WIDER:
        return tf.cast(x, _WIDER[x.dtype])
    if x.dtype == tf.float32 and in_tiles and x.shape.rank > 1 and x.shape[-1] % _TILE:
        return tf.reshape(x, [number])
    return x


def _decode(x: Encoded) -> tf.Tensor:
    return _unpacked(x.data, x.original_dtype, x.original_shape)


def _decode_as(x: Any, original: Any) -> tf.Tensor:
    if isinstance(x, Encoded):
        return _decode(x)
    x = tf.convert_to_tensor(x)
    if isinstance(original, (Encoded, Encoded.Spec)):
        return _unpacked(x, original.original_dtype, original.original_shape)
    if not hasattr(original, "dtype"):  # a plain number
        original = tf.convert_to_tensor(original)
    return _unpacked(x, tf.as_dtype(original.dtype), tf.TensorShape(original.shape))


def _unpacked(data: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    if dtype == tf.uint8 and data.dtype == tf.uint32:
        return tf.reshape(tf.bitcast(data, tf.uint8), shape)
    if data.dtype != dtype:
        data = tf.cast(data, dtype)
    # Only what is known in full can have become flat.
    return tf.reshape(data, shape) if shape.is_fully_defined() else data
