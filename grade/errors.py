"""The one error that bad input raises.

Bad input (a config value, a file, a model that cannot be supported, a reward that is not finite) raises `InputError`.
Its message is one line that names the field, the value and what is allowed; the command line prints that line and
exits with code 2. Mistakes of the calling code, such as tensors whose shapes do not fit, raise ordinary exceptions
with a traceback.
"""


class InputError(ValueError):
    """Input that cannot be used: ``<field>: got <value>; allowed: <what is allowed>``.

    Args:
        field: The wrong input as the user knows it: a config key, a file, an option.
        value: The given value. Long values are shortened in the message.
        allowed: What would be accepted, and how to get there.

    >>> raise InputError("tau", -1.0, "a number greater than 0")
    Traceback (most recent call last):
    grade.errors.InputError: tau: got -1.0; allowed: a number greater than 0
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(" ".join(f"{field}: got {shown}; allowed: {allowed}".split()))
        self.field, self.value, self.allowed = field, value, allowed
