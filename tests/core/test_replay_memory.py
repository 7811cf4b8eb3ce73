"""What a replay will take, and what is refused."""

import re

import numpy as np
import pytest

from seed_rl.available_memory import available_bytes
from seed_rl.grpc_service import TensorSpec
from seed_rl.replay import PrioritizedReplay
from seed_rl.replay_memory import check_replay_fits, estimate_replay_bytes
from seed_rl.user_error import UserError

GIB = 2**30
# An unroll of R2D2 on Atari.
UNROLL = {
    "frames": TensorSpec((121, 84, 84, 1), np.uint8),  # 853,776 bytes
    "q_values": TensorSpec((121, 18), np.float32),  # 8,712
    "reward": TensorSpec((121,), np.float32),  # 484
    "lstm": (TensorSpec((512,), np.float32), TensorSpec((512,), np.float32)),  # 4,096
}


def test_the_estimate_is_that_of_a_sum_by_hand():
    estimate = estimate_replay_bytes(UNROLL, 100_000)
    plain = 8_712 + 484 + 4_096
    # At most 110 bytes an item for the length, the object and the indices.
    assert 0 <= estimate.plain / 100_000 - (plain + 853_776) < 110
    assert 0 <= estimate.expected / 100_000 - (plain + 853_776 / 20) < 110
    half = estimate_replay_bytes(UNROLL, 100_000, compression=2)
    assert 0 <= half.expected / 100_000 - (plain + 853_776 / 2) < 110


def test_a_full_replay_of_noise_takes_the_plain_estimate():
    specs = (TensorSpec((5000,), np.uint8), TensorSpec((7,), np.float32))
    replay = PrioritizedReplay(1000, specs, 0.6)
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (1000, 5000)).astype(np.uint8)
    replay.insert((noise, np.ones((1000, 7), np.float32)), np.ones(1000))
    assert replay.bytes_used == pytest.approx(estimate_replay_bytes(specs, 1000).plain, rel=0.002)


def test_the_papers_replay_fits_and_the_learner_says_what_it_takes():
    line = check_replay_fits(UNROLL, 100_000, available=20 * GIB)
    figures = [float(x) for x in re.findall(r"([\d.]+) GiB", line)]
    # 55,981 and 867,068 bytes an item, and about a hundred for the object.
    assert figures == pytest.approx([5.22, 80.76, 20.0], abs=0.02)


@pytest.mark.parametrize(
    ("size", "max_bytes", "reserved", "fits"),
    [
        (100_000, None, 0, True),  # 5.2 GiB expected
        (100_000, None, 3 * GIB, False),
        (200_000, None, 0, False),
        (200_000, 7 * GIB, 0, True),  # the budget keeps it within
        (100_000, 9 * GIB, 0, True),  # the size does
        (None, 7 * GIB, 0, True),
        (None, 7 * GIB, 2 * GIB, False),
        (None, 9 * GIB, 0, False),
    ],
)
def test_what_does_not_fit_is_refused_with_figures(size, max_bytes, reserved, fits):
    def check():
        return check_replay_fits(UNROLL, size, max_bytes, reserved, available=8 * GIB)

    if fits:
        assert "available are 8.00 GiB" in check()
    else:
        with pytest.raises(UserError, match=r"available are 8\.00 GiB.*smaller size"):
            check()


def test_without_any_limit_it_is_refused():
    with pytest.raises(UserError, match="neither is given"):
        check_replay_fits(UNROLL, None)


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n"}


def test_linux_says_what_is_available(tmp_path):
    write(tmp_path, MEMINFO)
    assert available_bytes(tmp_path) == 5000 * 1024


def test_elsewhere_it_is_not_known_and_nothing_is_refused(tmp_path, monkeypatch):
    assert available_bytes(tmp_path) is None
    monkeypatch.setattr("seed_rl.replay_memory.available_bytes", lambda: None)
    assert "not known" in check_replay_fits(UNROLL, 10**9)


def test_limits_of_control_groups_count_with_those_around_them(tmp_path):
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "1000\n",
            "sys/fs/cgroup/outer/memory.max": "3000000\n",
            "sys/fs/cgroup/outer/memory.current": "2000000\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 5\ninactive_file 300000\n",
        },
    )
    assert available_bytes(tmp_path) == 3_000_000 - 2_000_000 + 300_000


def test_control_groups_of_version_1_count_too(tmp_path):
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "5:cpu:/job\n4:hugetlb,memory:/job\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "7000000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000000\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "500000\n",
        },
    )
    assert available_bytes(tmp_path) == 1_500_000
