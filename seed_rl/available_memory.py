"""How much memory this process can still take."""

import pathlib


def available_bytes(root: pathlib.Path | None = None) -> int | None:
    """Returns the bytes left for this process, or None where that cannot be found out.

    The lesser of what Linux calls available and what the limits of the process's control groups
    (containers, systemd, Slurm), version 1 or 2, leave.

    Args:
      root: the file system's root, another one in tests.
    """
    root = root or pathlib.Path("/")
    left = [_available_in_system(root), *_left_in_groups(root)]
    return min((x for x in left if x is not None), default=None)


def _available_in_system(root: pathlib.Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_groups(root: pathlib.Path) -> list[int | None]:
    """What the limits of the process's groups and of those around them leave."""
    left = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = pathlib.PurePosixPath(path.lstrip("/"))
        for part in (group, *group.parents):
            left.append(_left_in_group(folder / part, *names))
    return left


def _left_in_group(folder: pathlib.Path, limit_name: str, usage_name: str) -> int | None:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None  # no such group, or the limit is `max`
    # The cache of files is counted as used, but makes way.
    return max(0, int(limit) - int(usage) + _inactive_file_bytes(folder))


def _inactive_file_bytes(folder: pathlib.Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
