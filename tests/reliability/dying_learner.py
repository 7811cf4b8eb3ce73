"""seed_rl.main, killed while it writes its second checkpoint beyond DIE_BEYOND training steps."""

import os
import signal
import time

from tensorflow.python.ops import gen_io_ops

from seed_rl.checkpoints import Checkpoints
from seed_rl.main import run

_merge = gen_io_ops.merge_v2_checkpoints
_save = Checkpoints.save
_num_saves = 0  # beyond DIE_BEYOND


def _counted_save(self, frames, training_steps):
    global _num_saves
    _num_saves += training_steps > int(os.environ["DIE_BEYOND"])
    return _save(self, frames, training_steps)


def _die_before_the_merge(*args, **kwargs):
    """The data lie in a temporary directory; this moves them to where they belong."""
    if _num_saves == 2:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # until it comes
    return _merge(*args, **kwargs)


Checkpoints.save = _counted_save
gen_io_ops.merge_v2_checkpoints = _die_before_the_merge

if __name__ == "__main__":
    run()
