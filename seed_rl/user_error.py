"""The base of errors that are the user's to mend."""


class UserError(ValueError):
    """Something given by the user is wrong; the message says what, and what to do.

    The entry point prints the message alone, without a traceback.
    """
