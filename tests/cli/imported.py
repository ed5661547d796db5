"""Execute a command of grade, and say which packages that take seconds to import it has imported.

python tests/cli/imported.py FOLDER COMMAND...
"""

import contextlib
import sys

from grade.cli.main import main

with contextlib.suppress(SystemExit):  # of --help
    main(sys.argv[2:])
print(sorted({"torch", "transformers", "pandas"} & sys.modules.keys()))
