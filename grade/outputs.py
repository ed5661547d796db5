"""Names that moved to `grade.files`."""

from grade.files import LOCK, OutputFolder, check_file, claimed, writing

__all__ = ["LOCK", "OutputFolder", "check_file", "claimed", "writing"]
