"""`finetune_long_document.py` under the agent of `torchrun --max-restarts 1`; rank 1 is killed in the fourth step of its first life.

torchrun would start the agent and its workers as fresh processes, with seconds of imports each; these are forked.
"""

import os
import signal
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def worker() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import finetune_long_document as program

    class Killed(program.Trainer):
        steps = 0

        def step(self, batch, rate):
            self.steps += 1
            if self.steps == 4 and self.settings.resume is None and int(os.environ["RANK"]) == 1:
                newest = Path(self.settings.out, "checkpoint-000003")
                os.truncate(newest / "rank-00000.safetensors", 1000)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(batch, rate)

    program.Trainer = Killed
    program.main()


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
        local_addr="localhost",
    )
    elastic_launch(config, worker)()
