"""What stops the demo. The text is all a user sees: it names the value and what to do."""


class DemoError(Exception):
    """The demo can't go on: something is missing on this machine, a process failed or did not answer in time."""

    exit_code = 1


class OptionError(DemoError):
    """An option's value is wrong."""

    exit_code = 2
