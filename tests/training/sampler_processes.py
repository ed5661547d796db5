"""Train on another sampler's completions in one process, then in two; used by test_elsewhere.py, in a fresh process.

python tests/training/elsewhere_processes.py SETTINGS, as JSON
"""

import json
import sys

from processes import in_two
from runs import in_child, wait

from grade.training.config import TrainConfig
from grade.training.run import train


def main() -> int:
    """Exit code 1 if a run fails."""
    values = json.loads(sys.argv[1])
    for processes in (1, 2):

        def work(processes=processes):
            own = {"gradient_accumulation_steps": 2 // processes, "output_dir": f"{values['output_dir']}/{processes}"}
            return train(TrainConfig.parse(values | own), lambda line: None)

        codes = [wait(in_child(work))] if processes == 1 else in_two(work)
        if any(codes):
            print(f"{processes}: exit codes {codes}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
