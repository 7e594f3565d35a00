"""Starts runs of several processes as `torchrun` does, by forks of a process that has imported torch already.

    python ranks.py      reads a JSON object a line: {"start": [[argument, …] of each rank], "folder": …, "set": {…}}
                         and answers with {"pids": […]}; or {"wait": [pid, …]}, and answers with {"codes": […]}

What rank N prints is in `output-N.txt` of the folder. A start of torchrun takes ten seconds on two cores, this none.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch.nn.parallel  # noqa: F401

import vitmnist.run  # noqa: F401  # with torch
from vitmnist.cli.main import main


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(arguments: list[list[str]], folder: str, settings: dict[str, str]) -> list[int]:
    port = str(free_port())
    pids = []
    for rank, own in enumerate(arguments):
        child = os.fork()
        if child:
            pids.append(child)
            continue
        code: object = 1
        try:
            os.chdir(folder)
            with open(f"output-{rank}.txt", "wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(arguments))}
            os.environ |= {"LOCAL_WORLD_SIZE": str(len(arguments)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= settings
            sys.argv = ["train.py", *own]
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(code or 0))
    return pids


def serve(request: dict[str, Any]) -> dict[str, Any]:
    if "wait" in request:
        return {"codes": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["wait"]]}
    return {"pids": start(request["start"], request["folder"], request["set"])}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
