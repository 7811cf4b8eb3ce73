"""Compiled maps of DeepMind Lab, kept for all actors of all runs.

The engine compiles the map of every new maze, for 2 to 67 seconds; fetching one takes less than
one. It asks the cache through two methods, `fetch` and `write`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pathlib
import re
import uuid
from typing import Any, Protocol

from seed_rl.user_error import UserError

logger = logging.getLogger(__name__)

# An entry is this, the SHA-256 of the map in hexadecimal, a line feed, and the map. In one file,
# which is replaced as a whole, map and checksum always belong together.
_MAGIC = b"seed_rl map 1 "
_DIGEST_LENGTH = 64  # hexadecimal digits
_MAX_READABLE = 80  # characters of a key that are kept in the file's name


class LevelCache:
    """Keeps compiled maps in a folder that any number of actors may share.

    An entry appears as a whole or not at all, whoever writes it at the same time. One that is
    damaged counts as missing, so the engine compiles the map again and replaces it. A cache that
    fails costs time, and no episode: what goes wrong is logged.

    Args:
        directory: a local folder, made if it is missing, or one of TensorFlow's file systems, such
            as 'gs://bucket/maps'. TensorFlow is imported for the latter only.

    Raises:
        UserError: the folder cannot be made.
        ModuleNotFoundError: TensorFlow is needed and not installed.
    """

    def __init__(self, directory: str | os.PathLike):
        self._directory = os.fspath(directory)
        self._files: _Files
        if "://" in self._directory:
            self._files = _TensorFlowFiles(self._directory)
        else:
            self._files = _LocalFiles(self._directory)

    def fetch(self, key: str, pk3_path: str) -> bool:
        """Writes the map `key` to the local file pk3_path; returns whether it could."""
        try:
            entry = self._files.read(file_name(key))
            if entry is None:
                return False
            content = _content(entry)
            if content is None:
                logger.warning("the map %r in %s is damaged: made anew", key, self._directory)
                return False
            pathlib.Path(pk3_path).write_bytes(content)
        except Exception as error:  # of any file system
            logger.warning("could not fetch the map %r from %s: %s", key, self._directory, error)
            with contextlib.suppress(OSError):
                os.unlink(pk3_path)  # which may hold a part of the map
            return False
        return True

    def write(self, key: str, pk3_path: str) -> None:
        """Keeps the local file pk3_path as the map `key`, in place of what was there."""
        try:
            self._files.replace(file_name(key), _entry(pathlib.Path(pk3_path).read_bytes()))
        except Exception as error:
            logger.warning("could not keep the map %r in %s: %s", key, self._directory, error)


def file_name(key: str) -> str:
    """Returns the name of the file for `key`: different for every key, and of harmless characters.

    Levels make the keys, so they are not to be trusted: one may be '../../.bashrc'.
    """
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", key)[:_MAX_READABLE]
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{readable}.{digest[:32]}.map"


def _entry(content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _content(entry: bytes) -> bytes | None:
    """Returns the map of an entry; None if it is damaged."""
    content = entry[len(_MAGIC) + _DIGEST_LENGTH + 1 :]
    return content if entry == _entry(content) else None


class _Files(Protocol):
    """Files of one folder, by their names."""

    def read(self, name: str) -> bytes | None:
        """Returns what the file holds; None if there is no such file."""

    def replace(self, name: str, content: bytes) -> None:
        """Puts a file in place of the one there is, so that readers see either of them whole."""


def _temporary_name(name: str) -> str:
    return f".{name}.{uuid.uuid4().hex}.tmp"


class _LocalFiles:
    def __init__(self, directory: str):
        self._directory = pathlib.Path(directory).expanduser().absolute()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The level cache {directory!r} cannot be made: {error}") from error

    def read(self, name: str) -> bytes | None:
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        temporary = self._directory / _temporary_name(name)
        try:
            temporary.write_bytes(content)
            temporary.replace(self._directory / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class _TensorFlowFiles:
    def __init__(self, directory: str):
        import tensorflow as tf  # hundreds of MB, which actors with a local folder do without

        self._gfile: Any = tf.io.gfile
        self._directory = directory if directory.endswith("/") else directory + "/"
        try:
            self._gfile.makedirs(self._directory)
        except tf.errors.OpError as error:
            raise UserError(
                f"The level cache {directory!r} cannot be made: {error.message}"
            ) from error

    def read(self, name: str) -> bytes | None:
        path = self._directory + name
        if not self._gfile.exists(path):
            return None
        with self._gfile.GFile(path, "rb") as file:
            return file.read()

    def replace(self, name: str, content: bytes) -> None:
        temporary = self._directory + _temporary_name(name)
        try:
            with self._gfile.GFile(temporary, "wb") as file:
                file.write(content)
            self._gfile.rename(temporary, self._directory + name, overwrite=True)
        except BaseException:
            with contextlib.suppress(Exception):
                self._gfile.remove(temporary)
            raise
