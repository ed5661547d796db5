"""``python -m grade.pipeline``: run the pipeline in a profile."""

import sys

from grade.pipeline.profiles import main

if __name__ == "__main__":
    sys.exit(main())
