"""Records how a run ended, and lets the other ranks know of a failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError, DataError, PeerError
from vitmnist.runtime.distributed import SingleProcess
from vitmnist.runtime.failures import classify, worker_error
from vitmnist.runtime.files import ClaimedError
from vitmnist.runtime.signals import StopSignal
from vitmnist.tracking.result import Result

log = logging.getLogger(__name__)


@contextmanager
def recording_outcome(
    result: Result, config: Config, folder: Path, stop: StopSignal, world: SingleProcess
) -> Iterator[None]:
    """Record in `result.json` how the block ended, once training has begun; report a failure to the other ranks."""
    try:
        yield
    except BaseException as raised:
        error = world.root_cause(raised)
        if stop.due and worker_error(error):
            error = stop.due  # the signal that stops the run stops its workers too
        record_failure(error, result, config, folder, stop, world)
        if error is raised:
            raise
        raise error from raised
    world.disconnect()
    if result.setup_s is not None:
        result.status = "completed"
        if world.is_main:
            result.write(folder)


def record_failure(
    error: BaseException, result: Result, config: Config, folder: Path, stop: StopSignal, world: SingleProcess
) -> None:
    """Record why a run ended before its end, and let the other ranks know."""
    has_begun, failure = result.setup_s is not None, classify(error)
    if failure.status == "failed":
        world.report_failure(failure.message)
    elif has_begun:
        world.disconnect()
    is_refused = isinstance(error, ConfigError | DataError | PeerError)
    if not has_begun and (is_refused or config.resume):  # nothing to record
        if world.is_main and not config.resume and not isinstance(error, ClaimedError):
            (folder / ".lock").unlink(missing_ok=True)
        return
    result.status, result.error = failure.status, failure.message
    with stop.deferred():
        try:
            if world.is_main:
                result.write(folder)
        except OSError as unwritten:  # the reason why the run ended is worth more
            log.warning("cannot write %s: %s", unwritten.filename, unwritten.strerror)
