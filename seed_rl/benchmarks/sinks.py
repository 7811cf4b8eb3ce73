"""Unroll sinks for measuring."""

from seed_rl.agent import UnrollSink


class DiscardingSink(UnrollSink):
    """Takes unrolls and forgets them."""

    def put(self, unrolls) -> None:
        pass

    def next_batch(self, timeout):
        return None

    def training_done(self, batch, feedback, training_step) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass
