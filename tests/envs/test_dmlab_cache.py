"""The cache of compiled maps."""

import logging
import multiprocessing
import os
import subprocess
import sys

import pytest

from seed_rl.envs.dmlab_cache import LevelCache, file_name
from seed_rl.user_error import UserError

KEY = "explore_maze_noaas_0123456789abcdef0123456789abcdef"
MAP = b"PK\x03\x04 a compiled map" + bytes(range(256)) * 20


@pytest.fixture
def pk3(tmp_path):
    """A compiled map, as the engine hands it over."""
    path = tmp_path / "compiled.pk3"
    path.write_bytes(MAP)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "new" / "maps"


def fetched(cache, tmp_path, key=KEY):
    """What the cache gives for a key; None if it has nothing, and then leaves nothing behind."""
    path = tmp_path / "fetched.pk3"
    path.unlink(missing_ok=True)
    found = cache.fetch(key, str(path))
    assert found is path.exists()
    return path.read_bytes() if found else None


def test_a_map_is_kept_for_everyone(folder, pk3, tmp_path):
    cache = LevelCache(folder)
    assert fetched(cache, tmp_path) is None
    assert cache.write(KEY, pk3) is None
    assert fetched(cache, tmp_path) == MAP
    assert fetched(LevelCache(str(folder)), tmp_path) == MAP
    assert fetched(cache, tmp_path, KEY + "0") is None


def test_a_later_map_takes_the_place_of_an_earlier_one(folder, pk3, tmp_path):
    cache = LevelCache(folder)
    cache.write(KEY, pk3)
    (tmp_path / "compiled.pk3").write_bytes(b"another")
    cache.write(KEY, pk3)
    assert fetched(cache, tmp_path) == b"another"
    assert len(list(folder.iterdir())) == 1


def flip_a_bit(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"nonsense" * 100,
        flip_a_bit,
        lambda content: content[1:],
    ],
)
def test_a_damaged_map_counts_as_missing_and_can_be_made_anew(
    folder, pk3, tmp_path, damage, caplog
):
    cache = LevelCache(folder)
    cache.write(KEY, pk3)
    (entry,) = folder.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert fetched(cache, tmp_path) is None
    assert "damaged" in caplog.text and KEY in caplog.text
    cache.write(KEY, pk3)
    assert fetched(cache, tmp_path) == MAP


@pytest.mark.parametrize(
    "key",
    [
        "../../escaped",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b\\c",
        "with\0null and\nline",
        "~/.bashrc",
        "x" * 5000,
        "ключ",
        "\ud800",
    ],
)
def test_no_key_leaves_the_folder(folder, pk3, tmp_path, key):
    cache = LevelCache(folder)
    cache.write(key, pk3)
    assert fetched(cache, tmp_path, key) == MAP
    (entry,) = folder.iterdir()
    assert entry.is_file() and entry.name.isascii() and len(entry.name) < 200
    everything = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert everything == {entry, tmp_path / "compiled.pk3", tmp_path / "fetched.pk3"}


def test_different_keys_never_share_a_file():
    keys = ["a/b", "a_b", "a.b", "A_b", "x" * 100, "x" * 101, "", "_"]
    assert len({file_name(key).lower() for key in keys}) == len(keys)


def test_a_write_that_fails_keeps_the_old_map_and_no_rests(
    folder, pk3, tmp_path, monkeypatch, caplog
):
    cache = LevelCache(folder)
    cache.write(KEY, pk3)
    (tmp_path / "compiled.pk3").write_bytes(b"another")

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    cache.write(KEY, pk3)
    assert "No space left" in caplog.text
    assert len(list(folder.iterdir())) == 1
    assert fetched(cache, tmp_path) == MAP


def test_a_map_that_cannot_be_copied_whole_is_taken_away(folder, pk3, tmp_path, caplog):
    cache = LevelCache(folder)
    cache.write(KEY, pk3)
    missing = tmp_path / "not" / "there.pk3"
    assert cache.fetch(KEY, str(missing)) is False
    assert "could not fetch" in caplog.text


def test_a_missing_map_to_write_is_logged_and_ends_no_episode(folder, tmp_path, caplog):
    LevelCache(folder).write(KEY, str(tmp_path / "nothing.pk3"))
    assert "could not keep" in caplog.text
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(pk3):
    with pytest.raises(UserError, match="level cache"):
        LevelCache(os.path.join(pk3, "below_a_file"))


def _write_and_fetch(folder, number, barrier, failures):
    """Writes maps of its own and expects to fetch whole ones, anybody's."""
    cache = LevelCache(folder)
    own = os.path.join(folder, os.pardir, f"own_{number}")
    content = bytes([number]) * 200_000
    with open(own, "wb") as file:
        file.write(content)
    barrier.wait()
    for _ in range(40):
        cache.write(KEY, own)
        target = f"{own}.fetched"
        if not cache.fetch(KEY, target):
            failures.put("missing")
            return
        with open(target, "rb") as file:
            got = file.read()
        if len(got) != 200_000 or len(set(got)) != 1:
            failures.put("torn")
            return
    failures.put("")


def test_many_actors_at_once_never_see_half_a_map(folder):
    context = multiprocessing.get_context("spawn")
    barrier, failures = context.Barrier(4), context.Queue()
    workers = [
        context.Process(target=_write_and_fetch, args=(str(folder), i, barrier, failures))
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    assert [failures.get(timeout=60) for _ in workers] == [""] * 4
    for worker in workers:
        worker.join()
    assert len(list(folder.iterdir())) == 1


def test_a_local_cache_needs_no_tensorflow(tmp_path):
    script = (
        "import sys; from seed_rl.envs.dmlab_cache import LevelCache; LevelCache(sys.argv[1]);"
        "sys.exit('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert done.returncode == 0


# TensorFlow's file systems, here the one in memory


def test_any_path_that_tensorflow_knows(pk3, tmp_path):
    tf = pytest.importorskip("tensorflow")
    cache = LevelCache("ram://cache/maps")
    assert fetched(cache, tmp_path) is None
    cache.write(KEY, pk3)
    cache.write(KEY, pk3)
    assert fetched(cache, tmp_path) == MAP
    (name,) = tf.io.gfile.listdir("ram://cache/maps")
    assert name == file_name(KEY)
    with tf.io.gfile.GFile(f"ram://cache/maps/{name}", "wb") as file:
        file.write(b"damaged")
    assert fetched(cache, tmp_path) is None
    cache.write(KEY, pk3)
    assert fetched(cache, tmp_path) == MAP


def test_a_file_system_that_does_not_exist_is_the_users_to_mend():
    pytest.importorskip("tensorflow")
    with pytest.raises(UserError, match="nowhere://maps"):
        LevelCache("nowhere://maps")
