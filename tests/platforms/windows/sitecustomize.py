"""Takes away from Python on Linux what it does not have on Windows, for every process that has this folder on its path.

Modules and names are missing for vitmnist alone, because torch, psutil and subprocess need theirs here. Start methods,
the rules for open files, and the default encoding are those of Windows for the whole process.
"""

import builtins
import ctypes
import importlib
import io
import locale
import mmap
import multiprocessing
import multiprocessing.context
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

PACKAGES = ("vitmnist", "hydra_plugins")
MISSING_MODULES = ("fcntl", "pwd", "termios", "resource")
MISSING_FOLDERS = ("/proc", "/sys")
CODE_PAGE = "cp1252"
PATHLIB = ("pathlib", "pathlib._local", "pathlib._abc", "pathlib._os", "genericpath", __name__)


class _Builtin:
    """A function that is no method where it is an attribute of a class, as in pathlib of Python 3.10."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)


def _without(module: types.ModuleType, *missing: str, **other: object) -> types.ModuleType:
    """A copy of a module that lacks some names."""
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({name: value for name, value in vars(module).items() if name not in missing} | other)
    return copy


def _is_ours(namespace: dict[str, Any]) -> bool:
    return (namespace.get("__package__") or "").partition(".")[0] in PACKAGES


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> types.ModuleType:
    if level == 0 and globals and _is_ours(globals):
        if name in MISSING_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in _COPIES:
            return _COPIES[name]
    return _original_import(name, globals, locals, fromlist, level)


def _is_hidden(path: object) -> bool:
    """Whether a path is in a folder that Windows does not have, and vitmnist asks for it, directly or by pathlib."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(MISSING_FOLDERS):
        return False
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") in PATHLIB:
        frame = frame.f_back
    return _is_ours(frame.f_globals)


def _open(
    file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *arguments: Any, **options: Any
) -> Any:
    if _is_hidden(file):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    if "b" not in mode and encoding in (None, "locale"):
        encoding = CODE_PAGE
    return _original_open(file, mode, buffering, encoding, *arguments, **options)


def _stat(path: Any, **options: Any) -> os.stat_result:
    if _is_hidden(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return _original_stat(path, **options)


class _CodePageText(io.TextIOWrapper):
    """Text of a pipe or file, in the code page by default."""

    def __init__(self, buffer: Any, encoding: str | None = None, *arguments: Any, **options: Any) -> None:
        encoding = CODE_PAGE if encoding in (None, "locale") else encoding
        super().__init__(buffer, encoding, *arguments, **options)


def _refuse_open_files(*paths: Any) -> None:
    """Raise the error of Windows if this process has one of these files, or a file in one of these folders, open."""
    used = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            used.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # This is the descriptor of the list itself.
            continue
    with _original_open("/proc/self/maps", "rb") as maps:
        used += [os.fsdecode(line.split(None, 5)[5].rstrip(b"\n")) for line in maps if line.count(b"/")]
    for path in map(os.path.realpath, map(os.fspath, paths)):
        if any(name == path or name.startswith(f"{path}/") for name in used):
            raise PermissionError(13, "The process cannot access the file because it is used by another process", path)


def _on_windows(function: Callable[..., None], replaces: bool = True) -> Callable[..., None]:
    """A function that renames or removes a file, with the rules of Windows."""

    def refuse_or_call(path: Any, *target: Any, **options: Any) -> None:
        if options.get("dir_fd") is None:
            _refuse_open_files(path, *target)
        if not replaces and os.path.exists(*target):
            raise FileExistsError(17, "Cannot create a file when that file already exists", *target)
        function(path, *target, **options)

    return _Builtin(refuse_or_call)


_original_import, _original_open, _original_stat = builtins.__import__, io.open, os.stat
_parent = os.getppid()


def _load_library(name: str) -> ctypes.CDLL:
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return ctypes.CDLL(name)


def _open_descriptor(path: Any, *arguments: Any, **options: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))
    return os.open(path, *arguments, **options)


_COPIES = {
    "os": _without(
        os, "fork", "sched_getaffinity", "killpg", getppid=lambda: _parent, name="nt", open=_open_descriptor
    ),
    "ctypes": _without(ctypes, CDLL=_load_library),
    "mmap": _without(mmap, "MAP_PRIVATE", "MAP_NORESERVE"),
    # Linux has no Ctrl-Break, so another signal stands for it. It ends a process that does not handle it, too.
    "signal": _without(signal, "SIGHUP", "SIGUSR1", "SIGKILL", "pthread_sigmask", "setitimer", SIGBREAK=signal.SIGUSR2),
}
builtins.__import__ = _import
builtins.open = io.open = _Builtin(_open)  # type: ignore[assignment]
os.stat = _Builtin(_stat)  # type: ignore[assignment]
os.replace, os.rename = _on_windows(os.replace), _on_windows(os.rename, replaces=False)  # type: ignore[assignment]
os.unlink = os.remove = _on_windows(os.unlink)  # type: ignore[assignment]

importlib.reload(shutil)  # It asks whether `os.unlink` takes descriptors of folders, which Windows does not have.

locale.getpreferredencoding = lambda do_setlocale=True: CODE_PAGE
locale.getencoding = lambda: CODE_PAGE  # type: ignore[attr-defined,unused-ignore]
io.TextIOWrapper = _CodePageText  # type: ignore[misc]
for _name, _errors in (("stdin", "strict"), ("stdout", "strict"), ("stderr", "backslashreplace")):
    _text = _CodePageText(getattr(sys, _name).detach(), errors=_errors, line_buffering=_name == "stderr")
    setattr(sys, _name, _text)
    setattr(sys, f"__{_name}__", _text)

_spawn = multiprocessing.get_context("spawn")
multiprocessing.context._concrete_contexts = {"spawn": _spawn}  # type: ignore[attr-defined]
multiprocessing.context._default_context._default_context = _spawn  # type: ignore[attr-defined]
multiprocessing.get_all_start_methods = lambda: ["spawn"]  # type: ignore[assignment]

# These modules import pathlib, which keeps the function that opens files in Python 3.10.
import filelock  # noqa: E402
import psutil  # noqa: E402


class _FileLock(filelock.FileLock):
    """Removes the file of the lock, as on Windows."""

    def release(self, force: bool = False) -> None:
        is_held = self.is_locked
        super().release(force)
        if is_held:
            os.unlink(self.lock_file)


class _Process(psutil.Process):
    def memory_info(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(rss=super().memory_info().rss, peak_wset=2**30)


_COPIES |= {"filelock": _without(filelock, FileLock=_FileLock), "psutil": _without(psutil, Process=_Process)}
