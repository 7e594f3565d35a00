"""Records how a run ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError, DataError, PeerError
from vitmnist.runtime.failures import classify, os_error, worker_error
from vitmnist.runtime.signals import StopSignal, interruption
from vitmnist.runtime.world import World
from vitmnist.tracking.result import Result

log = logging.getLogger(__name__)


@contextmanager
def recording_outcome(result: Result, config: Config, folder: Path, stop: StopSignal, world: World) -> Iterator[None]:
    """Record in `result.json` how the block ended, once training has begun."""
    try:
        yield
    except BaseException as raised:
        error = world.root_cause(raised)
        if stop.request and worker_error(error):
            error = interruption(stop.request)  # the signal that stops the run stops its workers too
        record_failure(error, result, config, folder, world)
        if error is raised:
            raise
        raise error from raised
    world.disconnect()
    result.status = "completed"
    if world.is_main:
        result.write(folder)


def record_failure(error: BaseException, result: Result, config: Config, folder: Path, world: World) -> None:
    """Record why a run ended before its end."""
    has_begun, failure = result.setup_s is not None, classify(error)
    if failure.status == "interrupted" and has_begun:
        world.disconnect()
    is_refused = isinstance(error, ConfigError | DataError | PeerError)
    if not has_begun and (is_refused or config.resume):  # nothing to record
        return
    result.status, result.error, result.exit_code = failure.status, failure.message, failure.exit_code
    try:
        if world.is_main:
            result.write(folder)
    except OSError as unwritten:  # must not hide the error that ended the run
        log.warning("cannot write the records: %s", os_error(unwritten))
