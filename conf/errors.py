"""What a user is told: one sentence."""


class UserError(Exception):
    """One sentence for the user: the setting or file, what was wanted, what was found."""


class LoneError(UserError):
    """The same, met by one rank of many: it is told by that rank, whichever it is."""
