"""Several hosts that train one agent together, each with a learner of its own.

Each host serves its own actors, makes its own inference batches and trains on its own data; in
every training step the gradients of all hosts are averaged, so that all keep the same parameters.
Host 0 alone writes the checkpoints.

TensorFlow carries what hosts tell each other, by its own gRPC servers and collective operations (a
ring, on the hosts' CPUs). Such a server listens on all of the machine's addresses, and whoever
reaches it can run any TensorFlow operation there: they are for a network that one trusts.
"""

import concurrent.futures
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from seed_rl.grpc_service import addresses
from seed_rl.rendezvous import wait_for_all
from seed_rl.user_error import UserError

_ERRORS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)


class HostGoneError(UserError):
    """A host of the group has ended, or cannot be reached any more."""


class Meeting(NamedTuple):
    """What all hosts together said in one round; the same on all of them."""

    num_ready: int  # hosts that have a batch to train on
    num_stopping: int  # hosts that are to end
    num_steps: int  # agent steps of all hosts since they started


class HostGroup:
    """The hosts of a run. This one is of a single host, for which there is nothing to tell.

    What a host of several does here waits for all others to do the same; each must therefore call
    the same in the same order.

    Raises:
      HostGoneError: from every call, if another host has ended or is not reached.
    """

    size = 1
    index = 0

    @property
    def is_chief(self) -> bool:
        """Whether this host writes the checkpoints: the first one."""
        return self.index == 0

    def environments(self, num_envs: int) -> range:
        """The environments whose actors connect to this host."""
        each = num_envs // self.size
        return range(self.index * each, (self.index + 1) * each)

    def sum(self, nest: Any) -> Any:
        """Adds up a nest of tensors of one numeric type, leaf by leaf, over all hosts."""
        return nest

    def gather(self, nest: Any) -> Any:
        """Stacks float32 tensors of all hosts: leaves [*shape] become [size, *shape]."""
        return self.sum(tf.nest.map_structure(self._in_own_row, nest))

    def meet(self, ready: bool, stopping: bool, num_steps: int) -> Meeting:
        """Tells all hosts how this one stands, and returns how they all stand."""
        return Meeting(int(ready), int(stopping), num_steps)

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Gives variables the values that they have on the chief."""

    def check_same(self, described: Sequence[str]) -> None:
        """Raises UserError if what describes a host is not the same on all.

        Args:
          described: 'name=value', in the same order on all hosts.
        """

    def _in_own_row(self, x: Any) -> tf.Tensor:
        x = tf.cast(x, tf.float32)
        none = tf.zeros_like(x)
        return tf.stack([x if host == self.index else none for host in range(self.size)])


ALONE = HostGroup()


def connect_hosts(given: Sequence[str], index: int, insecure: bool = False) -> HostGroup:
    """Connects this process to those of the other hosts; waits until all of them are there.

    To be called before TensorFlow is used, and once in a process.

    Args:
      given: 'host:port' of every host in the same order on all: where it listens for the others.
        None or one of them: this process is alone.
      index: which of them this process is.
      insecure: that this is wanted although whoever reaches the ports can run code here.

    Raises:
      UserError: an address or the index is wrong, `insecure` is not said, or the port is taken.
    """
    if len(given) < 2:
        if index:
            raise UserError(f"--host_index={index}, but --hosts does not name so many hosts")
        return ALONE
    if not 0 <= index < len(given):
        raise UserError(f"--host_index={index} must be from 0 to {len(given) - 1}, as --hosts has")
    if len(set(given)) < len(given):
        raise UserError(f"--hosts={','.join(given)} has an address twice")
    for text in given:
        address = addresses.parse(text)
        if address.path or not address.port:
            raise UserError(f"--hosts has {text!r}: expected host:port")
    if not insecure:
        raise UserError(
            "--hosts: what hosts tell each other is not encrypted, TensorFlow listens for it on "
            "all addresses of this machine, and whoever reaches the port can run code here. Allow "
            "it with --insecure_hosts on a network that you trust (docs/devices.md)"
        )
    _check_port(addresses.parse(given[index]).port)
    return _Hosts(given, index)


def _check_port(port: int) -> None:
    """Raises UserError if the port is taken: TensorFlow would say so when all wait for this one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # as TensorFlow does
        except OSError as error:
            raise UserError(f"--hosts: port {port} cannot be listened on here: {error}") from error


