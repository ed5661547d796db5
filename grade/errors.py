"""The one error a user's input can raise.

Everything that a user can get wrong (a config value, a file, a model that cannot be supported) raises
`InputError`. Its message is one line that names the field, the value and what is allowed; the command line prints
that line and exits with code 2. Programming mistakes keep their ordinary exceptions and tracebacks.
"""


class InputError(ValueError):
    """Input that cannot be used: ``<field>: got <value>; allowed: <what is allowed>``.

    Args:
        field: What was wrong, in the user's words: a config key, a file, an option.
        value: What was given. Long values are shortened in the message.
        allowed: What would have been accepted, and how to get there.

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
