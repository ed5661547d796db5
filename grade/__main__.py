"""``python -m grade``."""

from grade.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
