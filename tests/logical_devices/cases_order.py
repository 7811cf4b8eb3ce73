"""A training step's reads of a variable come before its writes also as TensorFlow executes it.

TensorFlow's graph optimizer may drop an order that tf.function had put down. Then a step differs
from one run to the next, but only now and then; so the graph that is executed is looked at.
"""

import pytest
import tensorflow as tf
from cases_training import Training
from tensorflow.python.eager import context  # there is no public way to see an executed graph


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("max_gradient_norm", [0.0, 0.3])
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", ["vtrace", "r2d2"])
def test_what_is_read_before_a_write_stays_before_it(
    make_agent, make_batch, place, name, num_devices, max_gradient_norm, precision
):
    options = {"max_gradient_norm": max_gradient_norm, "precision": precision}
    training = Training(make_agent, name, place(num_devices), **options)
    with context.collect_graphs(optimized=True) as graphs:
        training.trainer.step(make_batch(name, 3))
    executed = max(graphs, key=lambda graph: len(graph.node))
    (function,) = training.trainer._step._list_all_concrete_functions()
    orders = list(_read_write_orders(function.graph))
    assert len(orders) > 40 * num_devices
    predecessors = _Predecessors({node.name: list(node.input) for node in executed.node})
    names = {node.name for node in executed.node}
    lost = [
        (read, write)
        for read, write in orders
        if read in names and read not in predecessors.of(write)
    ]
    assert lost == []


def _read_write_orders(graph):
    """Yields (read, write), the names of operations on one variable of which one follows the other.

    Args:
      graph: as tf.function traced it.
    """
    operations = {operation.name: operation for operation in graph.get_operations()}
    predecessors = _Predecessors(
        {
            name: [*(x.op.name for x in op.inputs), *(x.name for x in op.control_inputs)]
            for name, op in operations.items()
        }
    )
    for name, write in operations.items():
        if write.type.startswith("Assign"):
            for before in predecessors.of(name):
                read = operations[before]
                if read.type == "ReadVariableOp" and read.inputs[0] is write.inputs[0]:
                    yield before, name


class _Predecessors:
    """All nodes of a graph that are done before a node starts.

    Args:
      inputs: by a node's name the names of its inputs, with TensorFlow's marks or without.
    """

    def __init__(self, inputs):
        self._inputs = {
            name: [source.lstrip("^").split(":")[0] for source in sources]
            for name, sources in inputs.items()
        }

    def of(self, name):
        found, left = set(), [name]
        while left:
            new = set(self._inputs.get(left.pop(), ())) - found
            found |= new
            left.extend(new)
        return found


def test_an_order_that_was_lost_would_be_found():
    """The order of the first read is dropped by hand; that of the second has a way round."""
    graph = tf.Graph()
    with graph.as_default():
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], name="handle")
        reads = [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32, name=f"read{i}")
            for i in range(2)
        ]
        with tf.control_dependencies(reads):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(1.0), name="write")
    assert sorted(_read_write_orders(graph)) == [("read0", "write"), ("read1", "write")]
    executed = _Predecessors({"write": ["handle", "^way"], "way": ["read1:0"], "read0": ["handle"]})
    assert executed.of("write") == {"handle", "way", "read1"}
