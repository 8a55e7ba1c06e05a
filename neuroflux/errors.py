"""The errors that end a command in one clear line and exit code 2."""


class NeuroFluxError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, and what to do."""


class BudgetTooSmall(NeuroFluxError):
    """The budget is below the floor: the least memory with which the method can train this model on this data.

    Attributes:
        floor: the smallest budget that works, in bytes.
        layer: what decides it, mostly a layer: ``layer features.27``.
    """

    def __init__(self, message: str, floor: int, layer: str) -> None:
        super().__init__(message)
        self.floor = floor
        self.layer = layer
