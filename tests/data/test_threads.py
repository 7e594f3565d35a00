"""Work in threads: errors, and the cores that it leaves to others."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from threadpoolctl import threadpool_info

from vitmnist.data.threads import in_parts

IDLE = """
import time
import torch
from vitmnist.data.threads import map_in_threads

def spent_after_an_operation():
    values.add_(1)
    started = time.process_time()
    time.sleep(0.03)
    return time.process_time() - started

torch.set_num_threads(2)
values = torch.zeros(2**20)
results = map_in_threads(abs, range(9), threads=1)
next(results)
time.sleep(0.1)  # the idle team may spin once, as it starts
print(max(spent_after_an_operation() for _ in range(9)))
results.close()
"""


def test_an_error_in_a_part_is_raised_when_no_thread_writes_to_the_batch_any_more() -> None:
    written = []

    def write(span: slice) -> None:
        if not span.start:
            raise ValueError("the first part")
        time.sleep(0.05)
        written.append(span.start)

    with pytest.raises(ValueError, match="the first part"):
        in_parts(write, 3, size=1, threads=2)
    assert written == [1, 2]


@pytest.mark.skipif(all(pool["prefix"] != "libgomp" for pool in threadpool_info()), reason="torch has no libgomp")
def test_idle_threads_of_torch_do_not_spin_while_others_work() -> None:
    """libgomp's spin for some milliseconds after each operation, on a core that a thread may need."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found = subprocess.run([sys.executable, "-c", IDLE], env=environment, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 0.002
