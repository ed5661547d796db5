"""``python -m grade``."""

from grade.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
