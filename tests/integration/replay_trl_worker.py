"""The demo's GRPO job with an agent in the same process: `replay_trl_worker.py ROWS.json [job's arguments]`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from mxprobe.demo import job
from tests.standin_controller import agent_thread, controlled


def main() -> None:
    rows_file = Path(sys.argv.pop(1))
    options = {"every": 1000, "weights_every": 1000, "sensitivity_every": 3, "replay_every": 6}
    with tempfile.TemporaryDirectory() as directory, controlled(Path(directory), **options) as controller:
        with agent_thread(controller):
            job.main()
            controller.send({"verb": "detach"})
            detached = controller.frame("detached")
        rows_file.write_text(json.dumps({"detached": detached, **controller.rows}))


if __name__ == "__main__":
    main()
