"""One run of several processes: which of them begins it, and how the others come to the same folder.

`torchrun` starts the same command line several times. Rank 0 goes on as if it were alone, and tells the others what it
makes of the command line, and the folder that Hydra has made for it; they compose the same configuration, and log to
`rank-N.log` in that folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from vitmnist.cli import overrides as resume
from vitmnist.cli import sweep
from vitmnist.cli.messages import refuse_flags
from vitmnist.config.labels import CONF
from vitmnist.errors import ConfigError
from vitmnist.runtime.distributed import ALONE, SingleProcess, launched


class Launch:
    """How this process was started: alone, or as one of several."""

    def __init__(self) -> None:
        self.world: SingleProcess = ALONE
        self._told = False

    def join(self) -> None:
        """Meet the other processes, if there are any.

        Raises:
            ConfigError: they cannot be reached, or are to be restarted on several machines.
        """
        self.world, self._told = ALONE, False
        if launched():
            from vitmnist.runtime.torch_distributed import TorchDistributed  # and torch

            self.world = TorchDistributed()
            machines, restarts = (
                int(os.environ.get(name, "0")) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")
            )
            if machines > 1 and restarts:
                # torchrun counts its restarts apart on each machine, so nobody knows which processes belong together.
                raise ConfigError(
                    f"--max-restarts={restarts}: is for one machine, and these are {machines}; type --max-restarts=0, "
                    "and resume=auto when you start it again"
                )

    def arguments(self, typed: list[str]) -> list[str] | None:
        """The arguments for Hydra; None where rank 0 has ended without a run, as after --help.

        Raises:
            ConfigError: what was typed cannot be meant.
            PeerError: rank 0 has refused it.
        """
        self._typed = typed
        if self.world.is_main:
            refuse_flags(typed, CONF)
            restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
            self._meant = sweep.expand(resume.expand(resume.after_restart(typed) if restarted else typed))
            return self._meant
        begun = self.world.ask("begun")
        if begun is None:
            self.world.tell(f"gone {self.world.rank}", True)
            return None
        # What was typed differently must be composed, to be seen to differ; but the data may be elsewhere.
        own = [argument for argument in typed if argument.startswith("data.root=")]
        same = set(typed) - set(own) == {one for one in begun["typed"] if not one.startswith("data.root=")}
        return resume.with_more(
            begun["meant"] if same else typed,
            *own,
            f"hydra.run.dir={json.dumps(begun['folder'], ensure_ascii=False)}",
            "hydra.output_subdir=null",
            f"hydra.job.name=rank-{self.world.rank}",
            "hydra.job_logging.root.handlers=[file]",
        )

    def begin(self, folder: Path) -> None:
        """Let the others come to the run's folder."""
        if self.world.is_main:
            self._told = True
            self.world.tell("begun", {"typed": self._typed, "meant": self._meant, "folder": str(folder.absolute())})

    def end(self) -> None:
        """Let the others go, if there was no run."""
        if self.world.is_main and not self._told:
            self.world.tell("begun", None)
            for rank in range(1, self.world.size):  # the store may be this process's, and would go with it
                self.world.ask(f"gone {rank}")