class _Hosts(HostGroup):
    """Several hosts."""

    def __init__(self, given: Sequence[str], index: int):
        self.size, self.index = len(given), index
        logging.info("host %d of %s: waiting until all are there", index, ", ".join(given))
        wait_for_all(given, index)
        with _deadly_signals():
            self._strategy = _make_strategy(given, index)
        # TensorFlow is waited for in a thread, so that signals are heard meanwhile.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hosts")
        logging.info("all %d hosts are there", self.size)
        # One for each type, for any length: what differs in length alone is not traced anew.
        self._sums: dict[tf.DType, Any] = {}

    def sum(self, nest: Any) -> Any:
        leaves = [tf.convert_to_tensor(x) for x in tf.nest.flatten(nest)]
        # One message for all: each takes two rounds of the ring, however small.
        flat = tf.concat([tf.reshape(x, [-1]) for x in leaves], axis=0)
        try:
            total = self._thread.submit(self._sum_of(flat.dtype), flat).result()
        except _ERRORS as error:
            logging.debug("a collective operation failed", exc_info=True)
            raise HostGoneError(
                f"host {self.index} has lost another host: it ended, hangs or is not reached any "
                "more. Start all hosts again by the same commands: they go on from the newest "
                "checkpoint"
            ) from error
        parts = tf.split(total, [x.shape.num_elements() for x in leaves])
        summed = [tf.reshape(part, x.shape) for part, x in zip(parts, leaves, strict=True)]
        return tf.nest.pack_sequence_as(nest, summed)

    def meet(self, ready: bool, stopping: bool, num_steps: int) -> Meeting:
        said = tf.constant([int(ready), int(stopping), num_steps], tf.int64)
        return Meeting(*map(int, self.sum([said])[0].numpy()))

    def broadcast(self, variables: Sequence[Any]) -> None:
        for dtype in dict.fromkeys(variable.dtype for variable in variables):
            chosen = [variable for variable in variables if variable.dtype == dtype]
            values = [tf.convert_to_tensor(variable) for variable in chosen]
            own = values if self.is_chief else [tf.zeros_like(value) for value in values]
            for variable, value in zip(chosen, self.sum(own), strict=True):
                variable.assign(value)

    def check_same(self, described: Sequence[str]) -> None:
        (number,) = self.gather([float(len(described))])
        if len(set(number.numpy())) > 1:
            raise UserError("the hosts run different versions of seed_rl, or different agents")
        digests = tf.stack([tf.strings.to_hash_bucket_fast(text, 2**24) for text in described])
        (rows,) = self.gather([tf.cast(digests, tf.float32)])  # [hosts, described]; exact to 2**24
        wrong = [
            text
            for text, column in zip(described, rows.numpy().T, strict=True)
            if len(set(column)) > 1
        ]
        if wrong:
            raise UserError(
                f"the hosts are configured differently: host {self.index} has {'; '.join(wrong)}, "
                "and not all others do. Give all of them the same flags and gin, but for "
                "--host_index, --logdir and --server_address"
            )

    def _sum_of(self, dtype: tf.DType) -> Any:
        if dtype not in self._sums:
            flat = tf.TensorSpec([None], dtype)
            self._sums[dtype] = tf.function(self._all_reduce, [flat], autograph=False)
        return self._sums[dtype]

    def _all_reduce(self, flat: tf.Tensor) -> tf.Tensor:
        def replica(x: tf.Tensor) -> Any:
            context = tf.distribute.get_replica_context()
            # The identity is on the replica's device; an argument is on none.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(x))

        return self._strategy.run(replica, args=(flat,))


@contextlib.contextmanager
def _deadly_signals() -> Iterator[None]:
    """Signals end the process at once: while TensorFlow connects, Python hears none.

    Afterwards they are as they were; TensorFlow takes SIGTERM for itself meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: it is not Python's
                signal.signal(number, handler)


def _make_strategy(given: Sequence[str], index: int) -> tf.distribute.Strategy:
    """The strategy by which hosts talk; their accelerators are left to the placement."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(given)}),
        task_type="worker",
        task_id=index,
        num_accelerators={"GPU": 0, "TPU": 0},
        rpc_layer="grpc",
    )
    tf.get_logger().setLevel("WARNING")  # it would tell of every collective operation it makes
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(resolver, ring)
    except (tf.errors.OpError, RuntimeError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"host {index} cannot listen at {given[index]} or reach the others "
            f"({', '.join(given)}): {first_line[:300]}. Is the port free, and is every host "
            "started?"
        ) from error
