"""What settings are by default, and within which bounds: classes of settings as tables that tests write out."""


def table(settings):
    """Each field of a class of settings: its default, with its bounds when it has any."""
    return {name: row(field) for name, field in settings.model_fields.items()}


def row(field):
    default = field.get_default(call_default_factory=True)
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if hasattr(rule, name)
    ]
    return (default, ", ".join(bounds)) if bounds else default
